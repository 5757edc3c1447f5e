"""The parts of policy `gp_voi` against oracles: scipy's distributions and integrals, plain linear algebra."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from bso_server.core.gp_voi import normal
from bso_server.core.gp_voi.constants import CONSTANTS
from bso_server.core.gp_voi.gaussian_process import (
    Normal,
    Posterior,
    cost_posterior,
    cost_run_variance,
    epochs_posterior,
    prior,
    run_variance,
)
from bso_server.core.gp_voi.stopping import bound_of_try
from bso_server.core.gp_voi.value import expected_loss, expected_saving, worth
from bso_server.core.statistics import WeightedStatistics

SIZES = (8, 16, 48, 64, 512)
finite = st.floats(-5, 5)
positive = st.floats(0.01, 4)


def statistics(values: list[float]) -> WeightedStatistics:
    total = WeightedStatistics()
    for value in values:
        total = total.including(value)
    return total


# --- Statistics and the normal distribution ---------------------------------------------------------------------------


@given(st.lists(st.tuples(finite, positive), min_size=1, max_size=20), positive)
@settings(deadline=None)
def test_weighted_statistics(pairs: list[tuple[float, float]], factor: float) -> None:
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
def test_the_normal_distribution(z: float) -> None:
    assert normal.cdf(z) == pytest.approx(stats.norm.cdf(z), rel=1e-12)
    assert normal.log_cdf(z) == pytest.approx(stats.norm.logcdf(z), rel=1e-10, abs=1e-15)


@given(st.floats(-40, 80))
@settings(deadline=None)
def test_the_hazard_is_the_mean_above_a_bound(z: float) -> None:
    assert normal.hazard(z) == pytest.approx(math.exp(stats.norm.logpdf(z) - stats.norm.logsf(z)), rel=1e-6)


@given(finite, positive, positive, st.floats(-6, 6))
@settings(deadline=None)
def test_moments_given_a_censored_observation(mean: float, sd: float, noise_sd: float, deviations: float) -> None:
    """f ~ N(mean, sd²) given that f plus noise exceeds a bound: by integration over f."""
    bound = mean + deviations * math.hypot(sd, noise_sd)
    found = normal.moments_given_larger(mean, sd**2, noise_sd**2, bound)

    f = np.linspace(mean - 12 * sd, mean + 16 * sd, 20001)
    density = stats.norm.pdf(f, mean, sd) * stats.norm.sf(bound, f, noise_sd)
    density /= density.sum()
    expected = float((density * f).sum())
    assert found[0] == pytest.approx(expected, abs=1e-5 * (1 + abs(expected)))
    assert found[1] == pytest.approx(float((density * (f - expected) ** 2).sum()), rel=1e-3, abs=1e-6)


# --- Gaussian processes -----------------------------------------------------------------------------------------------


def kernel(sd: float, length: float, own_sd: float) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """The prior, entry by entry."""
    x = [math.log2(size) for size in SIZES]
    return np.array(
        [
            [
                sd**2 * math.exp(-0.5 * ((a - b) / length) ** 2) + own_sd**2 * (a == b) + CONSTANTS.level_variance
                for b in x
            ]
            for a in x
        ]
    )


def test_the_prior() -> None:
    assert prior(SIZES).epochs == pytest.approx(kernel(0.4, 4, 0.05))
    assert prior(SIZES).costs == pytest.approx(kernel(1, 8, 0.03))
    assert prior(SIZES).octaves[0].tolist() == pytest.approx([0, 1, math.log2(6), 3, 6])


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0.5, 4)), min_size=1, max_size=12))
@settings(deadline=None)
def test_the_posterior_of_epochs_is_that_of_every_single_run(runs: list[tuple[int, float]]) -> None:
    """By the joint distribution of all sizes and all runs, in place of each size's mean."""
    per_size = [[y for index, y in runs if index == size] for size in range(len(SIZES))]
    exact = tuple(map(statistics, per_size))
    found = epochs_posterior(SIZES, exact, exact, 1.0)

    level = float(np.mean([np.mean(ys) for ys in per_size if ys]))
    pooled = run_variance(exact)
    variance = max(pooled, math.exp(-2 * level) / 12)
    assert found.run_variance == pytest.approx(variance)
    k = kernel(0.4, 4, 0.05)
    at = [index for index, _ in runs]
    noisy = k[np.ix_(at, at)] + variance * np.eye(len(runs))
    gain = k[:, at] @ np.linalg.inv(noisy)
    mean = level + gain @ (np.array([y for _, y in runs]) - level)
    assert found.expected.mean == pytest.approx(mean, abs=1e-6)

    means = np.array([np.mean(ys) for ys in per_size if ys])
    seen = [index for index, ys in enumerate(per_size) if ys]
    spread = k[np.ix_(seen, seen)] + np.diag([variance / len(per_size[index]) for index in seen])
    misfit = (means - level) @ np.linalg.inv(spread) @ (means - level)
    scale = np.clip((4 + misfit) / (4 + len(seen) - 1), 1, 16)
    assert found.expected.covariance == pytest.approx((k - gain @ k[at]) * scale, abs=1e-6)


