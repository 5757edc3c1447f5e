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

import numpy as np

from bso_server.core.gp_voi.prior import CONSTANTS, Array, Family, Sizes, bounded_exp, laws
from bso_server.core.gp_voi.run_costs import CostRuns, CostSummary, summary_of


@dataclass(frozen=True, slots=True)
class WeightedStatistics:
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
        return WeightedStatistics(self.weight * factor, self.mean, self.squared_deviations * factor)


# Observations with a smaller weight are ignored.
_LEAST_WEIGHT = 1e-6
_LEAST_VARIANCE = 1e-9

# A family whose hypotheses together have a lower probability is left out.
_LEAST_CHANCE = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class Component:
    """Joint normal distributions over B batch sizes that differ only in their means.

    `means` of H hypotheses have the shape (H, B), their probabilities `weights` (H,), and the `covariance` (B, B).
    """

    means: Array
    weights: Array
    covariance: Array


@dataclass(frozen=True, eq=False)
class Posterior:
    """Belief about B batch sizes: log epochs to the target, or the log cost of an epoch.

    Attributes:
        components: Mixture of beliefs about each size's expectation; weights add up to 1.
        run_variance: Variance of one run around its size's expectation.
        log_evidence: Log density of the observations of log epochs around their mean; 0 where no caller needs it.
    """

    components: tuple[Component, ...]
    run_variance: float
    log_evidence: float = 0.0

    @cached_property
    def mean(self) -> Array:
        """Mean of the expectations, shape (B,)."""
        mean: Array = np.add.reduce([each.weights @ each.means for each in self.components])
        return mean

    @cached_property
    def variance(self) -> Array:
        """Variance of the expectations, within hypotheses and between them; shape (B,)."""
        variance: Array = np.add.reduce(
            [
                each.weights.sum() * np.diagonal(each.covariance) + each.weights @ (each.means - self.mean) ** 2
                for each in self.components
            ]
        )
        return np.maximum(variance, _LEAST_VARIANCE)

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
        components = []
        for each in self.components:
            covariance = each.covariance
            for index, runs in sorted(in_flight.items()):
                column = covariance[index]
                covariance = covariance - np.outer(column, column) * (runs / (self.run_variance + runs * column[index]))
            components.append(Component(each.means, each.weights, covariance))
        return Posterior(tuple(components), self.run_variance)

    def samples(self, ranks: Array, normals: Array) -> Array:
        """Return joint samples of the expectations, shape (S, B).

        `ranks` is a permutation of (0.5, 1.5, …)/S, which spreads the samples over the hypotheses by their weights;
        `normals` are standard normal values, shape (S, B).
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
    """Return L with ``L·Lᵀ`` the covariance; a small ridge keeps singular ones factorable."""
    ridge = 1e-9 * max(float(np.trace(covariance)) / len(covariance), 1.0)
    return np.asarray(np.linalg.cholesky(covariance + ridge * np.eye(len(covariance))), dtype=np.float64)


def freedom_of(exact: Iterable[WeightedStatistics]) -> float:
    """Return the degrees of freedom ``Σ (n_b − 1)`` of the deviations of runs from each size's own mean."""
    return sum(max(size.weight - 1, 0.0) for size in exact)


