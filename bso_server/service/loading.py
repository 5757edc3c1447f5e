"""The basis of decisions, as a transaction finds it."""

from __future__ import annotations

from collections.abc import Sequence

from bso_server.core.history import Arm, History, arms_after
from bso_server.core.model import TrialRecord
from bso_server.errors import UnknownJobError, UnknownTrialError
from bso_server.service.refusals import refuse_other_size
from bso_server.storage.rows import StoredJob
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import PolicyName, TrialId


def locked_job(transaction: Transaction, job_id: str) -> StoredJob:
    """The job's row; other writers wait.

    Raises:
        UnknownJobError: No such job.
    """
    job = transaction.locked_job(job_id)
    if job is None:
        raise UnknownJobError(job_id)
    return job


def locked_trial(transaction: Transaction, trial_id: TrialId) -> tuple[StoredJob, TrialRecord]:
    """The trial's row, and its job's; other writers of the trial wait.

    Raises:
        UnknownTrialError: No such trial.
        InvalidReportError: It has another batch size.
    """
    key = trial_id.job_id, trial_id.trial_number
    found = transaction.locked_trials([key])
    if key not in found:
        raise UnknownTrialError(*key)
    job, trial = found[key]
    refuse_other_size(trial, trial_id.batch_size)
    return job, trial


def load_history(transaction: Transaction, job: StoredJob) -> tuple[History, dict[int, Arm]]:
    """The summary that decisions rest on, and the arms in it that are newer than those in the database."""
    job_id = job.job_id
    arms = transaction.arms(job_id)
    ended = transaction.ended_after(job_id, job.folded_event)
    changed = arms_after(job.config, arms, ended, bandit_entered_at=job.bandit_entered_at)
    explorations: Sequence[TrialRecord] = ()
    in_flight: Sequence[TrialRecord] = ()
    if job.config.policy is PolicyName.GP_VOI:
        in_flight = transaction.in_flight(job_id)
    elif job.survivors is None:
        # The bandit stage needs them no more.
        explorations = transaction.counted_explorations(job_id)
    history = History(
        job.config,
        arms | changed,
        tuple(explorations),
        job.cheapest,
        job.bandit_entered_at,
        job.survivors,
        tuple(in_flight),
    )
    return history, changed
