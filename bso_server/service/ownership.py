"""The owners of jobs and trials: each belongs to the token that registered it, or that it was dispatched to.

A job that was registered without a token, or that is shared, is open to every token that may report. Its trials still
belong each to its own token. Administrators may do everything, and the log says in whose place.
"""

from __future__ import annotations

from bso_server.core.access import Caller
from bso_server.core.model import TrialRecord
from bso_server.errors import ForbiddenError
from bso_server.storage.rows import StoredJob
from bso_server.storage.transaction import Transaction


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
            f"job {job.job_id!r} belongs to {_described(transaction, owner)}, and token {caller.token_id} can neither "
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
            f"trial {trial.trial_number} of job {trial.job_id!r} belongs to {_described(transaction, owner)}, and "
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


def _described(transaction: Transaction, token_id: str) -> str:
    record = transaction.token(token_id)
    return f"token {token_id}" if record is None else f"token {token_id} ({record.name})"
