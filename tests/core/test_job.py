"""Verdicts on reports, states of a job and its trials, and the rows of its records, with literal values."""

from __future__ import annotations

import asyncio
import re
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bso_server.core.job import (
    TRANSITIONS,
    Crash,
    Crashes,
    InMemoryJob,
    JobState,
    LeasePolicy,
    Moment,
    abandon_trial,
    dispatch_trial,
    end_by_training,
    end_trial,
    judge_report,
    renew_lease,
    revive_trial,
)
from bso_server.core.model import Cheapest, Deviations, Report, Suggestion, TrialRecord
from bso_server.core.policy import judge, stop_rule
from bso_server.errors import IllegalTransitionError, InvalidReportError
from bso_server.service.exports import TrialExport
from bso_server.storage.database import open_database
from bso_server.storage.rows import TRIAL, trial_from, trial_row
from bso_server.storage.store import Store
from bso_server.storage.tables import trials
from tests.support import ROOT
from tests.support.histories import Life, make_job
from zeus_plugins.protocol import (
    ALIVE,
    FINAL,
    Ending,
    EndReason,
    Origin,
    Stage,
    TrialState,
    TrialView,
    cost,
)

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
MOMENT = Moment(NOW, LeasePolicy())
JOB = JobState(registration=make_job((8, 16), 16, eta_knob=0.5, target_metric=0.9, max_epochs=100))

JUDGED = make_job((8, 16), 16, eta_knob=0.5, target_metric=0.9)
RUNNING = TrialRecord(
    trial_number=1, batch_size=16, state=TrialState.RUNNING, origin=Origin.EXPLORATION, started_event=1
)


REFUSED = Ending(outcome=TrialState.WITHDRAWN, detail="OOM")
MEMORY = Ending(outcome=TrialState.INFEASIBLE, detail="OOM")
CRASH = Ending(outcome=TrialState.FAILED, detail="OOM")
EARLY = Ending(ended_early=True, detail="EarlyStopping")


def begun() -> tuple[JobState, TrialRecord]:
    return dispatch_trial(JOB, Suggestion(16, Origin.EXPLORATION, "why not"), MOMENT, owner="me")


def test_documented_transitions_match_the_code() -> None:
    text = (ROOT / "docs" / "reference.md").read_text()
    rows = re.findall(r"^\| (\w+) \| [^|]+ \| ([^|]+) \|$", text, flags=re.M)
    documented = {
        TrialState(state): set() if after == "–" else {TrialState(word) for word in after.split(", ")}
        for state, after in rows
        if state in set(TrialState) and after != "any other"
    }
    assert documented | {TrialState.RUNNING: set(TrialState) - {TrialState.RUNNING}} == TRANSITIONS
    assert ("running", "any other") in rows


def test_trial_moves_from_dispatch_to_completed() -> None:
    job, trial = begun()
    assert (job.event_count, job.trial_count) == (1, 1)
    assert (trial.key, trial.state, trial.started_event, trial.owner) == (("job", 1), TrialState.RUNNING, 1, "me")
    assert trial.lease_expires_at == NOW + timedelta(hours=1)

    job, trial, verdict = judge_report(job, trial, Report(10, 1000, 1, 0.5), MOMENT, energy_source="nvml")
    assert (verdict.stop, trial.report_count, trial.reported_at, trial.energy_source) == (False, 1, NOW, "nvml")
    assert (trial.first_epoch, trial.first_time_s, trial.first_energy_j, job.event_count) == (1, 10, 1000, 1)

    job, trial, verdict = judge_report(job, trial, Report(20, 2000, 2, 0.95), MOMENT)
    assert (verdict.converged, trial.state, trial.end_reason) == (True, TrialState.COMPLETED, EndReason.TARGET_REACHED)
    assert (trial.ended_event, trial.ended_at, trial.lease_expires_at) == (2, NOW, None)
    assert (job.event_count, job.cheapest) == (2, Cheapest(1, 16, 2000))


