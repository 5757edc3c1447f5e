"""The evidence of runs for policy `gp_voi` about the cost of an epoch: their means, and the spread of their epochs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bso_server.core.gp_voi.prior import CONSTANTS
from bso_server.core.gp_voi.run_costs import CostRun, CostRuns, change_of, epoch_variance, run_variance, summary_of
from bso_server.core.model import Report, after_other_rank, after_report
from tests.support.histories import new_life
from tests.support.properties import examples


def runs_of(*log_costs: float) -> CostRuns:
    return tuple(CostRun(each, math.inf) for each in log_costs)


def test_one_slowed_run_among_equal_ones_is_ignored() -> None:
    found = summary_of([runs_of(2.0, 2.0 + math.log(4), 2.01, 1.99)])
    assert found.means[0] == pytest.approx(2.0, abs=1e-3)
    assert found.weights[0] == pytest.approx(3.0, abs=0.05)
    assert not found.suspect[0]
    assert math.sqrt(found.run_variance) < 0.03


def test_of_two_runs_that_disagree_the_lower_counts_and_is_in_doubt() -> None:
    for runs in (runs_of(2.0, 2.0 + math.log(4)), runs_of(2.0 + math.log(4), 2.0)):
        found = summary_of([runs, runs_of(3.0, 3.0, 3.0)])
        assert found.means[0] == pytest.approx(2.0, abs=0.01)
        assert (found.suspect[0], found.suspect[1]) == (True, False)
        assert found.weights[0] == pytest.approx(1.0, abs=0.05)


def test_runs_on_a_busy_machine() -> None:
    noise = np.random.default_rng(1).normal(0, 0.3, (4, 8))
    found = summary_of([runs_of(*row) for row in 2 + noise])
    assert math.sqrt(found.run_variance) == pytest.approx(0.3, abs=0.08)
    # None of them is taken for a slowed one.
    assert min(found.weights) > 7
    assert found.means == pytest.approx((2 + noise).mean(axis=1), abs=0.1)


def test_before_two_runs_of_a_size_their_variance_is_as_expected_beforehand() -> None:
    grid = np.array(CONSTANTS.cost_run_sds)
    weights = stats.norm.pdf(np.log(grid), math.log(CONSTANTS.cost_run_sd), CONSTANTS.cost_run_sd_spread)
    assert run_variance([runs_of(2.0), (), runs_of(5.0)], 0.0) == pytest.approx(weights @ grid**2 / weights.sum())
    doubted = CostRun(5.0, math.inf, doubt=99 * run_variance([], 0.0))
    found = summary_of([runs_of(2.0), (), (doubted,)])
    assert found.means == pytest.approx((2.0, 0.0, 5.0))
    assert found.weights == pytest.approx((1.0, 0.0, 0.01))
    assert found.suspect == (True, False, True)


def test_the_variance_of_two_runs_by_every_sd_of_the_grid() -> None:
    """Their difference is normal with twice the variance; or one of them was slowed."""
    grid = np.array(CONSTANTS.cost_run_sds)
    prior = stats.norm.pdf(np.log(grid), math.log(CONSTANTS.cost_run_sd), CONSTANTS.cost_run_sd_spread)
    for apart in (0.0, 0.05, 0.4, 1.4):
        usual = stats.norm.pdf(apart, 0, grid * math.sqrt(2))
        slowed = stats.norm.pdf(apart, 0, np.sqrt(2 * grid**2 + CONSTANTS.slowed_sd**2))
        weights = prior * ((1 - CONSTANTS.slowed_chance) * usual + CONSTANTS.slowed_chance * slowed)
        expected = weights @ grid**2 / weights.sum()
        assert run_variance([runs_of(1.0, 1.0 + apart)], 0.0) == pytest.approx(expected)


def test_a_change_takes_two_runs_that_are_off_alike() -> None:
    four = math.log(4)

    def change(*runs: float) -> float | None:
        return change_of([runs_of(*runs), runs_of(3.0, 3.01)], 0)

    assert change(2.0, 2.01, 2 + four, 2.02 + four) == pytest.approx(four)
    assert change(2.0, 2.01, 2.02 - four, 2 - four) == pytest.approx(-four)
    # Where they differ, the one that is less off counts.
    assert change(2.0, 2.01, 2 + 2 * four, 2 + four) == pytest.approx(four)
    assert change(2.0, 2.01, 2.02, 2 + four) is None
    assert change(2.0, 2.01, 2 + four, 2.02) is None
    assert change(2.0, 2.01, 2 + four, 2 - four) is None
    assert change(2.0, 2.01, 2.02, 2.01) is None
    # One run before them may itself have been slowed.
    assert change(2 + four, 2.0, 2.0) is None
    assert change(2.0) is None
    assert change() is None


def test_on_a_busy_machine_dear_runs_in_a_row_are_no_change() -> None:
    noise = np.random.default_rng(2).normal(0, 0.3, (500, 8))
    changes = [change_of([runs_of(*row) for row in noise[start : start + 4]], 0) for start in range(0, 500, 4)]
    assert sum(each is not None for each in changes) == 0
    # Nor are two short runs of uneven epochs, whose mean is not sure.
    uneven = [CostRun(2.0, 100, 100.0, 99)] * 3 + [CostRun(3.0, 1.0)] * 2
    assert change_of([tuple(uneven)], 0) is None
    assert change_of([tuple(run._replace(epochs=100) for run in uneven)], 0) is not None


absurd_runs = st.builds(
    CostRun,
    st.floats(-700, 700),
    epochs=st.floats(1e-3, 1e6) | st.just(math.inf),
    deviations=st.floats(0, 1e12),
    freedom=st.integers(0, 1000).map(float),
    doubt=st.floats(0, 1),
    drift=st.sampled_from([0.0, 0.5, -3.0, 700.0]),
)


@given(
    st.lists(st.lists(absurd_runs, max_size=8).map(tuple), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
@settings(max_examples=examples(100), deadline=None)
def test_absurd_costs_leave_finite_numbers_and_their_order_does_not_matter(
    sizes: list[CostRuns], random: object
) -> None:
    found = summary_of(sizes)
    assert np.isfinite([*found.means, *found.weights, found.run_variance]).all()
    assert min(CONSTANTS.cost_run_sds) ** 2 <= found.run_variance * (1 + 1e-9)
    assert found.run_variance <= max(CONSTANTS.cost_run_sds) ** 2 * (1 + 1e-9)
    for index, runs in enumerate(sizes):
        change = change_of(sizes, index)
        assert change is None or (math.isfinite(change) and len(runs) > 3)
    for runs, mean, weight in zip(sizes, found.means, found.weights, strict=True):
        assert 0 <= weight <= len(runs) * (1 + 1e-9)
        if runs:
            assert weight > 0
            assert min(run.log_cost for run in runs) - 1e-6 <= mean <= max(run.log_cost for run in runs) + 1e-6
    mixed_up = []
    for runs in sizes:
        shuffled = list(runs)
        random.shuffle(shuffled)  # type: ignore[attr-defined]  # a random.Random
        mixed_up.append(tuple(shuffled))
    again = summary_of(mixed_up)
    assert again.means == pytest.approx(found.means)
    assert again.weights == pytest.approx(found.weights)
    assert again.run_variance == pytest.approx(found.run_variance)


# --- Within a run -----------------------------------------------------------------------------------------------------


def test_a_trial_keeps_how_unevenly_its_epochs_cost() -> None:
    """After the first report one epoch of 10 J, two of 16 J and half a one at 12 J for a whole one."""
    life = new_life()
    trial = life.dispatch(32)
    assert trial.cost_deviations_j2 is None
    deviations_j2 = []
    for epoch, cost_j in ((1, 50), (2, 60), (4, 92), (4.5, 98)):
        trial = after_report(life.job, trial, Report(1.0, cost_j, epoch, 0.0))
        deviations_j2.append(trial.cost_deviations_j2)
    whole = 10**2 + 2 * 16**2 + 0.5 * 12**2 - 48**2 / 3.5
    assert deviations_j2 == [0, 0, pytest.approx(10**2 + 2 * 16**2 - 42**2 / 3), pytest.approx(whole)]
    run = CostRun.of(life.job, trial)
    assert run == pytest.approx(CostRun(math.log(48 / 3.5), 3.5, whole / (48 / 3.5) ** 2, 2))
    # The same epoch once more tells nothing of another one.
    again = after_report(life.job, trial, Report(1.0, 99.0, 4.5, 0.0))
    assert again.cost_deviations_j2 == trial.cost_deviations_j2


def test_a_trial_that_an_earlier_version_saw_report_tells_its_mean_alone() -> None:
    life = new_life()
    trial = life.dispatch(32)
    for epoch in (1, 2, 3):
        trial = after_report(life.job, trial, Report(1.0, 10.0 * epoch**2, epoch, 0.0))
    from_before = after_report(life.job, replace(trial, cost_deviations_j2=None), Report(1.0, 160.0, 4, 0.0))
    assert from_before.cost_deviations_j2 is None
    assert CostRun.of(life.job, from_before) == pytest.approx(CostRun(math.log(50), 3))
    # Another rank's larger totals change the mean, and nothing else.
    later = after_other_rank(life.job, trial, Report(1.0, 100.0, 3, 0.0))
    assert later.cost_deviations_j2 == trial.cost_deviations_j2


def test_the_variance_of_an_epoch_is_that_of_all_runs_together() -> None:
    rng = np.random.default_rng(3)
    sizes: list[CostRuns] = []
    for _ in range(4):
        runs = []
        for epochs in (20, 50, 100):
            costs = 5.0 * (1 + 0.2 * rng.standard_normal(epochs))
            off = float(((costs / costs.mean() - 1) ** 2).sum())
            runs.append(CostRun(math.log(costs.mean()), epochs, off, epochs - 1))
        sizes.append(tuple(runs))
    assert math.sqrt(epoch_variance(sizes)) == pytest.approx(0.2, rel=0.1)
    # All that runs of a size differ by is what their epochs leave open: the runs themselves hardly vary.
    assert math.sqrt(summary_of(sizes).run_variance) < 0.03
    # Before any run tells, it is as expected beforehand.
    assert math.sqrt(epoch_variance([(), ()])) == pytest.approx(CONSTANTS.epoch_sd)


def test_a_short_run_weighs_as_its_epochs_allow() -> None:
    even, uneven = ([(CostRun(2.0, 100, off, 99),), (CostRun(3.0, 2, off / 99, 1),)] for off in (0.0, 99 * 0.3**2))
    assert summary_of(even).weights[1] > 0.9
    found = summary_of(uneven)
    assert found.weights[0] > 5 * found.weights[1]
