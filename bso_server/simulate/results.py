"""Costs of simulated jobs, compared with the costs of an oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from bso_server.core.model import History
from bso_server.simulate.play import Conditions, Played, Simulation, job_of
from bso_server.simulate.workload import Consumption, Landscape, Workload, landscape
from zeus_plugins.protocol import WarmStart

MARKS = (10, 20, 50, 100, 200, 500)
"""Numbers of recurrences after which costs are compared."""

_LAST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Extent and parameters of a simulation, in which `concurrency` recurrences are always under way.

    With `optimal_power_limits`, each size has its cheapest power limit, which its first run finds; otherwise the
    maximum.
    """

    recurrences: int = 100
    seeds: int = 200
    eta: float = 0.5
    beta: float | None = 2.0
    optimal_power_limits: bool = True
    concurrency: int = 1


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a policy on a workload.

    Attributes:
        ratio: Ratio of the total cost to the oracle's total cost, mean over the seeds, by number of recurrences;
            infinite after a recurrence that was given up, if a run at the default never reaches the target either.
        worst_seed_ratio: Largest ratio of any seed, after all recurrences.
        unfinished: Number of recurrences that were given up, over all seeds.
        consumed: Energy and time of all recurrences, mean over the seeds.
        energy_reduction_last5: Share of energy saved in the last five recurrences against the default at the maximum
            power limit; None if the default never reaches the target.
    """

    ratio: Mapping[int, float]
    worst_seed_ratio: float
    unfinished: int
    consumed: Consumption
    energy_reduction_last5: float | None

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON types, without the consumption."""
        return {
            "ratio": {str(mark): _finite(ratio) for mark, ratio in self.ratio.items()},
            "worst_seed_ratio": _finite(self.worst_seed_ratio),
            "unfinished": self.unfinished,
            "energy_reduction_last5": self.energy_reduction_last5,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Results of policies on one workload under constant conditions."""

    workload: Workload
    eta: float
    recurrences: int
    landscape: Landscape
    results: Mapping[str, Result]

    @property
    def default_consumption(self) -> Consumption | None:
        """Energy and time of all recurrences at the default; None if it never reaches the target."""
        expected = self.landscape.default.expected_consumption
        return None if expected is None else expected * self.recurrences

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as JSON types."""
        oracle, default = self.landscape.oracle, self.landscape.default
        consumed = self.default_consumption
        return {
            "workload": {
                "name": self.workload.name,
                "batch_sizes": [size.batch_size for size in self.workload.sizes],
                "max_epochs": self.workload.max_epochs,
                "max_power_w": self.workload.max_power_w,
            },
            "eta": self.eta,
            "oracle": {"batch_size": oracle.batch_size, "cost_j": oracle.expected_cost_j},
            "default": {
                "batch_size": default.batch_size,
                "cost_j": _finite(default.expected_cost_j),
                "ratio": _finite(default.expected_cost_j / oracle.expected_cost_j),
            },
            "policies": {policy: result.as_json() for policy, result in self.results.items()},
            "spending": {
                "default": None if consumed is None else asdict(consumed),
                "policies": {policy: asdict(result.consumed) for policy, result in self.results.items()},
            },
        }


def _finite(number: float) -> float | None:
    """Return None for an infinite number, because JSON has no infinity."""
    return number if math.isfinite(number) else None


def compare(workload: Workload, policies: Iterable[str], setting: Setting) -> Comparison:
    """Simulate a workload with each policy under constant conditions; raise like `landscape`."""
    conditions = Conditions(landscape_of(workload, setting))
    results: dict[str, Result] = {}
    for policy in policies:
        jobs = [played(workload, conditions, policy, setting, seed) for seed in range(setting.seeds)]
        results[policy] = _result(jobs, setting, conditions)
    return Comparison(workload, setting.eta, setting.recurrences, conditions.landscape, results)


def geometric_means(comparisons: Sequence[Comparison]) -> dict[str, dict[str, float | None]]:
    """Return each policy's geometric mean ratio over workloads, by number of recurrences; None if it is infinite."""
    means: dict[str, dict[str, float | None]] = {}
    for policy, result in comparisons[0].results.items():
        means[policy] = {
            str(mark): _finite(
                math.exp(sum(math.log(each.results[policy].ratio[mark]) for each in comparisons) / len(comparisons))
            )
            for mark in result.ratio
        }
    return means


def landscape_of(workload: Workload, setting: Setting) -> Landscape:
    """Return the landscape of a workload in a setting; raise like `landscape`."""
    return landscape(workload, eta=setting.eta, optimal_power_limits=setting.optimal_power_limits)


def played(
    workload: Workload,
    conditions: Conditions,
    policy: str,
    setting: Setting,
    seed: int,
    before_decision: Callable[[int, History], None] | None = None,
    *,
    warm: WarmStart | None = None,
) -> Played:
    """Simulate the job of one seed, which begins with the epochs in `warm`; `before_decision` is as in `Simulation`."""
    job = job_of(
        conditions.landscape,
        policy,
        seed=seed,
        max_power=workload.max_power_w,
        eta_knob=setting.eta,
        beta_knob=setting.beta,
        max_epochs=workload.max_epochs,
        warm=warm,
    )
    return Simulation(
        job,
        conditions,
        recurrences=setting.recurrences,
        concurrency=setting.concurrency,
        seed=seed,
        before_decision=before_decision,
    ).play()


def oracle_costs_j(conditions: Conditions, recurrences: int) -> list[float]:
    """Return the oracle's cost of each recurrence."""
    return [
        conditions.landscape_at(recurrence).oracle.expected_cost_j / (1 - conditions.waited_share(recurrence))
        for recurrence in range(recurrences)
    ]


def mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of the curves at each recurrence."""
    return [sum(column) / len(curves) for column in zip(*curves, strict=True)]


def _result(jobs: Sequence[Played], setting: Setting, conditions: Conditions) -> Result:
    marks = sorted({mark for mark in MARKS if mark <= setting.recurrences} | {setting.recurrences})
    totals_j = list(accumulate(oracle_costs_j(conditions, setting.recurrences)))
    ratios = [
        [cost_j / total_j for cost_j, total_j in zip(accumulate(job.costs_j), totals_j, strict=True)] for job in jobs
    ]
    curve = mean_curve(ratios)
    last = min(_LAST, setting.recurrences)
    default = conditions.landscape.default.expected_consumption
    last_j = sum(consumed.energy_j for job in jobs for consumed in job.consumed[-last:]) / (last * len(jobs))
    return Result(
        ratio={mark: curve[mark - 1] for mark in marks},
        worst_seed_ratio=max(ratio[-1] for ratio in ratios),
        unfinished=sum(job.unfinished for job in jobs),
        consumed=sum((consumed for job in jobs for consumed in job.consumed), Consumption()) * (1 / len(jobs)),
        energy_reduction_last5=Consumption(last_j).saved_against(default)[0],
    )