@pytest.mark.parametrize("startup_s", [None, 4.0])
def test_start_up_of_first_report_stays(startup_s: float | None) -> None:
    job, trial = begun()
    for epoch, sent_s in ((1, startup_s), (2, 8.0)):
        job, trial, _ = judge_report(job, trial, Report(10 * epoch, 1000, epoch, 0.5), MOMENT, startup_s=sent_s)
        assert trial.startup_s == startup_s


def test_abandoned_trial_runs_again_after_a_report() -> None:
    job, trial = begun()
    job, trial = abandon_trial(job, trial, MOMENT)
    assert (trial.state, trial.ended_event, job.event_count) == (TrialState.ABANDONED, 2, 2)
    assert trial.message == "abandoned: not heard of since 2026-01-02 03:04:05 UTC"
    beating = renew_lease(trial, MOMENT, regular=True)
    assert beating.state is TrialState.RUNNING
    assert beating.ended_event is beating.ended_at is beating.end_reason is None
    assert beating.lease_expires_at == NOW + timedelta(minutes=6)
    job, again, _ = judge_report(job, trial, Report(10, 1000, 1, 0.95), MOMENT)
    assert (again.state, again.ended_event, job.event_count) == (TrialState.COMPLETED, 3, 3)


@pytest.mark.parametrize(
    ("ending", "crashes", "observed", "state", "reason", "says"),
    [
        (REFUSED, 2, False, TrialState.WITHDRAWN, EndReason.REFUSED, "says nothing about 16"),
        (CRASH, 0, False, TrialState.FAILED, EndReason.CRASHED, "failed: the training ended before"),
        (CRASH, 2, False, TrialState.INFEASIBLE, EndReason.CRASHED, "16 crashed 3 times and is not tried"),
        (CRASH, 9, True, TrialState.FAILED, EndReason.CRASHED, "failed: the training ended before"),
        (MEMORY, 0, True, TrialState.INFEASIBLE, EndReason.OUT_OF_MEMORY, "16 ran out of memory"),
        (EARLY, 0, False, TrialState.FAILED, EndReason.ENDED_EARLY, "by a rule of its own, before its target and its"),
        (EARLY, 2, False, TrialState.INFEASIBLE, EndReason.CRASHED, "16 ended early or crashed 3 times and is not"),
    ],
)
def test_ending_reported_by_the_training_sets_state_and_reason(
    ending: Ending, crashes: int, observed: bool, state: TrialState, reason: EndReason, says: str
) -> None:
    job, trial = begun()
    earlier = Crashes((Crash(16, "failed (OOM)", 1),) * crashes, frozenset({16} if observed else ()))
    job, trial = end_by_training(job, trial, ending, MOMENT, earlier=earlier)
    assert (trial.state, trial.end_reason, trial.ended_event) == (state, reason, 2)
    assert says in (trial.message or "")
    assert (trial.message or "").endswith(f" ({ending.detail})")


def test_withdrawn_exploration_is_repeated() -> None:
    job = InMemoryJob(JOB.registration)
    rng = np.random.default_rng(1)
    first = job.begin_trial(rng)
    for _ in range(5):
        job.end_trial(first.trial_number, Ending(outcome=TrialState.WITHDRAWN))
        again = job.begin_trial(rng)
        assert (again.batch_size, again.origin) == (first.batch_size, first.origin)
        assert again.trial_number == first.trial_number + 1
        first = again


def test_preempted_trial_may_resume_for_a_day() -> None:
    job, trial = begun()
    after, trial = end_by_training(job, trial, Ending(outcome=TrialState.SUSPENDED), MOMENT)
    assert (after, trial.state, trial.ended_event) == (job, TrialState.SUSPENDED, None)
    assert trial.lease_expires_at == NOW + timedelta(days=1)
    assert revive_trial(trial).state is TrialState.RUNNING


