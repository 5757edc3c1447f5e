"""The service on a database with a separate job and a clock controlled by the test, without HTTP."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeVar

from bso_server.core.model import History
from bso_server.errors import BsoError
from bso_server.service import reading
from bso_server.service.commands import BatchSizeService, Commands
from bso_server.service.health import differences
from bso_server.service.loading import known_job, load_history
from bso_server.storage.database import open_database
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from tests.support import jobs
from zeus_plugins.protocol import (
    CreatedJob,
    Heartbeat,
    HeartbeatResponse,
    JobView,
    OfflineTrial,
    ReportResponse,
    StopRule,
    TrainingResult,
    TrialDispatch,
    TrialEnd,
    TrialId,
    TrialState,
    TrialView,
)

START = datetime(2026, 1, 1, tzinfo=UTC)
HOUR_S = 3600.0

T = TypeVar("T")


class JobService:
    """The service on a database with a separate job and a clock that advances on request."""

    def __init__(self, store: Store, **job: object) -> None:
        self.store = store
        self.now = START
        self.service = BatchSizeService(store, Commands(clock=lambda: self.now))
        self.job = CreatedJob.model_validate(jobs.job(**{**jobs.THREE_SIZES, **job}))
        self.job_id = self.job.job_id

    def wait(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    async def suggest(self, key: str | None = None) -> TrialDispatch:
        return await self.service.begin_trial(self.job_id, key)

    async def report(
        self,
        trial: TrialId,
        *,
        cost_j: float,
        metric: float = 0.5,
        epoch: float = 1,
        judged_by: StopRule | None = None,
        of_zeus: bool = False,
        startup_s: float | None = None,
    ) -> ReportResponse:
        """Report totals with a cost of `cost_j` at η = 0.5 and 100 W, optionally as a rank with Zeus's client."""
        of_client = {} if of_zeus else {"judged_by": judged_by, "startup_s": startup_s}
        report = result(trial, cost_j=cost_j, metric=metric, epoch=epoch, **of_client)
        return await self.service.reports.record_report(report)

    async def offline(self, batch_size: int, key: str) -> TrialDispatch:
        return await self.service.transact(
            self.service.commands.record_offline, OfflineTrial(job_id=self.job_id, batch_size=batch_size), key
        )

    async def beat(self, trial: TrialId, *, regular: bool = True) -> HeartbeatResponse:
        return await self.service.transact(self.service.commands.heartbeat, beat_of(trial, regular=regular))

    async def reach(self, trial: TrialId, cost_j: float = 500.0, startup_s: float | None = None) -> None:
        assert (await self.report(trial, cost_j=cost_j, metric=0.95, epoch=5, startup_s=startup_s)).converged

    Outcome = Literal[TrialState.FAILED, TrialState.INFEASIBLE, TrialState.SUSPENDED]

    async def end(self, trial: TrialId, outcome: Outcome = TrialState.FAILED) -> None:
        await self.service.transact(
            self.service.commands.end_trial, TrialEnd(**trial_id(trial).model_dump(), outcome=outcome)
        )

    async def discard(self, trial: TrialId) -> TrialView:
        return await self.service.transact(self.service.commands.discard, self.job_id, trial.trial_number)

    async def show(self) -> JobView:
        return await self.store.read(reading.show_job, self.job_id, now=self.now)

    async def history(self) -> History:
        """Return the history behind the next decision."""
        return await self.store.read(remembered, self.job_id)

    async def differences(self) -> list[str]:
        """Compare the caches of the job with a replay of its trials; return the differences in words."""
        return await self.store.read(differences, self.job_id)

    async def states(self) -> list[TrialState]:
        return [trial.state for trial in (await self.show()).trials]


def remembered(transaction: Transaction, job_id: str) -> History:
    return load_history(transaction, known_job(transaction, job_id))


def trial_id(trial: TrialId) -> TrialId:
    return TrialId(job_id=trial.job_id, batch_size=trial.batch_size, trial_number=trial.trial_number)