def test_run_variance_by_hand() -> None:
    # Deviations of ±0.1 at one size, and of ±0.2 at another: 0.02 + 0.08 with one degree of freedom each.
    pairs = (statistics([1.0, 1.2]), statistics([2.0, 2.4]), statistics([3.0]), WeightedStatistics())
    assert run_variance(pairs) == pytest.approx((2 * 0.08**2 + (0.02 + 0.08) / 2) / (2 + 2 / 2))
    assert run_variance((WeightedStatistics(),)) == pytest.approx(0.08**2)
    assert run_variance((WeightedStatistics(1e6, 1.0, 0.0),)) == pytest.approx(0.02**2)


def test_a_step_between_validations_is_noise() -> None:
    one = (statistics([math.log(2)]),) + (WeightedStatistics(),) * 4
    assert epochs_posterior(SIZES, one, one, 1.0).run_variance == pytest.approx(0.25 / 12)
    assert epochs_posterior(SIZES, one, one, 0.1).run_variance == pytest.approx(0.08**2)


def test_what_epochs_cost_by_what_runs_have_shown() -> None:
    seen = (statistics([]), statistics([3.0, 3.2]), statistics([]), statistics([2.0]), statistics([]))
    found = cost_posterior(SIZES, seen)
    # Deviations of ±0.1 at one size: 0.02, with one degree of freedom.
    variance = (0.5 * 0.015**2 + 0.02 / 2) / (0.5 + 1 / 2)
    assert found.run_variance == pytest.approx(variance)
    assert cost_run_variance(seen) == pytest.approx(variance)
    assert cost_run_variance((statistics([3.0] * 1000),)) == pytest.approx(0.01**2)
    k, at = kernel(1, 8, 0.03), [1, 3]
    gain = k[:, at] @ np.linalg.inv(k[np.ix_(at, at)] + np.diag([variance / 2, variance]))
    assert found.expected.mean == pytest.approx(2.55 + gain @ [0.55, -0.55], abs=1e-6)
    assert found.expected.covariance == pytest.approx(k - gain @ k[at], abs=1e-6)
    # Where epochs always cost the same, they are as good as known.
    steady = cost_posterior(SIZES, (statistics([3.0] * 8),) + (statistics([]),) * 4)
    assert math.sqrt(steady.expected.covariance[0, 0]) < 0.01


def test_runs_in_flight_narrow_the_belief_as_if_they_had_ended_as_expected() -> None:
    seen = (statistics([2.0, 2.1]), WeightedStatistics(), statistics([1.5]), WeightedStatistics(), WeightedStatistics())
    before = epochs_posterior(SIZES, seen, seen, 1.0)
    k = before.expected.covariance
    at = [1, 1, 3]
    gain = k[:, at] @ np.linalg.inv(k[np.ix_(at, at)] + before.run_variance * np.eye(3))
    after = before.believing({1: 2, 3: 1})
    assert after.expected.covariance == pytest.approx(k - gain @ k[at], abs=1e-9)
    assert after.expected.mean.tolist() == before.expected.mean.tolist()
    assert before.believing({}).expected.covariance.tolist() == k.tolist()


def test_a_runs_own_luck_adds_to_what_is_uncertain() -> None:
    expected = Normal(np.array([1.0, 2.0]), np.array([[0.5, 0.1], [0.1, -1e-18]]))
    posterior = Posterior(expected, 0.25)
    assert posterior.of_run(0) == (1.0, 0.75)
    assert posterior.of_run(1) == (2.0, 0.25)


# --- Value of information ---------------------------------------------------------------------------------------------


def by_integration(payoff: str, d: float, sd: float) -> float:
    def integrand(z: float) -> float:
        ratio = math.exp(d + sd * z)
        gain = 1 - ratio if payoff == "saving" else ratio - 1
        return max(gain, 0.0) * stats.norm.pdf(z)

    kink = -d / sd
    points = [min(max(kink, -12.0), 12.0)]
    return float(integrate.quad(integrand, -12, 12, points=points, limit=200)[0])


