"""A fleet of trainings at their natural pace: each reports when an epoch is over and beats in between, for a while.

An open load: a request leaves when it is due, whether or not others have been answered, on a connection of its own, as
that of a training has been closed since the last one. A latency counts from the instant at which the request was due.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from benchmarks import workload
from benchmarks.driver import SUCCESS, percentile
from benchmarks.errors import BenchmarkError
from benchmarks.load import EPOCH_REPORT, FINAL_REPORT, REGISTER_KNOWN, REGISTER_NEW, SUGGEST
from benchmarks.player import Exchange, Player, encode
from benchmarks.processes import Target
from benchmarks.workload import Job
from zeus_plugins.protocol import Paths, TrialId

HEARTBEAT = "PATCH /trials/heartbeat"

# Requests under way while the fleet starts, which nothing but the server's answers slows down.
STARTING_AT_ONCE = 32

# Those that may wait for an answer at the same time: a server that cannot follow has no more files than that, either.
MOST_UNDER_WAY = 4000


@dataclass(frozen=True, slots=True)
class Fleet:
    """The trainings, and how they behave.

    Attributes:
        trainings: How many run at the same time.
        per_job: How many of them are of one job.
        epochs: Epochs of each, the last of which reaches the target; then its job's next recurrence begins at once.
        epoch_s: Seconds that an epoch takes.
        heartbeat_s: Seconds between heartbeats.
    """

    trainings: int
    per_job: int
    epochs: int
    epoch_s: float
    heartbeat_s: float


@dataclass(frozen=True, slots=True)
class PaceFigures:
    """Requests of one kind while the fleet trains.

    Attributes:
        request: What was asked.
        due: How often.
        answers: Number of answers per HTTP status; 0 where none came.
        p50_ms: Median latency of those that were answered, from the instant at which they were due.
        p99_ms: Latency that 99 % of them kept.
    """

    request: str
    due: int
    answers: dict[str, int]
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """The requests of a fleet to a server.

    Attributes:
        target: The server.
        window_s: Seconds for which it was measured.
        start_s: Seconds that the fleet took to begin.
        server_cores: CPU time of the server per second, in cores; None where it cannot be known.
        generator_cores: That of the load generator.
        rss_mib: Resident memory of the server afterwards, or None.
        kinds: Figures per kind of request.
    """

    target: str
    window_s: float
    start_s: float
    server_cores: float | None
    generator_cores: float
    rss_mib: float | None
    kinds: tuple[PaceFigures, ...]

    @property
    def requests_per_s(self) -> float:
        """Requests that were due in a second."""
        return sum(kind.due for kind in self.kinds) / self.window_s

    @property
    def failures(self) -> int:
        """Requests that were not answered with success."""
        statuses = (pair for kind in self.kinds for pair in kind.answers.items())
        return sum(number for status, number in statuses if int(status) not in SUCCESS)


@dataclass(slots=True)
class _Tally:
    due: int = 0
    answers: Counter[int] = field(default_factory=Counter)
    latencies_s: list[float] = field(default_factory=list)

    def figures(self, request: str) -> PaceFigures:
        ascending_ms = sorted(1e3 * latency_s for latency_s in self.latencies_s) or [0.0]
        return PaceFigures(
            request=request,
            due=self.due,
            answers={str(status): number for status, number in sorted(self.answers.items())},
            p50_ms=percentile(ascending_ms, 0.5),
            p99_ms=percentile(ascending_ms, 0.99),
        )


class _Clients:
    """Requests to one server, each on a connection of its own."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._under_way = asyncio.Semaphore(MOST_UNDER_WAY)
        self.tallies: dict[str, _Tally] = defaultdict(_Tally)

    async def ask(self, kind: str, request: bytes, *, due: float | None = None) -> Exchange | None:
        """The answer to a request, which counts if it is due at an instant; None if none came."""
        # What belongs to the start of the fleet is not counted.
        tally, due = (_Tally(), time.monotonic()) if due is None else (self.tallies[kind], due)
        tally.due += 1
        async with self._under_way:
            try:
                player = await Player.connect(self._target.host, self._target.port)
                try:
                    (exchange,) = await player.play([request])
                finally:
                    player.close()
            except BenchmarkError:
                tally.answers[0] += 1
                return None
        tally.answers[exchange.status] += 1
        tally.latencies_s.append(time.monotonic() - due)
        return exchange


