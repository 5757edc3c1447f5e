"""The jobs and conditions of the comparison: rows of cases, made of recorded and published trainings.

The traces are those of the Zeus paper. MLPerf's file holds published reference convergence points: for each benchmark
its global batch sizes, and the evaluations to the target that each training took, hyper-parameters being tuned for each
size. It says nothing on time or power, which follow a law here:

- Time per epoch, of which an evaluation ends each, is ``t₀ · (1 + b₀ / b)``: throughput saturates at b₀.
- Power is 35 % of the largest, and 65 % of it times the utilisation ``b / (b + b₀)``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bso_server.simulate.play import Conditions, Played
from bso_server.simulate.results import Setting, landscape_of, oracle_costs_j, played
from bso_server.simulate.traces import PAPER_WORKLOADS, Traces
from bso_server.simulate.workload import Epoch, Landscape, SizeTrace, Workload

# Conditions, and jobs that are not smooth

OUTLIER_FACTOR = 4.0
"""Factor on the time and energy of a trial that is an outlier."""


@dataclass(frozen=True)
class VaryingConditions(Conditions):
    """Conditions that change from recurrence to recurrence.

    Attributes:
        drift_at: The first recurrence after a drift, counted from 0; None without one.
        landscape_after: Every batch size from then on; None without a drift.
        cost_noise_sd: σ of the log of a factor on the time and energy of each trial, whose mean is 1: that of a machine
            on which others work, too.
        epoch_noise_sd: The same of each epoch of a trial, independently of the others.
        outlier: Number of the one trial that takes `OUTLIER_FACTOR` times its time and energy; None without one.
    """

    drift_at: int | None = None
    landscape_after: Landscape | None = None
    cost_noise_sd: float = 0.0
    epoch_noise_sd: float = 0.0
    outlier: int | None = None

    def landscape_at(self, recurrence: int) -> Landscape:
        """Every batch size at a recurrence, counted from 0."""
        has_drifted = self.drift_at is not None and recurrence >= self.drift_at
        return self.landscape_after if has_drifted and self.landscape_after is not None else self.landscape

    def slowness(self, trial_number: int, draws: np.random.Generator) -> float:
        """A factor on the time and energy of one trial."""
        sd = self.cost_noise_sd
        noise = float(draws.lognormal(-sd * sd / 2, sd)) if sd else 1.0
        return noise * OUTLIER_FACTOR if trial_number == self.outlier else noise

    def epoch_factors(self, epochs: int, draws: np.random.Generator) -> NDArray[np.float64] | None:
        """Factors on the time and energy of each epoch of one trial, shape (epochs,); None if all are 1."""
        sd = self.epoch_noise_sd
        return draws.lognormal(-sd * sd / 2, sd, epochs) if sd else None


def in_reverse(workload: Workload) -> Workload:
    """The same job after a drift: the largest size now needs the epochs that the smallest did, and so on."""
    return _needing(workload, [size.epochs_to_target for size in reversed(workload.sizes)])


def dearer_when_larger(workload: Workload) -> Workload:
    """The same job after a drift: an epoch costs what it did at the smallest size, and eight times that at the largest.

    So do, say, longer texts of which a large batch is mostly padding.
    """
    octaves = np.linspace(0, 3, len(workload.sizes)).tolist()
    sizes = (
        replace(size, epochs={power_w: _times(epoch, 2.0**octave) for power_w, epoch in size.epochs.items()})
        for size, octave in zip(workload.sizes, octaves, strict=True)
    )
    return replace(workload, sizes=tuple(sizes))


def shuffled(workload: Workload, seed: int) -> Workload:
    """A job that is not smooth: its sizes' epochs to the target, dealt out anew; the default reaches the target."""
    rng = np.random.default_rng(seed)
    while True:
        paths = [workload.sizes[index].epochs_to_target for index in rng.permutation(len(workload.sizes))]
        if min(paths[_default_place(workload)]) <= workload.max_epochs:
            return _needing(workload, paths)


