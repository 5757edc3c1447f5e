"""The jobs of a fleet, drawn from recorded convergence, and what chance does to each of their runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.policies.conditions import VaryingConditions, in_reverse
from benchmarks.policies.mlperf import mlperf_workloads
from bso_server.simulate.results import Setting, landscape_of
from bso_server.simulate.traces import PAPER_WORKLOADS, Traces
from bso_server.simulate.workload import Profile, Workload
from zeus_plugins.protocol import JobRegistration

# All sizes at the highest power limit: a server of batch sizes chooses no other.
_SETTING = Setting(optimal_power_limits=False)

_DRIFTING = 0.2
_NOISES = (0.02, 0.05, 0.1, 0.3)
_SCALE_SD = 1.0
_FEWEST = 4


@dataclass(frozen=True, slots=True)
class Odds:
    """The chances of a run: to crash, to be preempted and resumed, and to vanish without a word."""

    crash: float = 0.03
    preemption: float = 0.05
    vanishing: float = 0.01


@dataclass(frozen=True, slots=True)
class Fate:
    """The course of one run, were it let go on.

    Attributes:
        epochs: At which it reaches the target; infinite if never.
        slowness: Factor on its time and energy.
        ends: ``crash`` or ``vanishing``; None: nothing befalls it.
        at: The share of its epochs after which that, or a preemption, befalls it.
        is_preempted: Whether it is preempted and resumes.
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
        number: Names it.
        workload: What recurs.
        conditions: What changes from run to run.
        recurrences: In a year.
        scale: Factor on time and energy of all of its runs.
        evaluated_every: Epochs between two evaluations.
        odds: What befalls its runs.
    """

    number: int
    workload: Workload
    conditions: VaryingConditions
    recurrences: int
    scale: float
    evaluated_every: int
    odds: Odds

    def registration(self, policy: str) -> JobRegistration:
        """The job as one of a policy, on its server."""
        job_id = f"fleet-{self.number}-{policy}"
        return JobRegistration(
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
        """A size at a recurrence, from 0."""
        return self.conditions.landscape_at(recurrence).profiles[batch_size]

    def fate(self, batch_size: int, recurrence: int, attempt: int) -> Fate:
        """The fate of a run; it depends on nothing else, so that each policy and the default meet the same."""
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
        """The epochs after which a run is evaluated that needs so many: the last of them reaches the target."""
        limit = self.workload.max_epochs
        last = min(limit, math.ceil(epochs / self.evaluated_every) * self.evaluated_every if epochs < limit else limit)
        return sorted({*range(self.evaluated_every, last, self.evaluated_every), last})


def draw_jobs(
    pool: Sequence[Workload], number: int, *, mean_recurrences: float, evaluations: int, odds: Odds, seed: int = 0
) -> list[FleetJob]:
    """Draw jobs.

    Args:
        pool: What they may train, each as likely as the others.
        number: How many.
        mean_recurrences: Of a job in a year; their numbers are spread as a log-normal law has it, 4 at least.
        evaluations: Of a run at the default.
        odds: What befalls runs.
        seed: Of all draws.
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
    """The workloads that jobs may train: those of MLPerf's file, and the six of Zeus's traces on each GPU.

    Args:
        mlperf: The file, or None.
        traces: A folder with ``summary_train.csv`` and ``summary_power_*.csv``, or None.

    Raises:
        ValueError: Neither holds a workload whose default reaches the target.
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
    """True if the default reaches the target, also after a drift: else nobody would let the job recur."""
    places = [size.batch_size for size in workload.sizes]
    default = places.index(workload.default_batch_size)
    return all(min(workload.sizes[place].epochs_to_target) <= workload.max_epochs for place in (default, -1 - default))
