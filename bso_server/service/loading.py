"""Loading of jobs and trials, with errors for unknown ids, and of the history that decisions rest on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from bso_server.core.access import Caller
from bso_server.core.job import replay
from bso_server.core.model import Arm, History, TrialRecord, arms_after, is_counted_exploration
from bso_server.core.policy import expectations, find, memory_after
from bso_server.errors import UnknownJobError, UnknownTrialError
from bso_server.service.refusals import log_replaced, refuse_message
from bso_server.storage import queries
from bso_server.storage.rows import StoredJob, StoredMemory
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import ALIVE, Heartbeat, TrialId, TrialState


def known_job(transaction: Transaction, job_id: str) -> StoredJob:
    """Return the job's row, or raise `UnknownJobError`."""
    job = transaction.job(job_id)
    if job is None:
        raise UnknownJobError(job_id)
    return job


def known_trial(transaction: Transaction, job_id: str, trial_number: int) -> tuple[StoredJob, TrialRecord]:
    """Return the rows of a job and its trial, or raise `UnknownJobError` or `UnknownTrialError`."""
    job = known_job(transaction, job_id)
    trial = queries.trial(transaction, job_id, trial_number)
    if trial is None:
        raise UnknownTrialError(job_id, trial_number)
    return job, trial


def locked_job(transaction: Transaction, job_id: str) -> StoredJob:
    """Lock the job's row against other writers and return it, or raise `UnknownJobError`."""
    job = transaction.locked_job(job_id)
    if job is None:
        raise UnknownJobError(job_id)
    return job


def locked_trial(transaction: Transaction, trial_id: TrialId, caller: Caller) -> tuple[StoredJob, TrialRecord]:
    """Lock a trial's row against other writers; return its job and the trial, or raise the errors of `Commands`."""
    key = trial_id.job_id, trial_id.trial_number
    found = transaction.locked_trials([key])
    if key not in found:
        raise UnknownTrialError(*key)
    job, trial = found[key]
    owner = refuse_message(transaction, job, trial, trial_id, caller)
    # A heartbeat of a running trial is not logged.
    if not (isinstance(trial_id, Heartbeat) and trial.state is TrialState.RUNNING):
        log_replaced(transaction, *trial.key, caller, owner)
    return job, trial


@dataclass(slots=True)
class Unsaved:
    """Arms, and the policy's memory if it has changed, after ends of trials that the database's arms lack."""

    arms: dict[int, Arm]
    memory: StoredMemory | None

    def save(self, transaction: Transaction, job: StoredJob) -> None:
        """Save the arms and the memory of a locked job."""
        transaction.update_arms(job.job_id, self.arms.values())
        if self.memory is not None:
            transaction.save_memory(self.memory, find(job.registration.policy))


class OpenTrials(NamedTuple):
    """The trials that are not yet in a job's arms or in the policy's memory, and the memory in the database, if any."""

    trials: Sequence[TrialRecord]
    memory: StoredMemory | None


def open_trials(transaction: Transaction, job: StoredJob) -> OpenTrials:
    """Return the trials that the next decision needs one by one; the job is locked, or the transaction a snapshot."""
    policy, memory, since = find(job.registration.policy), None, job.folded_event
    if policy.memory is not None:
        memory = transaction.memory(job.job_id, policy)
        # The memory may be older than the arms: another version of the policy made it, or needed none.
        since = min(since, 0 if memory is None else memory.folded_event)
    return OpenTrials(transaction.open_trials(job.job_id, since, with_explorations=job.needs_explorations), memory)


def best_size(transaction: Transaction, job: StoredJob) -> int | None:
    """Return the best batch size; None before a run has reached the target, and if the policy is not installed."""
    return expectations(load_history(transaction, job)).best


@dataclass(frozen=True, slots=True)
class LoadedJob:
    """A job as it was read. Its arms include every end of a trial; its memory may lack some.

    Attributes:
        job: The job's row.
        arms: Arm per batch size, ascending.
        changed: Arms that the database lacks in this form, because they include later ends.
        found: The open trials, and the memory in the database.
    """

    job: StoredJob
    arms: dict[int, Arm]
    changed: dict[int, Arm]
    found: OpenTrials

    def history(self) -> tuple[History, Unsaved]:
        """Return the history that decisions rest on, and its part that is not saved yet, without the database."""
        job, found, unsaved, memory = self.job, self.found, Unsaved(dict(self.changed), None), None
        registration, policy = job.registration, find(job.registration.policy)
        known = found.memory
        if policy.memory is not None and known is None:
            known = StoredMemory(job.job_id, policy.version, 0, policy.begun_memory(registration))
        if known is not None:
            to_learn = _ended(found, known.folded_event)
            memory = memory_after(registration, known.memory, to_learn)
            if to_learn:
                unsaved.memory = StoredMemory(job.job_id, policy.version, job.event_count, memory)
        return job.history(
            self.arms,
            memory,
            lambda: filter(is_counted_exploration, found.trials),
            (trial for trial in found.trials if trial.state in ALIVE),
        ), unsaved


def load(transaction: Transaction, job: StoredJob, found: OpenTrials | None = None) -> LoadedJob:
    """Read the facts behind the history of a job; `found` is by `open_trials`."""
    found = found or open_trials(transaction, job)
    arms = transaction.arms(job.job_id)
    new = _ended(found, job.folded_event)
    changed = arms_after(job.registration, arms, new, bandit_entered_at=job.bandit_entered_at)
    return LoadedJob(job, arms | changed, changed, found)


def recomputed(transaction: Transaction, job: StoredJob, trials: Iterable[TrialRecord]) -> StoredJob:
    """Compute the caches of a locked job again from all its trials, and save them; return the job, which is not saved.

    The next decision computes the policy's memory, which takes too long for a transaction.
    """
    new = replay(job.registration, trials, job.survivors, learns=False)
    transaction.replace_arms(job.job_id, new.arms.values())
    transaction.forget_memory(job.job_id)
    return replace(job, folded_event=job.event_count, cheapest=new.cheapest, bandit_entered_at=new.bandit_entered_at)


def load_history(transaction: Transaction, job: StoredJob) -> History:
    """Return the history that decisions rest on."""
    return load(transaction, job).history()[0]


def _ended(found: OpenTrials, after: int) -> list[TrialRecord]:
    """Return the trials that ended after this event of the job, in order of their ends."""
    ended = [trial for trial in found.trials if (trial.ended_event or 0) > after]
    return sorted(ended, key=lambda trial: trial.ended_event or 0)