@lru_cache(maxsize=256)
def epochs_posterior(
    sizes: Sizes,
    observed: tuple[WeightedStatistics, ...],
    exact: tuple[WeightedStatistics, ...],
    epoch_step: float,
) -> Posterior:
    """Return the posterior of log epochs to the target at every size.

    `observed` and `exact` are fields of `Belief`, per size; at least one size has observations. The variance of runs is
    uncertain, so each σ on a grid is a further hypothesis, weighed by the deviations of runs at one size and by how
    well the sizes follow the laws. A run reaches the target anywhere between two validations, `epoch_step` epochs
    apart. So the variance is at least ``(epoch_step/e^m)²/12``, with the mean m of the observations.

    Residuals that no hypothesis expected widen the covariance of a family, as in a Student-t process (Shah, Wilson,
    Ghahramani, AISTATS 2014, equation 6), by the factor ``q = (ν + E[rᵀA⁻¹r]) / (ν + |O| − 1)``, limited to
    [1, largest_scale]. Notation as in `_given`. With the weights w of the observed sizes, ``A = K_OO + v·diag(1/w)``.
    So the eigenvectors U and eigenvalues Λ of ``√w·K_OO·√w`` serve all variances v: ``A⁻¹ = √w·U (Λ + v)⁻¹ Uᵀ·√w``.
    """
    known = [index for index, size in enumerate(observed) if size.weight > _LEAST_WEIGHT]
    values = np.array([observed[index].mean for index in known])
    roots = np.sqrt(np.array([observed[index].weight for index in known]))
    level = float(values.mean())
    nu = CONSTANTS.scale_dof
    step = (epoch_step * bounded_exp(-level)) ** 2 / 12
    variances = np.maximum(np.square(CONSTANTS.run_sds), step)
    log_chances = _log_chances(variances, exact) + np.log(roots).sum()
    given, chances = [], []
    for family in laws(sizes).epochs:
        across = family.kernel[known]
        eigenvalues, vectors = np.linalg.eigh(across[:, known] * roots * roots[:, None])
        turned = vectors * roots[:, None]
        inverses = 1 / (np.maximum(eigenvalues, 0.0) + variances[:, None])
        residuals = (values - level - family.means[:, known]) @ turned
        misfits = inverses @ (residuals * residuals).T
        log_factors = log_chances + 0.5 * np.log(inverses).sum(axis=1)
        log_weights = family.log_weights - 0.5 * misfits + log_factors[:, None]
        # Relative weights stay finite even if the whole family's weights underflow.
        tops = log_weights.max(axis=1)
        relative = np.exp(log_weights - tops[:, None])
        totals = relative.sum(axis=1)
        scales = (nu + (relative * misfits).sum(axis=1) / totals) / (nu + len(known) - 1)
        given.append((family, inverses, residuals, turned.T @ across, log_weights, scales))
        chances.append(tops + np.log(totals))
    log_sums = np.array(chances).T
    top = log_sums.max()
    shares = np.exp(log_sums - top)
    run_variance = float((variances @ shares).sum() / shares.sum())
    kept = shares >= _LEAST_CHANCE * shares.sum()
    total, components = shares[kept].sum(), []
    for place, each in np.argwhere(kept):
        family, inverses, residuals, across, log_weights, scales = given[each]
        reaches = inverses[place][:, None] * across
        scale = min(max(float(scales[place]), 1.0), CONSTANTS.largest_scale)
        means, covariance = family.means + level + residuals @ reaches, (family.kernel - across.T @ reaches) * scale
        components.append(Component(means, np.exp(log_weights[place] - top) / total, covariance))
    return Posterior(tuple(components), run_variance, _log_sum(log_sums) - _LOG_PRIORS)


def mixed(shares: Mapping[Posterior, float]) -> Posterior:
    """Return the mixture of posteriors with these probabilities, which add up to 1."""
    components = tuple(
        replace(component, weights=component.weights * share)
        for posterior, share in shares.items()
        for component in posterior.components
    )
    return Posterior(components, sum(posterior.run_variance * share for posterior, share in shares.items()))


# Log of the prior probability of each σ of `run_sds`, up to a constant, and the log of their sum.
_LOG_PRIOR = -0.5 * (np.log(np.array(CONSTANTS.run_sds) / CONSTANTS.run_sd) / CONSTANTS.run_sd_spread) ** 2
_LOG_PRIORS = math.log(np.exp(_LOG_PRIOR).sum())


