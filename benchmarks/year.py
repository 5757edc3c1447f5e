"""``python -m benchmarks.year``: total energy of a fleet's simulated year, by policy, and the load on its server.

Jobs are drawn from recorded convergence, and each run draws at random whether it crashes, vanishes or is preempted.
Each job has its own simulated clock: runs report the time that they would have taken. The server's leases use the real
clock, on which a year takes minutes. A run that will vanish therefore first sends a regular heartbeat, as real
trainings do: the server then gives it a short lease and abandons it soon.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import math
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.driver import SUCCESS, Connection, Exchange, encode
from benchmarks.policies.cases import VaryingConditions, in_reverse, mlperf_workloads
from benchmarks.processes import BenchmarkError, Target, serving_bso
from benchmarks.reports import server_of_year, spent_by_policy
from benchmarks.tables import write_tables, year_tables
from bso_server.simulate.results import Setting, landscape_of
from bso_server.simulate.traces import PAPER_WORKLOADS, Traces
from bso_server.simulate.workload import Consumption, Profile, Workload
from zeus_plugins.protocol import OWN_POLICIES, CreatedJob, Paths, TrialState

# The jobs of the fleet

# All sizes have the maximum power limit, because the server chooses batch sizes and no power limits.
_SETTING = Setting(optimal_power_limits=False)

_DRIFTING = 0.2
_NOISES = (0.02, 0.05, 0.1, 0.3)
_SCALE_SD = 1.0
_FEWEST = 4


@dataclass(frozen=True, slots=True)
class Odds:
    """The chances that a run crashes, is preempted and resumed, or vanishes without a message to the server."""

    crash: float = 0.03
    preemption: float = 0.05
    vanishing: float = 0.01


@dataclass(frozen=True, slots=True)
class Fate:
    """The course of one run, unless the server stops it.

    Attributes:
        epochs: Epochs to the target; infinite if the run never reaches it.
        slowness: Factor on the run's time and energy.
        ends: ``crash`` or ``vanishing``; None if the run does neither.
        at: Share of the run's planned epochs after which it crashes, vanishes or is preempted.
        is_preempted: Whether the run is preempted and resumes.
    """

    epochs: float
    slowness: float
    ends: str | None
    at: float
    is_preempted: bool


@dataclass(frozen=True)
class FleetJob:
    """A recurring job.

    Attributes:
        number: Number that identifies the job.
        workload: The training that recurs.
        conditions: Noise and drift from run to run.
        recurrences: Recurrences in the year.
        scale: Factor on the time and energy of all runs of the job.
        evaluated_every: Epochs between two evaluations.
        odds: Chances of crashes, preemptions and vanishing runs.
    """

    number: int
    workload: Workload
    conditions: VaryingConditions
    recurrences: int
    scale: float
    evaluated_every: int
    odds: Odds

    def registration(self, policy: str) -> CreatedJob:
        """Return the registration of the job with one policy."""
        job_id = f"fleet-{self.number}-{policy}"
        return CreatedJob(
            job_id_prefix=job_id,
            job_id=job_id,
            batch_sizes=tuple(self.conditions.landscape.profiles),
            default_batch_size=self.workload.default_batch_size,
            target_metric=1.0,
            max_epochs=self.workload.max_epochs,
            mab_seed=self.number,
            policy=policy,
            max_power=self.workload.max_power_w,
            number_of_gpus=1,
            gpu_model="recorded",
        )

    def profile(self, batch_size: int, recurrence: int) -> Profile:
        """Return the profile of a size at a recurrence, counted from 0."""
        return self.conditions.landscape_at(recurrence).profiles[batch_size]

    def fate(self, batch_size: int, recurrence: int, attempt: int) -> Fate:
        """Draw the course of a run from these arguments only, so that all policies and the default get the same."""
        rng = np.random.default_rng([self.number, recurrence, attempt])
        path, ends, preemption, at = rng.random(4)
        paths = sorted(self.profile(batch_size, recurrence).epochs_to_target)
        odds = self.odds
        is_lost = ends < odds.crash + odds.vanishing
        return Fate(
            epochs=paths[int(path * len(paths))],
            slowness=self.conditions.slowness(0, rng) * self.scale,
            ends=("crash" if ends < odds.crash else "vanishing") if is_lost else None,
            at=float(at),
            is_preempted=preemption < odds.preemption,
        )

    def evaluations(self, epochs: float) -> list[int]:
        """Return the epochs after which a run is evaluated if it needs `epochs` to the target, `max_epochs` at most."""
        limit = self.workload.max_epochs
        last = min(limit, math.ceil(epochs / self.evaluated_every) * self.evaluated_every if epochs < limit else limit)
        return sorted({*range(self.evaluated_every, last, self.evaluated_every), last})


def draw_jobs(
    pool: Sequence[Workload], number: int, *, mean_recurrences: float, evaluations: int, odds: Odds, seed: int = 0
) -> list[FleetJob]:
    """Draw jobs.

    Args:
        pool: Workloads, drawn with equal probability.
        number: Number of jobs.
        mean_recurrences: Mean recurrences of a job in the year; the part above the minimum of 4 is log-normal.
        evaluations: Evaluations of a run at the default.
        odds: Chances of crashes, preemptions and vanishing runs.
        seed: Seed of all draws.
    """
    rng = np.random.default_rng(seed)
    jobs = []
    for place in range(number):
        workload = pool[int(rng.integers(len(pool)))]
        recurrences = _FEWEST + round((mean_recurrences - _FEWEST) * float(rng.lognormal(-0.5, 1.0)))
        conditions = VaryingConditions(
            landscape_of(workload, _SETTING),
            drift_at=recurrences // 2 if rng.random() < _DRIFTING else None,
            landscape_after=landscape_of(in_reverse(workload), _SETTING),
            cost_noise_sd=float(rng.choice(_NOISES)),
        )
        needed = conditions.landscape.default.expected_epochs
        every = max(1, math.ceil(needed / evaluations)) if math.isfinite(needed) else 1
        scale = float(rng.lognormal(0.0, _SCALE_SD))
        jobs.append(FleetJob(place, workload, conditions, recurrences, scale, every, odds))
    return jobs


def read_pool(mlperf: Path | None, traces: Path | None) -> list[Workload]:
    """Read the workloads for the jobs: all from MLPerf's file, and the six of Zeus's traces on each GPU.

    Args:
        mlperf: MLPerf's file, or None.
        traces: A folder with ``summary_train.csv`` and ``summary_power_*.csv``, or None.

    Raises:
        ValueError: Neither argument has a workload with a default that reaches the target.
    """
    pool = [] if mlperf is None else mlperf_workloads(mlperf)
    for power in [] if traces is None else sorted(traces.glob("summary_power_*.csv")):
        table = Traces.read(traces / "summary_train.csv", power) if traces is not None else None
        pool += [] if table is None else [table.workload(selection) for selection in PAPER_WORKLOADS]
    reaching = [each for each in pool if _reaches(each)]
    if not reaching:
        raise ValueError("there is no workload to draw jobs from: give --mlperf FILE or --traces DIR")
    return reaching


def _reaches(workload: Workload) -> bool:
    """Return True if the default reaches the target, also after a drift; a user would not repeat any other job."""
    places = [size.batch_size for size in workload.sizes]
    default = places.index(workload.default_batch_size)
    return all(min(workload.sizes[place].epochs_to_target) <= workload.max_epochs for place in (default, -1 - default))


# The life of one job: several recurrences in flight, each of which ends when one of its runs reaches the target

PATIENCE = 20
"""After this number of runs without the target, the default finishes a recurrence."""

_REFUSED = 409
_UNAVAILABLE = 503
_REPEATS = 30
_PAUSE_S = 1.0


@dataclass(slots=True)
class Spent:
    """The costs of a job in its year.

    Attributes:
        consumed: Energy and time of all runs of the job.
        reached: Number of recurrences in which a run reached the target.
        given_up: Number of recurrences that the default had to finish.
        runs: Number of trials.
        ends: Number of runs by how they ended, and of preemptions and repeated requests.
        requests: Number of requests by route.
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
    """Simulation of one job with one policy.

    Args:
        job: The job.
        policy: Name of the policy.
        connection: Connection to the server.
        in_flight: Number of recurrences at the same time.
    """

    def __init__(self, job: FleetJob, policy: str, connection: Connection, in_flight: int) -> None:
        self._job, self._connection, self._in_flight = job, connection, in_flight
        self._registration = job.registration(policy)
        self._started = 0
        self._queue: list[tuple[float, int, _Run]] = []
        self._pushed = 0
        self.spent = Spent()

    async def play(self) -> Spent:
        """Play all recurrences of the job's year.

        Raises:
            BenchmarkError: The server refused a valid request.
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
        """Begin a run; give up and return False if no size is left, or after `PATIENCE` runs without the target."""
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
        """Advance a run to its next evaluation, or to its crash, vanishing or preemption if that comes earlier."""
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
        """End a run that crashes (and reports it) or vanishes, and begin the next run of its recurrence."""
        self.spent.consumed += self._consumed(run, run.lost_after)
        self.spent.ends[str(run.fate.ends)] += 1
        if run.fate.ends == "crash":
            await self._send("PATCH", Paths.TRIALS, {**run.trial, "outcome": TrialState.FAILED, "detail": "simulated"})
        await self._begin_again(run, now_s)

    async def _preempt(self, run: _Run) -> None:
        """Preempt a run, and resume it at once from a checkpoint, without losing progress."""
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
        """Send a request and return the answer; raise `BenchmarkError` if the server refuses the request."""
        exchange = await self._ask(method, path, body)
        if exchange.status not in SUCCESS:
            told = exchange.body[:500].decode(errors="replace")
            raise BenchmarkError(f"the server answered {exchange.status} to {method} {path}: {told}")
        told_body: dict[str, Any] = json.loads(exchange.body) if exchange.body else {}
        return told_body

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Exchange:
        self.spent.requests[f"{method} {path.partition('?')[0]}"] += 1
        for _ in range(_REPEATS):
            (exchange,) = await self._connection.play([encode(method, path, body)])
            if exchange.status != _UNAVAILABLE:
                break
            self.spent.ends["asked again"] += 1  # like a training, after a 503: the server did nothing
            await asyncio.sleep(_PAUSE_S)
        return exchange


def by_default(job: FleetJob, recurrence: int) -> Consumption:
    """Return energy and time of a recurrence at the default size, crashed and failed runs included."""
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


# The command

_LEASE_S = 1.0
_GIVE_UP_S = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, print the tables, and write the requested files; return 0, or 1 after printing a reason."""
    options = _parser().parse_args(arguments)
    try:
        source: Path | None = options.source
        results = _measured(options) if source is None else json.loads(source.read_text("utf-8"))
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
        tables = year_tables(results)
        write_tables(tables, options.write)
    except (BenchmarkError, ValueError, OSError) as error:
        print(f"benchmarks.year: {error}", file=sys.stderr)
        return 1
    print("\n\n".join(tables.values()))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.year",
        description="A year of recurring jobs through `bso-server serve`, in accelerated time. See docs/proof.md.",
    )
    parser.add_argument(
        "--mlperf", type=Path, metavar="FILE", help="mlperf_convergence.json, as benchmarks.policies has it"
    )
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder of Zeus's traces")
    parser.add_argument("--jobs", type=int, default=1000, metavar="N", help="number of jobs (default 1000)")
    parser.add_argument("--recurrences", type=float, default=24.0, metavar="N", help="of a job, the mean (default 24)")
    parser.add_argument("--evaluations", type=int, default=8, metavar="N", help="of a run at the default (default 8)")
    parser.add_argument(
        "--in-flight", type=int, default=4, metavar="N", help="recurrences of a job at once (default 4)"
    )
    parser.add_argument(
        "--clients", type=int, default=16, metavar="N", help="jobs that are played at once (default 16)"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, metavar="M", help="begin no job later; count those done"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all draws (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="take the figures of an earlier JSON")
    parser.add_argument("--write", type=Path, nargs="+", default=[], metavar="FILE", help="documents with marks")
    return parser


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    pool = read_pool(options.mlperf, options.traces)
    jobs = draw_jobs(
        pool,
        options.jobs,
        mean_recurrences=options.recurrences,
        evaluations=options.evaluations,
        odds=Odds(),
        seed=options.seed,
    )
    with tempfile.TemporaryDirectory(prefix="fleet-") as temporary:
        directory = Path(temporary)
        file = directory / "bso.sqlite3"
        leases = {"ZEUS_BSO_HEARTBEAT_INTERVAL_S": str(_LEASE_S / 2), "ZEUS_BSO_HEARTBEAT_LEASE_S": str(_LEASE_S)}
        settings = leases | {"ZEUS_BSO_REAP_INTERVAL_S": str(_LEASE_S), "ZEUS_BSO_LOG_LEVEL": "WARNING"}
        with serving_bso("bso-server", f"sqlite:///{file}", directory, settings=settings) as target:
            empty_bytes = _bytes(file)
            spent, wall_s, cpu_s = asyncio.run(_play(jobs, target, options))
            stuck = _stuck(file)
        grown_bytes = _bytes(file) - empty_bytes
    done = [job for job in jobs if all(job.number in of_policy for of_policy in spent.values())]
    if not done:
        raise BenchmarkError("no job has been played with both policies: give it more --minutes")
    default = sum((by_default(job, number) for job in done for number in range(job.recurrences)), Consumption())
    everything = [each for of_policy in spent.values() for each in of_policy.values()]
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "jobs": len(done),
        "workloads": len(pool),
        "recurrences": sum(job.recurrences for job in done),
        "drifting": sum(job.conditions.drift_at is not None for job in done),
        "in_flight": options.in_flight,
        "default": default.as_json(None),
        "policies": {
            policy: spent_by_policy([of_policy[job.number] for job in done], default)
            for policy, of_policy in spent.items()
        },
        "server": server_of_year(everything, wall_s=wall_s, cpu_s=cpu_s, stuck_jobs=stuck, database_bytes=grown_bytes),
    }


