"""Posteriors over every batch size, from observations of some: mixtures of Gaussian processes.

The cost of a run at size b is ``c_b · T_b``: the cost of an epoch times the epochs to the target. `prior` has the
hypotheses about log T and log c. This module conditions each hypothesis on the observations, and weighs it by how well
it explains them. Hypotheses of one family share their covariance, so one matrix inverse serves all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np

from bso_server.core.gp_voi.prior import CONSTANTS, Array, Family, Sizes, bounded_exp, laws
from bso_server.core.gp_voi.run_costs import CostRuns, CostSummary, summary_of


class WeightedStatistics(NamedTuple):
    """Running weight, mean and weighted sum of squared deviations of a sequence (West, CACM 22(9), 1979).

    Weights may be fractions. Scaling all weights makes old values count less, without moving the mean.
    """

    weight: float = 0.0
    mean: float = 0.0
    squared_deviations: float = 0.0

    def including(self, value: float, weight: float = 1.0) -> WeightedStatistics:
        """Add a value of this weight (> 0)."""
        total = self.weight + weight
        mean = self.mean + (value - self.mean) * weight / total
        squared_deviations = self.squared_deviations + weight * (value - self.mean) * (value - mean)
        return WeightedStatistics(total, mean, squared_deviations)

    def scaled(self, factor: float) -> WeightedStatistics:
        """Multiply every weight by `factor` (≥ 0)."""
        if not self.weight:
            return self
        return WeightedStatistics(self.weight * factor, self.mean, self.squared_deviations * factor)


# Observations with a smaller weight are ignored.
_LEAST_WEIGHT = 1e-6
_LEAST_VARIANCE = 1e-9

# A family is left out if its hypotheses together have a lower probability.
_LEAST_CHANCE = 1e-3


@dataclass(frozen=True, eq=False)
class Posterior:
    """Belief about B batch sizes: log epochs to the target, or the log cost of an epoch.

    The belief is a mixture of C components, each with H hypotheses: joint normal distributions that differ only in
    their means.

    Attributes:
        means: Expectations of each hypothesis, shape (C, H, B).
        weights: Probability of each hypothesis, shape (C, H); all together add up to 1.
        covariances: Covariance of each component, shape (C, B, B).
        run_variance: Variance of one run around its size's expectation.
        log_evidence: Log density of the observations of log epochs around their mean; 0 where no caller needs it.
    """

    means: Array
    weights: Array
    covariances: Array
    run_variance: float
    log_evidence: float = 0.0

    @cached_property
    def mean(self) -> Array:
        """Mean of the expectations, shape (B,)."""
        mean: Array = self.weights.ravel() @ self.means.reshape(self.weights.size, -1)
        return mean

    @cached_property
    def variance(self) -> Array:
        """Variance of the expectations, within hypotheses and between them; shape (B,)."""
        between = self.weights.ravel() @ np.square(self.means - self.mean).reshape(self.weights.size, -1)
        within = self.weights.sum(axis=1) @ np.diagonal(self.covariances, axis1=1, axis2=2)
        variance: Array = np.maximum(within + between, _LEAST_VARIANCE)
        return variance

    def of_run(self, index: int) -> tuple[float, float]:
        """Return the mean and the variance of one run at the size with this index."""
        return float(self.mean[index]), float(self.variance[index]) + self.run_variance

    def believing(self, in_flight: Mapping[int, int]) -> Posterior:
        """Return the belief after the runs in flight (numbers by size index), if each ends as every hypothesis expects.

        k runs at size b, of variance s², leave means and weights unchanged and subtract ``Y_b Y_bᵀ · k / (s² +
        k·Y_bb)`` from a covariance Y ("kriging believer", Ginsbourger, Le Riche, Carraro 2010). If runs ended as the
        mixture expects instead, hypotheses near its mean would gain; in simulations this cost more.
        """
        if not in_flight:
            return self
        covariances = self.covariances
        for index, runs in sorted(in_flight.items()):
            columns = covariances[:, index]
            shares = runs / (self.run_variance + runs * columns[:, index])
            covariances = covariances - columns[:, :, None] * columns[:, None] * shares[:, None, None]
        return Posterior(self.means, self.weights, covariances, self.run_variance)

    def samples(self, ranks: Array, normals: Array) -> Array:
        """Return joint samples of the expectations, shape (S, B).

        `ranks` is a permutation of (0.5, 1.5, …)/S, which spreads the samples over the hypotheses by their weights;
        `normals` are standard normal values, shape (S, B).
        """
        edges = np.cumsum(self.weights)
        chosen = np.minimum(np.searchsorted(edges, ranks * edges[-1]), len(edges) - 1)
        drawn: Array = self.means.reshape(len(edges), -1)[chosen]
        for component, covariance in enumerate(self.covariances):
            here = chosen // self.weights.shape[1] == component
            drawn[here] += normals[here] @ _root(covariance).T
        return drawn


def _root(covariance: Array) -> Array:
    """Return L with ``L·Lᵀ`` the covariance; a small ridge keeps singular ones factorable."""
    ridge = 1e-9 * max(float(np.trace(covariance)) / len(covariance), 1.0)
    return np.asarray(np.linalg.cholesky(covariance + ridge * np.eye(len(covariance))), dtype=np.float64)


def freedom_of(exact: Iterable[WeightedStatistics]) -> float:
    """Return the degrees of freedom ``Σ (n_b − 1)`` of the deviations of runs from each size's own mean."""
    return sum(max(size.weight - 1, 0.0) for size in exact)


