"""Answers to requests for a trial: a trial that the request has started before, or a new trial."""

from __future__ import annotations

from bso_server.core import policy
from bso_server.core.access import Caller
from bso_server.core.model import TrialRecord
from bso_server.core.occurrences import TrialStarted
from bso_server.errors import KeyConflictError
from bso_server.service.refusals import require_trial
from bso_server.service.revisions import terms_of
from bso_server.storage.rows import StoredJob
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import FINAL, TrialDispatch


def dispatch_of(job: StoredJob, trial: TrialRecord) -> TrialDispatch:
    """Return the answer to the request that has started a trial; `job` is by `terms_of`."""
    return TrialDispatch(
        job_id=trial.job_id,
        batch_size=trial.batch_size,
        trial_number=trial.trial_number,
        registration_id=job.registration.registration_id,
        # Always the first lease: the caller is the run to which the trial was dispatched.
        lease_epoch=1,
        dispatch_id=trial.idempotency_key,
        origin=trial.origin,
        reason=trial.reason,
        stop_rule=policy.stop_rule(job.registration, trial, job.min_cost_j),
        scaling=job.registration.scaling,
    )


def started_with(
    transaction: Transaction, job: StoredJob, idempotency_key: str | None, caller: Caller
) -> TrialDispatch | None:
    """Return the trial of a locked job that the request with this key started, or None.

    Raises:
        KeyConflictError: The trial has ended.
    """
    started = None if idempotency_key is None else transaction.trial_with_key(job.job_id, idempotency_key)
    if started is None:
        return None
    require_trial(transaction, job, started, caller)
    if started.state in FINAL:
        raise KeyConflictError(
            f"the request with this Idempotency-Key started trial {started.trial_number}, which has ended "
            f"({started.state}): make a new key for a new trial",
            field="Idempotency-Key",
        )
    return with_job(transaction, job, dispatch_of(terms_of(transaction, job, started), started))


def save_start(transaction: Transaction, job: StoredJob, trial: TrialRecord) -> TrialDispatch:
    """Save a new trial and its locked job; return the answer."""
    transaction.insert_trials([trial])
    transaction.update_jobs([job])
    transaction.tell(TrialStarted(job.registration.policy, trial.origin))
    transaction.log("job %s trial %d: batch size %d, %s", *trial.key, trial.batch_size, trial.reason)
    return dispatch_of(job, trial)


def with_job(transaction: Transaction, job: StoredJob, dispatch: TrialDispatch) -> TrialDispatch:
    """Return `dispatch`, which also says whether no run of its job counts."""
    is_first = job.cheapest is None and not any(arm.measured for arm in transaction.arms(job.job_id).values())
    return dispatch.model_copy(update={"is_first": is_first})
