"""Parts of policy `gp_voi` against oracles: scipy's distributions and plain linear algebra."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from bso_server.core.gp_voi.gaussian_process import (
    Posterior,
    Seen,
    WeightedStatistics,
    cost_posterior,
    epochs_posterior,
    expected_runs,
    hazard,
    log_cdf,
    moments_given_larger,
)
from bso_server.core.gp_voi.prior import CONSTANTS, Array, Family, Sizes, laws
from bso_server.core.gp_voi.run_costs import CostRun, CostRuns, summary_of
from tests.support.properties import examples

SIZES = Sizes((8, 16, 48, 64, 512), 3)
COUNT = len(SIZES.batch_sizes)
finite = st.floats(-5, 5)
positive = st.floats(0.01, 4)


def statistics(values: Sequence[float]) -> WeightedStatistics:
    total = WeightedStatistics()
    for value in values:
        total = total.including(value)
    return total


# --- Statistics and the normal distribution ---------------------------------------------------------------------------


@given(st.lists(st.tuples(finite, positive), min_size=1, max_size=20), positive)
@settings(deadline=None)
def test_weighted_statistics_match_their_definition(pairs: list[tuple[float, float]], factor: float) -> None:
    total = WeightedStatistics()
    for value, weight in pairs:
        total = total.including(value, weight)
    values, weights = (np.array(column) for column in zip(*pairs, strict=True))
    mean = np.average(values, weights=weights)
    assert total.weight == pytest.approx(weights.sum())
    assert total.mean == pytest.approx(mean, abs=1e-9)
    assert total.squared_deviations == pytest.approx((weights * (values - mean) ** 2).sum(), abs=1e-9)
    scaled = total.scaled(factor)
    assert scaled == WeightedStatistics(total.weight * factor, total.mean, total.squared_deviations * factor)


@given(st.floats(-200, 40))
@settings(deadline=None)
def test_log_of_the_normal_distribution_matches_scipy(z: float) -> None:
    assert log_cdf(z) == pytest.approx(stats.norm.logcdf(z), rel=1e-10, abs=1e-15)


@given(st.floats(-40, 80))
@settings(deadline=None)
def test_hazard_equals_the_mean_above_a_bound(z: float) -> None:
    assert hazard(z) == pytest.approx(math.exp(stats.norm.logpdf(z) - stats.norm.logsf(z)), rel=1e-6)


@given(finite, positive, positive, st.floats(-6, 6))
@settings(deadline=None)
def test_moments_given_a_censored_observation(mean: float, sd: float, noise_sd: float, deviations: float) -> None:
    """Integrate over f ~ N(mean, sd²), given that f plus noise exceeds a bound."""
    bound = mean + deviations * math.hypot(sd, noise_sd)
    found = moments_given_larger(mean, sd**2, noise_sd**2, bound)

    f = np.linspace(mean - 12 * sd, mean + 16 * sd, 20001)
    density = stats.norm.pdf(f, mean, sd) * stats.norm.sf(bound, f, noise_sd)
    density /= density.sum()
    expected = float((density * f).sum())
    assert found[0] == pytest.approx(expected, abs=1e-5 * (1 + abs(expected)))
    assert found[1] == pytest.approx(float((density * (f - expected) ** 2).sum()), rel=1e-3, abs=1e-6)


# --- The laws ---------------------------------------------------------------------------------------------------------


def kernel(part: str) -> Array:
    """Compute the covariance of the residuals entry by entry; `part` is the prefix of the names of its constants."""
    sd, length = getattr(CONSTANTS, f"{part}_sd"), getattr(CONSTANTS, f"{part}_length")
    own_sd = CONSTANTS.arm_sd if part == "smooth" else getattr(CONSTANTS, f"{part}_arm_sd")
    x = np.log2(SIZES.batch_sizes)
    smooth = [[sd**2 * math.exp(-0.5 * ((a - b) / length) ** 2) for b in x] for a in x]
    return np.array(smooth) + own_sd**2 * np.eye(COUNT) + CONSTANTS.level_variance


def families_of_epochs() -> tuple[Family, ...]:
    """Return the families, without the hypotheses of probability 0."""
    both = laws(SIZES).epochs
    kept = np.isfinite(both.log_weights)
    return tuple(Family(both.means[n, kept[n]], both.log_weights[n, kept[n]], both.kernel[n]) for n in range(len(kept)))


def has_row(means: Array, row: Sequence[float]) -> bool:
    return bool((np.abs(means - np.array(row)).max(axis=1) < 1e-12).any())


def test_laws_of_epochs_at_literal_sizes() -> None:
    means = laws(Sizes((16, 32), 1)).epochs.means[0]
    # Flat; a critical batch size of 8 with both exponents; again with sizes below 2^2.5 and 2^3.5 too small.
    for row in (
        [0, 0],
        [math.log(3), math.log(5)],
        [0.5 * math.log(3), 0.5 * math.log(5)],
        [math.log(1 + 1 / 8), math.log(1 + 1 / 32)],
        [math.log(1 + 1 / 2), math.log(1 + 1 / 8)],
        [math.log(3 * (1 + 1 / 8)), math.log(5 * (1 + 1 / 32))],
    ):
        assert has_row(means, row), row
    # The smallest workable size is at most the critical size, 8, and not far above the default.
    assert not has_row(means, [math.log(3 * (1 + 1 / 2)), math.log(5 * (1 + 1 / 8))])
    assert not has_row(means, [math.log(1 + 4), math.log(1 + 1)])
    assert not has_row(means, [math.log(1 + 8), math.log(1 + 2)])


def test_laws_of_epoch_costs_match_literal_sizes() -> None:
    means = laws(Sizes((16, 32), 1)).costs.means
    # Saturated from 1 on, gradually or with a bend.
    assert has_row(means, [math.log(1 + 1 / 16), math.log(1 + 1 / 32)])
    assert has_row(means, [0.5 * math.log(1 + 1 / 256), 0.5 * math.log(1 + 1 / 1024)])


@given(st.sets(st.integers(1, 2**20), min_size=1, max_size=12), st.integers(0, 11))
@settings(max_examples=examples(50), deadline=None)
def test_laws_hold_for_any_job(batch_sizes: set[int], default: int) -> None:
    sizes = Sizes(tuple(sorted(batch_sizes)), default % len(batch_sizes))
    found, x = laws(sizes), np.log2(sorted(batch_sizes))
    assert found.octaves == pytest.approx(np.abs(x[:, None] - x[None, :]))
    assert np.exp(found.epochs.log_weights).sum() == pytest.approx(1)
    assert np.exp(found.costs.log_weights).sum() == pytest.approx(1)
    steps, lawful = np.diff(x) * math.log(2), found.epochs.means[0]
    slopes = np.diff(lawful) / steps
    # Epochs rise at most linearly with the batch size, fall at most with its square, and never fall after a rise.
    assert (slopes <= max(CONSTANTS.exponents) + 1e-9).all()
    assert (slopes >= -2 - 1e-9).all()
    for row in slopes:
        rising = np.flatnonzero(row > 1e-9)
        assert not rising.size or (row[rising[0] :] > -1e-9).all()
    # A larger batch size never makes an epoch dearer, nor a step cheaper.
    slopes = np.diff(found.costs.means) / steps
    assert (slopes <= 1e-9).all()
    assert (slopes >= -1 - 1e-9).all()
    # At the default, no law multiplies epochs by more than 2 for being too small.
    rise = np.log1p(np.exp2(x[sizes.default] - (x.min() - 1)))
    assert (lawful[:, sizes.default] <= rise + math.log(2) + 1e-9).all()


def test_residuals_of_the_laws_have_the_documented_kernels() -> None:
    (lawful, lawless), costs = families_of_epochs(), laws(SIZES).costs
    for part, family in (("smooth", lawful), ("lawless", lawless), ("cost", costs)):
        assert family.kernel == pytest.approx(kernel(part), abs=1e-12)
    assert lawless.means.tolist() == [[0.0] * COUNT]
    assert np.exp(lawless.log_weights).tolist() == pytest.approx([CONSTANTS.lawless_chance])
    flat = math.exp(lawful.log_weights[np.abs(lawful.means).max(axis=1) < 1e-12].item())
    assert flat == pytest.approx(CONSTANTS.flat_chance * (1 - CONSTANTS.too_small_chance), rel=0.2)


# --- Gaussian processes -----------------------------------------------------------------------------------------------


def conditioned(
    mean: Array, covariance: Array, at: Sequence[int], values: Array, noise: Array
) -> tuple[Array, Array, float]:
    """Condition normal variables on noisy observations; return mean, covariance and log density of the observations."""
    index = list(at)
    noisy = covariance[np.ix_(index, index)] + np.diag(noise)
    gain = covariance[:, index] @ np.linalg.inv(noisy)
    evidence = float(stats.multivariate_normal.logpdf(values, mean[index], noisy))
    return mean + gain @ (values - mean[index]), covariance - gain @ covariance[index], evidence


def mixed(families: Sequence[tuple[Sequence[Array], Array, Sequence[float]]]) -> tuple[Array, Array]:
    """Return mean and covariance of a mixture of normals, by means, covariance and log weights."""
    top = max(max(log_weights) for _, _, log_weights in families)
    weighed = [(means, covariance, np.exp(np.array(logs) - top)) for means, covariance, logs in families]
    total = sum(weights.sum() for _, _, weights in weighed)
    weighed = [each for each in weighed if each[2].sum() >= 1e-3 * total]
    total = sum(weights.sum() for _, _, weights in weighed)
    mean = sum((weights @ np.array(means) / total for means, _, weights in weighed), np.zeros(()))
    spread = np.zeros((len(mean), len(mean)))
    for means, covariance, weights in weighed:
        for each, weight in zip(means, weights, strict=True):
            spread += weight / total * (covariance + np.outer(each - mean, each - mean))
    return mean, spread


def total_covariance(posterior: Posterior) -> Array:
    """Return the covariance of the expectation, within components and between them."""
    spread = np.zeros((len(posterior.mean), len(posterior.mean)))
    for means, weights, covariance in zip(posterior.means, posterior.weights, posterior.covariances, strict=True):
        for mean, weight in zip(means, weights, strict=True):
            spread += weight * (covariance + np.outer(mean - posterior.mean, mean - posterior.mean))
    return spread


lawful_runs = st.tuples(st.floats(1, 3), st.floats(0, 1), st.lists(st.integers(0, 4), min_size=1, max_size=8)).map(
    lambda drawn: [
        (index, drawn[0] + math.log1p(drawn[1] * SIZES.batch_sizes[index] / 64) + 0.03 * (-1) ** number)
        for number, index in enumerate(drawn[2])
    ]
)
any_runs = st.lists(st.tuples(st.integers(0, 4), st.floats(0.5, 4)), min_size=1, max_size=12)


@given(st.one_of(lawful_runs, any_runs))
@settings(max_examples=examples(20), deadline=None)
def test_posterior_of_epochs_matches_joint_distribution_of_single_runs(runs: list[tuple[int, float]]) -> None:
    """Compute each hypothesis from the joint distribution of all sizes and runs instead of the mean of each size."""
    per_size = [[y for index, y in runs if index == size] for size in range(COUNT)]
    exact = tuple(map(statistics, per_size))
    found = epochs_posterior(SIZES, Seen(exact, exact, 1.0))

    seen = [index for index, ys in enumerate(per_size) if ys]
    averages = np.array([np.mean(per_size[index]) for index in seen])
    level = float(averages.mean())
    at, values = [index for index, _ in runs], np.array([y for _, y in runs])
    families, variances, chances = [], [], []
    for sd in CONSTANTS.run_sds:
        variance = max(sd * sd, math.exp(-2 * level) / 12)
        log_prior = stats.norm.logpdf(math.log(sd), math.log(CONSTANTS.run_sd), CONSTANTS.run_sd_spread)
        for family, part in zip(families_of_epochs(), ("smooth", "lawless"), strict=True):
            covariance = kernel(part)
            noisy = covariance[np.ix_(seen, seen)] + np.diag([variance / len(per_size[index]) for index in seen])
            means, log_weights, misfits = [], [], []
            for center, log_chance in zip(family.means + level, family.log_weights, strict=True):
                mean, narrowed, evidence = conditioned(center, covariance, at, values, np.full(len(runs), variance))
                means.append(mean)
                log_weights.append(evidence + log_chance + log_prior)
                misfits.append((averages - center[seen]) @ np.linalg.solve(noisy, averages - center[seen]))
            weights = np.exp(np.array(log_weights) - max(log_weights))
            misfit = weights @ misfits / weights.sum()
            scale = (CONSTANTS.scale_dof + misfit) / (CONSTANTS.scale_dof + len(seen) - 1)
            families.append((means, narrowed * np.clip(scale, 1, CONSTANTS.largest_scale), log_weights))
            variances.append(variance)
            chances.append(max(log_weights) + math.log(weights.sum()))
    shares = np.exp(np.array(chances) - max(chances))
    assert found.run_variance == pytest.approx(shares @ variances / shares.sum(), rel=1e-3)
    assert found.weights.sum() == pytest.approx(1)
    mean, covariance = mixed(families)
    assert found.mean == pytest.approx(mean, abs=1e-5)
    assert total_covariance(found) == pytest.approx(covariance, abs=1e-5)
    assert found.variance == pytest.approx(np.diag(covariance), abs=1e-5)


@given(st.lists(st.one_of(lawful_runs, any_runs), min_size=1, max_size=20), st.integers(0, 4))
@settings(max_examples=examples(20), deadline=None)
def test_expected_runs_are_those_of_posteriors_and_equal_in_a_list_and_alone(
    histories: list[list[tuple[int, float]]], index: int
) -> None:
    seen = []
    for runs in histories:
        exact = tuple(statistics([y for at, y in runs if at == size]) for size in range(COUNT))
        seen.append(Seen(tuple(each.scaled(0.9) for each in exact), exact, 0.5))
    indices = [(index + place) % COUNT for place in range(len(seen))]
    found = expected_runs(SIZES, seen, indices)
    for one, at, expected in zip(seen, indices, found, strict=True):
        assert expected_runs(SIZES, [one], [at]) == [expected]
        assert expected == pytest.approx(epochs_posterior(SIZES, one).of_run(at), rel=1e-6)


cost_runs = st.lists(
    st.lists(st.tuples(st.floats(0, 4), st.floats(0.1, 9)).map(lambda run: CostRun(*run)), max_size=3).map(tuple),
    min_size=COUNT,
    max_size=COUNT,
).filter(any)


Families = list[tuple[Sequence[Array], Array, Sequence[float]]]


def costs_by_brute_force(runs: Sequence[CostRuns], trusted: int | None, own_variance: float = 0.0) -> Families:
    """Enumerate which sizes with a single run were slowed; the common factor of slowing is one more variable."""
    summary, family = summary_of(runs), laws(SIZES).costs
    seen = [index for index, each in enumerate(runs) if each]
    values = np.array([summary.means[index] for index in seen])
    noise = summary.run_variance / np.array([summary.weights[index] for index in seen])
    centers, log_chances = family.means + values.mean(), family.log_weights
    covariance = kernel("cost") + own_variance * np.eye(COUNT)
    suspects = [index for index in seen if summary.suspect[index] and index != trusted]
    families: Families = []
    for slowed in (None, *(suspects if len(seen) > 1 else ())):
        # Variables: all sizes, the observed cost of each size with runs, and the factor of slowing.
        share = np.vstack([np.eye(COUNT), np.eye(COUNT)[seen], np.zeros(COUNT)])
        joint = share @ covariance @ share.T
        delay = np.array([0.0] * COUNT + [float(index == slowed) for index in seen] + [1.0])
        joint += CONSTANTS.slowed_sd**2 * np.outer(delay, delay)
        means, log_weights = [], []
        for center, log_chance in zip(centers, log_chances, strict=True):
            at = range(COUNT, COUNT + len(seen))
            mean, narrowed, evidence = conditioned(share @ center, joint, at, values, noise)
            log_weight = evidence + log_chance
            if slowed is not None:
                # Runs are slowed and never sped up: half of a normal distribution.
                log_weight += math.log(2 * CONSTANTS.slowed_chance)
                log_weight += float(stats.norm.logsf(0, mean[-1], math.sqrt(narrowed[-1, -1])))
            means.append(mean[:COUNT])
            log_weights.append(log_weight)
        families.append((means, narrowed[:COUNT, :COUNT], log_weights))
    return families


@given(cost_runs, st.one_of(st.none(), st.integers(0, 4)))
@settings(max_examples=examples(50), deadline=None)
def test_posterior_of_costs_matches_brute_force(runs: list[CostRuns], trusted: int | None) -> None:
    found = cost_posterior(SIZES, tuple(runs), trusted)
    assert found.run_variance == summary_of(runs).run_variance
    mean, covariance = mixed(costs_by_brute_force(runs, trusted))
    assert found.mean == pytest.approx(mean, abs=1e-4)
    assert total_covariance(found) == pytest.approx(covariance, abs=1e-4)


def test_posterior_of_costs_after_a_change_matches_brute_force() -> None:
    """Later runs show whether all sizes have changed equally or independently, which determines the other sizes."""
    old = ((CostRun(2.4, 5.0, drift=1.4),), (CostRun(1.9, 5.0, drift=1.4),), (), (), ())
    new: list[CostRuns] = [(), (), (CostRun(3.1, 9.0), CostRun(3.1, 9.0)), (CostRun(2.5, 9.0),), ()]
    runs = tuple(one or other for one, other in zip(old, new, strict=True))
    alike = [*(run_of(run.log_cost + 1.4, 5.0) for (run,) in old[:2]), *new[2:]]
    apart = [*(run_of(run.log_cost + 0.7, 5.0, 0.7**2) for (run,) in old[:2]), *new[2:]]
    variance = summary_of(alike).run_variance
    families: Families = []
    for hypothesis, own_variance in ((alike, 0.0), (apart, 0.7**2)):
        found = costs_by_brute_force(hypothesis, None, own_variance)
        total = special.logsumexp(np.concatenate([logs for _, _, logs in found]))
        # Only the later runs are evidence, and their laws share one prior.
        summary, family = summary_of(alike), laws(SIZES).costs
        values = np.array([summary.means[index] for index in (2, 3)])
        noise = variance / np.array([summary.weights[index] for index in (2, 3)])
        prior = kernel("cost") + own_variance * np.eye(COUNT)
        evidences = [
            log_chance + conditioned(mean + values.mean(), prior, (2, 3), values, noise)[2]
            for mean, log_chance in zip(family.means, family.log_weights, strict=True)
        ]
        shift = special.logsumexp(evidences) - total
        families += [(means, covariance, [log + shift for log in logs]) for means, covariance, logs in found]
    mean, covariance = mixed(families)
    found_posterior = cost_posterior(SIZES, runs)
    assert found_posterior.run_variance == variance
    assert found_posterior.mean == pytest.approx(mean, abs=1e-4)
    assert total_covariance(found_posterior) == pytest.approx(covariance, abs=1e-4)


def run_of(log_cost: float, epochs: float = math.inf, doubt: float = 0.0) -> CostRuns:
    return (CostRun(log_cost, epochs, doubt=doubt),)


def test_running_trials_are_believed_to_end_as_expected() -> None:
    seen = (statistics([2.0, 2.1]), WeightedStatistics(), statistics([1.5]), WeightedStatistics(), WeightedStatistics())
    before = epochs_posterior(SIZES, Seen(seen, seen, 1.0))
    after = before.believing({1: 2, 3: 1})
    flown, noise = [1, 1, 3], np.full(3, before.run_variance)
    assert (before.means == after.means).all()
    assert (before.weights == after.weights).all()
    for means, old, new in zip(before.means, before.covariances, after.covariances, strict=True):
        assert new == pytest.approx(conditioned(means[0], old, flown, means[0][flown], noise)[1], abs=1e-9)
    assert before.believing({}) is before


MIXTURE = Posterior(
    np.array([[[0.0, 1.0], [2.0, 1.5]], [[1.0, -1.0], [9.0, 9.0]]]),
    np.array([[0.3, 0.2], [0.5, 0.0]]),
    np.array([[[0.04, 0.03], [0.03, 0.09]], [[0.25, 0.0], [0.0, 0.0]]]),
    0.25,
)


def test_moments_of_a_mixture_by_hand() -> None:
    assert MIXTURE.mean.tolist() == pytest.approx([0.9, 0.1])
    within = [0.5 * 0.04 + 0.5 * 0.25, 0.5 * 0.09]
    between = [0.3 * 0.81 + 0.2 * 1.21 + 0.5 * 0.01, 0.3 * 0.81 + 0.2 * 1.96 + 0.5 * 1.21]
    assert MIXTURE.variance.tolist() == pytest.approx([within[0] + between[0], within[1] + between[1]])
    # A run's own luck adds to the variance of an uncertain cost, and a certain cost keeps a variance above 0.
    assert MIXTURE.of_run(1) == pytest.approx((0.1, MIXTURE.variance[1] + 0.25))
    sure = Posterior(np.array([[[1.0]]]), np.array([[1.0]]), np.array([[[-1e-18]]]), 0.25)
    assert sure.of_run(0) == pytest.approx((1.0, 0.25))
    assert sure.variance[0] > 0


def test_samples_have_the_moments_of_the_mixture() -> None:
    rng, count = np.random.default_rng(0), 40_000
    ranks, normals = (rng.permutation(count) + 0.5) / count, rng.standard_normal((count, 2))
    drawn = MIXTURE.samples(ranks, normals)
    assert drawn.mean(axis=0) == pytest.approx(MIXTURE.mean, abs=0.01)
    assert np.cov(drawn.T) == pytest.approx(total_covariance(MIXTURE), abs=0.02)
    # Each hypothesis has its share exactly.
    assert np.count_nonzero(np.abs(drawn[:, 1] + 1) < 1e-3) == count // 2
