"""What happens to the rows of a job and of its trial when the trial moves on; pure.

Each function takes the rows as they are and returns them as they become; saving them is the caller's business.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from bso_server.core.history import Cheapest, after_report
from bso_server.core.lease import LeasePolicy
from bso_server.core.model import Report, Suggestion, TrialRecord, check_transition
from bso_server.core.policy import Verdict
from bso_server.storage.rows import StoredJob, StoredTrial
from zeus_plugins.protocol import EndReason, TrialState


def dispatched(
    job: StoredJob, suggestion: Suggestion, now: datetime, leases: LeasePolicy, *, owner: str | None
) -> StoredTrial:
    """The job's next trial, running."""
    record = TrialRecord(
        trial_number=job.trial_count + 1,
        batch_size=suggestion.batch_size,
        state=TrialState.RUNNING,
        origin=suggestion.origin,
        started_event=job.event_count + 1,
        bound=suggestion.bound,
    )
    trial = StoredTrial(job.job.job_id, record, suggestion.reason, now, lease_expires_at=None, owner=owner)
    return renewed(trial, now, leases)


def renewed(trial: StoredTrial, now: datetime, leases: LeasePolicy) -> StoredTrial:
    """A running trial that was just heard of."""
    return replace(trial, lease_expires_at=_lease_end(trial.record, now, leases))


def _lease_end(record: TrialRecord, now: datetime, leases: LeasePolicy) -> datetime:
    lease_s = leases.lease_s(heartbeats=record.heartbeats, longest_gap_s=record.longest_gap_s)
    return now + timedelta(seconds=lease_s)


def revived(trial: StoredTrial) -> StoredTrial:
    """A suspended or abandoned trial whose training is back; a running one stays as it is.

    Raises:
        IllegalTransitionError: The trial has ended for good.
    """
    record = trial.record
    if record.state is TrialState.RUNNING:
        return trial
    check_transition(record.state, TrialState.RUNNING)
    running = replace(record, state=TrialState.RUNNING, ended_event=None, end_reason=None)
    return replace(trial, record=running, ended_at=None)


def beating(trial: StoredTrial, now: datetime, leases: LeasePolicy, *, regular: bool) -> StoredTrial:
    """A trial whose training sent a heartbeat, which more follow if it is `regular`."""
    trial = revived(trial)
    if regular:
        trial = replace(trial, record=replace(trial.record, heartbeats=True))
    return renewed(trial, now, leases)


def suspended(trial: StoredTrial, message: str, now: datetime, leases: LeasePolicy) -> StoredTrial:
    """A running trial whose training was preempted and may come back."""
    check_transition(trial.record.state, TrialState.SUSPENDED)
    record = replace(trial.record, state=TrialState.SUSPENDED, end_reason=EndReason.PREEMPTED, message=message)
    return replace(trial, record=record, lease_expires_at=now + timedelta(seconds=leases.suspended_lease_s))


def ended(
    job: StoredJob, trial: StoredTrial, state: TrialState, reason: EndReason, message: str, now: datetime
) -> tuple[StoredJob, StoredTrial]:
    """A trial that ends in `state`; the job's clock goes on, and it may have a new cheapest trial.

    Raises:
        IllegalTransitionError: The trial cannot become so.
    """
    check_transition(trial.record.state, state)
    event = job.event_count + 1
    record = replace(trial.record, state=state, end_reason=reason, message=message, ended_event=event)
    cheapest = Cheapest.of_both(job.cheapest, job.job, record)
    return (
        replace(job, event_count=event, cheapest=cheapest),
        replace(trial, record=record, ended_at=now, lease_expires_at=None),
    )


def reported(
    job: StoredJob,
    trial: StoredTrial,
    report: Report,
    verdict: Verdict,
    *,
    energy_source: str | None,
    now: datetime,
    leases: LeasePolicy,
) -> tuple[StoredJob, StoredTrial]:
    """A running trial that has reported, and goes on or ends as the verdict says."""
    record = replace(after_report(job.job, trial.record, report), message=verdict.message)
    trial = replace(
        trial,
        record=record,
        reported_at=now,
        energy_source=energy_source,
        lease_expires_at=_lease_end(record, now, leases),
    )
    if verdict.stop:
        return ended(job, trial, verdict.state, verdict.reason, verdict.message, now)
    return job, trial
