"""Effect of the batch size on the cost of a run, against a closed form, and its invariances."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bso_server.core.effect import _PART_SD, _SPREADS, PRIOR_SD, EffectModel, _Part

RUNS = st.lists(
    st.tuples(st.floats(1, 100), st.floats(1, 1e6), st.booleans()),
    min_size=1,
    max_size=15,
)


def learned(runs: list[tuple[float, float, bool]], factor: float = 1.0) -> EffectModel:
    model = EffectModel()
    for epochs, cost, is_default in runs:
        model.add(epochs, math.log(factor * cost) - math.log(epochs), is_default=is_default)
    return model


def test_single_filter_without_walk_equals_bayesian_linear_regression() -> None:
    """Surprises below 2.5 spreads are learned as by a Kalman filter, which then equals the conjugate posterior."""
    sigma, y = 0.2, [1.0, 1.1, 1.25, 0.9, 1.05, 1.3]
    is_default = [False, True, False, False, True, False]
    part = _Part([sigma], [0.0], {0.0: 1.0})
    for value, default in zip(y, is_default, strict=True):
        part.add(value, default)

    design = np.column_stack([np.ones(len(y)), is_default])
    precision = np.diag([1 / 25, 1 / _PART_SD**2]) + design.T @ design / sigma**2
    posterior = np.linalg.solve(precision, design.T @ (np.array(y) - y[0]) / sigma**2)
    equal_spreads = list(_SPREADS).index(1.0)
    assert part.delta[equal_spreads, 0] == pytest.approx(posterior[1])
    assert part.p_delta[equal_spreads, 0] == pytest.approx(np.linalg.inv(precision)[1, 1])


def test_wider_spread_of_default_lowers_the_log_mean() -> None:
    """A default with a spread of k·σ and an equal log mean has a mean cost higher by ½ σ² (k² - 1)."""
    sigma = 0.45
    part = _Part([sigma], [0.0], {0.0: 1.0})
    for number in range(4000):
        part.add(0.0, is_default=number % 2 == 1)
    assert part.delta[:, 0] == pytest.approx(0.5 * sigma**2 * (_SPREADS**2 - 1), abs=0.02)


def test_many_quiet_runs_show_the_ratio() -> None:
    effect = learned([(10, 100, True), (8, 60, False)] * 30).effect()
    assert effect.middle == pytest.approx(math.log(100 / 60), abs=0.03)
    assert 0.4 < effect.low < effect.middle < effect.high < 0.62


def test_single_outlier_of_the_pace_barely_moves_the_effect() -> None:
    quiet = [(10.0, 100.0, False), (10.0, 101.0, False), (10.0, 99.0, True), (10.0, 100.0, False)] * 3
    slowed = [*quiet, (10.0, 1000.0, True), *quiet]
    assert abs(learned(slowed).effect().middle) < 0.05


def test_slow_hours_weigh_less_than_fast_hours() -> None:
    """Neighbours on the machine slow a run down; they never speed a run up."""

    def effect(pace: float) -> float:
        quiet = [(10.0, 100.0, False), (10.0, 120.0, False), (10.0, 80.0, False), (10.0, 100.0, True)]
        return learned([*quiet, *quiet[:3], (10.0, 100.0 * pace, True), *quiet]).effect().middle

    assert 0 <= effect(4.0) < 0.5 * -effect(1 / 4.0)


def test_expected_loss_is_the_mean_of_what_the_default_costs_more() -> None:
    """Without runs, δ is N(0, s²): E[max(exp(δ) - 1, 0)] = exp(s²/2) Φ(s) - 1/2."""
    prior = math.exp(PRIOR_SD**2 / 2) * NormalDist().cdf(PRIOR_SD) - 0.5
    assert EffectModel().expected_loss() == pytest.approx(prior, rel=0.01)

    def loss(at_default: float) -> float:
        return learned([(10.0, 100.0, False), (10.0, at_default, True)] * 30).expected_loss()

    assert loss(200.0) == pytest.approx(1.0, abs=0.1)
    assert loss(50.0) == pytest.approx(0.0, abs=1e-3)


@given(runs=RUNS, factor=st.sampled_from([1e-6, 0.01, 3.6e6]))
def test_unit_of_cost_does_not_change_the_effect(runs: list[tuple[float, float, bool]], factor: float) -> None:
    assert learned(runs, factor).effect() == learned(runs).effect()


@given(runs=RUNS, alpha=st.sampled_from([0.01, 0.05, 0.2]))
def test_interval_holds_the_estimate_and_grows_with_certainty(
    runs: list[tuple[float, float, bool]], alpha: float
) -> None:
    effect, surer = learned(runs).effect(alpha), learned(runs).effect(alpha / 4)
    assert surer.low <= effect.low <= effect.middle <= effect.high <= surer.high
