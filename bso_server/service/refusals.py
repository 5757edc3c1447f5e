"""Checks that refuse a request: contradictions, and the owners of jobs and trials.

A job belongs to the token that registered it, and a trial to the token that it was dispatched to. A job that was
registered without a token, or that is shared, is open to every token with scope report; each of its trials still
belongs to its own token. Administrators may do everything, and the log names the owner in whose place they act.
"""

from __future__ import annotations

from bso_server.core.access import Caller
from bso_server.core.model import OBSERVED, TrialRecord
from bso_server.core.policy import find, installed
from bso_server.core.revisions import Changes
from bso_server.errors import (
    ForbiddenError,
    InvalidJobError,
    InvalidReportError,
    JobConflictError,
    OtherRegistrationError,
    StaleLeaseError,
    UnknownTrialError,
)
from bso_server.storage import queries
from bso_server.storage.rows import StoredJob
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import FIXED_TERMS, GP_VOI, CreatedJob, TrialId, terms_between

# Largest number of runs of one batch size in a window.
_LARGEST_WINDOW = 1000


def refuse_difference(transaction: Transaction, job: StoredJob, asked: CreatedJob) -> Changes:
    """Raise `JobConflictError` if a job that is registered again differs from the job with its id.

    Return the differences if the registration revises the job. A window that the policy has enlarged in the existing
    job is no difference. The direction of the metric can be revised while no run has been judged by it.
    """
    existing = job.registration
    if existing.window_size == asked.mab_num_explorations:
        asked = find(asked.policy).amended(asked)
    changes = terms_between(existing, asked)
    if "target_metric" in changes:
        before, after = changes["target_metric"]
        raise JobConflictError(
            f"job {existing.job_id!r} was begun with target {before:g}, and what it has learned holds for that alone: "
            f"for {after:g} use another job_id, such as {f'{existing.job_id}-{after:g}'!r}",
            field="job_id",
        )
    unchangeable = [name for name in changes if name in FIXED_TERMS]
    if "higher_is_better_metric" in unchangeable and (
        existing.target_metric is None
        or not any(tally.state in OBSERVED for tally in queries.tallies(transaction, job.job_id))
    ):
        unchangeable.remove("higher_is_better_metric")
    if changes and not (asked.revise and not unchangeable):
        named = {name: changes[name] for name in unchangeable} if asked.revise else changes
        differences = "; ".join(f"{name} is {before!r}, not {after!r}" for name, (before, after) in named.items())
        remedy = "" if unchangeable else f", or revise the job: bso-server jobs revise {existing.job_id}"
        raise JobConflictError(
            f"job {existing.job_id!r} exists with another configuration: {differences}. Use another job_id{remedy}",
            field="job_id",
        )
    return changes


def refuse_policy(job: CreatedJob) -> None:
    """Raise `InvalidJobError` for a job that its policy cannot serve, or `PolicyNotInstalledError`."""
    own = installed(job.policy)
    own.check(job)
    refuse_margins(job)


def refuse_margins(job: CreatedJob) -> None:
    """Raise `InvalidJobError` for margins that the job's policy would ignore."""
    if job.no_worse_than_default and not installed(job.policy).leaves_out:
        raise InvalidJobError(
            f"policy {job.policy!r} chooses sizes without regard to no_worse_than_default: use policy "
            f"{GP_VOI!r}, or leave the margins out and let the callbacks watch the metrics (watch=…)",
            field="no_worse_than_default",
        )


def refuse_folder_name(job: CreatedJob) -> None:
    """Raise `InvalidJobError` for a new job whose id cannot be part of a URL."""
    for field, name in (("job_id_prefix", job.job_id_prefix), ("job_id", job.job_id)):
        if name in {".", ".."}:
            raise InvalidJobError(
                f"{name!r} names a folder wherever it stands in a URL or path: use another", field=field
            )


