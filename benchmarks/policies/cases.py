"""The jobs and conditions of the comparison: rows of cases, made of trainings that were recorded, published or made up.

The traces come from the Zeus paper. MLPerf's file holds published reference convergence points: for each benchmark
its global batch sizes, and how many evaluations each training took to reach the target. The hyper-parameters were tuned
for each size. The file has no times or powers, so this module computes them:

- Every epoch ends with an evaluation and takes ``t₀ · (1 + b₀ / b)`` seconds: throughput saturates at b₀.
- The power is ``0.35 + 0.65 · b / (b + b₀)`` times the maximum power.

Module `landscapes` generates all other jobs.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.policies import landscapes
from benchmarks.policies.landscapes import MadeJob, made_jobs
from bso_server.core.model import History
from bso_server.core.policy import learned_by
from bso_server.simulate.play import Conditions, Played
from bso_server.simulate.results import Setting, landscape_of, oracle_costs_j, played
from bso_server.simulate.traces import PAPER_WORKLOADS, Traces
from bso_server.simulate.workload import Epoch, Landscape, Profile, SizeTrace, Workload

# Conditions


@dataclass(frozen=True)
class VaryingConditions(Conditions):
    """Conditions that change from recurrence to recurrence.

    Attributes:
        cost_noise_sd: σ of the log of a random factor on the time and energy of each trial, as if other programs used
            the machine, too. The factor's mean is 1.
        landscapes: Landscapes of the recurrences, repeated cyclically, for a job that changes; otherwise empty.
        crash_chance: Chance that a trial crashes half way.
        waited_shares: Share of its time for which each recurrence's run waits for a CPU core, repeated cyclically.
    """

    cost_noise_sd: float = 0.0
    landscapes: tuple[Landscape, ...] = ()
    crash_chance: float = 0.0
    waited_shares: tuple[float, ...] = (0.0,)

    def landscape_at(self, recurrence: int) -> Landscape:
        """Return the landscape at a recurrence, counted from 0."""
        return self.landscapes[recurrence % len(self.landscapes)] if self.landscapes else self.landscape

    def waited_share(self, recurrence: int) -> float:
        """Return the share of its time for which a run of this recurrence waits for a CPU core."""
        return self.waited_shares[recurrence % len(self.waited_shares)]

    def slowness(self, trial_number: int, draws: np.random.Generator) -> float:  # noqa: ARG002 - the hook's signature
        """Draw a factor on the time and energy of one trial."""
        sd = self.cost_noise_sd
        return float(draws.lognormal(-sd * sd / 2, sd)) if sd else 1.0

    def crashes(self, draws: np.random.Generator) -> bool:
        """Draw whether a trial crashes half way."""
        return bool(self.crash_chance) and bool(draws.random() < self.crash_chance)


# MLPerf's file

# Ratios of b₀ to the geometric mean of the sizes: throughput saturates below, among, or above the sizes.
_SATURATIONS = (1 / 8, 1.0, 8.0)
_IDLE_SHARE = 0.35
_MAX_POWER_W = 400.0
# t₀. Ratios of costs depend neither on t₀ nor on the maximum power.
_EPOCH_S = 600.0


def mlperf_workloads(file: Path) -> list[Workload]:
    """Return all jobs of a file: each benchmark with three values of b₀, and two defaults.

    The defaults are the second-smallest and the second-largest size. `max_epochs` is three times the mean of the
    default's epochs to the target, rounded up.

    Args:
        file: JSON, ``{"jobs": {NAME: {"sizes": [b, …], "reports_to_target": [[evaluations of each run, …], …]}}}`` with
            ascending sizes, and a list of runs for each size.

    Raises:
        ValueError: The file does not have this format, or a job has a single size.
    """
    try:
        jobs = json.loads(file.read_text("utf-8"))["jobs"]
        return [
            _workload(name, job["sizes"], job["reports_to_target"], saturation, place)
            for name, job in jobs.items()
            for saturation in _SATURATIONS
            for place in (1, -2)
        ]
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"{file} does not hold jobs with sizes and reports_to_target: {error!r}") from error


def _workload(
    name: str, sizes: Sequence[int], runs: Sequence[Sequence[float]], saturation: float, place: int
) -> Workload:
    saturates_at = saturation * math.exp(sum(map(math.log, sizes)) / len(sizes))
    return Workload(
        name=f"{name}, b₀ {saturation:g}, default {sizes[place]}",
        sizes=tuple(
            SizeTrace(size, tuple(map(float, epochs)), {_MAX_POWER_W: _epoch(size, saturates_at)})
            for size, epochs in zip(sizes, runs, strict=True)
        ),
        default_batch_size=sizes[place],
        max_epochs=math.ceil(3 * sum(runs[place]) / len(runs[place])),
        max_power_w=_MAX_POWER_W,
    )


def _epoch(size: int, saturates_at: float) -> Epoch:
    time_s = _EPOCH_S * (1 + saturates_at / size)
    utilisation = size / (size + saturates_at)
    return Epoch(time_s, time_s * _MAX_POWER_W * (_IDLE_SHARE + (1 - _IDLE_SHARE) * utilisation))


# The rows

_GPUS = ("v100", "a40")
_ETAS = (0.0, 0.5, 1.0)
_TOO_EXPENSIVE = 1.05
_WARM_RECURRENCES = 20


@dataclass(frozen=True)
class Case:
    """One job in one setting.

    Attributes:
        name: The job, η, and further details that make the name unique in its row.
        workload: The job.
        setting: The number of recurrences and the parameters; `seeds` is ignored.
        conditions: The conditions under which it recurs.
        elsewhere: The job on another GPU, for warm starts.
    """

    name: str
    workload: Workload
    setting: Setting
    conditions: VaryingConditions
    elsewhere: Workload | None = None

    def play(
        self,
        policy: str,
        seed: int,
        before_decision: Callable[[int, History], None] | None = None,
        *,
        is_warm: bool = False,
    ) -> Played:
        """Play the job of one seed with one of the server's policies; `Simulation` documents `before_decision`.

        If `is_warm`, the job begins with what 20 recurrences have taught the job on another GPU.
        """
        warm = None
        if is_warm and self.elsewhere is not None:
            setting = replace(self.setting, recurrences=_WARM_RECURRENCES)
            at = Conditions(landscape_of(self.elsewhere, setting))
            warm = learned_by(played(self.elsewhere, at, policy, setting, seed + setting.seeds).history)
        return played(self.workload, self.conditions, policy, self.setting, seed, before_decision, warm=warm)

    def ratios(self, costs_j: Sequence[float]) -> list[float]:
        """Return the ratio of total cost to the oracle's total cost after each recurrence.

        Args:
            costs_j: Cost of each recurrence, joules, shape (recurrences,).
        """
        oracle_j = oracle_costs_j(self.conditions, self.setting.recurrences)
        spent_j = needed_j = 0.0
        ratios = []
        for cost_j, least_j in zip(costs_j, oracle_j, strict=True):
            spent_j, needed_j = spent_j + cost_j, needed_j + least_j
            ratios.append(spent_j / needed_j)
        return ratios

    def is_too_expensive(self, batch_size: int | None) -> bool:
        """Return True if a size is over 5 % more expensive than the best at the last recurrence, or is None."""
        at = self.conditions.landscape_at(self.setting.recurrences - 1)
        limit_j = _TOO_EXPENSIVE * at.oracle.expected_cost_j
        return batch_size is None or at.profiles[batch_size].expected_cost_j > limit_j


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the report.

    Attributes:
        title: The row's name in tables.
        cases: Function that returns the cases, given the folder with the traces and a number of recurrences.
        is_made: True if the jobs are made up. Then `cases` reads no files, and the folder may be None.
    """

    title: str
    cases: Callable[[Path, int], list[Case]]
    is_made: bool = False


