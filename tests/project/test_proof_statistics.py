"""Savings, break-even, regret and intervals, with literal numbers."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.reports import (
    SizeFigure,
    best_size,
    bootstrap,
    break_even,
    hindsight,
    median_ratio,
    regret,
    share_saved,
)


def test_the_share_saved_is_of_the_sums() -> None:
    assert share_saved(np.array([[1.0, 4.0], [8.0, 8.0]])) == pytest.approx(0.25)


def test_the_median_of_ratios() -> None:
    assert median_ratio(np.array([[2.0, 1.0], [3.0, 3.0], [3.0, 2.0]])) == 1.5


def test_an_interval_of_equal_samples_has_no_width() -> None:
    assert bootstrap([(1.0, 2.0)] * 5, share_saved) == (0.5, 0.5, 0.5)


def test_an_interval_holds_what_resampling_gives_and_is_always_the_same() -> None:
    samples = [(1.0, 2.0), (3.0, 2.0)]
    interval = bootstrap(samples, share_saved)
    # Of two samples, a quarter of the draws have one twice: 1 - 1/2 and 1 - 3/2 are the ends.
    assert interval == (0.0, -0.5, 0.5)
    many = [(float(spent), 10.0) for spent in (3, 4, 7, 11, 13, 17, 19)]
    assert bootstrap(many, share_saved) == bootstrap(many, share_saved)


def test_no_samples_are_an_error() -> None:
    with pytest.raises(ValueError, match="no samples"):
        bootstrap([], share_saved)


@pytest.mark.parametrize(
    ("costs_j", "expected"),
    [
        ([9.0, 9.0], 1),
        ([20.0, 5.0, 4.0, 10.0], 3),
        ([5.0, 20.0, 4.0], 3),
        ([5.0, 4.0, 30.0], None),
        ([10.0, 10.0], 1),
    ],
)
def test_break_even_is_for_good(costs_j: list[float], expected: int | None) -> None:
    assert break_even(costs_j, [10.0] * len(costs_j)) == expected


def test_a_size_that_misses_the_target_costs_its_repeats() -> None:
    figures = hindsight({64: [(30.0, True), (50.0, True)], 8: [(20.0, False), (40.0, True)], 512: [(90.0, False)]})
    assert figures == [SizeFigure(8, 2, 1, 60.0), SizeFigure(64, 2, 2, 40.0), SizeFigure(512, 1, 0, None)]
    assert best_size(figures) == SizeFigure(64, 2, 2, 40.0)
    assert best_size(figures[2:]) is None


def test_regret_is_a_share_of_the_best() -> None:
    assert regret([60.0, 40.0], [40.0, 40.0]) == pytest.approx(0.25)