class Seen(NamedTuple):
    """Observations of log epochs: `Belief.observed` and `Belief.exact` of each size, and the least `epoch_step`."""

    observed: tuple[WeightedStatistics, ...]
    exact: tuple[WeightedStatistics, ...]
    epoch_step: float

    @property
    def known(self) -> tuple[int, ...]:
        """Indices of the sizes with observations."""
        return tuple(index for index, size in enumerate(self.observed) if size.weight > _LEAST_WEIGHT)


class _Weighed(NamedTuple):
    """Probabilities of all hypotheses about log epochs, given N sets of observations of the same O sizes.

    In the notation of `epochs_posterior`, with F families and V variances, the shapes are: `levels` (N,),
    `run_variances` (N,), `inverses` 1/(Λ + v) (N, F, V, O), `residuals` rᵀ√w·U (N, F, H, O), `turned` √w·U
    (N, F, O, O), `weights` (N, F, V, H), `scales` q (N, F, V), `log_evidences` (N,).
    """

    levels: Array
    run_variances: Array
    inverses: Array
    residuals: Array
    turned: Array
    weights: Array
    scales: Array
    log_evidences: Array


def _weighed(sizes: Sizes, known: Sequence[int], seen: Sequence[Seen]) -> _Weighed:
    """Return the probabilities of the hypotheses that `epochs_posterior` describes, for each set of observations."""
    values = np.array([[each.observed[index].mean for index in known] for each in seen])
    roots = np.sqrt(np.array([[each.observed[index].weight for index in known] for each in seen]))
    levels = values.mean(axis=1)
    steps = np.array([each.epoch_step * bounded_exp(-level) for each, level in zip(seen, levels.tolist(), strict=True)])
    variances = np.maximum(np.square(CONSTANTS.run_sds), np.square(steps)[:, None] / 12)
    family = laws(sizes).epochs
    among = family.kernel[:, known][:, :, known]
    eigenvalues, vectors = np.linalg.eigh(among * (roots[:, None, :, None] * roots[:, None, None]))
    turned = vectors * roots[:, None, :, None]
    inverses = 1 / (np.maximum(eigenvalues, 0.0)[:, :, None] + variances[:, None, :, None])
    residuals = ((values - levels[:, None])[:, None, None] - family.means[:, :, known]) @ turned
    misfits = inverses @ np.square(residuals).swapaxes(2, 3)
    log_weights = family.log_weights[:, None] - 0.5 * misfits
    # Relative weights stay finite even if all weights of a family underflow.
    tops = log_weights.max(axis=3, keepdims=True)
    relative = np.exp(log_weights - tops)
    totals = relative.sum(axis=3)
    nu = CONSTANTS.scale_dof
    scales = (nu + (relative * misfits).sum(axis=3) / totals) / (nu + len(known) - 1)
    log_chances = _log_chances(variances, seen) + np.log(roots).sum(axis=1)[:, None]
    log_sums = tops[..., 0] + np.log(totals) + 0.5 * np.log(inverses).sum(axis=3) + log_chances[:, None]
    highest = log_sums.max(axis=(1, 2), keepdims=True)
    shares = np.exp(log_sums - highest)
    sums = shares.sum(axis=(1, 2), keepdims=True)
    kept = np.where(shares >= _LEAST_CHANCE * sums, shares, 0.0)
    return _Weighed(
        levels,
        (shares.sum(axis=1) * variances).sum(axis=1) / sums[:, 0, 0],
        inverses,
        residuals,
        turned,
        relative * (kept / totals / kept.sum(axis=(1, 2), keepdims=True))[..., None],
        np.minimum(np.maximum(scales, 1.0), CONSTANTS.largest_scale),
        (highest + np.log(sums))[:, 0, 0] - _LOG_PRIORS,
    )