async def _play(
    jobs: Sequence[FleetJob], target: Target, options: argparse.Namespace
) -> tuple[dict[str, dict[int, Spent]], float, float | None]:
    """Return the costs by policy and job number, the wall time, and the server's CPU time (seconds, or None)."""
    waiting = [(policy, job) for job in jobs for policy in OWN_POLICIES]
    total = len(waiting)
    waiting.reverse()
    spent: dict[str, dict[int, Spent]] = {policy: {} for policy in OWN_POLICIES}

    async def client() -> None:
        connection = await Connection.open(target)
        try:
            while waiting and time.monotonic() < begun_s + 60 * options.minutes:
                policy, job = waiting.pop()
                spent[policy][job.number] = await Life(job, policy, connection, options.in_flight).play()
                done = sum(map(len, spent.values()))
                if done % max(1, total // 20) == 0:
                    _say(f"{done} of {total} jobs, {time.monotonic() - begun_s:.0f} s")
        finally:
            connection.close()

    begun_s, before_s = time.monotonic(), target.meter.cpu_s()
    await asyncio.gather(*(client() for _ in range(options.clients)))
    after_s = target.meter.cpu_s()
    used_s = None if before_s is None or after_s is None else after_s - before_s
    return spent, time.monotonic() - begun_s, used_s


def _stuck(database: Path) -> int:
    """Count jobs with a running or suspended trial, after waiting for the leases of vanished runs to expire."""
    deadline_s = time.monotonic() + _GIVE_UP_S
    alive = "SELECT COUNT(DISTINCT job_id) FROM trials WHERE state IN (?, ?)"
    while True:
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            (jobs,) = connection.execute(alive, (TrialState.RUNNING.value, TrialState.SUSPENDED.value)).fetchone()
        if not jobs or time.monotonic() > deadline_s:
            return int(jobs)
        time.sleep(_LEASE_S)


def _bytes(file: Path) -> int:
    """Return the size of a SQLite file and its journal."""
    return sum(part.stat().st_size for part in file.parent.glob(f"{file.name}*"))


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