class _Training:
    """One of the fleet: the trial that it has, and its epochs so far."""

    def __init__(self, clients: _Clients, job: Job, fleet: Fleet, chance: random.Random) -> None:
        self._clients, self._job, self._fleet = clients, job, fleet
        self._epoch = chance.randrange(fleet.epochs)
        # The whole fleet is in the midst of its work: its epochs and heartbeats are spread evenly.
        self._until_report_s = chance.uniform(0, fleet.epoch_s)
        self._until_beat_s = chance.uniform(0, fleet.heartbeat_s)
        self._trial: TrialId | None = None

    async def begin(self, *, due: float | None = None) -> None:
        """Get a trial."""
        await self._clients.ask(REGISTER_KNOWN, self._job.registration, due=due)
        answer = await self._clients.ask(SUGGEST, self._job.suggest, due=None if due is None else time.monotonic())
        if answer is not None and answer.status in SUCCESS:
            self._trial = TrialId.model_validate_json(answer.body)
        elif due is None:
            raise BenchmarkError(f"no batch size while the fleet starts: {answer}")

    async def train(self, *, began: float, until: float) -> None:
        """Report and beat until the window is over."""
        report_at, beat_at = began + self._until_report_s, began + self._until_beat_s
        while (due := min(report_at, beat_at)) < until:
            await asyncio.sleep(due - time.monotonic())
            if self._trial is None:
                await self.begin(due=due)
            elif due == beat_at:
                await self._clients.ask(HEARTBEAT, encode("PATCH", Paths.HEARTBEAT, dict(self._trial)), due=due)
            else:
                await self._report(self._trial, due)
            report_at += self._fleet.epoch_s if due == report_at else 0
            beat_at += self._fleet.heartbeat_s if due == beat_at else 0

    async def _report(self, trial: TrialId, due: float) -> None:
        self._epoch += 1
        report = workload.report(trial, epoch=self._epoch, epochs=self._fleet.epochs)
        is_last = self._epoch == self._fleet.epochs
        answer = await self._clients.ask(FINAL_REPORT if is_last else EPOCH_REPORT, report, due=due)
        if is_last and answer is not None:
            self._epoch = 0
            await self.begin(due=time.monotonic())


async def run_fleet(target: Target, fleet: Fleet, *, window_s: float, say: Callable[[str], None]) -> FleetFigures:
    """Let a fleet begin, as fast as the server can, and then train for a while.

    Args:
        target: The server.
        fleet: The trainings.
        window_s: Seconds for which to measure.
        say: Gets a line now and then.

    Raises:
        BenchmarkError: The fleet could not begin.
    """
    clients, chance = _Clients(target), random.Random(0)  # noqa: S311 - spreads a load
    numbers = range(-(-fleet.trainings // fleet.per_job))
    jobs = [Job(f"fleet-{number}", max_epochs=fleet.epochs, pruning_rounds=2) for number in numbers]
    trainings = [_Training(clients, jobs[number // fleet.per_job], fleet, chance) for number in range(fleet.trainings)]
    start = time.monotonic()
    await _few_at_once(clients.ask(REGISTER_NEW, job.registration) for job in jobs)
    await _few_at_once(training.begin() for training in trainings)
    began = time.monotonic()
    say(f"{fleet.trainings} trainings of {len(jobs)} jobs have begun in {began - start:.0f} s")

    server_cpu_s, own_cpu_s = target.meter.cpu_s(), time.process_time()
    await asyncio.gather(*(training.train(began=began, until=began + window_s) for training in trainings))
    took_s = time.monotonic() - began
    used_s = target.meter.cpu_s()
    return FleetFigures(
        target=target.name,
        window_s=took_s,
        start_s=began - start,
        server_cores=None if used_s is None or server_cpu_s is None else (used_s - server_cpu_s) / took_s,
        generator_cores=(time.process_time() - own_cpu_s) / took_s,
        rss_mib=target.meter.rss_mib(),
        kinds=tuple(tally.figures(kind) for kind, tally in clients.tallies.items()),
    )


async def _few_at_once(asked: Iterable[Awaitable[object]]) -> None:
    semaphore = asyncio.Semaphore(STARTING_AT_ONCE)

    async def wait_for(one: Awaitable[object]) -> None:
        async with semaphore:
            await one

    await asyncio.gather(*map(wait_for, asked))
