"""The bandit stage of policy `zeus`: Thompson sampling with a Gaussian posterior per batch size.

The reward of a run is its cost, negated. An arm's rewards are taken as draws from a normal distribution whose precision
is the inverse of their own variance; its unknown mean has a conjugate normal prior.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from bso_server.core.history import History
from bso_server.core.model import Expectations, ExpectedCost
from bso_server.core.statistics import Statistics


@dataclass(frozen=True, slots=True)
class Posterior:
    """Belief about the mean reward (−cost, joules) of one arm, from so many observations.

    The precision (1/joules²) is infinite when the mean is taken as known, and 0 when nothing is known.
    """

    mean: float
    precision: float
    observations: int

    @property
    def std(self) -> float:
        """Posterior standard deviation in joules; infinite when nothing is known."""
        return math.inf if self.precision == 0 else 1 / math.sqrt(self.precision)

    def draw(self, rng: np.random.Generator) -> float:
        """One Thompson draw of the mean reward: the mean itself if it is known, +∞ if nothing is (so it gets tried)."""
        return math.inf if self.precision == 0 else float(rng.normal(self.mean, self.std))


def fit(rewards: Statistics, *, prior_mean: float, prior_precision: float) -> Posterior:
    """Posterior of an arm's mean reward.

    With n rewards of population variance v, reward precision p = 1/v and prior N(m₀, 1/p₀)::

        precision = p₀ + n·p        mean = (p₀·m₀ + p·Σ rewards) / precision

    and, where the rewards do not vary (v = 0, so p = ∞), their mean, known exactly. (Normal likelihood with known
    precision, conjugate prior; e.g. Murphy, Machine Learning, 2012, §4.4.1.)
    """
    if rewards.count == 0:
        return Posterior(prior_mean, prior_precision, 0)
    if rewards.variance == 0:
        return Posterior(rewards.mean, math.inf, rewards.count)
    reward_precision = 1 / rewards.variance
    precision = prior_precision + rewards.count * reward_precision
    mean = (prior_precision * prior_mean + reward_precision * rewards.count * rewards.mean) / precision
    return Posterior(mean, precision, rewards.count)


def posteriors(history: History, batch_sizes: Iterable[int]) -> dict[int, Posterior]:
    """Posterior per batch size, in the order given, fitted on what `Arm.learned_costs` says."""
    job = history.job
    return {
        batch_size: fit(
            history.arms[batch_size].learned_costs.negated(),
            prior_mean=job.mab_prior_mean,
            prior_precision=job.mab_prior_precision,
        )
        for batch_size in batch_sizes
    }


def expectations(history: History) -> Expectations:
    """The posterior of each size that has reached the target; of the other survivors costs are known, but no success.

    A size that only ran beside an exploration is not in its posterior yet: what it cost then stands for that.
    """
    survivors = history.survivors or history.job.batch_sizes
    reaching = [size for size in survivors if size in history.runnable_sizes and history.arms[size].completed.count]
    costs = {}
    for size, arm in posteriors(history, reaching).items():
        known = (
            arm if arm.observations else fit(history.arms[size].completed.negated(), prior_mean=0, prior_precision=0)
        )
        costs[size] = ExpectedCost(-known.mean, known.std if known.observations > 1 else None)
    return Expectations(costs, min(costs, key=lambda size: costs[size].mean_j, default=None))


def choose(
    arms: Mapping[int, Posterior], *, min_observations: int, rng: np.random.Generator
) -> tuple[int, dict[int, float] | None]:
    """Choose an arm.

    The arms are put in a random order; the first in it with fewer than `min_observations` observations is played. When
    none is left, each arm's mean reward is drawn from its posterior, in the order of `arms`, and the largest wins (the
    first on ties). The job's generator is advanced.

    Returns:
        The batch size, and the draws per batch size, or None if the choice was not by merit.
    """
    sizes = list(arms)
    for batch_size in rng.choice(sizes, len(sizes), replace=False).tolist():
        if arms[batch_size].observations < min_observations:
            return batch_size, None
    draws = {batch_size: posterior.draw(rng) for batch_size, posterior in arms.items()}
    return max(draws, key=draws.__getitem__), draws
