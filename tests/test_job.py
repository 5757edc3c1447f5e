"""The life of a job and its trials, step by step, with literal values; and the rows that its records become."""

from __future__ import annotations

import asyncio
import re
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bso_server.core import job as life
from bso_server.core.history import Cheapest
from bso_server.core.job import TRANSITIONS, InMemoryJob, JobState, LeasePolicy, Moment
from bso_server.core.model import Report, Suggestion, TrialRecord
from bso_server.core.replay import replay
from bso_server.errors import IllegalTransitionError, NoSurvivorError
from bso_server.service.messages import TrialExport
from bso_server.storage.database import open_database
from bso_server.storage.rows import TRIAL, trial_from
from bso_server.storage.store import Store
from bso_server.storage.tables import trials
from tests.support.histories import make_job
from zeus_plugins.protocol import ALIVE, OWN_POLICIES, Ending, EndReason, JobRegistration, Origin, TrialState, TrialView

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
MOMENT = Moment(NOW, LeasePolicy())
JOB = JobState(registration=make_job((8, 16), 16, eta_knob=0.5, target_metric=0.9, max_epochs=100))


def begun() -> tuple[JobState, TrialRecord]:
    return life.dispatched(JOB, Suggestion(16, Origin.EXPLORATION, "why not"), MOMENT, owner="me")


def test_the_documented_transitions_are_those_of_the_code() -> None:
    text = (Path(__file__).parent.parent / "docs" / "states.md").read_text()
    rows = re.findall(r"^\| (\w+) \| [^|]+ \| ([^|]+) \|$", text, flags=re.M)
    documented = {
        TrialState(state): set() if after == "–" else {TrialState(word) for word in after.split(", ")}
        for state, after in rows
        if state in set(TrialState) and after != "any other"
    }
    assert documented | {TrialState.RUNNING: set(TrialState) - {TrialState.RUNNING}} == TRANSITIONS
    assert ("running", "any other") in rows


def test_a_trial_from_its_dispatch_to_its_end() -> None:
    job, trial = begun()
    assert (job.event_count, job.trial_count) == (1, 1)
    assert (trial.key, trial.state, trial.started_event, trial.owner) == (("job", 1), TrialState.RUNNING, 1, "me")
    assert trial.lease_expires_at == NOW + timedelta(hours=1)

    job, trial, verdict = life.reported(job, trial, Report(10, 1000, 1, 0.5), MOMENT, energy_source="nvml")
    assert (verdict.stop, trial.report_count, trial.reported_at, trial.energy_source) == (False, 1, NOW, "nvml")
    assert (trial.first_epoch, trial.first_cost_j, job.event_count) == (1, 1000, 1)

    job, trial, verdict = life.reported(job, trial, Report(20, 2000, 2, 0.95), MOMENT)
    assert (verdict.converged, trial.state, trial.end_reason) == (True, TrialState.COMPLETED, EndReason.TARGET_REACHED)
    assert (trial.ended_event, trial.ended_at, trial.lease_expires_at) == (2, NOW, None)
    assert (job.event_count, job.cheapest) == (2, Cheapest(1, 16, 2000))


def test_a_trial_that_is_given_up_comes_back_and_its_end_never_was() -> None:
    job, trial = begun()
    job, trial = life.abandoned(job, trial, MOMENT)
    assert (trial.state, trial.ended_event, job.event_count) == (TrialState.ABANDONED, 2, 2)
    assert trial.message == "abandoned: not heard of since 2026-01-02 03:04:05 UTC"
    beating = life.beating(trial, MOMENT, regular=True)
    assert (beating.state, beating.ended_event, beating.ended_at, beating.end_reason) == (
        *(TrialState.RUNNING, None),
        *(None, None),
    )
    assert beating.lease_expires_at == NOW + timedelta(minutes=3)
    job, again, _ = life.reported(job, trial, Report(10, 1000, 1, 0.95), MOMENT)
    assert (again.state, again.ended_event, job.event_count) == (TrialState.COMPLETED, 3, 3)


