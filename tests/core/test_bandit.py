"""The bandit stage: statistics against numpy, posteriors against Bayes' rule on a grid, choices against own draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bso_server.core.model import Statistics
from bso_server.core.zeus import Posterior, choose, fit, posteriors
from tests.support.histories import Life, make_job
from zeus_plugins.protocol import Origin, TrialState

CONCURRENT, EXPLORATION, BANDIT = Origin.CONCURRENT, Origin.EXPLORATION, Origin.BANDIT
COMPLETED = TrialState.COMPLETED
REWARDS = st.floats(-1e6, 1e6)


# --- Statistics -----------------------------------------------------------------------------------------------------


def test_statistics_of_no_values_are_zero() -> None:
    assert Statistics.of([]) == Statistics(0, 0.0, 0.0)
    assert Statistics.of([]).variance == 0


def test_variance_stays_exact_despite_a_large_offset() -> None:
    # Mean of the squares minus square of the mean would give 0 here, or a negative number.
    assert Statistics.of([1e9 + 4, 1e9 + 7, 1e9 + 13, 1e9 + 16]).variance == 22.5


@given(st.lists(REWARDS, min_size=1, max_size=50))
def test_statistics_match_numpy(values: list[float]) -> None:
    statistics, scale = Statistics.of(values), max(map(abs, values))
    assert statistics.count == len(values)
    assert statistics.mean == pytest.approx(np.mean(values), rel=1e-12, abs=1e-12 * scale)
    assert statistics.variance == pytest.approx(np.var(values), rel=1e-9, abs=1e-12 * scale**2)


@given(REWARDS, st.integers(1, 100))
def test_equal_values_have_exactly_their_mean_and_no_variance(value: float, count: int) -> None:
    statistics = Statistics.of([value] * count)
    assert (statistics.mean, statistics.variance) == (value, 0.0)


# --- Posteriors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rewards", [[-7.0], [-7.0, -7.0, -7.0]])
def test_posterior_of_equal_rewards_is_exact_for_any_prior(rewards: list[float]) -> None:
    posterior = fit(Statistics.of(rewards), prior_mean=-100, prior_precision=50)
    assert posterior == Posterior(-7.0, math.inf, len(rewards))
    assert posterior.std == 0


def test_posterior_without_rewards_is_the_prior() -> None:
    assert fit(Statistics(), prior_mean=-20, prior_precision=0.25) == Posterior(-20, 0.25, 0)
    assert Posterior(-20, 0.25, 0).std == 2
    assert Posterior(-20, 0, 0).std == math.inf


def bayes_on_a_grid(rewards: list[float], prior_mean: float, prior_precision: float) -> tuple[float, float]:
    """Integrate prior × likelihood numerically over a grid of means; return posterior mean and variance."""
    reward_precision = 1 / np.var(rewards)
    widest = 1 / math.sqrt(len(rewards) * reward_precision)
    means = np.linspace(min(*rewards, prior_mean) - 10 * widest, max(*rewards, prior_mean) + 10 * widest, 40_001)
    log_density = -prior_precision / 2 * (means - prior_mean) ** 2
    for reward in rewards:
        log_density -= reward_precision / 2 * (reward - means) ** 2
    density = np.exp(log_density - log_density.max())
    mean = float((means * density).sum() / density.sum())
    return mean, float(((means - mean) ** 2 * density).sum() / density.sum())


@given(
    st.lists(st.integers(-40, 0), min_size=2, max_size=8).filter(lambda rewards: len(set(rewards)) > 1),
    st.integers(-40, 0),
    st.sampled_from([0.0, 0.01, 0.2, 1.0]),
)
def test_fit_matches_bayes_rule_on_a_grid(rewards: list[float], prior_mean: float, prior_precision: float) -> None:
    mean, variance = bayes_on_a_grid(rewards, prior_mean, prior_precision)
    posterior = fit(Statistics.of(rewards), prior_mean=prior_mean, prior_precision=prior_precision)
    assert posterior.mean == pytest.approx(mean, rel=1e-6, abs=1e-6)
    assert posterior.std**2 == pytest.approx(variance, rel=1e-6)
    assert posterior.observations == len(rewards)


# --- Draws and choices ----------------------------------------------------------------------------------------------


def generators(seed: int) -> tuple[np.random.Generator, np.random.Generator]:
    """Return two generators in the same state, for the code and for the test."""
    return np.random.default_rng(seed), np.random.default_rng(seed)


def test_draw_of_known_mean_is_exact_and_consumes_a_random_number() -> None:
    rng, same = generators(3)
    mean = -0.1 - 0.2
    assert Posterior(mean, math.inf, 4).draw(rng) == mean
    same.normal()
    assert rng.bit_generator.state == same.bit_generator.state


@given(
    st.dictionaries(st.integers(1, 512), st.integers(0, 4), min_size=1, max_size=6),
    st.integers(1, 4),
    st.integers(0, 2**32),
)
def test_arms_short_of_observations_are_played_in_random_order(
    observations: dict[int, int], least: int, seed: int
) -> None:
    arms = {size: Posterior(-float(size), 1.0, count) for size, count in sorted(observations.items())}
    rng, same = generators(seed)
    order = same.choice(sorted(observations), len(observations), replace=False).tolist()
    short = [size for size in order if observations[size] < least]
    chosen, draws = choose(arms, min_observations=least, rng=rng)
    if short:
        assert (chosen, draws) == (short[0], None)
    else:
        expected = {size: same.normal(-float(size), 1.0) for size in sorted(observations)}
        assert draws == expected
        assert expected[chosen] == max(expected.values())
    assert rng.bit_generator.state == same.bit_generator.state


def test_first_of_equal_draws_wins() -> None:
    arms = {8: Posterior(-9, math.inf, 2), 16: Posterior(-5, math.inf, 2), 32: Posterior(-5, math.inf, 2)}
    for seed in range(10):
        chosen, draws = choose(arms, min_observations=2, rng=np.random.default_rng(seed))
        assert (chosen, draws) == (16, {8: -9, 16: -5, 32: -5})


def test_arms_without_observations_are_played_first() -> None:
    arms = {8: Posterior(-1, math.inf, 2), 16: Posterior(0, 0, 0), 32: Posterior(0, 0, 0)}
    for seed in range(10):
        assert choose(arms, min_observations=0, rng=np.random.default_rng(seed))[0] == 16


# --- Observations of an arm -----------------------------------------------------------------------------------------


def rewards_behind(life: Life, batch_size: int) -> tuple[int, float]:
    """Return number and mean of the costs that an arm is fitted on, with an uninformative prior."""
    posterior = posteriors(life.history, [batch_size])[batch_size]
    return posterior.observations, -posterior.mean


def explored_life(**fields: object) -> Life:
    """Size 16 explored at 10 J and 20 J, with a concurrent trial of 90 J between; size 8 explored at 50 J."""
    life = Life(make_job((8, 16), 16, **fields))
    life.run(16, EXPLORATION, COMPLETED, 10.0)
    life.run(16, CONCURRENT, COMPLETED, 90.0)
    life.run(8, EXPLORATION, COMPLETED, 50.0)
    life.run(16, EXPLORATION, COMPLETED, 20.0)
    return life


def test_arm_starts_with_exploration_trials_and_ignores_failures() -> None:
    life = explored_life()
    assert rewards_behind(life, 16) == (2, 15.0)
    life.dispatch(16, BANDIT)
    for state in (TrialState.FAILED, TrialState.ABANDONED, TrialState.INFEASIBLE):
        assert rewards_behind(life, 16) == (2, 15.0)
        life.run(16, BANDIT, state, 40.0)
    assert rewards_behind(life, 16) == (2, 15.0)


def test_trial_dispatched_before_the_bandit_stage_counts_when_completed_during_the_stage() -> None:
    life = explored_life()
    concurrent = life.dispatch(8, CONCURRENT)
    life.dispatch(16, BANDIT)
    assert rewards_behind(life, 8) == (1, 50.0)
    life.complete(concurrent, 70.0)
    assert rewards_behind(life, 8) == (2, 60.0)
    assert rewards_behind(life, 16) == (2, 15.0)


def test_arm_learns_only_from_trials_measured_to_their_end() -> None:
    life = explored_life()
    for state, cost_j in ((COMPLETED, 30.0), (TrialState.EARLY_STOPPED, 40.0), (TrialState.EXHAUSTED, 50.0)):
        life.run(16, BANDIT, state, cost_j)
    for state in (TrialState.FAILED, TrialState.ABANDONED, TrialState.INFEASIBLE, TrialState.SUSPENDED):
        life.run(16, BANDIT, state, 1000.0)
    life.dispatch(16, BANDIT)
    assert rewards_behind(life, 16) == (6, (10 + 90 + 20 + 30 + 40 + 50) / 6)


@pytest.mark.parametrize(
    ("window_size", "learned"),
    [
        (0, [10.0, 90.0, 20.0, 40.0, 45.0]),
        (1, [45.0]),
        (2, [40.0, 45.0]),
        (4, [90.0, 20.0, 40.0, 45.0]),
        (5, [10.0, 90.0, 20.0, 40.0, 45.0]),
        (6, [10.0, 90.0, 20.0, 40.0, 45.0]),
    ],
)
def test_window_keeps_the_latest_trials(window_size: int, learned: list[float]) -> None:
    life = explored_life(window_size=window_size)
    assert rewards_behind(life, 16) == (2, 15.0), "the window is for refits"
    life.run(16, BANDIT, COMPLETED, 40.0)
    life.run(16, BANDIT, COMPLETED, 45.0)
    assert rewards_behind(life, 16) == pytest.approx((len(learned), sum(learned) / len(learned)))


@pytest.mark.parametrize(
    ("window_size", "learned"),
    [(1, [40.0]), (2, [60.0, 40.0]), (3, [50.0, 60.0, 40.0]), (4, [20.0, 50.0, 60.0, 40.0])],
)
def test_window_orders_trials_by_end_not_by_start(window_size: int, learned: list[float]) -> None:
    life = explored_life(window_size=window_size)
    first, second, third = (life.dispatch(16, BANDIT) for _ in range(3))
    for trial, cost_j in ((third, 60.0), (second, 50.0), (first, 40.0)):
        life.complete(trial, cost_j)
    assert rewards_behind(life, 16) == pytest.approx((len(learned), sum(learned) / len(learned)))


def test_posteriors_use_the_prior_of_the_job_and_keep_the_order_of_the_arms() -> None:
    life = Life(make_job((8, 16), 16, mab_prior_mean=-20.0, mab_prior_precision=0.5))
    for cost_j in (10.0, 14.0):
        life.run(16, EXPLORATION, COMPLETED, cost_j)
    arms = posteriors(life.history, [16, 8])
    assert list(arms.items()) == [(16, Posterior(-16.0, 1.0, 2)), (8, Posterior(-20.0, 0.5, 0))]
