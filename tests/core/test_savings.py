"""The savings of a job over its default batch size, counted by hand and against scipy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bso_server.core.savings import Tally, savings, student_quantile
from tests.support.histories import make_job
from tests.support.properties import examples
from zeus_plugins.protocol import Origin, SavedView, SavingsView, TrialState

# Cost = energy/2 + 50 · time.
JOB = make_job((8, 16, 32), 16, eta_knob=0.5)
COMPLETED, STOPPED, EXHAUSTED = TrialState.COMPLETED, TrialState.EARLY_STOPPED, TrialState.EXHAUSTED

Run = tuple[int, TrialState, float, float]
"""Batch size, state, energy (J) and time (s) of a trial."""


def tallies(runs: Sequence[Run], origin: Origin = Origin.INCUMBENT) -> list[Tally]:
    """One for each trial."""
    return [
        Tally(size, state, origin, 1, energy_j, time_s, energy_j**2, time_s**2, energy_j * time_s)
        for size, state, energy_j, time_s in runs
    ]


def found(*runs: Run, best_cost_j: float | None = None) -> SavingsView:
    result = savings(JOB, tallies(runs), best_cost_j)
    assert result is not None
    return result


def test_nothing_is_known_before_the_default_reaches_the_target() -> None:
    assert savings(JOB, tallies([(8, COMPLETED, 100, 1), (16, EXHAUSTED, 900, 9)]), 100) is None


def test_always_the_default_saves_nothing_for_sure() -> None:
    result = found((16, COMPLETED, 300, 3), (16, COMPLETED, 500, 5), (16, TrialState.FAILED, 40, 1))
    energy = result.energy_j
    assert (energy.spent, energy.default, energy.saved, energy.low, energy.high) == (840, 840, 0, 0, 0)
    assert result.recurrences == 2


def test_what_was_tried_is_paid_for() -> None:
    result = found(
        (16, COMPLETED, 400, 4),
        (16, COMPLETED, 400, 6),
        (8, STOPPED, 150, 1),  # was tried for nothing
        (16, STOPPED, 30, 1),  # would not have been stopped
        (16, EXHAUSTED, 200, 2),  # the default fails now and then: 100 J a run
        (32, COMPLETED, 100, 2),
        (32, COMPLETED, 100, 2),
        (32, COMPLETED, 100, 2),
        (8, TrialState.RUNNING, 77, 7),  # not over yet
        (8, TrialState.WITHDRAWN, 1e9, 7),  # its numbers are wrong
    )
    energy, time, cost = result.energy_j, result.time_s, result.cost_j
    # Five recurrences at the default: 1000 J of its own runs, and 3 · 500 J.
    assert (energy.default, energy.spent, energy.saved) == (2500, 1480, 1020)
    assert (time.default, time.spent, time.saved) == (12 + 3 * 6, 12 + 1 + 1 + 6, 10)
    assert cost.saved == pytest.approx(energy.saved / 2 + 50 * time.saved)
    # All runs of a size took the same energy.
    assert (energy.low, energy.high) == (energy.saved, energy.saved)
    # Times: 4 and 6 s around 5 s, and three equal ones: (0.2² + 0.2²)/3 of three degrees of freedom.
    reach = stats.t.ppf(0.95, 3) * 6 * math.sqrt(0.08 / 3 * (9 / 2 + 3))
    assert (time.low, time.high) == (pytest.approx(10 - reach, rel=0.01), pytest.approx(10 + reach, rel=0.01))


def test_without_two_runs_of_a_size_nobody_knows_how_sure_it_is() -> None:
    energy = found((16, COMPLETED, 400, 4), (32, COMPLETED, 100, 2)).energy_j
    assert (energy.saved, energy.low, energy.high) == (300, None, None)


def test_a_loss_is_a_loss() -> None:
    energy = found((16, COMPLETED, 400, 4), (32, COMPLETED, 500, 2), (8, STOPPED, 50, 1)).energy_j
    assert energy.saved == -150


def test_what_exploring_took() -> None:
    explored = tallies([(16, COMPLETED, 400, 4), (32, COMPLETED, 100, 2), (8, STOPPED, 60, 1)], Origin.EXPLORATION)
    played = tallies([(32, COMPLETED, 120, 2)])
    result = savings(JOB, [*explored, *played], 155)
    assert result is not None
    assert result.exploration_cost_j == (200 + 200) + (50 + 100) + (30 + 50) - 2 * 155


def test_sums_over_several_trials_are_those_of_each() -> None:
    at_16 = Tally(16, COMPLETED, Origin.INCUMBENT, 2, 820, 9, 400**2 + 420**2, 41, 3700)
    at_32 = Tally(32, COMPLETED, Origin.INCUMBENT, 2, 200, 4, 90**2 + 110**2, 8, 400)
    assert savings(JOB, [at_16, at_32], None) == found(
        (16, COMPLETED, 400, 4), (16, COMPLETED, 420, 5), (32, COMPLETED, 90, 2), (32, COMPLETED, 110, 2)
    )


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 10, 100, 10**6])
def test_quantiles_are_those_of_scipy(freedom: int) -> None:
    assert student_quantile(freedom) == pytest.approx(stats.t.ppf(0.95, freedom), rel=0.005)


@given(st.integers(2, 6), st.integers(1, 30), st.integers(0, 2**32))
@settings(max_examples=examples(20), deadline=None)
def test_nine_intervals_in_ten_hold_what_the_default_would_have_taken(runs: int, elsewhere: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    times, held = 300, 0
    for default, other, instead in zip(
        rng.normal(100, 8, (times, runs)),
        rng.normal(50, 4, (times, elsewhere)),
        rng.normal(100, 8, (times, elsewhere)),
        strict=True,
    ):
        energy = found(
            *((16, COMPLETED, energy_j, 1.0) for energy_j in default.tolist()),
            *((32, COMPLETED, energy_j, 1.0) for energy_j in other.tolist()),
        ).energy_j
        assert energy.low is not None
        assert energy.high is not None
        held += energy.low <= float(instead.sum() - other.sum()) <= energy.high
    # Within five standard deviations of a share of 0.9 of them.
    assert held / times == pytest.approx(0.9, abs=5 * math.sqrt(0.09 / times))


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        (SavedView(spent=69, default=100, saved=31, low=25, high=37), "saved 31 % (25 to 37 %)"),
        (SavedView(spent=95, default=100, saved=5, low=-3, high=13), "saved 5 % (-3 to 13 %)"),
        (SavedView(spent=110, default=100, saved=-10, low=-14, high=-6), "lost 10 % (6 to 14 %)"),
        (SavedView(spent=69, default=100, saved=31, low=None, high=None), "saved 31 %"),
        (SavedView(spent=100, default=100, saved=0, low=0, high=0), "saved 0 %"),
        (SavedView(spent=0, default=0, saved=0, low=0, high=0), "saved nothing"),
    ],
)
def test_in_words(saved: SavedView, words: str) -> None:
    assert saved.in_words == words