@given(st.floats(-2, 2), st.floats(0.05, 0.8))
@settings(deadline=None)
def test_expected_saving_and_loss(d: float, sd: float) -> None:
    assert expected_saving(d, sd**2) == pytest.approx(by_integration("saving", d, sd), abs=1e-7)
    assert expected_loss(d, sd**2) == pytest.approx(min(by_integration("loss", d, sd), 1.0), abs=1e-7)


@given(st.floats(-1, 1), st.floats(0.1, 0.8), st.floats(0.05, 0.95), st.floats(1, 50))
@settings(deadline=None)
def test_worth_is_what_a_preposterior_analysis_says(d: float, sd: float, share: float, horizon: float) -> None:
    """One run reveals a normal part of log R, of variance k; a later run is then chosen by the expected ratio."""
    variance, learned = sd**2, share * sd**2

    def saving_after(z: float) -> float:
        revealed = d + math.sqrt(learned) * z
        expected_ratio = math.exp(revealed + (variance - learned) / 2)
        return max(1 - expected_ratio, 0.0) * stats.norm.pdf(z)

    kink = -(d + (variance - learned) / 2) / math.sqrt(learned)
    later = integrate.quad(saving_after, -12, 12, points=[min(max(kink, -12.0), 12.0)], limit=200)[0]
    found = worth(d, variance, learned, horizon)
    assert found.value == pytest.approx(horizon * later, abs=1e-5)
    assert found.chance == pytest.approx(stats.norm.cdf(0, d, sd))
    assert found.index == found.value - found.loss
    assert found.loss == expected_loss(d, variance)


def test_nothing_to_learn_is_worth_nothing_and_a_bad_try_costs_a_run_at_most() -> None:
    assert worth(0.1, 0.04, 0.0, 100).value == pytest.approx(0, abs=1e-9)
    assert worth(50.0, 0.04, 0.04, 100).loss == 1.0


# --- The end of a try -------------------------------------------------------------------------------------------------


def test_the_bound_of_a_try_by_truncated_log_normals() -> None:
    """Each epoch's two numbers by scipy, for tries that are hopeful, hopeless, and cheap."""
    bounds = []
    for log_epochs, sd, epoch_j, epoch_j_sd in (
        (math.log(10), 0.5, 8.0, 0.0),
        (math.log(30), 0.3, 5.0, 0.0),
        (math.log(30), 0.3, 5.0, 0.5),
        (math.log(20), 0.1, 6.0, 0.0),
        (math.log(3), 1.0, 1.0, 0.0),
        (math.log(3), 0.3, 33.0, 0.0),
        (math.log(50), 0.4, 60.0, 0.0),
        (math.log(8), 1.2, 10.0, 0.0),
        (math.log(8), 1.2, 10.0, 0.5),
    ):
        found = bound_of_try(
            log_epochs, sd, epoch_j=epoch_j, epoch_j_sd=epoch_j_sd, incumbent_j=100.0, beta=1.6, max_epochs=100
        )
        assert found.epochs == first_hopeless_epoch(log_epochs, sd, epoch_j, epoch_j_sd)
        bounds.append(found.epochs)
    # Twice the joules end a try however little its epochs may really cost.
    assert bounds == [20, 1, 32, 1, 100, 4, 1, 8, 14]


def first_hopeless_epoch(log_epochs: float, sd: float, epoch_j: float, epoch_j_sd: float) -> int:
    epochs = stats.lognorm(s=sd, scale=math.exp(log_epochs))
    least_j = epoch_j * math.exp(-epoch_j_sd)
    for k in range(1, 101):
        if epoch_j * (k + 1) > 160:
            return k
        alive = epochs.sf(k)
        chance = max(1 - epochs.sf(100 / least_j) / alive, 0)
        if chance >= 0.15:
            continue
        remaining = integrate.quad(lambda t: t * epochs.pdf(t), k, np.inf)[0] / alive - k
        if least_j * remaining > 100:
            return k
    return 100


@given(finite, positive, st.floats(0.01, 100), st.floats(0, 3), st.integers(1, 10**6))
@settings(deadline=None)
def test_a_bound_is_within_max_epochs(
    log_epochs: float, sd: float, epoch_j: float, epoch_j_sd: float, max_epochs: int
) -> None:
    found = bound_of_try(
        log_epochs, sd, epoch_j=epoch_j, epoch_j_sd=epoch_j_sd, incumbent_j=50.0, beta=2.0, max_epochs=max_epochs
    )
    assert 1 <= found.epochs <= max_epochs
    assert found.reason
