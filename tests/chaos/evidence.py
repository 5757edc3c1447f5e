"""Comparison of the acknowledgements of the chaos test's clients with the database."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bso_server.core.model import OBSERVED, TrialKey, TrialRecord
from bso_server.service.health import differences
from bso_server.storage.queries import epochs_between
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import ALIVE, EndReason, TrialState

Acknowledgement = dict[str, Any]

# Possible reasons of each state; None: the trial has not ended.
REASONS: dict[TrialState, set[EndReason | None]] = {
    TrialState.RUNNING: {None},
    TrialState.COMPLETED: {EndReason.TARGET_REACHED},
    TrialState.EARLY_STOPPED: {EndReason.COST_BOUND_CROSSED},
    TrialState.EXHAUSTED: {EndReason.MAX_EPOCHS_REACHED},
    TrialState.FAILED: {EndReason.CRASHED},
    TrialState.INFEASIBLE: {EndReason.CRASHED, EndReason.OUT_OF_MEMORY},
    TrialState.SUSPENDED: {EndReason.PREEMPTED},
    TrialState.ABANDONED: {EndReason.LEASE_EXPIRED},
}
# Possible states of a trial that its client ended in this way and never resumed.
OUTCOMES = {
    "failed": {TrialState.FAILED, TrialState.INFEASIBLE},
    "infeasible": {TrialState.INFEASIBLE},
    "suspended": {TrialState.SUSPENDED, TrialState.ABANDONED},
}


def read_logs(logs: Iterable[Path]) -> list[Acknowledgement]:
    """Return all acknowledgements of each client in order. A line that a SIGKILL cut off was never finished."""
    lines = (line for log in logs for line in log.read_text().splitlines(keepends=True))
    return [json.loads(line) for line in lines if line.endswith("\n")]


def check_numbers(acknowledged: Iterable[Acknowledgement]) -> None:
    """Assert that no two clients received the same trial."""
    dispatched = Counter(key_of(line) for line in acknowledged if line["kind"] == "dispatched")
    assert [key for key, times in dispatched.items() if times > 1] == []


def check_job(transaction: Transaction, job_id: str, acknowledged: Iterable[Acknowledgement]) -> None:
    """Assert that a job's rows are consistent and contain everything acknowledged."""
    job = transaction.job(job_id)
    assert job is not None
    trials = transaction.all_trials(job_id)
    assert [trial.trial_number for trial in trials] == list(range(1, job.trial_count + 1))
    for trial in trials:
        assert trial.end_reason in REASONS[trial.state], trial
        assert (trial.ended_event is None) == (trial.ended_at is None) == (trial.state in ALIVE), trial
        assert (trial.lease_expires_at is not None) == (trial.state in ALIVE), trial
        assert trial.state not in OBSERVED or trial.report_count > 0, trial
    # No two events of a job have the same number.
    events = [event for trial in trials for event in (trial.started_event, trial.ended_event) if event is not None]
    assert len(set(events)) == len(events)
    assert max(events, default=0) <= job.event_count
    # The caches behind decisions equal a replay of all trials.
    assert differences(transaction, job_id) == []
    about_trials = [line for line in acknowledged if line["job_id"] == job_id and line["kind"] != "registered"]
    _check_acknowledged(transaction, job_id, trials, about_trials)


def _check_acknowledged(
    transaction: Transaction, job_id: str, trials: Iterable[TrialRecord], acknowledged: Iterable[Acknowledgement]
) -> None:
    by_key = {trial.key: trial for trial in trials}
    going_on: dict[TrialKey, list[tuple[float, ...]]] = {key: [] for key in by_key}
    for epoch in epochs_between(transaction, job_id, 1, len(by_key)):
        going_on[epoch.job_id, epoch.trial_number].append((epoch.time_s, epoch.energy_j, epoch.epoch, epoch.metric))
    for totals in going_on.values():
        assert totals == sorted(set(totals)), "a report is there twice"
    for line in acknowledged:
        trial = by_key[key_of(line)]
        assert trial.batch_size == line["batch_size"]
        if line["kind"] == "ended" and not line["comes_back"]:
            assert trial.state in OUTCOMES[line["outcome"]], (trial, line)
        elif line["kind"] == "reported":
            _check_report(trial, going_on[trial.key], line)


def _check_report(record: TrialRecord, going_on: list[tuple[float, ...]], line: Acknowledgement) -> None:
    answer = line["answer"]
    reported = tuple(line["result"][name] for name in ("time", "energy", "current_epoch", "metric"))
    if not answer["stop_train"]:
        assert reported in going_on, (record, line)
        assert record.epoch >= line["result"]["current_epoch"], (record, line)
        return
    assert (record.time_s, record.energy_j, record.epoch, record.metric) == reported, (record, line)
    assert (record.state is TrialState.COMPLETED) == answer["converged"], (record, line)
    assert (record.end_reason, record.message) == (answer["reason"], answer["message"]), (record, line)


def key_of(line: Acknowledgement) -> TrialKey:
    """Return the key of the trial in an acknowledgement."""
    return line["job_id"], line["trial_number"]