@lru_cache(maxsize=256)
def epochs_posterior(sizes: Sizes, seen: Seen) -> Posterior:
    """Return the posterior of log epochs to the target at every size; at least one size has observations.

    The variance of runs is uncertain, so each σ on a grid is a further hypothesis, weighed by the deviations of runs at
    one size and by how well the sizes follow the laws. A run reaches the target anywhere between two validations,
    `epoch_step` epochs apart. So the variance is at least ``(epoch_step/e^m)²/12``, with the mean m of the
    observations.

    Residuals that no hypothesis expected widen the covariance of a family, as in a Student-t process (Shah, Wilson,
    Ghahramani, AISTATS 2014, equation 6), by the factor ``q = (ν + E[rᵀA⁻¹r]) / (ν + |O| − 1)``, limited to
    [1, largest_scale]. Notation as in `_given`. With the weights w of the observed sizes, ``A = K_OO + v·diag(1/w)``.
    So the eigenvectors U and eigenvalues Λ of ``√w·K_OO·√w`` serve all variances v: ``A⁻¹ = √w·U (Λ + v)⁻¹ Uᵀ·√w``.
    """
    known, family = seen.known, laws(sizes).epochs
    found = _weighed(sizes, known, [seen])
    # Components are in the order of their variances, on which samples depend.
    of_variance, of_family = found.weights[0].any(axis=2).T.nonzero()
    kept = (of_family, of_variance)
    across = (found.turned[0].swapaxes(1, 2) @ family.kernel[:, known])[of_family]
    reaches = found.inverses[0][kept][:, :, None] * across
    covariances = family.kernel[of_family] - across.swapaxes(1, 2) @ reaches
    return Posterior(
        family.means[of_family] + found.levels[0] + found.residuals[0][of_family] @ reaches,
        found.weights[0][kept],
        covariances * found.scales[0][kept][:, None, None],
        float(found.run_variances[0]),
        float(found.log_evidences[0]),
    )


def expected_runs(sizes: Sizes, seen: Sequence[Seen], indices: Sequence[int]) -> list[tuple[float, float]]:
    """Return `Posterior.of_run` of a size after each set of observations; `indices` has the sizes.

    Each posterior takes a fraction of the time of `epochs_posterior`, a small one in a long list.
    """
    found: list[tuple[float, float]] = []
    family = laws(sizes).epochs
    for known, group in groupby(zip(seen, indices, strict=True), key=lambda pair: pair[0].known):
        sets, at = zip(*group, strict=True)
        given, count = _weighed(sizes, known, sets), len(sets)
        across = family.kernel[:, known][:, :, at].transpose(2, 0, 1)[..., None]
        across = (given.turned.swapaxes(2, 3) @ across)[..., 0]
        reaches = given.inverses * across[:, :, None]
        means = family.means[:, None, :, at].transpose(3, 0, 1, 2) + reaches @ given.residuals.swapaxes(2, 3)
        variances = family.kernel[:, at, at].T[:, :, None] - (reaches @ across[..., None])[..., 0]
        weights = given.weights.reshape(count, 1, -1)
        mean = (weights @ means.reshape(count, -1, 1))[:, 0, 0]
        between = weights @ np.square(means.reshape(count, -1, 1) - mean[:, None, None])
        within = (given.weights.sum(axis=3) * given.scales * variances).reshape(count, -1).sum(axis=1)
        variance = np.maximum(within + between[:, 0, 0], _LEAST_VARIANCE) + given.run_variances
        found += zip((mean + given.levels).tolist(), variance.tolist(), strict=True)
    return found


