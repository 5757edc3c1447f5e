"""The bandit stage of policy `zeus`: Thompson sampling with a Gaussian posterior per batch size.

The reward of a run is its cost, negated. An arm's rewards are taken as draws from a normal distribution whose precision
is the inverse of their own variance; its unknown mean has a conjugate normal prior.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bso_server.core.model import OBSERVED, History, TrialRecord
from zeus_plugins.protocol import Origin

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Statistics:
    """Running count, mean and sum of squared deviations of a sequence (Welford, Technometrics 4(3), 1962).

    Constant in size whatever the length of the sequence, and exact (variance 0) for equal values.
    """

    count: int = 0
    mean: float = 0.0
    squared_deviations: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Statistics:
        """Statistics of `values`."""
        statistics = cls()
        for value in values:
            statistics = statistics.including(value)
        return statistics

    def including(self, value: float) -> Statistics:
        """These statistics with one more value."""
        count = self.count + 1
        mean = self.mean + (value - self.mean) / count
        return Statistics(count, mean, self.squared_deviations + (value - self.mean) * (value - mean))

    @property
    def variance(self) -> float:
        """Population variance; 0 for fewer than two values."""
        return self.squared_deviations / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True)
class Posterior:
    """Belief about the mean reward (−cost, joules) of one arm.

    Attributes:
        mean: Posterior mean, joules.
        precision: Posterior precision, 1/joules²; infinite when the mean is taken as known, 0 when nothing is known.
        observations: Number of rewards behind it.
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
    """Posterior per batch size, in the order given.

    An arm enters the bandit stage fitted on its exploration trials. Once one of its trials has ended within the stage,
    it is fitted on its last `window_size` (0: all) trials, whatever their origin: the one that ended last, and the
    others that were dispatched last.
    """
    job = history.job
    return {
        batch_size: fit(
            Statistics.of(-history.cost_of(trial) for trial in _learned_from(history, batch_size)),
            prior_mean=job.mab_prior_mean,
            prior_precision=job.mab_prior_precision,
        )
        for batch_size in batch_sizes
    }


def _learned_from(history: History, batch_size: int) -> list[TrialRecord]:
    ended = [trial for trial in history.of_size(batch_size) if trial.state in OBSERVED]
    entered_at = history.bandit_entered_at
    refitted = entered_at is not None and any((trial.ended_event or 0) > entered_at for trial in ended)
    if refitted:
        return _window(ended, history.job.window_size)
    return [trial for trial in ended if trial.origin is Origin.EXPLORATION]


def _window(ended: list[TrialRecord], window_size: int) -> list[TrialRecord]:
    if window_size == 0:
        return ended
    # A refit learns from the trial that brings it about, even if `window_size` trials dispatched later ended before it.
    newest = max(ended, key=lambda trial: trial.ended_event or 0)
    others = [trial for trial in ended if trial is not newest]
    return [*others[max(0, len(others) - window_size + 1) :], newest]


def choose(
    arms: Mapping[int, Posterior], *, min_observations: int, rng: np.random.Generator
) -> tuple[int, dict[int, float] | None]:
    """Choose an arm.

    The arms are put in a random order; the first in it with fewer than `min_observations` observations is played. When
    none is left, each arm's mean reward is drawn from its posterior, in the order of `arms`, and the largest wins (the
    first on ties).

    Args:
        arms: Posterior per batch size, ascending in size.
        min_observations: Observations that every arm gets before merit counts.
        rng: The job's generator, advanced by this call.

    Returns:
        The batch size, and the draws per batch size, or None if the choice was not by merit.
    """
    sizes = list(arms)
    for batch_size in rng.choice(sizes, len(sizes), replace=False).tolist():
        if arms[batch_size].observations < min_observations:
            return batch_size, None
    draws = {batch_size: posterior.draw(rng) for batch_size, posterior in arms.items()}
    return max(draws, key=draws.__getitem__), draws