@pytest.mark.parametrize(("before", "after"), list(product(TrialState, TrialState)))
def test_illegal_transition_raises_and_changes_nothing(before: TrialState, after: TrialState) -> None:
    job, trial = begun()
    trial = replace(trial, state=before)
    if after in TRANSITIONS[before]:
        _, moved = end_trial(job, trial, after, EndReason.CRASHED, "", MOMENT)
        assert moved.state is after
        return
    kept = replace(job), replace(trial)
    with pytest.raises(IllegalTransitionError, match=f"{before} cannot become {after}"):
        end_trial(job, trial, after, EndReason.CRASHED, "", MOMENT)
    assert (job, trial) == kept


# A job for judging reports.


def test_cost_weighs_energy_against_time_at_maximum_power() -> None:
    assert cost(energy_j=300, time_s=10, max_power_w=100, eta=0.25) == 0.25 * 300 + 0.75 * 100 * 10
    assert cost(energy_j=300, time_s=10, max_power_w=100, eta=0) == 1000
    assert cost(energy_j=300, time_s=10, max_power_w=100, eta=1) == 300


def test_bound_needs_both_beta_and_a_cheapest_run() -> None:
    assert stop_rule(JUDGED, RUNNING, 50.0).max_cost_j == 100.0
    assert stop_rule(JUDGED, RUNNING, None).max_cost_j is None
    assert stop_rule(JUDGED.model_copy(update={"beta_knob": None}), RUNNING, 50.0).max_cost_j is None
    assert not judge(make_job((8,), 8, beta_knob=None), RUNNING, Report(1e9, 1e9, 1, metric=0.1), 1.0).stop
    # JSON has no infinity.
    assert stop_rule(JUDGED.model_copy(update={"beta_knob": 1e308}), RUNNING, 50.0).max_cost_j is None


# With η = 0.5 and 100 W, a report of (time, energy) = (10, 1000) costs 1000 J.
@pytest.mark.parametrize(
    ("metric", "epoch", "min_cost_j", "state", "reason"),
    [
        (0.5, 3, None, TrialState.RUNNING, EndReason.KEEP_TRAINING),
        (0.5, 3, 500.0, TrialState.RUNNING, EndReason.KEEP_TRAINING),  # a cost exactly at the bound is allowed
        (0.5, 3, 499.9, TrialState.EARLY_STOPPED, EndReason.COST_BOUND_CROSSED),
        (0.9, 3, None, TrialState.COMPLETED, EndReason.TARGET_REACHED),
        (0.9, 3, 500.0, TrialState.COMPLETED, EndReason.TARGET_REACHED),
        # the target is reached beyond the bound
        (0.95, 3, 499.9, TrialState.EARLY_STOPPED, EndReason.COST_BOUND_CROSSED),
        (0.5, 10, None, TrialState.EXHAUSTED, EndReason.MAX_EPOCHS_REACHED),
        (0.5, 9.5, None, TrialState.RUNNING, EndReason.KEEP_TRAINING),
        (0.9, 10, None, TrialState.COMPLETED, EndReason.TARGET_REACHED),
        (0.5, 10, 499.9, TrialState.EARLY_STOPPED, EndReason.COST_BOUND_CROSSED),
    ],
)
def test_judge_returns_documented_state_and_reason(
    metric: float, epoch: float, min_cost_j: float | None, state: TrialState, reason: EndReason
) -> None:
    verdict = judge(JUDGED, RUNNING, Report(time_s=10, energy_j=1000, epoch=epoch, metric=metric), min_cost_j)
    assert (verdict.state, verdict.reason) == (state, reason)
    assert verdict.stop == (state is not TrialState.RUNNING)
    assert verdict.converged == (state is TrialState.COMPLETED)


def test_judge_handles_a_metric_to_minimize() -> None:
    job = make_job((8,), 8, eta_knob=0.5, target_metric=0.9, higher_is_better_metric=False)
    assert judge(job, RUNNING, Report(1, 1, 1, metric=0.9), None).converged
    assert not judge(job, RUNNING, Report(1, 1, 1, metric=0.91), None).stop