def case_of(workload: Workload, setting: Setting, **conditions: Any) -> Case:
    """Return the case of a job in a setting; `conditions` are fields of `VaryingConditions`.

    Raises:
        ValueError: No run of the job reaches the target.
    """
    fields: dict[str, Any] = {"landscape": landscape_of(workload, setting)} | conditions
    return Case(f"{workload.name}, η {setting.eta:g}", workload, setting, VaryingConditions(**fields))


def _traced(folder: Path) -> list[Workload]:
    """Read the six workloads of the Zeus paper on each GPU."""
    workloads = []
    for gpu in _GPUS:
        traces = Traces.read(folder / "summary_train.csv", folder / f"summary_power_{gpu}.csv")
        found = (traces.workload(selection) for selection in PAPER_WORKLOADS)
        workloads += [replace(each, name=f"{each.name} on {gpu}") for each in found]
    return workloads


def _elsewhere(workloads: Sequence[Workload], key: Callable[[Workload], object]) -> list[Workload]:
    """Return for each job the next job with the same key, on another GPU; for the last of a key the first."""
    alike: dict[object, list[Workload]] = defaultdict(list)
    for each in workloads:
        alike[key(each)].append(each)
    following = {
        id(one): other for group in alike.values() for one, other in zip(group, group[1:] + group[:1], strict=True)
    }
    return [following[id(each)] for each in workloads]


def _traces(folder: Path, recurrences: int) -> list[Case]:
    settings = [Setting(recurrences=recurrences, eta=eta) for eta in _ETAS]
    workloads = _traced(folder)
    others = _elsewhere(workloads, lambda each: each.name.split(" on ")[0])
    pairs = list(zip(workloads, others, strict=True))
    return [replace(case_of(each, setting), elsewhere=other) for setting in settings for each, other in pairs]


def _mlperf(folder: Path, recurrences: int) -> list[Case]:
    setting, found = Setting(recurrences=recurrences), mlperf_workloads(folder / "mlperf_convergence.json")
    others = _elsewhere(found, lambda each: (each.name.split(", b₀")[0], each.default_batch_size))
    return [replace(case_of(each, setting), elsewhere=other) for each, other in zip(found, others, strict=True)]


# Rows of made landscapes

_DRIFT_AT = 50
_GPU_CHANGE_AT = 40
_CRASH_CHANCE = 0.05


