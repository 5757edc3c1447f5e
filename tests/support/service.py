"""The service on a database with a job of its own, under a clock that stands still, without HTTP."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Literal

from bso_server.errors import BsoError
from bso_server.service import queries
from bso_server.service.batch_size_service import BatchSizeService
from bso_server.service.commands import Commands
from bso_server.service.messages import JobExport
from bso_server.service.queries import JobReader
from bso_server.storage.database import open_database
from bso_server.storage.store import Store
from tests.support import jobs
from zeus_plugins.protocol import (
    Heartbeat,
    JobRegistration,
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


class Server:
    """The service on a database with a job of its own, and a clock that stands still until it is moved."""

    def __init__(self, store: Store, **job: object) -> None:
        self.store = store
        self.now = START
        self.service = BatchSizeService(store, Commands(clock=lambda: self.now))
        self.job = JobRegistration.model_validate(jobs.job(**{**jobs.THREE_SIZES, **job}))
        self.job_id = self.job.job_id or ""

    def wait(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    async def suggest(self, key: str | None = None) -> TrialDispatch:
        return await self.service.run(self.service.commands.suggest, self.job_id, key)

    async def report(
        self,
        trial: TrialId,
        *,
        cost_j: float,
        metric: float = 0.5,
        epoch: float = 1,
        judged_by: StopRule | None = None,
        of_zeus: bool = False,
    ) -> ReportResponse:
        """Report totals that cost `cost_j`, with η = 0.5 and 100 W; perhaps as a rank with Zeus's client does."""
        result = TrainingResult(
            **trial_id(trial).model_dump(),
            time=cost_j / 100,
            energy=cost_j,
            metric=metric,
            current_epoch=epoch,
            **({} if of_zeus else {"judged_by": judged_by}),
        )
        return await self.service.report(result)

    async def offline(self, batch_size: int, key: str) -> TrialDispatch:
        return await self.service.run(
            self.service.commands.record_offline, OfflineTrial(job_id=self.job_id, batch_size=batch_size), key
        )

    async def reach(self, trial: TrialId, cost_j: float = 500.0) -> None:
        assert (await self.report(trial, cost_j=cost_j, metric=0.95, epoch=5)).converged

    Outcome = Literal[TrialState.FAILED, TrialState.INFEASIBLE, TrialState.SUSPENDED]

    async def end(self, trial: TrialId, outcome: Outcome = TrialState.FAILED) -> None:
        await self.service.run(
            self.service.commands.end_trial, TrialEnd(**trial_id(trial).model_dump(), outcome=outcome)
        )

    async def discard(self, trial: TrialId) -> TrialView:
        return await self.service.run(self.service.commands.discard, self.job_id, trial.trial_number)

    async def show(self) -> JobView:
        return await JobReader(self.store).read(queries.show_job, self.job_id)

    async def states(self) -> list[TrialState]:
        return [trial.state for trial in (await self.show()).trials]


async def exported(store: Store, job_id: str) -> JobExport:
    """The job's export as a whole, as somebody who has received all of it reads it."""
    return JobExport.model_validate_json(b"".join([piece async for piece in JobReader(store).export(job_id)]))


async def pieces_of(export: JobExport) -> AsyncIterator[bytes]:
    """The text of an export, as it may come."""
    yield export.model_dump_json().encode()


def trial_id(trial: TrialId) -> TrialId:
    return TrialId(job_id=trial.job_id, batch_size=trial.batch_size, trial_number=trial.trial_number)


def beat_of(trial: TrialId, *, regular: bool = True) -> Heartbeat:
    return Heartbeat(**trial_id(trial).model_dump(), regular=regular)


def serve(database_url: str, use: Callable[[Server], Awaitable[None]], **job: object) -> None:
    async def run() -> None:
        # Longer than by default: see `tests.support.servers.Server`.
        store = Store(open_database(database_url, patience_s=60.0), patience_s=60.0)
        try:
            await store.migrate()
            server = Server(store, **job)
            await server.service.register(server.job)
            await use(server)
        finally:
            await store.close()

    asyncio.run(run())


async def live(server: Server, random_source: random.Random, steps: int) -> None:
    """Anything that may happen to a job, in any order."""
    open_trials: list[TrialDispatch] = []
    for _ in range(steps):
        try:
            match random_source.choice(
                [
                    "suggest",
                    "suggest",
                    "offline",
                    "epoch",
                    "rank",
                    "reach",
                    "reach",
                    "miss",
                    "end",
                    "beat",
                    "wait",
                    "discard",
                ]
            ):
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
            continue  # a refusal, which must change nothing


async def act(server: Server, random_source: random.Random, action: str, trial: TrialDispatch) -> None:
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
            await server.service.run(server.service.commands.heartbeat, beat_of(trial))
        case "discard":
            await server.discard(trial)
        case "end":
            outcomes: tuple[Server.Outcome, ...] = (TrialState.FAILED, TrialState.INFEASIBLE, TrialState.SUSPENDED)
            await server.end(trial, random_source.choices(outcomes, (6, 1, 3))[0])
