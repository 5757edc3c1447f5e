"""Comparison of policies on one workload with noise and drift: the first seed's job, and costs after the drift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from benchmarks.policies.cases import VaryingConditions, in_reverse
from bso_server.simulate.play import Conditions, Played
from bso_server.simulate.results import Comparison, Setting, compare, landscape_of, oracle_costs_j, played
from bso_server.simulate.workload import Workload


@dataclass(frozen=True)
class Study:
    """A comparison of policies on one workload, with noise and drift.

    Attributes:
        comparison: The policies' results.
        setting: The number of recurrences and seeds, and the parameters.
        drift_at: The first recurrence after a drift, counted from 0; None without one.
    """

    comparison: Comparison
    setting: Setting
    drift_at: int | None = None

    @cached_property
    def first_jobs(self) -> Mapping[str, Played]:
        """The job of the first seed for each policy, played again to get its trials."""
        workload, conditions = self.comparison.workload, self.comparison.conditions
        return {policy: played(workload, conditions, policy, self.setting, 0) for policy in self.comparison.results}

    def ratio_since_drift(self, policy: str) -> float | None:
        """Return the ratio of mean cost since the drift, over all seeds, to the oracle's; None without a drift."""
        if self.drift_at is None or self.drift_at >= self.comparison.recurrences:
            return None
        costs_j = self.comparison.costs_j[policy]
        spent_j = sum(sum(job_j[self.drift_at :]) for job_j in costs_j)
        return spent_j / (sum(self._oracle_j[self.drift_at :]) * len(costs_j))

    def add_ratios_since_drift(self, document: dict[str, Any]) -> None:
        """Add ``ratio_since_drift`` to each policy in the comparison's JSON; without a drift, add nothing."""
        for policy in self.comparison.results:
            ratio = self.ratio_since_drift(policy)
            if ratio is not None:
                document["policies"][str(policy)]["ratio_since_drift"] = ratio

    @property
    def _oracle_j(self) -> list[float]:
        return oracle_costs_j(self.comparison.conditions, self.comparison.recurrences)


def study(
    workload: Workload,
    policies: Sequence[str],
    setting: Setting,
    *,
    foresight: bool = True,
    cost_noise_sd: float = 0.0,
    drift_at: int | None = None,
) -> Study:
    """Simulate a workload with each policy.

    Args:
        workload: The job.
        policies: The policies.
        setting: The number of recurrences and seeds, and the parameters.
        foresight: See `Conditions.has_foresight`.
        cost_noise_sd: See `VaryingConditions`.
        drift_at: From this recurrence on, the largest size needs the epochs of the smallest, and so on; None: no drift.

    Raises:
        ValueError: No recorded run reaches the target.
    """
    conditions: Conditions = VaryingConditions(
        landscape_of(workload, setting),
        foresight,
        drift_at=drift_at,
        landscape_after=None if drift_at is None else landscape_of(in_reverse(workload), setting),
        cost_noise_sd=cost_noise_sd,
    )
    return Study(compare(workload, policies, setting, conditions), setting, drift_at)
