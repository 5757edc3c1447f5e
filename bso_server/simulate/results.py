"""What simulated jobs cost, compared with an oracle."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from bso_server.simulate.play import Phase, Played, job_of, landscape_at, play
from bso_server.simulate.savings import Account, Spending
from bso_server.simulate.workload import Landscape, Workload, landscape
from zeus_plugins.protocol import PolicyName

MARKS = (10, 20, 50, 100, 200, 500)
"""After so many recurrences costs are compared."""

_LAST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How to simulate.

    Attributes:
        recurrences: Recurrences of a job.
        seeds: Simulated jobs.
        eta: η of the cost.
        beta: β of early stopping.
        optimal_power_limits: Each size at its cheapest power limit, tried out at its first run; or all at the maximum.
        concurrency: Recurrences that are always under way.
        foresight: As in `play`.
        cost_noise_sd: As in `play`.
        drift_at: From this recurrence on, the sizes' epochs to the target are those of the sizes in reverse order.
    """

    recurrences: int = 100
    seeds: int = 200
    eta: float = 0.5
    beta: float | None = 2.0
    optimal_power_limits: bool = True
    concurrency: int = 1
    foresight: bool = True
    cost_noise_sd: float = 0.0
    drift_at: int | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A policy on a workload.

    Attributes:
        ratio: By number of recurrences: mean over the seeds of the cost until then over the oracle's.
        worst_seed_ratio: The largest of these over the seeds, after all recurrences.
        unfinished: Recurrences that were given up, over all seeds.
        spent: What all recurrences took, mean over the seeds.
        energy_reduction_last5: Of the last five recurrences, against the default at the maximum power limit; None if
            that never reaches the target.
        ratio_since_drift: As `ratio`, of all recurrences since the drift alone; None without one.
    """

    ratio: Mapping[int, float]
    worst_seed_ratio: float
    unfinished: int
    spent: Spending
    energy_reduction_last5: float | None
    ratio_since_drift: float | None = None

    def as_json(self) -> dict[str, Any]:
        """The same in JSON's types, without what was spent."""
        since = {} if self.ratio_since_drift is None else {"ratio_since_drift": self.ratio_since_drift}
        return {
            "ratio": {str(mark): ratio for mark, ratio in self.ratio.items()},
            "worst_seed_ratio": self.worst_seed_ratio,
            "unfinished": self.unfinished,
            "energy_reduction_last5": self.energy_reduction_last5,
            **since,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Policies on one workload.

    Attributes:
        workload: The workload.
        eta: η of the cost.
        recurrences: Of each simulated job.
        phases: What it is like, from which recurrence on.
        results: By policy.
        first_jobs: By policy the job of the first seed, to be looked at.
        curves: By policy the mean over the seeds of the total cost over the oracle's, after each recurrence.
        regrets: Likewise of the cost above the oracle's, in runs of the oracle.
    """

    workload: Workload
    eta: float
    recurrences: int
    phases: Sequence[Phase]
    results: Mapping[PolicyName, Result]
    first_jobs: Mapping[PolicyName, Played]
    curves: Mapping[PolicyName, Sequence[float]]
    regrets: Mapping[PolicyName, Sequence[float]]

    @property
    def default_ratio(self) -> float | None:
        """Cost of the default over the oracle's; None if it never reaches the target."""
        first = self.phases[0].landscape
        return _finite(first.default.expected_cost_j / first.oracle.expected_cost_j)

    @property
    def default_spending(self) -> Spending | None:
        """What all recurrences take at the default; None if that does not reach the target in all of them."""
        total = Spending()
        for recurrence in range(self.recurrences):
            spending = landscape_at(self.phases, recurrence).default.expected_spending
            if spending is None:
                return None
            total += spending
        return total

    def account(self, policy: PolicyName) -> Account:
        """What a policy's recurrences took, against the default."""
        return Account(self.recurrences, self.results[policy].spent, self.default_spending)

    def as_json(self, price_per_kwh: float | None = None, recorded: Account | None = None) -> dict[str, Any]:
        """The same in JSON's types, without the jobs and the curves.

        Args:
            price_per_kwh: In any currency; None leaves money out.
            recorded: What the recorded job really took.
        """
        oracle, default = self.phases[0].landscape.oracle, self.phases[0].landscape.default
        spent = self.default_spending
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
            "policies": {str(policy): result.as_json() for policy, result in self.results.items()},
            "spending": {
                "recurrences": self.recurrences,
                "price_per_kwh": price_per_kwh,
                "default": None if spent is None else spent.as_json(price_per_kwh),
                "policies": {str(policy): self.account(policy).as_json(price_per_kwh) for policy in self.results},
                **({} if recorded is None else {"recorded": recorded.as_json(price_per_kwh)}),
            },
        }


def _finite(number: float) -> float | None:
    """JSON has no infinity: a default that never reaches its target costs null."""
    return number if math.isfinite(number) else None