@pytest.mark.parametrize(
    ("outcome", "crashes", "observed", "state", "reason", "says"),
    [
        (TrialState.WITHDRAWN, 2, False, TrialState.WITHDRAWN, EndReason.REFUSED, "says nothing about 16"),
        (TrialState.FAILED, 0, False, TrialState.FAILED, EndReason.CRASHED, "failed: the training ended before"),
        (TrialState.FAILED, 2, False, TrialState.INFEASIBLE, EndReason.CRASHED, "16 crashed 3 times and is not tried"),
        (TrialState.FAILED, 9, True, TrialState.FAILED, EndReason.CRASHED, "failed: the training ended before"),
        (TrialState.INFEASIBLE, 0, True, TrialState.INFEASIBLE, EndReason.OUT_OF_MEMORY, "16 ran out of memory"),
    ],
)
def test_a_training_that_ends_its_trial(
    outcome: TrialState, crashes: int, observed: bool, state: TrialState, reason: EndReason, says: str
) -> None:
    job, trial = begun()
    ending = Ending.model_validate({"outcome": outcome, "detail": "OOM"})
    job, trial = life.ended_by_training(job, trial, ending, MOMENT, crashes=crashes, observed=observed, retries=3)
    assert (trial.state, trial.end_reason, trial.ended_event) == (state, reason, 2)
    assert says in (trial.message or "")
    assert (trial.message or "").endswith(" (OOM)")


@pytest.mark.parametrize(
    ("crashes", "reason", "says"),
    [
        (0, EndReason.ENDED_EARLY, "by a rule of its own, before its target and its last epoch (EarlyStopping)"),
        (2, EndReason.CRASHED, "16 ended early or crashed 3 times and is not tried again (EarlyStopping)"),
    ],
)
def test_a_training_that_ends_by_a_rule_of_its_own(crashes: int, reason: EndReason, says: str) -> None:
    job, trial = begun()
    ending = Ending(ended_early=True, detail="EarlyStopping")
    _, trial = life.ended_by_training(job, trial, ending, MOMENT, crashes=crashes, retries=3)
    assert trial.end_reason is reason
    assert says in (trial.message or "")


def test_a_withdrawn_exploration_is_owed_again() -> None:
    job = InMemoryJob(JOB.registration)
    rng = np.random.default_rng(1)
    first = job.suggest(rng)
    for _ in range(5):
        job.end(first.trial_number, Ending(outcome=TrialState.WITHDRAWN), retries=3)
        again = job.suggest(rng)
        assert (again.batch_size, again.origin, again.trial_number) == (
            first.batch_size,
            first.origin,
            first.trial_number + 1,
        )
        first = again


def test_a_preempted_trial_has_a_day_to_come_back() -> None:
    job, trial = begun()
    after, trial = life.ended_by_training(job, trial, Ending(outcome=TrialState.SUSPENDED), MOMENT, retries=3)
    assert (after, trial.state, trial.ended_event) == (job, TrialState.SUSPENDED, None)
    assert trial.lease_expires_at == NOW + timedelta(days=1)
    assert life.revived(trial).state is TrialState.RUNNING


@pytest.mark.parametrize(("before", "after"), list(product(TrialState, TrialState)))
def test_an_illegal_transition_raises_and_leaves_all_as_it_was(before: TrialState, after: TrialState) -> None:
    job, trial = begun()
    trial = replace(trial, state=before)
    if after in TRANSITIONS[before]:
        _, moved = life.ended(job, trial, after, EndReason.CRASHED, "", MOMENT)
        assert moved.state is after
        return
    kept = replace(job), replace(trial)
    with pytest.raises(IllegalTransitionError, match=f"{before} cannot become {after}"):
        life.ended(job, trial, after, EndReason.CRASHED, "", MOMENT)
    assert (job, trial) == kept


OUTCOMES = {"crash": TrialState.FAILED, "memory": TrialState.INFEASIBLE, "suspend": TrialState.SUSPENDED}