def mixed(shares: Mapping[Posterior, float]) -> Posterior:
    """Return the mixture of posteriors with these probabilities, which add up to 1."""
    return Posterior(
        np.concatenate([each.means for each in shares]),
        np.concatenate([each.weights * share for each, share in shares.items()]),
        np.concatenate([each.covariances for each in shares]),
        sum(each.run_variance * share for each, share in shares.items()),
    )


# Log of the prior probability of each σ of `run_sds`, up to a constant, and the log of their sum.
_LOG_PRIOR = -0.5 * (np.log(np.array(CONSTANTS.run_sds) / CONSTANTS.run_sd) / CONSTANTS.run_sd_spread) ** 2
_LOG_PRIORS = math.log(np.exp(_LOG_PRIOR).sum())


def _log_chances(variances: Array, seen: Sequence[Seen]) -> Array:
    """Return the log probability, up to a constant, of each σ of `run_sds`, given the runs of each size: (N, V).

    σ has a log-normal prior around `run_sd`. The likelihood is the density of the deviations from each size's own
    mean, with f degrees of freedom (`freedom_of`): ``v^(−f/2) · exp(−Σ squared deviations / 2v)`` for the variances v.
    """
    deviations = np.array([[max(sum(size.squared_deviations for size in each.exact), 0.0)] for each in seen])
    freedom = np.array([[freedom_of(each.exact)] for each in seen])
    return _LOG_PRIOR - 0.5 * deviations / variances - 0.5 * freedom * np.log(variances)


@lru_cache(maxsize=256)
def cost_posterior(sizes: Sizes, runs: tuple[CostRuns, ...], trusted: int | None = None) -> Posterior:
    """Return the posterior of the log cost of an epoch at every size; at least one size has runs.

    If the log cost of one size has changed by d since other sizes ran, either all sizes have changed alike (as with
    more data), or each size by its own amount, N(d/2, (d/2)²) (as with longer texts, whose padding grows with the
    batch). Both hypotheses are equally probable a priori, and are then weighed by how well they explain the sizes that
    have run since the change.

    `trusted` is the index of a size whose cost is not in doubt, because its current run reports it.
    """
    family = laws(sizes).costs
    drift = max((abs(run.drift) for of_size in runs for run in of_size), default=0.0)
    if not drift:
        summary = summary_of(runs)
        return _mixed(_costs_given(family, summary, trusted), summary.run_variance)
    lawless = replace(family, kernel=family.kernel + (drift / 2) ** 2 * np.eye(len(runs)))
    alike, apart = (summary_of([tuple(run.drifted(share) for run in each) for each in runs]) for share in (1.0, 0.5))
    fresh = [index for index in _known(alike) if not runs[index][-1].drift]
    found = []
    for laws_of_costs, summary in ((family, alike), (lawless, apart)):
        hypotheses, evidence = _costs_given(laws_of_costs, summary, trusted), 0.0
        if fresh:
            evidence = _log_sum(_given(laws_of_costs, alike, fresh).family.log_weights)
        shift = evidence - _log_sum(np.concatenate([each.log_weights for each in hypotheses]))
        found += [replace(each, log_weights=each.log_weights + shift) for each in hypotheses]
    return _mixed(found, alike.run_variance)


def _costs_given(family: Family, summary: CostSummary, trusted: int | None) -> list[Family]:
    """Return the hypotheses about costs after the observations in a summary.

    A busy machine may have slowed the single run of a size. Beside the hypothesis that no run was slowed, each size j
    with a single run has a hypothesis that this run was slowed: the observation includes the modulus of a normal
    deviate of variance d, so the size can cost less than observed, and hardly more. Apart from the sign of the deviate,
    this adds ``d·e·eᵀ`` to A of `_given`, with the unit vector e of size j (Sherman and Morrison, Ann. Math. Stat.
    21(1), 1950), and everything that follows from A by terms of f = d / (1 + d·A⁻¹_jj). The deviate is then
    N(f·(A⁻¹r)_j, f), and has the required sign with the probability ``Φ(√f·(A⁻¹r)_j)``. Unless this probability is
    small, the condition on the sign hardly changes the moments.
    """
    known = _known(summary)
    given = _given(family, summary, known)
    means, log_weights, kernel = given.family.means, given.family.log_weights, given.family.kernel
    found = [given.family]
    for place, index in enumerate(known):
        if len(given.solved[0]) == 1 or not summary.suspect[index] or index == trusted:
            continue
        own = 1 + CONSTANTS.slowed_sd**2 * given.inverse[place, place]
        factor, residuals, reach = CONSTANTS.slowed_sd**2 / own, given.solved[:, place], given.reaches[place]
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
    """Return the indices of the sizes with an observed cost."""
    return [index for index, weight in enumerate(summary.weights) if weight > _LEAST_WEIGHT]


