"""The beliefs about every batch size, from observations of some: mixtures of Gaussian processes.

The cost of a run at size b is ``c_b · T_b``: the cost of an epoch times the epochs to the target. `laws` says what is
expected of log T and of log c beforehand. Here its hypotheses meet what was seen: of each, a posterior, and how
probable it has become. Hypotheses of one family share their covariance, so that all of them together take one inverse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from bso_server.core.gp_voi.prior import CONSTANTS, Array, Family, Sizes, bounded_exp, laws
from bso_server.core.gp_voi.run_costs import CostRuns, CostSummary, summary_of


@dataclass(frozen=True, slots=True)
class WeightedStatistics:
    """Running weight, mean and weighted sum of squared deviations of a sequence (West, CACM 22(9), 1979).

    Weights may be fractions, and all of them may be scaled: that forgets without moving the mean.
    """

    weight: float = 0.0
    mean: float = 0.0
    squared_deviations: float = 0.0

    def including(self, value: float, weight: float = 1.0) -> WeightedStatistics:
        """These statistics with one more value of this weight (> 0)."""
        total = self.weight + weight
        mean = self.mean + (value - self.mean) * weight / total
        squared_deviations = self.squared_deviations + weight * (value - self.mean) * (value - mean)
        return WeightedStatistics(total, mean, squared_deviations)

    def scaled(self, factor: float) -> WeightedStatistics:
        """The same with every weight multiplied by `factor` (≥ 0)."""
        return WeightedStatistics(self.weight * factor, self.mean, self.squared_deviations * factor)


# Observations that have been forgotten so far count as none.
_LEAST_WEIGHT = 1e-6
_LEAST_VARIANCE = 1e-9

# Hypotheses that have become less probable than that together are left out.
_LEAST_CHANCE = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class Component:
    """Joint normal distributions over B batch sizes that differ in their means alone.

    Attributes:
        means: Of each of H hypotheses, shape (H, B).
        weights: Their probabilities, shape (H,).
        covariance: Shape (B, B).
    """

    means: Array
    weights: Array
    covariance: Array


@dataclass(frozen=True, eq=False)
class Posterior:
    """The belief about runs at B batch sizes: log epochs to the target, or the log cost of an epoch.

    Attributes:
        components: What is expected of each size: a mixture, whose weights add up to 1.
        run_variance: Variance of one run around that.
    """

    components: tuple[Component, ...]
    run_variance: float

    @cached_property
    def mean(self) -> Array:
        """Of what is expected, shape (B,)."""
        mean: Array = np.add.reduce([each.weights @ each.means for each in self.components])
        return mean

    @cached_property
    def variance(self) -> Array:
        """Of what is expected, shape (B,): within the hypotheses and between them."""
        variance: Array = np.add.reduce(
            [
                each.weights.sum() * np.diagonal(each.covariance) + each.weights @ (each.means - self.mean) ** 2
                for each in self.components
            ]
        )
        return np.maximum(variance, _LEAST_VARIANCE)

    def of_run(self, index: int) -> tuple[float, float]:
        """Mean and variance of one run at the size with this index."""
        return float(self.mean[index]), float(self.variance[index]) + self.run_variance

    def believing(self, in_flight: Mapping[int, int]) -> Posterior:
        """The belief as it will be when runs in flight have ended, each as every hypothesis expects.

        k runs at size b, of variance s², leave means and weights where they are and take
        ``Y_b Y_bᵀ · k / (s² + k·Y_bb)`` off a covariance Y ("kriging believer", Ginsbourger, Le Riche, Carraro 2010).
        Runs that end as the mixture expects would favour hypotheses in its middle: that was tried, and cost more.
        `in_flight` holds the number of runs by the index of their size.
        """
        if not in_flight:
            return self
        components = []
        for each in self.components:
            covariance = each.covariance
            for index, runs in sorted(in_flight.items()):
                column = covariance[index]
                covariance = covariance - np.outer(column, column) * (runs / (self.run_variance + runs * column[index]))
            components.append(Component(each.means, each.weights, covariance))
        return Posterior(tuple(components), self.run_variance)

    def samples(self, ranks: Array, normals: Array) -> Array:
        """Joint samples of what is expected, shape (S, B).

        Args:
            ranks: A permutation of (0.5, 1.5, …)/S, which spreads the samples over the hypotheses by their weights.
            normals: Standard normal values, shape (S, B).
        """
        edges = np.cumsum(np.concatenate([each.weights for each in self.components]))
        chosen = np.minimum(np.searchsorted(edges, ranks * edges[-1]), len(edges) - 1)
        drawn, first = np.empty_like(normals), 0
        for each in self.components:
            here = (chosen >= first) & (chosen < first + len(each.weights))
            if here.any():
                drawn[here] = each.means[chosen[here] - first] + normals[here] @ _root(each.covariance).T
            first += len(each.weights)
        return drawn


def _root(covariance: Array) -> Array:
    """L with ``L·Lᵀ`` the covariance, which may be singular but for rounding."""
    ridge = 1e-9 * max(float(np.trace(covariance)) / len(covariance), 1.0)
    return np.asarray(np.linalg.cholesky(covariance + ridge * np.eye(len(covariance))), dtype=np.float64)


def run_variance(exact: Sequence[WeightedStatistics]) -> float:
    """Variance of log epochs from run to run, by those of runs that reached the target, per size; pooled over sizes.

    The precision 1/s² has a gamma prior of shape a and mean 1/s₀²; s² is the inverse of its posterior mean. With the
    squared deviations from each size's own mean, and their degrees of freedom, Σ (n_b − 1)::

        s² = (a·s₀² + Σ squared deviations / 2) / (a + degrees of freedom / 2)

    (Murphy, Machine Learning, 2012, §4.6.2.2.) Here s₀ is `run_sd`, a its strength, and s never below `least_run_sd`.
    """
    deviations = sum(size.squared_deviations for size in exact)
    freedom = sum(max(size.weight - 1, 0.0) for size in exact)
    strength = CONSTANTS.run_sd_strength
    pooled = (strength * CONSTANTS.run_sd**2 + max(deviations, 0.0) / 2) / (strength + freedom / 2)
    return max(pooled, CONSTANTS.least_run_sd**2)


@lru_cache(maxsize=256)
def epochs_posterior(
    sizes: Sizes,
    observed: tuple[WeightedStatistics, ...],
    exact: tuple[WeightedStatistics, ...],
    epoch_step: float,
) -> Posterior:
    """Posterior of log epochs to the target at every size.

    The covariance of a family is widened by the factor ``q = (ν + E[rᵀA⁻¹r]) / (ν + |O| − 1)``, kept within
    [1, largest_scale], as that of a Student-t process (Shah, Wilson, Ghahramani, AISTATS 2014, equation 6): residuals
    that no hypothesis expected make the belief less sure. Notation as in `_given`.

    A run's epochs are known to within the step at which it validates, which adds a variance of ``(step/e^m)²/12`` to
    log epochs, m being the mean of what was observed; s² is never taken to be smaller.

    Args:
        sizes: The B sizes.
        observed: Their log epochs, pseudo-observations included; at least one has weight.
        exact: Those of runs that reached the target.
        epoch_step: Epochs between two validations.
    """
    known = [index for index, size in enumerate(observed) if size.weight > _LEAST_WEIGHT]
    values = np.array([observed[index].mean for index in known])
    level = float(values.mean())
    variance = max(run_variance(exact), (epoch_step * bounded_exp(-level)) ** 2 / 12)
    noise = variance / np.array([observed[index].weight for index in known])
    nu = CONSTANTS.scale_dof
    found = []
    for family in laws(sizes).epochs:
        given = _given(family, known, values - level, noise)
        # Even where all of a family is beyond what a double holds.
        posterior = given.family
        weights = np.exp(posterior.log_weights - posterior.log_weights.max())
        misfit = float(weights @ given.misfits / weights.sum())
        scale = min(max((nu + misfit) / (nu + len(known) - 1), 1.0), CONSTANTS.largest_scale)
        found.append(Family(posterior.means + level, posterior.log_weights, posterior.kernel * scale))
    return Posterior(_mixed(found), variance)


@lru_cache(maxsize=256)
def cost_posterior(sizes: Sizes, runs: tuple[CostRuns, ...], trusted: int | None = None) -> Posterior:
    """Posterior of the log cost of an epoch at every size; at least one has runs.

    Where one size has changed by d since others ran, all may have changed alike, as with more data, or each by
    something of its own, N(d/2, (d/2)²), which no law binds, as with longer texts, whose padding grows with the batch.
    Both are as probable before any other size has run since, and then by how well they explain what those have cost.

    `trusted` is the index of a size whose own run asks: what its epochs cost is not in doubt.
    """
    family = laws(sizes).costs
    drift = max(abs(run.drift) for of_size in runs for run in of_size)
    if not drift:
        summary = summary_of(runs)
        return Posterior(_mixed(_costs_given(family, summary, trusted)), summary.run_variance)
    lawless = replace(family, kernel=family.kernel + (drift / 2) ** 2 * np.eye(len(runs)))
    alike, apart = (summary_of([tuple(run.drifted(share) for run in each) for each in runs]) for share in (1.0, 0.5))
    fresh = [index for index in _known(alike) if not runs[index][-1].drift]
    found = [
        *_weighing(_costs_given(family, alike, trusted), _log_evidence(family, alike, fresh)),
        *_weighing(_costs_given(lawless, apart, trusted), _log_evidence(lawless, alike, fresh)),
    ]
    return Posterior(_mixed(found), alike.run_variance)


def _costs_given(family: Family, summary: CostSummary, trusted: int | None) -> list[Family]:
    """The hypotheses about costs that follow from a summary of them.

    A size whose cost rests on one run may have been slowed when that ran, by a machine that was busy. That each of them
    was is a hypothesis of its own, beside that none was: to that observation was then added the modulus of a normal
    deviate of variance d, so that the size can cost less than was seen, and hardly more. Up to its sign, that changes A
    by ``d·e·eᵀ`` (Sherman and Morrison, Ann. Math. Stat. 21(1), 1950), and with f = d / (1 + d·A⁻¹_jj) everything that
    follows from it by terms of f. What was added is N(f·(A⁻¹r)_j, f) by then, and has the sign that it must have with
    the probability ``Φ(√f·(A⁻¹r)_j)``; where that is not small, moments are as good as without it.
    """
    known = _known(summary)
    given, level = _given_costs(family, summary, known)
    means, log_weights, kernel = given.family.means + level, given.family.log_weights, given.family.kernel
    found = [Family(means, log_weights, kernel)]
    if len(known) > 1:
        slowed = CONSTANTS.slowed_sd**2
        for place, index in enumerate(known):
            if not summary.suspect[index] or index == trusted:
                continue
            own = 1 + slowed * given.inverse[place, place]
            factor, residuals, reach = slowed / own, given.solved[:, place], given.reaches[place]
            evidence = 0.5 * factor * residuals**2 - 0.5 * math.log(own) + math.log(2 * CONSTANTS.slowed_chance)
            evidence += np.array([log_cdf(math.sqrt(factor) * each) for each in residuals.tolist()])
            found.append(
                Family(
                    means - factor * np.outer(residuals, reach),
                    log_weights + evidence,
                    kernel + factor * np.outer(reach, reach),
                )
            )
    return found


def _known(summary: CostSummary) -> list[int]:
    """Indices of the sizes of which it tells something."""
    return [index for index, weight in enumerate(summary.weights) if weight > _LEAST_WEIGHT]


def _given_costs(family: Family, summary: CostSummary, known: list[int]) -> tuple[_Given, float]:
    """The posterior by these sizes' costs, up to a level."""
    values = np.array([summary.means[index] for index in known])
    level = float(values.mean())
    noise = summary.run_variance / np.array([summary.weights[index] for index in known]) + _LEAST_VARIANCE
    return _given(family, known, values - level, noise), level


