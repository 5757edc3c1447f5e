"""Cost, judgement and trial states, with literal numbers."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bso_server.core.job import TRANSITIONS, check_transition
from bso_server.core.model import Report, TrialRecord
from bso_server.core.policy import judge, stop_rule
from bso_server.core.replay import replay
from bso_server.errors import IllegalTransitionError, InvalidReportError
from tests.support.histories import make_job
from zeus_plugins.protocol import ALIVE, FINAL, EndReason, Origin, Stage, TrialState, cost

JOB = make_job((8, 16), 16, eta_knob=0.5, target_metric=0.9)
RUNNING = TrialRecord(
    trial_number=1, batch_size=16, state=TrialState.RUNNING, origin=Origin.EXPLORATION, started_event=1
)


def test_cost_weighs_energy_against_time_at_maximum_power() -> None:
    assert cost(energy_j=300, time_s=10, max_power_w=100, eta=0.25) == 0.25 * 300 + 0.75 * 100 * 10
    assert cost(energy_j=300, time_s=10, max_power_w=100, eta=0) == 1000
    assert cost(energy_j=300, time_s=10, max_power_w=100, eta=1) == 300


def test_bound_needs_both_beta_and_a_cheapest_run() -> None:
    assert stop_rule(JOB, RUNNING, 50.0).max_cost_j == 100.0
    assert stop_rule(JOB, RUNNING, None).max_cost_j is None
    assert stop_rule(JOB.model_copy(update={"beta_knob": None}), RUNNING, 50.0).max_cost_j is None
    assert (
        stop_rule(JOB.model_copy(update={"beta_knob": 1e308}), RUNNING, 50.0).max_cost_j is None
    )  # JSON has no infinity


# With η = 0.5 and 100 W, a report of (time, energy) = (10, 1000) costs 1000 J.
@pytest.mark.parametrize(
    ("metric", "epoch", "min_cost_j", "state", "reason"),
    [
        (0.5, 3, None, TrialState.RUNNING, EndReason.KEEP_TRAINING),
        (0.5, 3, 500.0, TrialState.RUNNING, EndReason.KEEP_TRAINING),  # exactly at the bound is within it
        (0.5, 3, 499.9, TrialState.EARLY_STOPPED, EndReason.COST_BOUND_CROSSED),
        (0.9, 3, None, TrialState.COMPLETED, EndReason.TARGET_REACHED),
        (0.9, 3, 500.0, TrialState.COMPLETED, EndReason.TARGET_REACHED),
        (0.95, 3, 499.9, TrialState.EARLY_STOPPED, EndReason.COST_BOUND_CROSSED),  # too late to count
        (0.5, 10, None, TrialState.EXHAUSTED, EndReason.MAX_EPOCHS_REACHED),
        (0.5, 9.5, None, TrialState.RUNNING, EndReason.KEEP_TRAINING),
        (0.9, 10, None, TrialState.COMPLETED, EndReason.TARGET_REACHED),
        (0.5, 10, 499.9, TrialState.EARLY_STOPPED, EndReason.COST_BOUND_CROSSED),
    ],
)
def test_judge(metric: float, epoch: float, min_cost_j: float | None, state: TrialState, reason: EndReason) -> None:
    verdict = judge(JOB, RUNNING, Report(time_s=10, energy_j=1000, epoch=epoch, metric=metric), min_cost_j)
    assert (verdict.state, verdict.reason) == (state, reason)
    assert verdict.stop == (state is not TrialState.RUNNING)
    assert verdict.converged == (state is TrialState.COMPLETED)


def test_judge_of_a_metric_that_falls() -> None:
    job = make_job((8,), 8, eta_knob=0.5, target_metric=0.9, higher_is_better_metric=False)
    assert judge(job, RUNNING, Report(1, 1, 1, metric=0.9), None).converged
    assert not judge(job, RUNNING, Report(1, 1, 1, metric=0.91), None).stop


def test_without_beta_no_cost_is_too_high() -> None:
    job = make_job((8,), 8, eta_knob=0.5, beta_knob=None)
    assert not judge(job, RUNNING, Report(1e9, 1e9, 1, metric=0.1), 1.0).stop


@pytest.mark.parametrize(
    ("report", "field"),
    [
        (Report(time_s=9, energy_j=50, epoch=2, metric=0.5), "time"),
        (Report(time_s=10, energy_j=49, epoch=2, metric=0.5), "energy"),
        (Report(time_s=10, energy_j=50, epoch=1, metric=0.5), "current_epoch"),
    ],
)
def test_totals_cannot_shrink(report: Report, field: str) -> None:
    earlier = TrialRecord(
        trial_number=1,
        batch_size=16,
        state=TrialState.RUNNING,
        origin=Origin.EXPLORATION,
        time_s=10,
        energy_j=50,
        epoch=2,
        metric=0.4,
    )
    with pytest.raises(InvalidReportError, match="cannot shrink") as caught:
        judge(JOB, earlier, report, None)
    assert caught.value.field == field


# What a trial has reported so far: how many times, and the last epoch. Then a fraction.
@pytest.mark.parametrize(
    ("reports", "last", "epoch"),
    [
        (0, 0, 0.5),  # the first report of a training that validates twice per epoch
        (0, 0, 1.5),
        (1, 0.5, 1.5),
        (2, 1, 1.5),  # 0.5, 1
        (4, 2, 2.5),  # 0.5, 1, 1.5, 2
        (1, 2, 2.5),  # not every epoch was reported
        (3, 2, 2.5),
    ],
)
def test_a_fraction_may_follow_a_fraction(reports: int, last: float, epoch: float) -> None:
    trial = replace(RUNNING, report_count=reports, epoch=last, metric=0.1)
    assert not judge(JOB, trial, Report(1, 1, epoch, metric=0.5), None).stop


@pytest.mark.parametrize(("reports", "epoch"), [(1, 1.5), (2, 2.0001), (7, 9.5)])
def test_no_fraction_follows_when_every_epoch_was_reported_as_a_whole(reports: int, epoch: float) -> None:
    trial = replace(RUNNING, report_count=reports, epoch=float(reports), metric=0.1)
    with pytest.raises(InvalidReportError, match=f"{epoch:g} is none") as caught:
        judge(JOB, trial, Report(1, 1, epoch, metric=0.5), None)
    assert caught.value.field == "current_epoch"
    for whole in (reports, reports + 1.0, 9.0):
        assert not judge(JOB, trial, Report(1, 1, whole, metric=0.5), None).stop


def test_a_target_reached_for_nothing_is_refused() -> None:
    energy_only = make_job((8,), 8)
    with pytest.raises(InvalidReportError, match="cost of 0 J"):
        judge(energy_only, RUNNING, Report(time_s=10, energy_j=0, epoch=1, metric=1.0), None)


def test_every_state_has_its_moves() -> None:
    assert set(TRANSITIONS) == set(TrialState)


def test_final_states_are_those_without_a_move_and_living_ones_have_leases() -> None:
    assert {state for state in TrialState if not TRANSITIONS[state]} == FINAL
    assert {state for state in TrialState if TrialState.ABANDONED in TRANSITIONS[state]} == ALIVE


@given(st.sampled_from(list(TrialState)), st.sampled_from(list(TrialState)))
def test_only_listed_moves_are_legal(before: TrialState, after: TrialState) -> None:
    if after in TRANSITIONS[before]:
        check_transition(before, after)
    else:
        with pytest.raises(IllegalTransitionError, match=f"{before} cannot become {after}"):
            check_transition(before, after)


def test_what_was_measured_to_the_end_stays_as_it_is() -> None:
    measured = {TrialState.COMPLETED, TrialState.EARLY_STOPPED, TrialState.EXHAUSTED}
    for before, after in product(measured, TrialState):
        with pytest.raises(IllegalTransitionError):
            check_transition(before, after)


def test_an_abandoned_trial_can_come_back() -> None:
    check_transition(TrialState.ABANDONED, TrialState.RUNNING)


def _ended(
    number: int, size: int, state: TrialState, cost_j: float, origin: Origin = Origin.EXPLORATION
) -> TrialRecord:
    return TrialRecord(
        trial_number=number,
        batch_size=size,
        state=state,
        origin=origin,
        energy_j=cost_j,
        time_s=cost_j / 100,
        started_event=2 * number,
        ended_event=2 * number + 1,
    )


def test_only_trials_that_reached_the_target_can_be_the_cheapest() -> None:
    trials = (
        _ended(1, 8, TrialState.EARLY_STOPPED, 10),
        _ended(2, 8, TrialState.EXHAUSTED, 20),
        _ended(3, 16, TrialState.COMPLETED, 50),
        _ended(4, 8, TrialState.COMPLETED, 50),
        _ended(5, 8, TrialState.FAILED, 1),
    )
    history = replay(JOB, trials)
    assert history.cheapest is not None
    assert history.cheapest.trial_number == 3
    assert replay(JOB, trials[:2]).cheapest is None


def test_stage_follows_from_the_trials() -> None:
    exploring = _ended(1, 8, TrialState.COMPLETED, 10)
    drawn = _ended(2, 8, TrialState.COMPLETED, 10, Origin.BANDIT)
    assert replay(JOB, (exploring,)).stage is Stage.PRUNING
    assert replay(JOB, (exploring, drawn)).stage is Stage.BANDIT