def _log_sum(logs: Array) -> float:
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).sum()))


class _Given(NamedTuple):
    """Posterior of a family, with weights up to a factor, and other results of `_given`.

    With O of B sizes observed, the shapes are: `inverse` A⁻¹ (O, O), `solved` A⁻¹r (H, O), `reaches` A⁻¹K_O· (O, B).
    """

    family: Family
    inverse: Array
    solved: Array
    reaches: Array


def _given(family: Family, summary: CostSummary, known: list[int]) -> _Given:
    """Return the posterior and the weight of each hypothesis m, given the costs of the known sizes.

    With the observed sizes O, their mean costs y relative to the mean of y, the covariance N of the errors of y,
    A = K_OO + N and r = y − m_O::

        mean = m + K_·O A⁻¹ r        covariance = K − K_·O A⁻¹ K_O·        log weight = log prior − ½ rᵀA⁻¹r − ½ log|A|

    (Rasmussen, Williams 2006, equations 2.25, 2.26 and 2.30.)
    """
    values = np.array([summary.means[index] for index in known])
    level = float(values.mean())
    variances = [summary.run_variance / summary.weights[index] for index in known]
    across = family.kernel[known]
    noisy = across[:, known] + (np.diag(variances) + _LEAST_VARIANCE * np.eye(len(values)))
    inverse: Array = np.asarray(np.linalg.inv(noisy), dtype=np.float64)
    residuals = values - level - family.means[:, known]
    solved = residuals @ inverse
    reaches = inverse @ across
    posterior = Family(
        family.means + solved @ across + level,
        family.log_weights - 0.5 * (solved * residuals).sum(axis=1) - 0.5 * np.linalg.slogdet(noisy)[1],
        family.kernel - across.T @ reaches,
    )
    return _Given(posterior, inverse, solved, reaches)


def _mixed(found: Sequence[Family], run_variance: float) -> Posterior:
    """Return the mixture of families; their log weights share an unknown constant."""
    log_weights = np.array([each.log_weights for each in found])
    weights = np.exp(log_weights - log_weights.max())
    kept = weights.sum(axis=1) >= _LEAST_CHANCE * weights.sum()
    means, covariances = np.array([each.means for each in found]), np.array([each.kernel for each in found])
    return Posterior(means[kept], weights[kept] / weights[kept].sum(), covariances[kept], run_variance)


_SQRT_HALF = math.sqrt(0.5)
_LOG_SQRT_2_PI = 0.5 * math.log(2 * math.pi)

# Below this, Φ comes close to the smallest double.
_FAR_TAIL = -36.0


def log_cdf(z: float) -> float:
    """Return log Φ(z); if Φ(z) is too small for a double, by its asymptote ``φ(z)/(−z) · (1 − 1/z² + 3/z⁴)``.

    (Abramowitz, Stegun, Handbook of Mathematical Functions, 1964, 26.2.12.)
    """
    if z > _FAR_TAIL:
        return math.log(0.5 * math.erfc(-z * _SQRT_HALF))
    square = z * z
    return -0.5 * square - _LOG_SQRT_2_PI - math.log(-z) + math.log1p((3 / square - 1) / square)


def hazard(z: float) -> float:
    """Return φ(z) / (1 − Φ(z)): the mean of a standard normal variable that is known to exceed `z`."""
    return math.exp(-0.5 * z * z - _LOG_SQRT_2_PI - log_cdf(-z))


def moments_given_larger(mean: float, variance: float, noise_variance: float, bound: float) -> tuple[float, float]:
    """Return the mean and variance of f, given that a noisy observation of it exceeds a bound.

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
