"""The basis of decisions, as a transaction finds it."""

from __future__ import annotations

from functools import partial

from bso_server.core.access import Caller
from bso_server.core.history import Arm, History, arms_after
from bso_server.core.model import TrialRecord
from bso_server.errors import UnknownJobError, UnknownTrialError
from bso_server.service.ownership import log_replaced, require_trial
from bso_server.service.refusals import refuse_other_registration, refuse_other_size, refuse_stale_run
from bso_server.storage.rows import StoredJob
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import Heartbeat, TrialId, TrialState


def locked_job(transaction: Transaction, job_id: str) -> StoredJob:
    """The job's row, or `UnknownJobError`; other writers wait."""
    job = transaction.locked_job(job_id)
    if job is None:
        raise UnknownJobError(job_id)
    return job


def locked_trial(transaction: Transaction, trial_id: TrialId, caller: Caller) -> tuple[StoredJob, TrialRecord]:
    """The row of a trial of the caller's, or any for administrators, and its job's; other writers of the trial wait.

    Errors as of `Commands`.
    """
    key = trial_id.job_id, trial_id.trial_number
    found = transaction.locked_trials([key])
    if key not in found:
        raise UnknownTrialError(*key)
    job, trial = found[key]
    refuse_other_registration(job, trial_id)
    refuse_other_size(trial, trial_id.batch_size)
    owner = require_trial(transaction, job, trial, caller)
    refuse_stale_run(trial, trial_id)
    # Of heartbeats the first one tells enough.
    if not (isinstance(trial_id, Heartbeat) and trial.state is TrialState.RUNNING):
        log_replaced(transaction, *trial.key, caller, owner)
    return job, trial


def load_history(transaction: Transaction, job: StoredJob) -> tuple[History, dict[int, Arm]]:
    """The summary that decisions rest on, and the arms in it that are newer than those in the database."""
    job_id = job.job_id
    arms = transaction.arms(job_id)
    ended = transaction.ended_after(job_id, job.folded_event)
    changed = arms_after(job.registration, arms, ended, bandit_entered_at=job.bandit_entered_at)
    explorations, in_flight = partial(transaction.counted_explorations, job_id), partial(transaction.in_flight, job_id)
    return job.history(arms | changed, explorations, in_flight), changed
