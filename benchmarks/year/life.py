"""The life of one job: up to four recurrences in flight, each until a run of it reaches the target.

Time is the job's own, simulated: what is reported is what the runs would have taken. The server's leases run by the
real clock, on which a year takes seconds; a run that is going to vanish therefore sends a heartbeat, as real trainings
do, so that the server gives it up after its short lease for such.
"""

from __future__ import annotations

import asyncio
import heapq
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.driver import SUCCESS
from benchmarks.errors import BenchmarkError
from benchmarks.player import Exchange, Player, encode
from benchmarks.year.jobs import Fate, FleetJob
from bso_server.simulate.savings import Consumption
from zeus_plugins.protocol import Paths, TrialState

PATIENCE = 20
"""Runs of a recurrence in a row that miss the target, before the default finishes it."""

_REFUSED = 409
_UNAVAILABLE = 503
_REPEATS = 30
_PAUSE_S = 1.0


@dataclass(slots=True)
class Spent:
    """The costs of a job in its year.

    Attributes:
        consumed: Energy and time of all of its runs.
        reached: Recurrences of which a run has reached the target.
        given_up: Recurrences that the default had to finish.
        runs: Trials.
        ends: Runs by how they ended.
        requests: Requests by route.
    """

    consumed: Consumption = field(default_factory=Consumption)
    reached: int = 0
    given_up: int = 0
    runs: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Run:
    """A run under way."""

    recurrence: int
    attempt: int
    trial: dict[str, Any]
    fate: Fate
    began_s: float
    evaluations: Iterator[int]
    lost_after: float
    epoch: int = 0