def _log_evidence(family: Family, summary: CostSummary, known: list[int]) -> float:
    """Log of the probability of these sizes' costs, up to a term that all families share."""
    if not known:
        return 0.0
    return _log_sum(_given_costs(family, summary, known)[0].family.log_weights)


def _weighing(found: list[Family], log_weight: float) -> list[Family]:
    """The same hypotheses with this weight in all."""
    total = _log_sum(np.concatenate([each.log_weights for each in found]))
    return [replace(each, log_weights=each.log_weights + (log_weight - total)) for each in found]


def _log_sum(logs: Array) -> float:
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).sum()))


@dataclass(frozen=True, slots=True, eq=False)
class _Given:
    """A family, given observations; O of the B sizes were observed.

    Attributes:
        family: What the hypotheses expect now, and weigh up to a factor.
        misfits: ``rᵀA⁻¹r`` of each hypothesis, shape (H,).
        inverse: A⁻¹, shape (O, O).
        solved: A⁻¹r of each hypothesis, shape (H, O).
        reaches: A⁻¹K_O·, shape (O, B).
    """

    family: Family
    misfits: Array
    inverse: Array
    solved: Array
    reaches: Array


def _given(family: Family, known: list[int], values: Array, noise: Array) -> _Given:
    """The posterior of each hypothesis m, and its weight.

    With the observed sizes O, what was seen of them y, the variances of that, A = K_OO + diag(noise) and r = y − m_O::

        mean = m + K_·O A⁻¹ r        covariance = K − K_·O A⁻¹ K_O·        log weight = log prior − ½ rᵀA⁻¹r − ½ log|A|

    (Rasmussen, Williams 2006, equations 2.25, 2.26 and 2.30.)
    """
    across = family.kernel[known]
    noisy = across[:, known] + np.diag(noise)
    inverse: Array = np.asarray(np.linalg.inv(noisy), dtype=np.float64)
    residuals = values - family.means[:, known]
    solved = residuals @ inverse
    misfits = (solved * residuals).sum(axis=1)
    reaches = inverse @ across
    posterior = Family(
        family.means + solved @ across,
        family.log_weights - 0.5 * misfits - 0.5 * np.linalg.slogdet(noisy)[1],
        family.kernel - across.T @ reaches,
    )
    return _Given(posterior, misfits, inverse, solved, reaches)


