"""The basis of decisions, as a transaction finds it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bso_server.core.access import Caller
from bso_server.core.model import Arm, History, TrialRecord, arms_after, is_counted_exploration
from bso_server.core.policy import find, memory_after
from bso_server.errors import UnknownJobError, UnknownTrialError
from bso_server.service.refusals import (
    log_replaced,
    refuse_other_registration,
    refuse_other_size,
    refuse_stale_run,
    require_trial,
)
from bso_server.storage import queries
from bso_server.storage.rows import StoredJob, StoredMemory
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import ALIVE, Heartbeat, TrialId, TrialState


def known_job(transaction: Transaction, job_id: str) -> StoredJob:
    """The job's row, or `UnknownJobError`."""
    job = transaction.job(job_id)
    if job is None:
        raise UnknownJobError(job_id)
    return job


def known_trial(transaction: Transaction, job_id: str, trial_number: int) -> tuple[StoredJob, TrialRecord]:
    """The rows of a trial and of its job, or `UnknownJobError` or `UnknownTrialError`."""
    job = known_job(transaction, job_id)
    trial = queries.trial(transaction, job_id, trial_number)
    if trial is None:
        raise UnknownTrialError(job_id, trial_number)
    return job, trial


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


def generator_of(job: StoredJob) -> np.random.Generator:
    """The job's generator as the last decision has left it; with fresh entropy for a job without a seed."""
    rng = np.random.default_rng(job.registration.mab_seed)
    if job.rng_state is not None:
        rng.bit_generator.state = json.loads(job.rng_state)
    return rng


@dataclass(slots=True)
class Unsaved:
    """The consequences of ended trials that are not in the database yet: arms, and the policy's memory.

    `memory` is None where there is nothing new to remember.
    """

    arms: dict[int, Arm]
    memory: StoredMemory | None

    def save(self, transaction: Transaction, job: StoredJob) -> None:
        """Save it for a locked job."""
        transaction.update_arms(job.job_id, self.arms.values())
        if self.memory is not None:
            transaction.save_memory(self.memory, find(job.registration.policy))


@dataclass(frozen=True, slots=True)
class OpenTrials:
    """The trials that the next decision on a job rests on one by one; the others stand in its arms and its memory.

    `memory` is the policy's as the database has it; None where it has none.
    """

    trials: Sequence[TrialRecord]
    memory: StoredMemory | None


def open_trials(transaction: Transaction, job: StoredJob) -> OpenTrials:
    """See `OpenTrials`; the job is locked, or the transaction sees one moment."""
    policy, memory, since = find(job.registration.policy), None, job.folded_event
    if policy.memory is not None:
        memory = transaction.memory(job.job_id, policy)
        # It may be older than the arms: made by another version, or while the policy needed none.
        since = min(since, 0 if memory is None else memory.folded_event)
    return OpenTrials(transaction.open_trials(job.job_id, since, with_explorations=job.needs_explorations), memory)


def load_history(transaction: Transaction, job: StoredJob, found: OpenTrials | None = None) -> tuple[History, Unsaved]:
    """The summary that decisions rest on, and what of it is newer than in the database.

    `found` is what `open_trials` finds, where that is known already.
    """
    found = found or open_trials(transaction, job)
    registration, job_id = job.registration, job.job_id
    policy, known, arms = find(registration.policy), found.memory, transaction.arms(job_id)
    if policy.memory is not None and known is None:
        known = StoredMemory(job_id, policy.version, 0, policy.begun_memory(registration))
    ended = sorted(
        (trial for trial in found.trials if trial.ended_event is not None), key=lambda trial: trial.ended_event or 0
    )
    new = [trial for trial in ended if (trial.ended_event or 0) > job.folded_event]
    unsaved = Unsaved(arms_after(registration, arms, new, bandit_entered_at=job.bandit_entered_at), None)
    memory = None
    if known is not None:
        to_learn = [trial for trial in ended if (trial.ended_event or 0) > known.folded_event]
        memory = memory_after(registration, known.memory, to_learn)
        if to_learn:
            unsaved.memory = StoredMemory(job_id, policy.version, job.event_count, memory)
    return job.history(
        arms | unsaved.arms,
        memory,
        lambda: filter(is_counted_exploration, found.trials),
        (trial for trial in found.trials if trial.state in ALIVE),
    ), unsaved
