"""Warm starts: a new job takes over the epochs that a job of the same training has learned on other GPUs.

The server decides once, at the registration, and stores what it took over with the job, so that decisions and replays
need no other job. Every token that registers jobs may read all jobs, so it may take from each of them.
"""

from __future__ import annotations

from bso_server.core.policy import learned_by
from bso_server.core.revisions import has_other_gpus, has_other_rule
from bso_server.errors import InvalidJobError
from bso_server.service.loading import load_history
from bso_server.storage.rows import StoredJob
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import CreatedJob, Fingerprint, WarmStart

# Data may grow a little. Epochs to the target depend on their length.
_SAMPLES_APART = 0.1

# Jobs with equal parameters that are compared, newest first.
_MOST_JOBS = 50

_SAME = ("model", "parameters", "data", "monitor")


def warm_start_of(transaction: Transaction, job: CreatedJob) -> WarmStart | None:
    """Return the warm start of a new job, or None.

    With ``"auto"``, the other job has the same training, target and policy, and other GPUs; of several jobs, the job
    with the most runs that reached the target. A job that the user names only needs the same metric, target and policy.

    Raises:
        InvalidJobError: The named job does not exist, has another metric, target or policy, or has learned no epochs.
    """
    if job.warm_start == "off":
        return None
    if job.warm_start != "auto":
        return _from_named(transaction, job)
    own = job.fingerprint
    if own is None or job.target_metric is None or None in (getattr(own, name) for name in _SAME):
        return None
    alike = [
        each
        for each in transaction.jobs_with_parameters(job.policy, own.parameters or "", limit=_MOST_JOBS)
        if has_other_gpus(job, each.registration)
        and not has_other_rule(job, each.registration)
        and _difference(job, each.registration) is None
        and _is_same_training(own, each.registration.fingerprint)
    ]
    alike.sort(key=lambda each: sum(arm.reached for arm in transaction.arms(each.job_id).values()), reverse=True)
    found = (_learned(transaction, each) for each in alike)
    return next((each for each in found if each is not None), None)


def _from_named(transaction: Transaction, job: CreatedJob) -> WarmStart:
    named = transaction.job(job.warm_start)
    why, found = "does not exist", None
    if named is not None:
        why = _difference(job, named.registration) or "has learned no epochs to its target"
        found = _learned(transaction, named)
    if found is None or why.startswith("has another"):
        raise InvalidJobError(
            f"this job cannot start warm from job {job.warm_start!r}, which {why}: name another, or omit warm_start",
            field="warm_start",
        )
    # No check of the optimizer follows, because the user has compared the trainings.
    return found.model_copy(update={"optimizer": None})


def _difference(job: CreatedJob, other: CreatedJob) -> str | None:
    """Return how the policy, metric or target of another job differs, in words; None if all are alike."""
    mine, theirs = (None if each.fingerprint is None else each.fingerprint.monitor for each in (job, other))
    if None not in (mine, theirs) and mine != theirs:
        return f"has another metric, {theirs} instead of {mine}"
    for name in ("policy", "target_metric", "higher_is_better_metric", "confirm"):
        own, before = getattr(job, name), getattr(other, name)
        if own != before:
            return f"has another {name}, {before!r} instead of {own!r}"
    return None


def _is_same_training(own: Fingerprint, other: Fingerprint | None) -> bool:
    """Return True if two trainings have the same model, optimizer and data. An unknown optimizer counts as equal."""
    if other is None or any(getattr(own, name) != getattr(other, name) for name in _SAME):
        return False
    if None not in (own.optimizer, other.optimizer) and own.optimizer != other.optimizer:
        return False
    mine, theirs = own.samples, other.samples
    return mine is None or theirs is None or abs(mine - theirs) <= _SAMPLES_APART * theirs


def _learned(transaction: Transaction, job: StoredJob) -> WarmStart | None:
    found, known = learned_by(load_history(transaction, job)), job.registration.fingerprint
    return found and found.model_copy(update={"optimizer": None if known is None else known.optimizer})