def compare(workload: Workload, policies: Iterable[PolicyName], setting: Setting) -> Comparison:
    """Simulate a workload with each of these policies.

    Raises:
        ValueError: No recorded run reaches the target.
    """
    phases = [Phase(0, _landscape(workload, setting))]
    if setting.drift_at is not None:
        phases.append(Phase(setting.drift_at, _landscape(workload.reversed(), setting)))
    results: dict[PolicyName, Result] = {}
    first_jobs: dict[PolicyName, Played] = {}
    curves: dict[PolicyName, Sequence[float]] = {}
    regrets: dict[PolicyName, Sequence[float]] = {}
    oracle_j = _oracle_costs_j(phases, setting.recurrences)
    for policy in policies:
        jobs = [_played(workload, phases, policy, setting, seed) for seed in range(setting.seeds)]
        ratios = [_running_ratios(job.costs_j, oracle_j) for job in jobs]
        curves[policy] = _mean_curve(ratios)
        regrets[policy] = _mean_curve([_running_regrets(job.costs_j, oracle_j) for job in jobs])
        results[policy] = _result(jobs, curves[policy], ratios, phases, setting, oracle_j)
        first_jobs[policy] = jobs[0]
    return Comparison(workload, setting.eta, setting.recurrences, phases, results, first_jobs, curves, regrets)


def geometric_means(comparisons: Sequence[Comparison]) -> dict[str, dict[str, float]]:
    """Over workloads: of each policy's ratio, by number of recurrences."""
    means: dict[str, dict[str, float]] = {}
    for policy, result in comparisons[0].results.items():
        means[str(policy)] = {
            str(mark): math.exp(
                sum(math.log(each.results[policy].ratio[mark]) for each in comparisons) / len(comparisons)
            )
            for mark in result.ratio
        }
    return means


def _landscape(workload: Workload, setting: Setting) -> Landscape:
    return landscape(workload, eta=setting.eta, optimal_power_limits=setting.optimal_power_limits)


def _played(workload: Workload, phases: Sequence[Phase], policy: PolicyName, setting: Setting, seed: int) -> Played:
    job = job_of(
        phases[0].landscape,
        policy,
        seed=seed,
        max_power=workload.max_power_w,
        eta_knob=setting.eta,
        beta_knob=setting.beta,
        max_epochs=workload.max_epochs,
    )
    return play(
        job,
        phases,
        recurrences=setting.recurrences,
        concurrency=setting.concurrency,
        foresight=setting.foresight,
        cost_noise_sd=setting.cost_noise_sd,
        seed=seed,
    )


def _oracle_costs_j(phases: Sequence[Phase], recurrences: int) -> list[float]:
    return [landscape_at(phases, recurrence).oracle.expected_cost_j for recurrence in range(recurrences)]


def _running_ratios(costs_j: Sequence[float], oracle_j: Sequence[float]) -> list[float]:
    """Total cost over the oracle's total after each recurrence."""
    ratios: list[float] = []
    spent = needed = 0.0
    for cost_j, least_j in zip(costs_j, oracle_j, strict=True):
        spent += cost_j
        needed += least_j
        ratios.append(spent / needed)
    return ratios


def _running_regrets(costs_j: Sequence[float], oracle_j: Sequence[float]) -> list[float]:
    """Sum of what each recurrence cost above the oracle's, in runs of the oracle, after each."""
    return list(accumulate(cost_j / least_j - 1 for cost_j, least_j in zip(costs_j, oracle_j, strict=True)))


def _mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(curves) for column in zip(*curves, strict=True)]


def _result(
    jobs: Sequence[Played],
    curve: Sequence[float],
    ratios: Sequence[Sequence[float]],
    phases: Sequence[Phase],
    setting: Setting,
    oracle_j: Sequence[float],
) -> Result:
    marks = sorted({mark for mark in MARKS if mark <= setting.recurrences} | {setting.recurrences})
    last = min(_LAST, setting.recurrences)
    default = phases[-1].landscape.default.expected_spending
    last_j = sum(spent.energy_j for job in jobs for spent in job.spent[-last:]) / (last * len(jobs))
    since = None
    if setting.drift_at is not None and setting.drift_at < setting.recurrences:
        spent = sum(sum(job.costs_j[setting.drift_at :]) for job in jobs)
        since = spent / (sum(oracle_j[setting.drift_at :]) * len(jobs))
    return Result(
        ratio={mark: curve[mark - 1] for mark in marks},
        worst_seed_ratio=max(ratio[-1] for ratio in ratios),
        unfinished=sum(job.unfinished for job in jobs),
        spent=sum((spent for job in jobs for spent in job.spent), Spending()) * (1 / len(jobs)),
        energy_reduction_last5=Account(1, Spending(last_j), default).energy_share_saved,
        ratio_since_drift=since,
    )