def refuse_long_window(job: CreatedJob) -> None:
    """Raise `InvalidJobError` for a new job whose window is too long to be read for each suggestion.

    Each suggestion reads the windows of all sizes: 25 kB for a size at the limit. A mean over more runs is hardly more
    precise, and a mean over all runs needs no window. Policy `zeus` raises the window to `mab_num_explorations`.
    """
    if job.window_size > _LARGEST_WINDOW:
        field = "mab_num_explorations" if job.window_size == job.mab_num_explorations else "window_size"
        raise InvalidJobError(
            f"a window of {job.window_size} runs is more than the {_LARGEST_WINDOW} that the server reads for each "
            f"batch size: set {field} to {_LARGEST_WINDOW} or less, or window_size to 0, which counts all runs",
            field=field,
        )


def refuse_other_size(trial: TrialRecord, batch_size: int) -> None:
    """Raise `InvalidReportError` if a message names another batch size than the trial's."""
    if trial.batch_size != batch_size:
        raise InvalidReportError(
            f"trial {trial.trial_number} of job {trial.job_id!r} has batch size {trial.batch_size}, not {batch_size}",
            field="batch_size",
        )


def refuse_message(
    transaction: Transaction, job: StoredJob, trial: TrialRecord, sent: TrialId, caller: Caller
) -> str | None:
    """Check a message about a trial against the trial; return what `require_trial` returns.

    Raises:
        OtherRegistrationError: The message is about a trial of an earlier, deleted job with this job's id.
        UnknownTrialError: The message is about a lost trial, whose number was given again.
        InvalidReportError: The message names another batch size.
        ForbiddenError: See `require_trial`.
        StaleLeaseError: Another run of the training has taken the trial over.
    """
    registered = job.registration.registration_id
    if registered is not None and sent.registration_id not in (None, registered):
        raise OtherRegistrationError(
            f"job {job.job_id!r} was deleted and registered again after trial {sent.trial_number} began: its "
            "measurements do not count for the new trial of this number",
            field="registration_id",
        )
    if trial.idempotency_key is not None and sent.dispatch_id not in (None, trial.idempotency_key):
        lost = " of this training: the database was restored to a state before it, and another training has its number"
        raise UnknownTrialError(*trial.key, lost)
    refuse_other_size(trial, sent.batch_size)
    owner = require_trial(transaction, job, trial, caller)
    if sent.lease_epoch not in (None, trial.lease_epoch):
        raise StaleLeaseError(
            f"trial {trial.trial_number} of job {trial.job_id!r} was resumed from a checkpoint by another run of "
            f"its training (lease epoch {trial.lease_epoch}, not {sent.lease_epoch})",
            field="lease_epoch",
        )
    return owner


def require_job(transaction: Transaction, job: StoredJob, caller: Caller) -> str | None:
    """Return the owner if the caller may use the job only as an administrator, or None if any other right suffices.

    Raises:
        ForbiddenError: The job belongs to another token, and the caller is no administrator.
    """
    owner = None if job.shared else job.owner
    refused = "register it nor run its trials: use that token or another job_id"
    return _require(transaction, caller, owner, f"job {job.job_id!r}", refused)


def require_trial(transaction: Transaction, job: StoredJob, trial: TrialRecord, caller: Caller) -> str | None:
    """Check a trial as `require_job` checks a job; a trial without a token of its own belongs to its job's owner."""
    owner = trial.owner or (None if job.shared else job.owner)
    refused = "report on it, nor keep it alive, nor end it: use that token, or have an administrator do it"
    return _require(transaction, caller, owner, f"trial {trial.trial_number} of job {trial.job_id!r}", refused)


def _require(transaction: Transaction, caller: Caller, owner: str | None, what: str, refused: str) -> str | None:
    if owner is None or caller.owns(owner):
        return None
    if not caller.is_admin:
        record = transaction.token(owner)
        named = "" if record is None else f" ({record.name})"
        raise ForbiddenError(
            f"{what} belongs to token {owner}{named}, and token {caller.token_id} can neither {refused}, or have an "
            "administrator move the job (docs/tokens.md)"
        )
    return owner


def log_replaced(transaction: Transaction, job_id: str, trial_number: int, caller: Caller, owner: str | None) -> None:
    """Log that an administrator acts in the place of a trial's owner, unless `owner` is None."""
    if owner is not None:
        transaction.log(
            "job %s trial %d: token %s, an administrator's, in the place of token %s",
            *(job_id, trial_number, caller.token_id, owner),
        )