@pytest.mark.parametrize(
    ("totals", "field"), [((9, 50, 2), "time"), ((10, 49, 2), "energy"), ((10, 50, 1), "current_epoch")]
)
def test_decreasing_totals_are_refused(totals: tuple[int, int, int], field: str) -> None:
    earlier = replace(RUNNING, time_s=10, energy_j=50, epoch=2, metric=0.4)
    with pytest.raises(InvalidReportError, match="cannot shrink") as caught:
        judge(JUDGED, earlier, Report(*totals, metric=0.5), None)
    assert caught.value.field == field


# Earlier reports of a trial (their number and last epoch), followed by a fractional epoch.
@pytest.mark.parametrize(
    ("reports", "last", "epoch"),
    [
        (0, 0, 0.5),  # the first report of a training with two validations per epoch
        (0, 0, 1.5),
        (1, 0.5, 1.5),
        (2, 1, 1.5),  # 0.5, 1
        (4, 2, 2.5),  # 0.5, 1, 1.5, 2
        (1, 2, 2.5),  # not every epoch was reported
        (3, 2, 2.5),
    ],
)
def test_fraction_may_follow_a_fraction(reports: int, last: float, epoch: float) -> None:
    trial = replace(RUNNING, report_count=reports, epoch=last, metric=0.1)
    assert not judge(JUDGED, trial, Report(1, 1, epoch, metric=0.5), None).stop


@pytest.mark.parametrize(("reports", "epoch"), [(1, 1.5), (2, 2.0001), (7, 9.5)])
def test_no_fraction_follows_when_every_epoch_was_reported_as_a_whole(reports: int, epoch: float) -> None:
    trial = replace(RUNNING, report_count=reports, epoch=float(reports), metric=0.1)
    with pytest.raises(InvalidReportError, match=f"{epoch:g} is none") as caught:
        judge(JUDGED, trial, Report(1, 1, epoch, metric=0.5), None)
    assert caught.value.field == "current_epoch"
    for whole in (reports, reports + 1.0, 9.0):
        assert not judge(JUDGED, trial, Report(1, 1, whole, metric=0.5), None).stop


def test_target_reached_at_no_cost_is_refused() -> None:
    energy_only = make_job((8,), 8)
    with pytest.raises(InvalidReportError, match="cost of 0 J"):
        judge(energy_only, RUNNING, Report(time_s=10, energy_j=0, epoch=1, metric=1.0), None)


def test_final_states_have_no_transitions_and_open_states_have_leases() -> None:
    assert {state for state in TrialState if not TRANSITIONS[state]} == FINAL
    assert {state for state in TrialState if TrialState.ABANDONED in TRANSITIONS[state]} == ALIVE


def test_only_completed_trials_can_be_the_cheapest() -> None:
    life = Life(JUDGED)
    life.run(8, Origin.EXPLORATION, TrialState.EARLY_STOPPED, 10)
    life.run(8, Origin.EXPLORATION, TrialState.EXHAUSTED, 20)
    assert life.history.cheapest is None
    life.run(16, Origin.EXPLORATION, TrialState.COMPLETED, 50)
    life.run(8, Origin.EXPLORATION, TrialState.COMPLETED, 50)
    life.run(8, Origin.EXPLORATION, TrialState.FAILED, 1)
    assert life.history.cheapest == Cheapest(3, 16, 25)


def test_stage_follows_from_the_trials() -> None:
    life = Life(JUDGED)
    life.run(8, Origin.EXPLORATION, TrialState.COMPLETED, 10)
    assert life.history.stage is Stage.PRUNING
    life.run(8, Origin.BANDIT, TrialState.COMPLETED, 10)
    assert life.history.stage is Stage.BANDIT


# Rows.


