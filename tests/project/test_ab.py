"""The A/B test and its comparison with the verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.ab import ab, ab_test, compared, runs_in_turn
from benchmarks.recurrences.harness import State


def test_pairs_are_compared_by_their_ratios() -> None:
    """Compare ratios of 0.5, 0.4 and 0.6: on average 1 - (0.12)^(1/3)."""
    found = compared([100, 50, 10], [50, 20, 6])
    assert found.middle == pytest.approx(1 - 0.12 ** (1 / 3))
    assert found.low < found.middle < found.high < 1
    assert compared([100, 50, 10], [50, 25, 5]).in_words == "50 % (50 to 50 %)"


def test_pinned_sizes_train_in_turn() -> None:
    steps = runs_in_turn("digits", (32, 128), 3)
    assert [step.order.batch_size for step in steps] == [128, 32, 32, 128, 128, 32]
    assert [step.order.seed for step in steps] == [7000, 7000, 7001, 7001, 7002, 7002]
    assert {step.order.job_id for step in steps} == {"ab-digits-32", "ab-digits-128"}


def test_costs_of_recorded_runs_are_compared_by_size(tmp_path: Path) -> None:
    state = State(tmp_path)
    for step, cpu_s in zip(runs_in_turn("digits", (32, 128), 3), (10.0, 20.0, 22.0, 11.0, 12.0, 24.0), strict=True):
        state.add({"key": step.key, "state": "bare", "fit_cpu_s": cpu_s})
    found = ab_test("digits", (32, 128), 3, state)
    assert (found.default_s, found.best_s) == ([20.0, 22.0, 24.0], [10.0, 11.0, 12.0])
    assert found.middle == pytest.approx(0.5)


@pytest.mark.slow
def test_job_with_runs_at_the_default_only_needs_no_ab_test(tmp_path: Path) -> None:
    savings, found = ab("tabular", number=1, pairs=3, state=State(tmp_path))
    assert savings.recurrences == 1
    assert found is None