def _landscape(job: MadeJob) -> Landscape:
    return landscape_of(job.workload(), Setting(eta=job.eta))


def _made_case(job: MadeJob, recurrences: int, *, concurrency: int = 1, **conditions: Any) -> Case:
    """Return the case of a made job; `conditions` are fields of `VaryingConditions` and override the job's."""
    setting = Setting(recurrences=recurrences, eta=job.eta, concurrency=concurrency)
    return case_of(job.workload(), setting, **{"cost_noise_sd": job.cost_noise_sd} | conditions)


def _changing(before: MadeJob, after: MadeJob, change_at: int, recurrences: int) -> Case:
    """Return the case of a job that becomes another job at recurrence `change_at`, counted from 0."""
    jobs = [_landscape(before)] * change_at + [_landscape(after)] * (recurrences - change_at)
    return _made_case(before, recurrences, landscapes=tuple(jobs))


def _crashing(job: MadeJob, recurrences: int) -> Case:
    """Return a case with crashes. A crash costs half a run, then the run is repeated; the oracle's runs crash, too."""
    case = _made_case(job, recurrences, crash_chance=_CRASH_CHANCE)
    at, factor = case.conditions.landscape, 1 + _CRASH_CHANCE / 2 / (1 - _CRASH_CHANCE)

    def with_crashes(profile: Profile) -> Profile:
        return replace(profile, expected_epochs=factor * profile.expected_epochs)

    profiles = {size: with_crashes(profile) for size, profile in at.profiles.items()}
    crashing = Landscape(profiles, with_crashes(at.oracle), with_crashes(at.default))
    return replace(case, conditions=replace(case.conditions, landscape=crashing))


def _abruptly_changing(job: MadeJob, recurrences: int) -> Case:
    """Return a case with a drift that reverses the sizes' epochs; `max_epochs` suffices for the default afterwards."""
    after = landscapes.with_epochs_reversed(job)
    max_epochs = max(job.max_epochs, math.ceil(3 * after.mean_epochs[after.default_place]))
    before, after = replace(job, max_epochs=max_epochs), replace(after, max_epochs=max_epochs)
    return _changing(before, after, _DRIFT_AT, recurrences)


def _loaded(job: MadeJob, recurrences: int) -> Case:
    """Return a case on a machine whose other load is an AR(1) process, with factors of 1 to 10 on the time of a run."""
    load, loads = 0.0, list[float]()
    for shock in np.random.default_rng(sum(job.name.encode())).standard_normal(recurrences):
        load = 0.8 * load + 0.6 * 1.2 * shock
        loads.append(min(max(load, 0.0), math.log(10)))
    return _made_case(job, recurrences, waited_shares=tuple(-math.expm1(-each) for each in loads))


def _changing_gpu(job: MadeJob, recurrences: int) -> Case:
    return _changing(job, landscapes.on_faster_gpu(job), _GPU_CHANGE_AT, recurrences)


def _made(
    _: Path | None,
    recurrences: int,
    *,
    change: Callable[[MadeJob], MadeJob] = lambda job: job,
    case: Callable[[MadeJob, int], Case] = _made_case,
    only: Callable[[MadeJob], bool] = lambda _: True,
) -> list[Case]:
    return [case(change(job), recurrences) for job in made_jobs() if only(job)]


def _never_fails(job: MadeJob) -> bool:
    return not job.missing.any()


def _made_row(title: str, **options: Any) -> Row:
    return Row(title, partial(_made, **options), is_made=True)


_MADE_ROWS = {
    "landscapes": _made_row("made landscapes: sixty of ten families"),
    "default-best": _made_row("the default is the best size", change=landscapes.from_the_best),
    "made-crashes": _made_row("5 % of the runs crash half way", case=_crashing),
    "made-abrupt-change": _made_row("sizes reversed from recurrence 51 on", case=_abruptly_changing, only=_never_fails),
    "made-gpu-change": _made_row("a GPU 2.5 times cheaper from recurrence 41 on", case=_changing_gpu),
    "made-in-flight-4": _made_row("four recurrences always under way", case=partial(_made_case, concurrency=4)),
    "made-epochs": _made_row("epochs ±60 % from run to run", change=landscapes.with_epoch_noise),
    "made-costs": _made_row("cost noise of 50 %", case=partial(_made_case, cost_noise_sd=0.5)),
    "made-busy": _made_row(
        "all runs wait for a core for half of their time", case=partial(_made_case, waited_shares=(0.5,))
    ),
    "made-busy-half": _made_row(
        "every second run waits for a core for 60 % of its time", case=partial(_made_case, waited_shares=(0.0, 0.6))
    ),
    "made-busy-load": _made_row("other load slows runs up to tenfold, as an AR(1) process", case=_loaded),
}

ROWS = {
    "traces": Row("traces: six workloads, V100 and A40, η 0, 0.5 and 1", _traces),
    "mlperf": Row("MLPerf: nine benchmarks, three saturations, two defaults", _mlperf),
    **_MADE_ROWS,
}
"""The rows by name: traces, MLPerf's file, and made landscapes under usual and under difficult conditions."""