def instants() -> st.SearchStrategy[datetime]:
    return st.datetimes(datetime(1970, 1, 2), datetime(8999, 1, 1), timezones=st.just(UTC))


def numbers() -> st.SearchStrategy[float]:
    return st.floats(0, 1e10, allow_subnormal=False)


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
RECORDS = st.builds(
    TrialRecord,
    job_id=st.just("round-trip"),
    trial_number=st.just(1),
    batch_size=st.sampled_from((8, 16)),
    state=st.sampled_from(TrialState),
    origin=st.sampled_from(Origin),
    reason=TEXTS,
    message=st.none() | TEXTS,
    end_reason=st.none() | st.sampled_from(EndReason),
    started_at=instants(),
    started_event=st.integers(1, 2**30),
    reported_at=st.none() | instants(),
    ended_at=st.none() | instants(),
    ended_event=st.none() | st.integers(1, 2**30),
    time_s=st.floats(1e-3, 1e10),
    energy_j=numbers(),
    energy_source=st.none() | TEXTS,
    epoch=st.floats(1e-3, 1e6),
    metric=st.floats(-1e10, 1e10, allow_subnormal=False),
    report_count=st.integers(1, 1000),
    longest_gap_s=numbers(),
    lease_expires_at=st.none() | instants(),
    heartbeats=st.booleans(),
    lease_epoch=st.integers(1, 2**30),
    first_epoch=st.floats(1e-3, 1e6),
    first_time_s=st.floats(1e-3, 1e10),
    first_energy_j=numbers(),
    deviations=st.none() | st.builds(Deviations, numbers(), numbers(), numbers()),
    other_gpus=st.booleans(),
    epoch_bound=st.none() | st.integers(1, 1000),
    epoch_bound_reason=st.none() | TEXTS,
    idempotency_key=st.none() | st.just("key"),
    owner=st.none() | st.just("0123456789abcdef"),
    power_limit_w=st.none() | st.floats(1, 1e3),
    power_limits=st.none() | st.integers(1, 256),
)


def unreported(trial: TrialRecord) -> TrialRecord:
    reported = replace(trial, metric=None, report_count=0, deviations=None)
    return replace(reported, time_s=0.0, energy_j=0.0, epoch=0.0, first_epoch=0.0, first_time_s=0.0, first_energy_j=0.0)


def test_fields_of_a_trial_equal_the_columns() -> None:
    names = [field.name for field in fields(TrialRecord)]
    assert sorted(names) == sorted(trials.c.keys())
    shown = set(TrialView.model_fields) | set(TrialExport.model_fields)
    # Other objects name the job; a client's idempotency key is meaningless to readers.
    assert set(names) - shown == {"job_id", "idempotency_key"}


def test_record_survives_the_database_and_an_export_unchanged(database_url: str) -> None:
    registration = make_job((8, 16), 16, job_id_prefix="r", job_id="round-trip")
    store = Store(open_database(database_url, patience_s=60.0), patience_s=60.0)

    @given(RECORDS, st.booleans())
    @settings(max_examples=10, deadline=None)
    def check(record: TrialRecord, reported: bool) -> None:
        record = record if reported else unreported(record)
        runner.run(store.write(lambda transaction: transaction.delete_job("round-trip")))
        runner.run(store.write(lambda transaction: transaction.insert_job(registration, NOW)))
        runner.run(store.write(lambda transaction: transaction.insert_trials([record])))
        assert runner.run(store.read(lambda transaction: transaction.all_trials("round-trip"))) == [record]
        row = trial_row(record)
        assert (row["time_s"] is None) is (not reported)
        kept = {name: value for name, value in TrialExport(**row) if name in TRIAL}
        assert trial_from({"job_id": record.job_id, **kept}) == replace(record, idempotency_key=None, owner=None)

    with asyncio.Runner() as runner:
        try:
            runner.run(store.migrate())
            check()
        finally:
            runner.run(store.close())
