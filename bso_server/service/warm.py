"""Warm starts: a new job takes over the epochs that a job of the same training has learned on other GPUs.

The server decides once, at the registration, and stores what it found with the job. So a decision of the job, and its
replay, need no other job. Every token that registers jobs may read all jobs, so it may take from each of them.
"""

from __future__ import annotations

from bso_server.core.policy import find, learned_by
from bso_server.core.revisions import has_other_gpus
from bso_server.errors import InvalidJobError
from bso_server.service.loading import load_history
from bso_server.storage.rows import StoredJob
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import CreatedJob, Fingerprint, WarmStart

# Data may grow a little; epochs to the target depend on its length.
_SAMPLES_APART = 0.1

# Jobs of equal parameters that are compared, newest first.
_MOST_JOBS = 50


def warm_start_of(transaction: Transaction, job: CreatedJob) -> WarmStart | None:
    """Return what a new job takes over, or None.

    With ``"auto"``, the other job has the same training, target and policy, other GPUs, and the most runs that have
    reached the target. A job that the user names only needs the same metric and target.

    Raises:
        InvalidJobError: The named job does not exist, has another metric or target, or has learned no epochs.
    """
    memory = find(job.policy).memory
    if job.warm_start == "off" or (job.warm_start == "auto" and (memory is None or memory.learned is None)):
        return None
    if job.warm_start != "auto":
        return _from_named(transaction, job)
    own = job.fingerprint
    if own is None or None in (own.model, own.parameters, own.data, own.monitor) or job.target_metric is None:
        return None
    alike = [
        each
        for each in transaction.jobs_with_parameters(job.policy, own.parameters or "", limit=_MOST_JOBS)
        if has_other_gpus(job, each.registration)
        and _difference(job, each.registration) is None
        and each.registration.fingerprint is not None
        and _is_same_training(own, each.registration.fingerprint)
    ]
    alike.sort(key=lambda each: sum(arm.reached for arm in transaction.arms(each.job_id).values()), reverse=True)
    found = (_learned(transaction, each) for each in alike)
    return next((each for each in found if each is not None), None)


def _from_named(transaction: Transaction, job: CreatedJob) -> WarmStart:
    named = transaction.job(job.warm_start)
    if named is None:
        raise InvalidJobError(
            f"there is no job {job.warm_start!r} to start warm from: name a job of this server, or leave warm_start out",
            field="warm_start",
        )
    difference = _difference(job, named.registration)
    if difference is not None:
        raise InvalidJobError(
            f"job {job.warm_start!r} has {difference}, so its epochs say nothing about this job: name another one, or "
            "leave warm_start out",
            field="warm_start",
        )
    found = _learned(transaction, named) if named.registration.policy == job.policy else None
    if found is None:
        raise InvalidJobError(
            f"job {job.warm_start!r} of policy {named.registration.policy!r} has learned no epochs that policy "
            f"{job.policy!r} could take over: name a job of this policy that has reached its target, or leave warm_start "
            "out",
            field="warm_start",
        )
    # The user has compared the trainings.
    return found.model_copy(update={"optimizer": None})


def _difference(job: CreatedJob, other: CreatedJob) -> str | None:
    """Return how the metric or target of another job differs, in words; None if both are alike."""
    mine, theirs = (None if each.fingerprint is None else each.fingerprint.monitor for each in (job, other))
    if None not in (mine, theirs) and mine != theirs:
        return f"the metric {theirs}, not {mine}"
    for name in ("target_metric", "higher_is_better_metric", "confirm"):
        own, before = getattr(job, name), getattr(other, name)
        if own != before or own is None:
            return f"{name}={before!r}, not {own!r}"
    return None


def _is_same_training(own: Fingerprint, other: Fingerprint) -> bool:
    """Return True if two trainings have the same model, optimizer and data. Some know their optimizer only later."""
    if any(getattr(own, name) != getattr(other, name) for name in ("model", "parameters", "data", "monitor")):
        return False
    if None not in (own.optimizer, other.optimizer) and own.optimizer != other.optimizer:
        return False
    mine, theirs = own.samples, other.samples
    return mine is None or theirs is None or abs(mine - theirs) <= _SAMPLES_APART * theirs


def _learned(transaction: Transaction, job: StoredJob) -> WarmStart | None:
    found, known = learned_by(load_history(transaction, job)), job.registration.fingerprint
    return found and found.model_copy(update={"optimizer": None if known is None else known.optimizer})
