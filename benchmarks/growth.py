"""Growth: what a suggest, a final report and a look at the page cost when one job has had 10 to 5,000 trials."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks import workload
from benchmarks.driver import Block, Driver, driving
from benchmarks.processes import Target
from benchmarks.workload import Job
from zeus_plugins.protocol import TrialId

REFERENCE_TRIALS = 10
CLIENTS = 16
BLOCK_REQUESTS = 10


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one kind of request, with one client.

    Attributes:
        server_cpu_ms: CPU time of the server per request (median over blocks of requests), or None.
        p50_ms: Median latency.
        cpu_ratio: `server_cpu_ms` over that of a job with 10 trials measured at the same time, or None.
        p50_ratio: `p50_ms` over that of the same job.
    """

    server_cpu_ms: float | None
    p50_ms: float
    cpu_ratio: float | None
    p50_ratio: float


@dataclass(frozen=True, slots=True)
class GrowthPoint:
    """Costs at one number of trials.

    Attributes:
        trials: Trials that the job had had when the measurement began.
        requests: How many requests of each kind were measured.
        suggest: Cost of ``GET /jobs/batch_size``.
        final_report: Cost of the ``POST /report`` that ends a trial.
        page: Cost of ``GET /ui/jobs/{job_id}``, one after each block of the others.
        page_bytes: Size of that, as it is sent.
    """

    trials: int
    requests: int
    suggest: Cost
    final_report: Cost
    page: Cost
    page_bytes: int


@dataclass(frozen=True, slots=True)
class GrowthFigures:
    """Costs as a job grows.

    Attributes:
        asked: Numbers of trials at which to measure.
        points: What was measured; the last at fewer trials than asked if time ran out.
        note: Why there is less than asked, or None.
    """

    asked: tuple[int, ...]
    points: tuple[GrowthPoint, ...]
    note: str | None


@dataclass(slots=True)
class _Blocks:
    suggest: list[Block] = field(default_factory=list)
    final_report: list[Block] = field(default_factory=list)
    page: list[Block] = field(default_factory=list)


class _GrowingJob:
    """A job, and how many trials it has had."""

    def __init__(self, driver: Driver, job_id: str) -> None:
        self._driver = driver
        self._job = Job(job_id, max_epochs=1, pruning_rounds=1)
        self.trials = 0

    async def register(self) -> None:
        await self._driver.send([[self._job.registration]])

    async def delete(self) -> None:
        await self._driver.send([[self._job.delete]])

    async def grow(self, to: int, *, deadline: float) -> None:
        """Run trials until the job has had `to` of them or the time has come.

        The first ones run alone: trials that run beside an exploration do not bring the job into the bandit stage.
        """
        while self.trials < to and time.monotonic() < deadline:
            together = 1 if self.trials < REFERENCE_TRIALS else min(CLIENTS, to - self.trials)
            await self._run_trials([1] * together)

    async def measure(self, into: _Blocks) -> None:
        """Run a few trials with one client: all their suggests, all their final reports, a look at the page."""
        suggested, reported = await self._run_trials([BLOCK_REQUESTS])
        into.suggest.append(suggested)
        into.final_report.append(reported)
        into.page.append(await self._driver.send([[self._job.page]]))

    async def _run_trials(self, per_client: Sequence[int]) -> tuple[Block, Block]:
        suggested = await self._driver.send([[self._job.suggest] * trials for trials in per_client])
        dispatched = workload.dispatched(suggested)
        reported = await self._driver.send([[_final_report(trial) for trial in trials] for trials in dispatched])
        workload.expect(reported, stop_train=True, converged=True)
        self.trials += sum(per_client)
        return suggested, reported


def _final_report(trial: TrialId) -> bytes:
    return workload.report(trial, epoch=1, epochs=1)


async def run_growth(
    target: Target, sizes: Sequence[int], *, blocks: int, prefix: str, limit_s: float
) -> GrowthFigures:
    """Let one job grow and measure at each of the sizes.

    Beside the job, a new one with 10 trials is measured in turn: the ratio of the two is free of the machine's drift,
    and at 10 trials, where both are alike, it shows how far a ratio can be trusted.

    Args:
        target: The server.
        sizes: Numbers of trials, ascending.
        blocks: How many blocks of 10 requests are measured per size.
        prefix: Starts the job ids; new for each call.
        limit_s: When to stop growing; what has been reached by then is measured too.

    Raises:
        BenchmarkError: The server did not do what was asked of it.
    """
    deadline = time.monotonic() + limit_s
    points: list[GrowthPoint] = []
    note = None
    async with driving(target, CLIENTS) as driver:
        job = _GrowingJob(driver, f"{prefix}-growing")
        await job.register()
        for size in sizes:
            await job.grow(size, deadline=deadline)
            points.append(await _point(driver, job, f"{prefix}-at-{size}", blocks))
            if points[-1].trials < size:
                note = f"{limit_s:g} s were over at {points[-1].trials} of {sizes[-1]} trials"
                break
        await job.delete()
    return GrowthFigures(asked=tuple(sizes), points=tuple(points), note=note)


async def _point(driver: Driver, job: _GrowingJob, reference_id: str, blocks: int) -> GrowthPoint:
    reference = _GrowingJob(driver, reference_id)
    await reference.register()
    await reference.grow(REFERENCE_TRIALS, deadline=float("inf"))
    trials = job.trials
    measured, compared = _Blocks(), _Blocks()
    for _ in range(blocks):
        await job.measure(measured)
        await reference.measure(compared)
    await reference.delete()
    return GrowthPoint(
        trials=trials,
        requests=blocks * BLOCK_REQUESTS,
        suggest=_cost(measured.suggest, compared.suggest),
        final_report=_cost(measured.final_report, compared.final_report),
        page=_cost(measured.page, compared.page),
        page_bytes=max(len(looked.body) for block in measured.page for played in block.exchanges for looked in played),
    )


def _cost(measured: Sequence[Block], compared: Sequence[Block]) -> Cost:
    cpu_ms, compared_cpu_ms = _cpu_ms(measured), _cpu_ms(compared)
    p50_ms = _p50_ms(measured)
    return Cost(
        server_cpu_ms=cpu_ms,
        p50_ms=p50_ms,
        cpu_ratio=cpu_ms / compared_cpu_ms if cpu_ms and compared_cpu_ms else None,
        p50_ratio=p50_ms / _p50_ms(compared),
    )


def _cpu_ms(blocks: Sequence[Block]) -> float | None:
    known = [block.server_cpu_ms for block in blocks if block.server_cpu_ms is not None]
    return statistics.median(known) if known else None


def _p50_ms(blocks: Sequence[Block]) -> float:
    return statistics.median(
        1e3 * exchange.latency_s for block in blocks for played in block.exchanges for exchange in played
    )
