"""What refuses a request: contradictions, and the owners of jobs and trials, as functions that raise.

A job belongs to the token that registered it, and a trial to the token that it was dispatched to. A job that was
registered without a token, or that is shared, is open to every token that may report. Its trials still belong each to
its own token. Administrators may do everything, and the log says in whose place.
"""

from __future__ import annotations

from bso_server.core.access import Caller
from bso_server.core.job import is_stale
from bso_server.core.model import TrialRecord
from bso_server.core.policy import installed
from bso_server.errors import (
    ForbiddenError,
    InvalidJobError,
    InvalidReportError,
    JobConflictError,
    OtherRegistrationError,
    StaleLeaseError,
)
from bso_server.storage.rows import StoredJob
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import CreatedJob, GpuConfig, TrialId

# Runs of one batch size that a window holds at most.
_LARGEST_WINDOW = 1000


def refuse_difference(existing: CreatedJob, asked: CreatedJob) -> None:
    """Raise `JobConflictError` when a job is registered again that differs from the one with its id."""
    before, after = (job.model_dump(exclude={"fingerprint", "registration_id"}) for job in (existing, asked))
    differences = [f"{name} is {before[name]!r}, not {after[name]!r}" for name in before if before[name] != after[name]]
    if differences:
        raise JobConflictError(
            f"job {existing.job_id!r} exists with another configuration: {'; '.join(differences)}. "
            f"Use another job_id, or delete the job to start over: bso-server jobs delete {existing.job_id}",
            field="job_id",
        )


def refuse_folder_name(job: CreatedJob) -> None:
    """Raise `InvalidJobError` for a new job whose id no URL can hold."""
    for field, name in (("job_id_prefix", job.job_id_prefix), ("job_id", job.job_id)):
        if name in {".", ".."}:
            raise InvalidJobError(
                f"{name!r} names a folder wherever it stands in a URL or path: use another", field=field
            )


def refuse_unserved(job: CreatedJob) -> None:
    """Raise `InvalidJobError` for a new job that its policy could not serve, `PolicyNotInstalledError` without one.

    A job that names no policy, as a Zeus client's, is not refused but amended.
    """
    policy = installed(job.policy)
    if "policy" in job.model_fields_set:
        policy.check(job)


def refuse_long_window(job: CreatedJob) -> None:
    """Raise `InvalidJobError` for a new job with a window that no decision can read in passing.

    Each suggestion reads the windows of all sizes, and writes that of the size whose run has ended: 25 kB at the limit.
    A mean over more runs of one size says hardly more, and one over all of them needs no window.
    """
    if job.window_size > _LARGEST_WINDOW:
        raise InvalidJobError(
            f"a window of {job.window_size} runs is more than the {_LARGEST_WINDOW} that are kept in hand for each "
            "batch size: make window_size smaller, or 0, which counts all runs",
            field="window_size",
        )


def refuse_other_size(trial: TrialRecord, batch_size: int) -> None:
    """Raise `InvalidReportError` for what names another batch size than the trial's."""
    if trial.batch_size != batch_size:
        raise InvalidReportError(
            f"trial {trial.trial_number} of job {trial.job_id!r} has batch size {trial.batch_size}, not {batch_size}",
            field="batch_size",
        )


def refuse_other_registration(job: StoredJob, sent: TrialId) -> None:
    """Raise `OtherRegistrationError` for what was sent of a trial of an earlier job that had this job's id."""
    registered = job.registration.registration_id
    if registered is not None and sent.registration_id not in (None, registered):
        raise OtherRegistrationError(
            f"job {job.job_id!r} was deleted and registered anew since trial {sent.trial_number} began, so what was "
            "measured then does not count for the trial that has this number now",
            field="registration_id",
        )


def refuse_stale_run(trial: TrialRecord, sent: TrialId) -> None:
    """Raise `StaleLeaseError` for what a run of the training sends from which another one has taken the trial over."""
    if is_stale(trial, sent.lease_epoch):
        raise StaleLeaseError(
            f"trial {trial.trial_number} of job {trial.job_id!r} goes on in another run of its training, which has "
            f"resumed from a checkpoint (lease epoch {trial.lease_epoch}, not {sent.lease_epoch})",
            field="lease_epoch",
        )


def refuse_other_gpus(job: StoredJob, gpus: GpuConfig) -> None:
    """Raise `InvalidReportError` for power limits that were measured on other GPUs than the job's."""
    registered = job.registration.gpus
    if gpus != registered:
        raise InvalidReportError(
            f"job {job.job_id!r} runs on {_described(registered)}, and the power limits are of {_described(gpus)}",
            field="gpus",
        )


def _described(gpus: GpuConfig) -> str:
    return f"{gpus.number_of_gpus} x {gpus.gpu_model} of {gpus.max_power:g} W together"


def require_job(transaction: Transaction, job: StoredJob, caller: Caller) -> str | None:
    """The token in whose place an administrator uses a job; None where it is open to the caller.

    Raises:
        ForbiddenError: It is another token's, and the caller is no administrator.
    """
    owner = None if job.shared else job.owner
    if owner is None or caller.owns(owner):
        return None
    if not caller.is_admin:
        raise ForbiddenError(
            f"job {job.job_id!r} belongs to {_token_name(transaction, owner)}, and token {caller.token_id} can neither "
            "register it nor run its trials: use another job_id, or have an administrator share the job "
            f"(bso-server jobs share {job.job_id}) or hand over all that is that token's (bso-server token transfer "
            f"{owner} {caller.token_id})"
        )
    return owner


def require_trial(transaction: Transaction, job: StoredJob, trial: TrialRecord, caller: Caller) -> str | None:
    """The same for a trial; one that was dispatched to no token belongs to its job's."""
    owner = trial.owner or (None if job.shared else job.owner)
    if owner is None or caller.owns(owner):
        return None
    if not caller.is_admin:
        raise ForbiddenError(
            f"trial {trial.trial_number} of job {trial.job_id!r} belongs to {_token_name(transaction, owner)}, and "
            f"token {caller.token_id} can neither report on it, nor keep it alive, nor end it: use that token, or have "
            f"an administrator do it or hand over all that is that token's (bso-server token transfer {owner} "
            f"{caller.token_id})"
        )
    return owner


def log_replaced(transaction: Transaction, job_id: str, trial_number: int, caller: Caller, owner: str | None) -> None:
    """Have the log say that an administrator speaks of a trial in the place of its owner, if it does."""
    if owner is not None:
        transaction.log(
            "job %s trial %d: token %s, an administrator's, in the place of token %s",
            *(job_id, trial_number, caller.token_id, owner),
        )


def _token_name(transaction: Transaction, token_id: str) -> str:
    record = transaction.token(token_id)
    return f"token {token_id}" if record is None else f"token {token_id} ({record.name})"
