"""Costs of simulated jobs, compared with an oracle's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from bso_server.simulate.play import Conditions, Played, Simulation, job_of
from bso_server.simulate.workload import Consumption, Landscape, Savings, Workload, landscape

MARKS = (10, 20, 50, 100, 200, 500)
"""After so many recurrences costs are compared."""

_LAST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The extent and the parameters of a simulation.

    Attributes:
        recurrences: Recurrences of a job.
        seeds: Simulated jobs.
        eta: η of the cost.
        beta: β of early stopping.
        optimal_power_limits: Each size at its cheapest power limit, tried out at its first run; or all at the maximum.
        concurrency: Recurrences that are always under way.
    """

    recurrences: int = 100
    seeds: int = 200
    eta: float = 0.5
    beta: float | None = 2.0
    optimal_power_limits: bool = True
    concurrency: int = 1


@dataclass(frozen=True, slots=True)
class Result:
    """A policy on a workload.

    Attributes:
        ratio: By number of recurrences: mean over the seeds of the cost until then over the oracle's; infinite once a
            recurrence was given up that the default does not finish either.
        worst_seed_ratio: The largest of these over the seeds, after all recurrences.
        unfinished: Recurrences that were given up, over all seeds.
        consumed: Energy and time of all recurrences, mean over the seeds.
        energy_reduction_last5: Of the last five recurrences, against the default at the maximum power limit; None if
            that never reaches the target.
    """

    ratio: Mapping[int, float]
    worst_seed_ratio: float
    unfinished: int
    consumed: Consumption
    energy_reduction_last5: float | None

    def as_json(self) -> dict[str, Any]:
        """The same in JSON's types, without the consumption."""
        return {
            "ratio": {str(mark): _finite(ratio) for mark, ratio in self.ratio.items()},
            "worst_seed_ratio": _finite(self.worst_seed_ratio),
            "unfinished": self.unfinished,
            "energy_reduction_last5": self.energy_reduction_last5,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Policies on one workload: results by policy, and costs of each recurrence of each job, (seeds, recurrences)."""

    workload: Workload
    eta: float
    recurrences: int
    conditions: Conditions
    results: Mapping[str, Result]
    costs_j: Mapping[str, Sequence[Sequence[float]]]

    @property
    def default_ratio(self) -> float | None:
        """Cost of the default over the oracle's; None if it never reaches the target."""
        first = self.conditions.landscape
        return _finite(first.default.expected_cost_j / first.oracle.expected_cost_j)

    @property
    def default_consumption(self) -> Consumption | None:
        """Energy and time of all recurrences at the default; None if that does not always reach the target."""
        total = Consumption()
        for recurrence in range(self.recurrences):
            expected = self.conditions.landscape_at(recurrence).default.expected_consumption
            if expected is None:
                return None
            total += expected
        return total

    def savings(self, policy: str) -> Savings:
        """A policy's savings over the default."""
        return Savings(self.recurrences, self.results[policy].consumed, self.default_consumption)

    def as_json(self, price_per_kwh: float | None = None, recorded: Savings | None = None) -> dict[str, Any]:
        """The same in JSON's types, without the costs of single recurrences; without a price, money is left out."""
        oracle, default = self.conditions.landscape.oracle, self.conditions.landscape.default
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
                "ratio": self.default_ratio,
            },
            "policies": {policy: result.as_json() for policy, result in self.results.items()},
            "spending": {
                "recurrences": self.recurrences,
                "price_per_kwh": price_per_kwh,
                "default": None if consumed is None else consumed.as_json(price_per_kwh),
                "policies": {policy: self.savings(policy).as_json(price_per_kwh) for policy in self.results},
                **({} if recorded is None else {"recorded": recorded.as_json(price_per_kwh)}),
            },
        }


def _finite(number: float) -> float | None:
    """JSON has no infinity: a default that never reaches its target costs null, and so what it has to finish."""
    return number if math.isfinite(number) else None


def compare(
    workload: Workload, policies: Iterable[str], setting: Setting, conditions: Conditions | None = None
) -> Comparison:
    """Simulate a workload with each of these policies, always as it is if no conditions are given.

    Errors as in `landscape`.
    """
    conditions = conditions or Conditions(landscape_of(workload, setting))
    oracle_j = oracle_costs_j(conditions, setting.recurrences)
    results: dict[str, Result] = {}
    costs_j: dict[str, Sequence[Sequence[float]]] = {}
    for policy in policies:
        jobs = [played(workload, conditions, policy, setting, seed) for seed in range(setting.seeds)]
        results[policy] = _result(jobs, setting, oracle_j, conditions)
        costs_j[policy] = [job.costs_j for job in jobs]
    return Comparison(workload, setting.eta, setting.recurrences, conditions, results, costs_j)


def geometric_means(comparisons: Sequence[Comparison]) -> dict[str, dict[str, float | None]]:
    """Over workloads: of each policy's ratio, by number of recurrences; None where one is infinite."""
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
    """Every batch size of a workload in a setting; errors as in `landscape`."""
    return landscape(workload, eta=setting.eta, optimal_power_limits=setting.optimal_power_limits)


def played(workload: Workload, conditions: Conditions, policy: str, setting: Setting, seed: int) -> Played:
    """The job of one seed."""
    job = job_of(
        conditions.landscape,
        policy,
        seed=seed,
        max_power=workload.max_power_w,
        eta_knob=setting.eta,
        beta_knob=setting.beta,
        max_epochs=workload.max_epochs,
    )
    extent = {"recurrences": setting.recurrences, "concurrency": setting.concurrency}
    return Simulation(job, conditions, **extent, seed=seed).play()


def oracle_costs_j(conditions: Conditions, recurrences: int) -> list[float]:
    """The oracle's cost of each recurrence."""
    return [conditions.landscape_at(recurrence).oracle.expected_cost_j for recurrence in range(recurrences)]


def running_ratios(costs_j: Sequence[float], oracle_j: Sequence[float]) -> list[float]:
    """Total cost over the oracle's total after each recurrence."""
    totals = zip(accumulate(costs_j), accumulate(oracle_j), strict=True)
    return [spent_j / needed_j for spent_j, needed_j in totals]


def mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    """Mean over the curves at each recurrence."""
    return [sum(column) / len(curves) for column in zip(*curves, strict=True)]


def _result(jobs: Sequence[Played], setting: Setting, oracle_j: Sequence[float], conditions: Conditions) -> Result:
    marks = sorted({mark for mark in MARKS if mark <= setting.recurrences} | {setting.recurrences})
    ratios = [running_ratios(job.costs_j, oracle_j) for job in jobs]
    curve = mean_curve(ratios)
    last = min(_LAST, setting.recurrences)
    default = conditions.landscape_at(setting.recurrences - 1).default.expected_consumption
    last_j = sum(consumed.energy_j for job in jobs for consumed in job.consumed[-last:]) / (last * len(jobs))
    return Result(
        ratio={mark: curve[mark - 1] for mark in marks},
        worst_seed_ratio=max(ratio[-1] for ratio in ratios),
        unfinished=sum(job.unfinished for job in jobs),
        consumed=sum((consumed for job in jobs for consumed in job.consumed), Consumption()) * (1 / len(jobs)),
        energy_reduction_last5=Savings(1, Consumption(last_j), default).energy_share_saved,
    )