@given(st.lists(st.sampled_from(["suggest", "report", "reach", "crash", "memory", "suspend"]), max_size=40), st.data())
@settings(deadline=None)
def test_a_job_in_memory_remembers_what_a_replay_of_its_trials_yields(steps: list[str], data: st.DataObject) -> None:
    policy = data.draw(st.sampled_from(OWN_POLICIES))
    config = make_job((8, 16, 32), 16, num_pruning_rounds=1, policy=policy)
    job, rng, lived = InMemoryJob(config), np.random.default_rng(1), dict[int, TrialRecord]()
    for step in steps:
        open_trials = [number for number, trial in lived.items() if trial.state in ALIVE]
        if step == "suggest" or not open_trials:
            try:
                trial = job.suggest(rng)
            except NoSurvivorError:
                break
        else:
            number = data.draw(st.sampled_from(open_trials))
            before = lived[number]
            if step in {"report", "reach"}:
                epoch = before.epoch + 1
                trial, _ = job.report(number, Report(epoch, 10 * epoch, epoch, float(step == "reach")))
            else:
                outcomes = {
                    "crash": TrialState.FAILED,
                    "memory": TrialState.INFEASIBLE,
                    "suspend": TrialState.SUSPENDED,
                }
                ending = Ending.model_validate({"outcome": outcomes[step]})
                trial = job.end(number, ending, retries=3)
        lived[trial.trial_number] = trial
        replayed = InMemoryJob(config, lived.values(), job.state.survivors)
        assert replayed.history == job.history
        assert replayed.state == replace(job.state, folded_event=replayed.state.folded_event)
        assert replay(config, lived.values(), job.state.survivors).arms == job.history.arms


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
    first_cost_j=numbers(),
    cost_deviations_j2=st.none() | numbers(),
    epoch_bound=st.none() | st.integers(1, 1000),
    epoch_bound_reason=st.none() | TEXTS,
    idempotency_key=st.none() | st.just("key"),
    owner=st.none() | st.just("0123456789abcdef"),
    power_limit_w=st.none() | st.floats(1, 1e3),
    power_limits=st.none() | st.integers(1, 256),
)


def unreported(trial: TrialRecord) -> TrialRecord:
    reported = replace(trial, metric=None, report_count=0, cost_deviations_j2=None)
    return replace(reported, time_s=0.0, energy_j=0.0, epoch=0.0, first_epoch=0.0, first_cost_j=0.0)


def test_a_trial_s_fields_are_its_columns() -> None:
    names = [field.name for field in fields(TrialRecord)]
    assert sorted(names) == sorted(trials.c.keys())
    shown = set(TrialView.model_fields) | set(TrialExport.model_fields)
    # The job is named elsewhere; a client's key means nothing to others.
    assert set(names) - shown == {"job_id", "idempotency_key"}


@given(RECORDS, st.booleans())
@settings(max_examples=25, deadline=None)
def test_a_record_is_the_same_after_its_row_and_after_an_export(record: TrialRecord, reported: bool) -> None:
    record = record if reported else unreported(record)
    row = TRIAL.of(record)
    assert (row["time_s"] is None) is (not reported)
    assert trial_from(row) == record
    kept = {name: value for name, value in TrialExport(**row) if name in TRIAL.names}
    assert trial_from({"job_id": record.job_id, **kept}) == replace(record, idempotency_key=None, owner=None)


def test_a_record_is_the_same_after_the_database(database_url: str) -> None:
    registration = JobRegistration(
        job_id="round-trip",
        job_id_prefix="r",
        batch_sizes=(8, 16),
        default_batch_size=16,
        max_power=100,
        number_of_gpus=1,
        gpu_model="V100",
    )
    store = Store(open_database(database_url, patience_s=60.0), patience_s=60.0)

    @given(RECORDS, st.booleans())
    @settings(max_examples=10, deadline=None)
    def check(record: TrialRecord, reported: bool) -> None:
        record = record if reported else unreported(record)
        runner.run(store.write(lambda transaction: transaction.delete_job("round-trip")))
        runner.run(store.write(lambda transaction: transaction.insert_job(registration, NOW)))
        runner.run(store.write(lambda transaction: transaction.insert_trials([record])))
        assert runner.run(store.read(lambda transaction: transaction.all_trials("round-trip"))) == [record]

    with asyncio.Runner() as runner:
        try:
            runner.run(store.migrate())
            check()
        finally:
            runner.run(store.close())