def with_bad_neighbours(workload: Workload) -> Workload:
    """A job whose default is a hill's top as seen from beside it: the next sizes need three times their epochs."""
    place = _default_place(workload)
    factors = [3.0 if abs(number - place) == 1 else 1.0 for number in range(len(workload.sizes))]
    paths = [
        tuple(factor * epochs for epochs in size.epochs_to_target)
        for size, factor in zip(workload.sizes, factors, strict=True)
    ]
    return _needing(workload, paths)


def with_two_sizes(workload: Workload, sizes: Landscape) -> Workload:
    """A job of two sizes: the default, and the cheapest of the others (`sizes`: all that it has)."""
    others = [each for each in sizes.profiles.values() if each.batch_size != workload.default_batch_size]
    cheapest = min(others, key=lambda profile: profile.expected_cost_j)
    kept = {workload.default_batch_size, cheapest.batch_size}
    return replace(workload, sizes=tuple(size for size in workload.sizes if size.batch_size in kept))


def _times(epoch: Epoch, factor: float) -> Epoch:
    return Epoch(factor * epoch.time_s, factor * epoch.energy_j)


def _default_place(workload: Workload) -> int:
    return [size.batch_size for size in workload.sizes].index(workload.default_batch_size)


def _needing(workload: Workload, paths: Sequence[tuple[float, ...]]) -> Workload:
    sizes = (replace(size, epochs_to_target=path) for size, path in zip(workload.sizes, paths, strict=True))
    return replace(workload, sizes=tuple(sizes))


# MLPerf's file

# b₀ over the geometric mean of the sizes: throughput saturates below the sizes, among them, or above.
_SATURATIONS = (1 / 8, 1.0, 8.0)
_IDLE_SHARE = 0.35
_MAX_POWER_W = 400.0
# t₀; neither it nor the largest power changes a ratio of costs.
_EPOCH_S = 600.0


