"""The beliefs about every batch size, from observations of some: two Gaussian processes over log2 of the batch size.

The cost of a run at size b is ``c_b · T_b``: the cost of an epoch times the epochs to the target. Of each run, log c
and log T are Gaussian around functions that are smooth in x = log2 b: T varies much from run to run, c little on a
machine of one's own, and more where others work beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from bso_server.core.gp_voi.constants import CONSTANTS
from bso_server.core.gp_voi.normal import bounded_exp
from bso_server.core.statistics import WeightedStatistics

Array: TypeAlias = NDArray[np.float64]

# Observations that have been forgotten so far count as none.
_LEAST_WEIGHT = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Prior:
    """Prior covariances between B batch sizes.

    Attributes:
        octaves: |log2 a − log2 b|, shape (B, B).
        epochs: Covariance of log epochs to the target, shape (B, B).
        costs: Covariance of log cost per epoch, shape (B, B).
    """

    octaves: Array
    epochs: Array
    costs: Array


@dataclass(frozen=True, slots=True, eq=False)
class Normal:
    """A joint normal distribution over B batch sizes: mean of shape (B,), covariance of shape (B, B)."""

    mean: Array
    covariance: Array


@dataclass(frozen=True, slots=True, eq=False)
class Posterior:
    """Belief about what runs take: log epochs to the target, or the log cost of an epoch.

    What is expected of each size, in a joint distribution, and the variance of one run around that.
    """

    expected: Normal
    run_variance: float

    def of_run(self, index: int) -> tuple[float, float]:
        """Mean and variance of one run at the size with this index."""
        expected = self.expected
        return float(expected.mean[index]), max(float(expected.covariance[index, index]), 0.0) + self.run_variance

    def believing(self, in_flight: Mapping[int, int]) -> Posterior:
        """The belief as it will be when runs in flight have ended, each as expected.

        k runs at one size, of variance s², leave the mean where it is and take ``Y_b Y_bᵀ · k / (s² + k·Y_bb)`` off the
        covariance Y (a rank-one update; "kriging believer", Ginsbourger, Le Riche, Carraro 2010). `in_flight` holds
        their number by the index of their size.
        """
        covariance = self.expected.covariance
        for index, runs in sorted(in_flight.items()):
            column = covariance[index]
            gain = runs / (self.run_variance + runs * column[index])
            covariance = covariance - np.outer(column, column) * gain
        return Posterior(Normal(self.expected.mean, covariance), self.run_variance)


@lru_cache(maxsize=64)
def prior(batch_sizes: tuple[int, ...]) -> Prior:
    """Squared-exponential kernels over x = log2 b, a term of each size's own, and a flat prior on the level.

    ``k(a, b) = σ² exp(−½ ((x_a − x_b)/ℓ)²) + τ² [a = b] + level_variance``
    (Rasmussen, Williams, Gaussian Processes for Machine Learning, 2006, equation 4.9).
    """
    x = np.log2(np.asarray(batch_sizes, dtype=float))
    octaves = np.abs(x[:, None] - x[None, :])
    return Prior(
        octaves,
        epochs=_kernel(octaves, CONSTANTS.smooth_sd, CONSTANTS.smooth_length, CONSTANTS.arm_sd),
        costs=_kernel(octaves, CONSTANTS.cost_sd, CONSTANTS.cost_length, CONSTANTS.cost_arm_sd),
    )


def _kernel(octaves: Array, sd: float, length: float, arm_sd: float) -> Array:
    smooth: Array = sd**2 * np.exp(-0.5 * (octaves / length) ** 2) + CONSTANTS.level_variance
    return smooth + arm_sd**2 * np.eye(len(octaves))


def run_variance(exact: Sequence[WeightedStatistics]) -> float:
    """Variance of log epochs from run to run, by those of runs that reached the target, per size."""
    return _pooled_variance(exact, CONSTANTS.run_sd, CONSTANTS.run_sd_strength, CONSTANTS.least_run_sd)


def cost_run_variance(costs: Sequence[WeightedStatistics]) -> float:
    """Variance of the log cost of an epoch from run to run, by log costs per size."""
    return _pooled_variance(costs, CONSTANTS.cost_run_sd, CONSTANTS.cost_run_sd_strength, CONSTANTS.least_cost_run_sd)


def _pooled_variance(sizes: Sequence[WeightedStatistics], guess_sd: float, strength: float, least_sd: float) -> float:
    """Variance from run to run, pooled over all sizes.

    The precision 1/s² has a gamma prior of shape a and mean 1/s₀²; s² is the inverse of its posterior mean. With the
    squared deviations from each size's own mean, and their degrees of freedom, Σ (n_b − 1)::

        s² = (a·s₀² + Σ squared deviations / 2) / (a + degrees of freedom / 2)

    (Murphy, Machine Learning, 2012, §4.6.2.2.) Here s₀ is the guess, a its strength, and s never below `least_sd`.
    """
    deviations = sum(size.squared_deviations for size in sizes)
    freedom = sum(max(size.weight - 1, 0.0) for size in sizes)
    pooled = (strength * guess_sd**2 + max(deviations, 0.0) / 2) / (strength + freedom / 2)
    return max(pooled, least_sd**2)


@lru_cache(maxsize=256)
def epochs_posterior(
    batch_sizes: tuple[int, ...],
    observed: tuple[WeightedStatistics, ...],
    exact: tuple[WeightedStatistics, ...],
    epoch_step: float,
) -> Posterior:
    """Posterior of log epochs to the target at every size.

    With the observed sizes O, their means ȳ, weights n, the level m (the mean of ȳ), r = ȳ − m and
    A = K_OO + diag(s²/n)::

        mean = m + K_·O A⁻¹ r        covariance = q · (K − K_·O A⁻¹ K_O·)

    (Rasmussen, Williams 2006, equations 2.25 and 2.26.) The factor
    ``q = (ν + rᵀA⁻¹r) / (ν + |O| − 1)``, kept within [1, largest_scale], is that of a Student-t process (Shah, Wilson,
    Ghahramani, AISTATS 2014, equation 6): residuals that the prior did not expect widen the belief.

    A run's epochs are known to within the step at which it validates, which adds a variance of ``(step/e^m)²/12`` to
    log epochs; s² is never taken to be smaller.

    Args:
        batch_sizes: The B sizes, ascending.
        observed: Their log epochs, pseudo-observations included; at least one has weight.
        exact: Those of runs that reached the target.
        epoch_step: Epochs between two validations.
    """
    known = _known(observed)
    level = float(np.mean([observed[index].mean for index in known]))
    variance = max(run_variance(exact), (epoch_step * bounded_exp(-level)) ** 2 / 12)
    expected, misfit = _conditioned(prior(batch_sizes).epochs, observed, known, level, variance)
    nu = CONSTANTS.scale_dof
    scale = min(max((nu + misfit) / (nu + len(known) - 1), 1.0), CONSTANTS.largest_scale)
    return Posterior(Normal(expected.mean, expected.covariance * scale), variance)


@lru_cache(maxsize=256)
def cost_posterior(batch_sizes: tuple[int, ...], costs: tuple[WeightedStatistics, ...]) -> Posterior:
    """Posterior of the log cost (J) of an epoch at every size, as in `epochs_posterior` without q and the step."""
    known = _known(costs)
    level = float(np.mean([costs[index].mean for index in known]))
    variance = cost_run_variance(costs)
    expected, _ = _conditioned(prior(batch_sizes).costs, costs, known, level, variance)
    return Posterior(expected, variance)


def _known(sizes: Sequence[WeightedStatistics]) -> list[int]:
    return [index for index, size in enumerate(sizes) if size.weight > _LEAST_WEIGHT]


def _conditioned(
    kernel: Array, sizes: Sequence[WeightedStatistics], known: list[int], level: float, run_variance: float
) -> tuple[Normal, float]:
    """A Gaussian process given the means of noisy runs at some sizes, and the residuals' misfit ``rᵀA⁻¹r``."""
    residuals = np.array([sizes[index].mean for index in known]) - level
    noise = run_variance / np.array([sizes[index].weight for index in known])
    across = kernel[known]
    noisy = across[:, known] + np.diag(noise)
    solved = np.linalg.solve(noisy, np.column_stack([across, residuals]))
    weights = solved[:, -1]
    covariance = kernel - across.T @ solved[:, :-1]
    return Normal(level + across.T @ weights, covariance), float(residuals @ weights)
