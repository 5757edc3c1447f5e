"""The forecast of policy `gp_voi`: the cost of a run at each batch size, at one moment of a job."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bso_server.core.gp_voi.beliefs import Belief, Beliefs, posterior_of
from bso_server.core.gp_voi.gaussian_process import Array, Normal, Posterior, cost_posterior
from bso_server.core.gp_voi.normal import bounded_exp
from bso_server.core.history import History, log_costs_per_epoch
from bso_server.core.model import TrialRecord


@dataclass(frozen=True, slots=True)
class Forecast:
    """The beliefs about a run at each batch size, once one of them has reached the target.

    Attributes:
        beliefs: What is remembered of each size.
        available: Indices of the sizes that may run, ascending.
        epochs: Log epochs to the target.
        epoch_costs: Log cost (J) of an epoch.
        costs: Log cost (J) that is expected of a run, c·T, a run that fails being paid for and done again.
        incumbent: Index of the size to play when nothing is to be learned.
    """

    beliefs: Beliefs
    available: tuple[int, ...]
    epochs: Posterior
    epoch_costs: Posterior
    costs: Normal
    incumbent: int

    @classmethod
    def of(cls, history: History, beliefs: Beliefs, in_flight: Iterable[TrialRecord]) -> Forecast:
        """The forecast with these beliefs, while these trials are under way.

        A run of failure chance p takes ``1/(1 − p)`` runs until one succeeds: the expected log cost is
        ``E[log T] + E[log c] + log 1/(1 − p)``, and its covariance that of log T and that of log c together. At least
        one belief has an observation; trials under way are believed to end as expected.
        """
        sizes = history.job.batch_sizes
        runs = Counter(sizes.index(trial.batch_size) for trial in in_flight)
        epochs = posterior_of(sizes, beliefs).believing(runs)
        epoch_costs = cost_posterior(sizes, tuple(belief.costs for belief in beliefs)).believing(runs)
        retries: Array = np.array([-math.log1p(-belief.failure_chance) for belief in beliefs])
        mean = epochs.expected.mean + epoch_costs.expected.mean + retries
        costs = Normal(mean, epochs.expected.covariance + epoch_costs.expected.covariance)
        available = available_of(history)
        return cls(beliefs, available, epochs, epoch_costs, costs, _incumbent(mean, beliefs, available))

    def expected_cost_j(self, index: int) -> float:
        """Expected cost of a run at the size with this index: ``exp(μ + (V + s²)/2)``, the log-normal mean.

        s² is the variance from run to run, of epochs and of their cost together.
        """
        run_variance = self.epochs.run_variance + self.epoch_costs.run_variance
        variance = float(self.costs.covariance[index, index]) + run_variance
        return bounded_exp(float(self.costs.mean[index]) + variance / 2)

    def expected_cost_std_j(self, index: int) -> float:
        """Standard deviation of that as a belief: ``E · √(exp(V) − 1)``, without what varies from run to run."""
        variance = max(float(self.costs.covariance[index, index]), 0.0)
        return self.expected_cost_j(index) * math.sqrt(bounded_exp(variance) - 1)

    @property
    def incumbent_converges(self) -> bool:
        """Whether the incumbent is known to reach the target."""
        return self.beliefs[self.incumbent].converged


def available_of(history: History) -> tuple[int, ...]:
    """Indices of the sizes that may run, ascending."""
    return tuple(index for index, size in enumerate(history.job.batch_sizes) if size in history.runnable_sizes)


def beliefs_of(history: History, in_flight: Iterable[TrialRecord]) -> Beliefs:
    """The beliefs; where no trial has ended yet, one in flight tells what an epoch costs, from its second report on."""
    beliefs: dict[int, Belief] = {size: arm.belief for size, arm in history.arms.items()}
    for trial in in_flight:
        belief = beliefs[trial.batch_size]
        _, log_cost = log_costs_per_epoch(history.job, trial)
        if log_cost is not None and not belief.has_cost:
            beliefs[trial.batch_size] = belief.costing(log_cost, trial.report_count - 1)
    return tuple(beliefs.values())


def _incumbent(log_costs: Array, beliefs: Beliefs, available: Sequence[int]) -> int:
    """The cheapest size known to reach the target; if all of them broke down, the cheapest that missed least often."""
    candidates = [index for index in available if beliefs[index].converged]
    if not candidates:
        least = min((beliefs[index].missed for index in available), default=0)
        candidates = [index for index in available if beliefs[index].missed == least] or list(range(len(beliefs)))
    return min(candidates, key=log_costs.__getitem__)
