"""The rows of the report: on which jobs, and under which conditions, policies are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.policies.conditions import (
    VaryingConditions,
    dearer_when_larger,
    in_reverse,
    shuffled,
    with_bad_neighbours,
    with_two_sizes,
)
from benchmarks.policies.mlperf import mlperf_workloads
from bso_server.simulate.play import Played
from bso_server.simulate.results import Setting, landscape_of, oracle_costs_j, played
from bso_server.simulate.traces import PAPER_WORKLOADS, Traces
from bso_server.simulate.workload import Workload

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
