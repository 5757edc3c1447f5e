"""Loading of jobs and trials, with errors for unknown ids, and of the history that decisions rest on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from bso_server.core.access import Caller
from bso_server.core.job import replay
from bso_server.core.model import Arm, History, TrialRecord, arms_after, is_counted_exploration
from bso_server.core.policy import find, memory_after
from bso_server.errors import ComputeFirstError, UnknownJobError, UnknownTrialError
from bso_server.service.refusals import log_replaced, refuse_message
from bso_server.storage import queries
from bso_server.storage.rows import StoredJob, StoredMemory
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import ALIVE, Heartbeat, TrialId, TrialState

# Events of a job after those in its policy's memory that a transaction itself learns, within some milliseconds. More of
# them would hold locks, and a thread or the event loop, for seconds.
_MOST_LEARNED = 100


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
    """The trials that are not yet in a job's arms or in the policy's memory, and the memory, if the policy has one."""

    trials: Sequence[TrialRecord]
    memory: StoredMemory | None


def open_trials(transaction: Transaction, job: StoredJob) -> OpenTrials:
    """Return the trials that the next decision needs one by one; the job is locked, or the transaction a snapshot.

    Raises:
        ComputeFirstError: The policy's memory lacks too many events.
    """
    policy, memory, since = find(job.registration.policy), None, job.folded_event
    if policy.memory is not None:
        memory = _latest_memory(transaction, job)
        if job.event_count - memory.folded_event > _MOST_LEARNED:
            message = f"the runs of job {job.job_id!r} are being summarised: send the request again in some seconds"
            raise ComputeFirstError(message, key=job.job_id, read=partial(_read_to_learn, job.job_id))
        # The memory may be older than the arms: another version of the policy made it, or needed none.
        since = min(since, memory.folded_event)
    return OpenTrials(transaction.open_trials(job.job_id, since, with_explorations=job.needs_explorations), memory)


def _latest_memory(transaction: Transaction, job: StoredJob) -> StoredMemory:
    """Return the memory in the database, or a new one."""
    policy = find(job.registration.policy)
    return transaction.memory(job.job_id, policy) or StoredMemory(
        job.job_id, policy.version, 0, policy.begun_memory(job.registration)
    )


def _read_to_learn(job_id: str, transaction: Transaction) -> Callable[[], Callable[[Transaction], None]]:
    """Read the events that a job's memory lacks; return a function that learns them.

    That function returns another one, which saves the memory.
    """
    job = known_job(transaction, job_id)
    memory = _latest_memory(transaction, job)
    ended = _ended(transaction.open_trials(job_id, memory.folded_event, with_explorations=False), memory.folded_event)

    def learn() -> Callable[[Transaction], None]:
        after = memory_after(job.registration, memory.memory, ended)
        return partial(_save_unless_outdated, job, replace(memory, folded_event=job.event_count, memory=after))

    return learn


def _save_unless_outdated(job: StoredJob, memory: StoredMemory, transaction: Transaction) -> None:
    """Save a memory that follows from the job as it was read."""
    policy = find(job.registration.policy)
    # A revision before `_read_to_learn` may have given the job a policy without a memory.
    if is_unchanged(transaction, job) and policy.memory is not None:
        transaction.save_memory(memory, policy)


def is_unchanged(transaction: Transaction, job: StoredJob) -> bool:
    """Lock a job; return True unless its past has changed since it was read."""
    now = transaction.locked_job(job.job_id)
    # A revision, a new target and a discarded trial change at least one of the two values.
    return now is not None and (now.registration, now.folded_event) == (job.registration, job.folded_event)


@dataclass(frozen=True, slots=True)
class LoadedJob:
    """A job as it was read. Its arms include every end of a trial; its memory may lack some.

    Attributes:
        job: The job's row.
        arms: Arm per batch size, ascending.
        changed: Arms that the database lacks in this form, because they include later ends.
        found: The open trials, and the memory.
    """

    job: StoredJob
    arms: dict[int, Arm]
    changed: dict[int, Arm]
    found: OpenTrials

    def history(self) -> tuple[History, Unsaved]:
        """Return the history that decisions rest on, and its part that is not saved yet, without the database."""
        job, found, unsaved, memory = self.job, self.found, Unsaved(dict(self.changed), None), None
        known = found.memory
        if known is not None:
            to_learn = _ended(found.trials, known.folded_event)
            memory = memory_after(job.registration, known.memory, to_learn)
            if to_learn:
                unsaved.memory = replace(known, folded_event=job.event_count, memory=memory)
        return job.history(
            self.arms,
            memory,
            lambda: filter(is_counted_exploration, found.trials),
            (trial for trial in found.trials if trial.state in ALIVE),
        ), unsaved


def load(transaction: Transaction, job: StoredJob, found: OpenTrials | None = None) -> LoadedJob:
    """Read the facts behind the history of a job; `found` is by `open_trials`. Raise as `open_trials`."""
    found = found or open_trials(transaction, job)
    arms = transaction.arms(job.job_id)
    new = _ended(found.trials, job.folded_event)
    changed = arms_after(job.registration, arms, new, bandit_entered_at=job.bandit_entered_at)
    return LoadedJob(job, arms | changed, changed, found)


def recomputed(transaction: Transaction, job: StoredJob, trials: Iterable[TrialRecord]) -> StoredJob:
    """Compute the caches of a locked job again from all its trials, and save them; return the job, which is not saved.

    The next request that needs the policy's memory computes it, which takes too long for a transaction.
    """
    new = replay(job.registration, trials, job.survivors, learns=False)
    transaction.replace_arms(job.job_id, new.arms.values())
    transaction.forget_memory(job.job_id)
    return replace(job, folded_event=job.event_count, cheapest=new.cheapest, bandit_entered_at=new.bandit_entered_at)


def load_history(transaction: Transaction, job: StoredJob) -> History:
    """Return the history that decisions rest on; raise as `open_trials`."""
    return load(transaction, job).history()[0]


def _ended(trials: Iterable[TrialRecord], after: int) -> list[TrialRecord]:
    """Return the trials that ended after this event of the job, in order of their ends."""
    ended = [trial for trial in trials if (trial.ended_event or 0) > after]
    return sorted(ended, key=lambda trial: trial.ended_event or 0)