def result(trial: TrialId, *, cost_j: float, metric: float, epoch: float, **of_client: Any) -> TrainingResult:
    """Return totals with a cost of `cost_j` at η = 0.5 and 100 W."""
    identity = trial_id(trial).model_dump()
    return TrainingResult(**identity, time=cost_j / 100, energy=cost_j, metric=metric, current_epoch=epoch, **of_client)


def beat_of(trial: TrialId, *, regular: bool = True) -> Heartbeat:
    return Heartbeat(**trial_id(trial).model_dump(), regular=regular)


def run_apart(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine function to its end in a separate thread, because this thread may run an event loop."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(work())).result()


@asynccontextmanager
async def open_store(database_url: str, *, patience_s: float = 60.0) -> AsyncIterator[Store]:
    """Open a migrated store with long timeouts, because parallel tests are slow."""
    store = Store(open_database(database_url, patience_s=patience_s), patience_s=patience_s)
    try:
        await store.migrate()
        yield store
    finally:
        await store.close()


class BlockingStore:
    """Counterpart of `SyncStore` for any database, already migrated."""

    def __init__(self, database_url: str, *, patience_s: float = 60.0) -> None:
        self._runner = asyncio.Runner()
        self._store = Store(open_database(database_url, patience_s=patience_s), patience_s=patience_s)
        self._runner.run(self._store.migrate())

    def write(self, work: Callable[[Transaction], T], *, timeout_s: float) -> T:  # noqa: ARG002 - as SyncStore
        return self._runner.run(self._store.write(work))

    def read(self, work: Callable[[Transaction], T], *, timeout_s: float) -> T:  # noqa: ARG002 - as SyncStore
        return self._runner.run(self._store.read(work))

    def close(self) -> None:
        self._runner.run(self._store.close())
        self._runner.close()


def in_store(database_url: str, use: Callable[[Store], Awaitable[T]]) -> T:
    """Run `use` on a migrated store, from code without an event loop."""

    async def run() -> T:
        async with open_store(database_url) as store:
            return await use(store)

    return asyncio.run(run())


async def new_job(store: Store, **job: object) -> JobService:
    """Register a job on an open store; `job` overrides fields of `jobs.THREE_SIZES`."""
    service = JobService(store, **job)
    await service.service.register(service.job)
    return service


@asynccontextmanager
async def job_service(database_url: str, **job: object) -> AsyncIterator[JobService]:
    """Open a store on the database, with a registered job."""
    async with open_store(database_url) as store:
        yield await new_job(store, **job)


ACTIONS = ["suggest", "suggest", "offline", "epoch", "rank", "reach", "reach", "miss", "end", "beat", "wait", "discard"]


async def live(server: JobService, random_source: random.Random, steps: int) -> None:
    """Cause random events of a job in random order."""
    open_trials: list[TrialDispatch] = []
    for _ in range(steps):
        try:
            match random_source.choice(ACTIONS):
                case "suggest":
                    open_trials.append(await server.suggest())
                case "offline":
                    size = random_source.choice(server.job.batch_sizes)
                    open_trials.append(await server.offline(size, str(random_source.random())))
                case "wait":
                    server.wait(random_source.choice([100.0, HOUR_S + 1, 25 * HOUR_S]))
                    await server.service.reap()
                case action if open_trials:
                    await act(server, random_source, action, random_source.choice(open_trials))
        except BsoError:
            continue  # a refusal, which must not change the job


async def act(server: JobService, random_source: random.Random, action: str, trial: TrialDispatch) -> None:
    cost_j = float(random_source.randint(1, 50) * trial.batch_size)
    match action:
        case "epoch":
            await server.report(trial, cost_j=cost_j)
        case "rank":
            await server.report(trial, cost_j=cost_j, epoch=random_source.randint(1, 5), of_zeus=True)
        case "reach":
            await server.report(trial, cost_j=cost_j, metric=0.95, epoch=5)
        case "miss":
            await server.report(trial, cost_j=cost_j, epoch=10)
        case "beat":
            await server.beat(trial)
        case "discard":
            await server.discard(trial)
        case "end":
            outcomes: tuple[JobService.Outcome, ...] = (TrialState.FAILED, TrialState.INFEASIBLE, TrialState.SUSPENDED)
            await server.end(trial, random_source.choices(outcomes, (6, 1, 3))[0])