def mlperf_workloads(file: Path) -> list[Workload]:
    """All jobs of a file: each benchmark with three values of b₀, and two defaults.

    The defaults are the second-smallest and the second-largest size. `max_epochs` is three times the mean of the
    default's epochs to the target, rounded up.

    Args:
        file: JSON, ``{"jobs": {NAME: {"sizes": [b, …], "reports_to_target": [[evaluations of each run, …], …]}}}`` with
            ascending sizes, and a list of runs for each.

    Raises:
        ValueError: The file is no such JSON, or a job has a single size.
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
_SHUFFLES = 4
_DRIFT_AT = 50


@dataclass(frozen=True)
class Case:
    """One job in one setting.

    Attributes:
        name: The job, η and whatever else tells it from the others of its row.
        workload: The job.
        setting: The extent and the parameters; `seeds` is not looked at.
        conditions: The conditions under which it recurs.
        counted_from: The first recurrence whose cost counts, from 0.
    """

    name: str
    workload: Workload
    setting: Setting
    conditions: VaryingConditions
    counted_from: int = 0

    def play(self, policy: str, seed: int) -> Played:
        """The job of one seed with one of the server's policies."""
        return played(self.workload, self.conditions, policy, self.setting, seed)

    def ratios(self, costs_j: Sequence[float]) -> list[float]:
        """Total cost over the oracle's total after each recurrence that counts.

        Args:
            costs_j: Cost of each recurrence, joules, shape (recurrences,).
        """
        oracle_j = oracle_costs_j(self.conditions, self.setting.recurrences)
        spent_j = needed_j = 0.0
        ratios = []
        for cost_j, least_j in zip(costs_j[self.counted_from :], oracle_j[self.counted_from :], strict=True):
            spent_j, needed_j = spent_j + cost_j, needed_j + least_j
            ratios.append(spent_j / needed_j)
        return ratios


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the report.

    Attributes:
        title: As tables name it.
        cases: Its cases, from the folder with the traces and a number of recurrences.
    """

    title: str
    cases: Callable[[Path, int], list[Case]]


def case_of(
    workload: Workload,
    setting: Setting,
    *,
    cost_noise_sd: float = 0.0,
    epoch_noise_sd: float = 0.0,
    outlier: int | None = None,
    drift_at: int | None = None,
    drift: Callable[[Workload], Workload] = in_reverse,
) -> Case:
    """A job in a setting; conditions as in `VaryingConditions`; from `drift_at` on `drift` of it, and costs count.

    Raises:
        ValueError: No run of the job reaches the target.
    """
    conditions = VaryingConditions(
        landscape_of(workload, setting),
        drift_at=drift_at,
        landscape_after=None if drift_at is None else landscape_of(drift(workload), setting),
        cost_noise_sd=cost_noise_sd,
        epoch_noise_sd=epoch_noise_sd,
        outlier=outlier,
    )
    return Case(f"{workload.name}, η {setting.eta:g}", workload, setting, conditions, drift_at or 0)


def _traced(folder: Path) -> list[Workload]:
    """The six workloads of the Zeus paper on each GPU."""
    workloads = []
    for gpu in _GPUS:
        traces = Traces.read(folder / "summary_train.csv", folder / f"summary_power_{gpu}.csv")
        found = (traces.workload(selection) for selection in PAPER_WORKLOADS)
        workloads += [replace(each, name=f"{each.name} on {gpu}") for each in found]
    return workloads


def _traces(folder: Path, recurrences: int) -> list[Case]:
    settings = [Setting(recurrences=recurrences, eta=eta) for eta in _ETAS]
    return [case_of(workload, setting) for setting in settings for workload in _traced(folder)]


def _mlperf(folder: Path, recurrences: int) -> list[Case]:
    setting = Setting(recurrences=recurrences)
    return [case_of(workload, setting) for workload in mlperf_workloads(folder / "mlperf_convergence.json")]


def _robust(
    folder: Path,
    recurrences: int,
    *,
    concurrency: int = 1,
    change: Callable[[Workload], Workload] = lambda workload: workload,
    made: Callable[[Workload, Setting], Case] = case_of,
) -> list[Case]:
    setting = Setting(recurrences=recurrences, concurrency=concurrency)
    return [made(change(workload), setting) for workload in _traced(folder)]


def _shuffled(folder: Path, recurrences: int) -> list[Case]:
    return [
        replace(case, name=f"{case.name}, shuffle {seed}")
        for seed in range(1, _SHUFFLES + 1)
        for case in _robust(folder, recurrences, change=partial(shuffled, seed=seed))
    ]


def _two_sizes(folder: Path, recurrences: int) -> list[Case]:
    return _robust(folder, recurrences, change=lambda job: with_two_sizes(job, landscape_of(job, Setting())))


ROWS = {
    "traces": Row("traces: six workloads, V100 and A40, η 0, 0.5 and 1", _traces),
    "mlperf": Row("MLPerf: nine benchmarks, three saturations, two defaults", _mlperf),
    "noise": Row("cost noise of 30 %", partial(_robust, made=partial(case_of, cost_noise_sd=0.3))),
    "epoch-noise": Row(
        "cost noise of 50 % from epoch to epoch, and of 2 % from run to run",
        partial(_robust, made=partial(case_of, cost_noise_sd=0.02, epoch_noise_sd=0.5)),
    ),
    "in-flight": Row("four recurrences always under way", partial(_robust, concurrency=4)),
    "shuffled": Row("sizes shuffled, four times", _shuffled),
    "two-sizes": Row("two sizes: the default, and the cheapest of the others", _two_sizes),
    "bad-neighbours": Row(
        "sizes beside the default need three times their epochs", partial(_robust, change=with_bad_neighbours)
    ),
    "first-outlier": Row("the first run costs four times as much", partial(_robust, made=partial(case_of, outlier=1))),
    "second-outlier": Row(
        "the second run costs four times as much", partial(_robust, made=partial(case_of, outlier=2))
    ),
    "drift": Row(
        "drift at recurrence 50, sizes reversed (51 and later)",
        partial(_robust, made=partial(case_of, drift_at=_DRIFT_AT)),
    ),
    "cost-drift": Row(
        "drift at recurrence 50, epochs cost more, the larger the size (51 and later)",
        partial(_robust, made=partial(case_of, drift_at=_DRIFT_AT, drift=dearer_when_larger)),
    ),
}
"""The rows by name. Those after the first two are of the same traces at η 0.5."""