def _mixed(found: Sequence[Family]) -> tuple[Component, ...]:
    """The mixture of these families, which weigh what their log weights say up to a common factor."""
    top = max(float(each.log_weights.max()) for each in found)
    weights = [np.exp(each.log_weights - top) for each in found]
    total = sum(float(each.sum()) for each in weights)
    kept = [place for place, each in enumerate(weights) if each.sum() >= _LEAST_CHANCE * total]
    total = sum(float(weights[place].sum()) for place in kept)
    return tuple(Component(found[place].means, weights[place] / total, found[place].kernel) for place in kept)


_SQRT_HALF = math.sqrt(0.5)
_LOG_SQRT_2_PI = 0.5 * math.log(2 * math.pi)

# Below this Φ itself comes close to what a double can hold.
_FAR_TAIL = -36.0


def cdf(z: float) -> float:
    """Φ(z): the probability that a standard normal variable is at most `z`."""
    return 0.5 * math.erfc(-z * _SQRT_HALF)


def log_cdf(z: float) -> float:
    """Log Φ(z), also where Φ(z) is smaller than any double: there ``φ(z)/(−z) · (1 − 1/z² + 3/z⁴)``, its asymptote.

    (Abramowitz, Stegun, Handbook of Mathematical Functions, 1964, 26.2.12.)
    """
    if z > _FAR_TAIL:
        return math.log(cdf(z))
    square = z * z
    return -0.5 * square - _LOG_SQRT_2_PI - math.log(-z) + math.log1p((3 / square - 1) / square)


def hazard(z: float) -> float:
    """φ(z) / (1 − Φ(z)): the mean of a standard normal variable that is known to be larger than `z`."""
    return math.exp(-0.5 * z * z - _LOG_SQRT_2_PI - log_cdf(-z))


def moments_given_larger(mean: float, variance: float, noise_variance: float, bound: float) -> tuple[float, float]:
    """Mean and variance of f once a noisy look at it is known to exceed a bound.

    With f ~ N(m, v), y = f + N(0, s²) and y > b; t² = v + s², a = (b − m)/t and the hazard λ(a)::

        E[f | y > b] = m + v/t · λ        Var[f | y > b] = v − v²/t² · λ·(λ − a)

    (Moments of a truncated normal: Johnson, Kotz, Balakrishnan, Continuous Univariate Distributions 1, 1994, §13.10.1;
    f given y is linear in y.) Here v > 0 and s² ≥ 0.
    """
    total = variance + noise_variance
    z = (bound - mean) / math.sqrt(total)
    rate = hazard(z)
    shifted = mean + variance / math.sqrt(total) * rate
    return shifted, variance - variance * variance / total * rate * (rate - z)