def _log_chances(variances: Array, exact: Sequence[WeightedStatistics]) -> Array:
    """Return the log probability, up to a constant, of each σ of `run_sds`, given the runs of each size.

    σ has a log-normal prior around `run_sd`. The likelihood is that of the squared deviations from each size's own
    mean, with f degrees of freedom (`freedom_of`): ``v^(−f/2) · exp(−Σ squared deviations / 2v)`` for the variances v.
    """
    deviations = max(sum(size.squared_deviations for size in exact), 0.0)
    return _LOG_PRIOR - 0.5 * deviations / variances - 0.5 * freedom_of(exact) * np.log(variances)


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
        return Posterior(_mixed(_costs_given(family, summary, trusted)), summary.run_variance)
    lawless = replace(family, kernel=family.kernel + (drift / 2) ** 2 * np.eye(len(runs)))
    alike, apart = (summary_of([tuple(run.drifted(share) for run in each) for each in runs]) for share in (1.0, 0.5))
    fresh = [index for index in _known(alike) if not runs[index][-1].drift]
    found = []
    for laws_of_costs, summary in ((family, alike), (lawless, apart)):
        hypotheses, evidence = _costs_given(laws_of_costs, summary, trusted), 0.0
        if fresh:
            evidence = _log_sum(_given_costs(laws_of_costs, alike, fresh)[0].family.log_weights)
        shift = evidence - _log_sum(np.concatenate([each.log_weights for each in hypotheses]))
        found += [replace(each, log_weights=each.log_weights + shift) for each in hypotheses]
    return Posterior(_mixed(found), alike.run_variance)


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
    given, level = _given_costs(family, summary, known)
    means, log_weights, kernel = given.family.means + level, given.family.log_weights, given.family.kernel
    found = [Family(means, log_weights, kernel)]
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
    """Return the indices of the sizes whose cost was observed."""
    return [index for index, weight in enumerate(summary.weights) if weight > _LEAST_WEIGHT]


def _given_costs(family: Family, summary: CostSummary, known: list[int]) -> tuple[_Given, float]:
    """Return the posterior given the costs of the known sizes, relative to a level, and that level."""
    values = np.array([summary.means[index] for index in known])
    level = float(values.mean())
    variances = [summary.run_variance / summary.weights[index] for index in known]
    noise = np.diag(variances) + _LEAST_VARIANCE * np.eye(len(values))
    return _given(family, known, values - level, noise), level


def _log_sum(logs: Array) -> float:
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).sum()))


@dataclass(frozen=True, slots=True, eq=False)
class _Given:
    """Posterior of a family, with weights up to a factor, and other results of `_given`.

    With O of the B sizes observed, the shapes are: `misfits` rᵀA⁻¹r (H,), `inverse` A⁻¹ (O, O), `solved` A⁻¹r (H, O),
    `reaches` A⁻¹K_O· (O, B).
    """

    family: Family
    misfits: Array
    inverse: Array
    solved: Array
    reaches: Array


def _given(family: Family, known: list[int], values: Array, noise: Array) -> _Given:
    """Return the posterior and the weight of each hypothesis m.

    With the observed sizes O, their values y, the covariance of their errors (`noise`), A = K_OO + noise, r = y − m_O::

        mean = m + K_·O A⁻¹ r        covariance = K − K_·O A⁻¹ K_O·        log weight = log prior − ½ rᵀA⁻¹r − ½ log|A|

    (Rasmussen, Williams 2006, equations 2.25, 2.26 and 2.30.)
    """
    across = family.kernel[known]
    noisy = across[:, known] + noise
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
    """Return the mixture of families whose log weights share an unknown constant."""
    top = max(float(each.log_weights.max()) for each in found)
    weights = [np.exp(each.log_weights - top) for each in found]
    total = sum(float(each.sum()) for each in weights)
    kept = [place for place, each in enumerate(weights) if each.sum() >= _LEAST_CHANCE * total]
    total = sum(float(weights[place].sum()) for place in kept)
    return tuple(Component(found[place].means, weights[place] / total, found[place].kernel) for place in kept)


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