class Life:
    """Plays one job with one policy.

    Args:
        job: The job.
        policy: Its policy.
        player: A connection to the server.
        in_flight: Recurrences at the same time.
    """

    def __init__(self, job: FleetJob, policy: str, player: Player, in_flight: int) -> None:
        self._job, self._player, self._in_flight = job, player, in_flight
        self._registration = job.registration(policy)
        self._started = 0
        self._queue: list[tuple[float, int, _Run]] = []
        self._pushed = 0
        self.spent = Spent()

    async def play(self) -> Spent:
        """Let the job recur for its year.

        Raises:
            BenchmarkError: The server refused what it must take.
        """
        await self._send("POST", Paths.JOBS, self._registration.model_dump(mode="json"))
        for _ in range(self._in_flight):
            await self._begin_next(0.0)
        while self._queue:
            now_s, _, run = heapq.heappop(self._queue)
            await self._go_on(run, now_s)
        return self.spent

    async def _begin_next(self, now_s: float) -> None:
        while self._started < self._job.recurrences:
            self._started += 1
            if await self._begin(self._started - 1, 0, now_s):
                return

    async def _begin(self, recurrence: int, attempt: int, now_s: float) -> bool:
        """Begin a run; False where the recurrence is given up, as no size is left or none has reached the target."""
        if attempt == PATIENCE:
            self._give_up(recurrence)
            return False
        exchange = await self._ask("GET", f"{Paths.BATCH_SIZE}?job_id={self._registration.job_id}")
        if exchange.status == _REFUSED:
            self._give_up(recurrence)
            return False
        told = json.loads(exchange.body)
        trial = {
            name: told[name] for name in ("job_id", "batch_size", "trial_number", "registration_id", "lease_epoch")
        }
        fate = self._job.fate(trial["batch_size"], recurrence, attempt)
        evaluations = self._job.evaluations(fate.epochs)
        lost_after = fate.at * evaluations[-1]
        self.spent.runs += 1
        if fate.ends == "vanishing":
            await self._send("PATCH", Paths.HEARTBEAT, {**trial, "regular": True})
        self._schedule(_Run(recurrence, attempt, trial, fate, now_s, iter(evaluations), lost_after))
        return True

    def _schedule(self, run: _Run) -> None:
        """Put the next evaluation of a run into the queue."""
        run.epoch = next(run.evaluations)
        self._pushed += 1
        heapq.heappush(self._queue, (run.began_s + self._consumed(run, run.epoch).time_s, self._pushed, run))

    async def _go_on(self, run: _Run, now_s: float) -> None:
        """Let a run come to its next evaluation, or to what befalls it before."""
        if run.epoch >= run.lost_after:
            if run.fate.ends is not None:
                await self._lose(run, now_s)
                return
            if run.fate.is_preempted:
                await self._preempt(run)
        consumed = self._consumed(run, run.epoch)
        reached = run.epoch >= run.fate.epochs
        evaluation = {"time": consumed.time_s, "energy": consumed.energy_j, "metric": 1.0 if reached else 0.0}
        told = await self._send(
            "POST",
            Paths.REPORT,
            {**run.trial, **evaluation, "current_epoch": run.epoch, "energy_source": "simulated", "judged_by": None},
        )
        if not told["stop_train"]:
            self._schedule(run)
            return
        self.spent.consumed += consumed
        self.spent.ends[told["reason"]] += 1
        if told["converged"]:
            self.spent.reached += 1
            await self._begin_next(now_s)
        else:
            await self._begin_again(run, now_s)

    async def _lose(self, run: _Run, now_s: float) -> None:
        """A run crashes and says so, or vanishes; the recurrence is launched again."""
        self.spent.consumed += self._consumed(run, run.lost_after)
        self.spent.ends[str(run.fate.ends)] += 1
        if run.fate.ends == "crash":
            await self._send("PATCH", Paths.TRIALS, {**run.trial, "outcome": TrialState.FAILED, "detail": "simulated"})
        await self._begin_again(run, now_s)

    async def _preempt(self, run: _Run) -> None:
        """A run is preempted, and resumes from a checkpoint of that moment."""
        run.lost_after = float("inf")
        self.spent.ends["preemption"] += 1
        await self._send("PATCH", Paths.TRIALS, {**run.trial, "outcome": TrialState.SUSPENDED})
        told = await self._send("PATCH", Paths.HEARTBEAT, {**run.trial, "regular": False, "resumes": True})
        run.trial["lease_epoch"] = told["lease_epoch"]

    async def _begin_again(self, run: _Run, now_s: float) -> None:
        if not await self._begin(run.recurrence, run.attempt + 1, now_s):
            await self._begin_next(now_s)

    def _give_up(self, recurrence: int) -> None:
        self.spent.given_up += 1
        self.spent.consumed += by_default(self._job, recurrence)

    def _consumed(self, run: _Run, epochs: float) -> Consumption:
        epoch = self._job.profile(run.trial["batch_size"], run.recurrence).epoch
        return Consumption(epoch.energy_j, epoch.time_s) * (epochs * run.fate.slowness)

    async def _send(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send what the server must take; its answer."""
        exchange = await self._ask(method, path, body)
        if exchange.status not in SUCCESS:
            told = exchange.body[:500].decode(errors="replace")
            raise BenchmarkError(f"the server answered {exchange.status} to {method} {path}: {told}")
        told_body: dict[str, Any] = json.loads(exchange.body) if exchange.body else {}
        return told_body

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Exchange:
        self.spent.requests[f"{method} {path.partition('?')[0]}"] += 1
        for _ in range(_REPEATS):
            (exchange,) = await self._player.play([encode(method, path, body)])
            if exchange.status != _UNAVAILABLE:
                break
            self.spent.ends["asked again"] += 1  # as a training does, when the server says that nothing was done
            await asyncio.sleep(_PAUSE_S)
        return exchange


def by_default(job: FleetJob, recurrence: int) -> Consumption:
    """Energy and time of a recurrence at the default size, crashed and failed runs included."""
    size = job.workload.default_batch_size
    profile = job.profile(size, recurrence)
    epochs = 0.0
    for attempt in range(100 * PATIENCE):
        fate = job.fate(size, recurrence, attempt)
        planned = job.evaluations(fate.epochs)[-1]
        if fate.ends is not None:
            epochs += fate.slowness * fate.at * planned
            continue
        epochs += fate.slowness * planned
        if fate.epochs <= planned:
            return Consumption(profile.epoch.energy_j, profile.epoch.time_s) * epochs
    raise BenchmarkError(f"{job.workload.name}: its default never reaches the target")
