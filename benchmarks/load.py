"""The load: jobs × concurrent trials × epochs, one kind of request at a time.

All clients do the same thing at the same moment (all suggest, all report epochs, …), so that the server's CPU time can
be told apart by route. Servers are driven in turn, round by round, so that a machine whose speed drifts is fair to all.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

from benchmarks import workload
from benchmarks.driver import Block, Driver, RouteFigures, Tally, driving
from benchmarks.processes import Target
from benchmarks.workload import Job
from zeus_plugins.protocol import GP_VOI, TrialId

REGISTER_NEW = "POST /jobs (new)"
REGISTER_KNOWN = "POST /jobs (known)"
SUGGEST = "GET /jobs/batch_size"
EPOCH_REPORT = "POST /report (epoch)"
FINAL_REPORT = "POST /report (final)"
END_TRIAL = "PATCH /trials"
DELETE_JOB = "DELETE /jobs"
ECHO = "POST /report (echo)"

WARM_UP_EPOCHS = 30
PRUNING_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """The extent of a load.

    Attributes:
        jobs: Number of jobs.
        concurrency: Trials of each job at the same time; each has a connection of its own.
        epochs: Reports per trial.
        rounds: How often each client runs a trial, one after another.
    """

    jobs: int
    concurrency: int
    epochs: int
    rounds: int

    @property
    def clients(self) -> int:
        """Trials at the same time."""
        return self.jobs * self.concurrency


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Figures of one server under one load.

    Attributes:
        target: The server.
        clients: Trials at the same time.
        rounds: Trials that each client ran; fewer than asked if time ran out.
        rss_mib: Resident memory afterwards, or None.
        routes: Figures per kind of request.
    """

    target: str
    clients: int
    rounds: int
    rss_mib: float | None
    routes: tuple[RouteFigures, ...]

    @property
    def server_cpu_ms(self) -> float | None:
        """CPU time of the server per request over all routes, or None."""
        used = [route.server_cpu_ms * route.requests for route in self.routes if route.server_cpu_ms is not None]
        return sum(used) / sum(route.requests for route in self.routes) if len(used) == len(self.routes) else None

    def route(self, name: str) -> RouteFigures:
        """The figures of one kind of request."""
        return next(figures for figures in self.routes if figures.route == name)


class Load(Protocol):
    """Requests to one server: `begin` once, `round` as often as there is time, `finish` once."""

    driver: Driver
    tallies: dict[str, Tally]

    async def begin(self) -> None:
        """Prepare."""

    async def round(self) -> None:
        """Let every client run one trial."""

    async def finish(self) -> None:
        """Leave the server as it was."""


class TrainingLoad:
    """Trainings, as a batch size optimization server sees them."""

    policy: str | None = None

    def __init__(self, driver: Driver, shape: Shape, prefix: str) -> None:
        self.driver = driver
        self.tallies: dict[str, Tally] = defaultdict(Tally)
        self._epochs = shape.epochs
        self._jobs = [
            Job(f"{prefix}-{n}", max_epochs=shape.epochs, pruning_rounds=PRUNING_ROUNDS, policy=self.policy)
            for n in range(shape.jobs)
        ]
        self._job_of_client = [job for job in self._jobs for _ in range(shape.concurrency)]

    async def begin(self) -> None:
        """Register the jobs."""
        await self._send(REGISTER_NEW, [[job.registration] for job in self._jobs])

    async def round(self) -> None:
        """One trial per client: it finds its job, gets a batch size, and reports until the target is reached."""
        await self._send(REGISTER_KNOWN, [[job.registration] for job in self._job_of_client])
        trials = await self._suggest()
        epochs = self._epochs
        block = await self._send(
            EPOCH_REPORT,
            [[workload.report(trial, epoch=n, epochs=epochs) for n in range(1, epochs)] for trial in trials],
        )
        workload.expect(block, stop_train=False, converged=False)
        block = await self._send(
            FINAL_REPORT, [[workload.report(trial, epoch=epochs, epochs=epochs)] for trial in trials]
        )
        workload.expect(block, stop_train=True, converged=True)

    async def finish(self) -> None:
        """One trial per client that crashes; then delete the jobs."""
        await self._send(END_TRIAL, [[workload.end(trial)] for trial in await self._suggest()])
        await self._send(DELETE_JOB, [[job.delete] for job in self._jobs])

    async def _suggest(self) -> list[TrialId]:
        block = await self._send(SUGGEST, [[job.suggest] for job in self._job_of_client])
        return [trial for (trial,) in workload.dispatched(block)]

    async def _send(self, route: str, scripts: Sequence[Sequence[bytes]]) -> Block:
        block = await self.driver.send(scripts)
        self.tallies[route].blocks.append(block)
        return block


class GpVoiLoad(TrainingLoad):
    """The same with jobs of policy `gp_voi`."""

    policy = GP_VOI


class EchoLoad:
    """The epoch reports alone, for the bare route."""

    def __init__(self, driver: Driver, shape: Shape, prefix: str) -> None:
        self.driver = driver
        self.tallies: dict[str, Tally] = defaultdict(Tally)
        trial = TrialId(job_id=f"{prefix}-0", batch_size=workload.BATCH_SIZES[0], trial_number=1)
        script = [workload.report(trial, epoch=n, epochs=shape.epochs) for n in range(1, shape.epochs)]
        self._scripts = [script] * shape.clients

    async def begin(self) -> None:
        """Nothing to prepare."""

    async def round(self) -> None:
        """As many reports as a round of trainings sends between its first and its last epoch."""
        self.tallies[ECHO].blocks.append(await self.driver.send(self._scripts))

    async def finish(self) -> None:
        """Nothing to leave behind."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A server and the load that suits it."""

    target: Target
    load: type[TrainingLoad] | type[EchoLoad]


async def run_load(
    contestants: Sequence[Contestant], shape: Shape, *, prefix: str, limit_s: float
) -> tuple[LoadFigures, ...]:
    """Put the same load on several servers in turn, after a round that does not count.

    Args:
        contestants: The servers.
        shape: How much.
        prefix: Starts the job ids; new for each call.
        limit_s: No round is begun after so many seconds, but one is always run.

    Raises:
        BenchmarkError: A server did not do what was asked of it.
    """
    warm_up = Shape(shape.jobs, shape.concurrency, epochs=min(shape.epochs, WARM_UP_EPOCHS), rounds=1)
    await _drive(contestants, warm_up, f"{prefix}-warm", limit_s)
    return await _drive(contestants, shape, prefix, limit_s)


async def _drive(
    contestants: Sequence[Contestant], shape: Shape, prefix: str, limit_s: float
) -> tuple[LoadFigures, ...]:
    async with AsyncExitStack() as connections:
        loads: list[Load] = []
        for n, contestant in enumerate(contestants):
            driver = await connections.enter_async_context(driving(contestant.target, shape.clients))
            loads.append(contestant.load(driver, shape, f"{prefix}-{n}"))
        for load in loads:
            await load.begin()
        started, rounds = time.monotonic(), 0
        while rounds < shape.rounds and (rounds == 0 or time.monotonic() - started < limit_s):
            for load in loads:
                await load.round()
            rounds += 1
        for load in loads:
            await load.finish()
        return tuple(_figures(load, rounds) for load in loads)


def _figures(load: Load, rounds: int) -> LoadFigures:
    driver = load.driver
    return LoadFigures(
        target=driver.target.name,
        clients=driver.clients,
        rounds=rounds,
        rss_mib=driver.target.meter.rss_mib(),
        routes=tuple(tally.figures(route) for route, tally in load.tallies.items()),
    )
