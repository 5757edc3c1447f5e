"""A job's next trial: the decision in two steps, and the answer to the request.

The first step reads the basis of the decision, the second decides without the database, so that no lock is held and no
event loop waits while a policy works. `Commands.begin_decided` saves the decision, unless the job's row has changed
since it was read. In each process, the requests on one job take turns.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

import numpy as np

from bso_server.core import policy
from bso_server.core.access import Caller
from bso_server.core.model import Suggestion, TrialRecord
from bso_server.core.occurrences import TrialStarted
from bso_server.errors import DatabaseUnavailableError, KeyConflictError
from bso_server.service.loading import LoadedJob, OpenTrials, Unsaved, load
from bso_server.service.refusals import require_trial
from bso_server.service.revisions import terms_of
from bso_server.service.savings import Learned, evidence_for, suggestion_for
from bso_server.storage.deadlines import waiting
from bso_server.storage.rows import StoredJob
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import FINAL, TrialDispatch

TRIES = 3
"""Number of decisions without the lock that may be outdated; the next decision is made under the lock."""


@dataclass(frozen=True, slots=True)
class Basis:
    """Basis of the decision on a job's next trial."""

    loaded: LoadedJob
    evidence: Learned


@dataclass(frozen=True, slots=True)
class Decided:
    """Decision on a job's next trial.

    Attributes:
        job: The job's row to save: `read` with the next state of the random generator.
        read: The job's row as it was read.
        suggestion: The batch size, and the reason.
        unsaved: Arms, with the new trial, and memory.
    """

    job: StoredJob
    read: StoredJob
    suggestion: Suggestion
    unsaved: Unsaved


def basis_of(transaction: Transaction, job: StoredJob, found: OpenTrials | None = None) -> Basis:
    """Read the basis of a decision; the job is locked, or the transaction a snapshot. `found` is from `open_trials`."""
    loaded = load(transaction, job, found)
    return Basis(loaded, evidence_for(transaction, job, loaded.arms))


def decide(basis: Basis) -> Decided:
    """Choose the batch size of the next trial; raise as `policy.suggest`."""
    job = basis.loaded.job
    history, unsaved = basis.loaded.history()
    rng = generator_of(job)
    drawn_from = rng.bit_generator.state
    suggestion = suggestion_for(history, rng, basis.evidence)
    unsaved.arms[suggestion.batch_size] = history.arms[suggestion.batch_size].after_dispatch()
    after = job
    if job.registration.mab_seed is not None and rng.bit_generator.state != drawn_from:
        after = replace(job, rng_state=json.dumps(rng.bit_generator.state))
    return Decided(after, job, suggestion, unsaved)


def generator_of(job: StoredJob) -> np.random.Generator:
    """Return the job's generator in the state after its last decision, or with fresh entropy without a seed."""
    rng = np.random.default_rng(job.registration.mab_seed)
    if job.rng_state is not None:
        rng.bit_generator.state = json.loads(job.rng_state)
    return rng


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


@asynccontextmanager
async def turn(queue: asyncio.Lock | asyncio.Semaphore, patience_s: float, others: str) -> AsyncIterator[None]:
    """Wait up to `patience_s` seconds for a turn, and keep later requests waiting until the block ends.

    Raises:
        DatabaseUnavailableError: The `others`, which came earlier, took too long.
    """
    with waiting(patience_s) as deadline:
        try:
            async with asyncio.timeout(deadline.left_s):
                await queue.acquire()
        except TimeoutError:
            raise DatabaseUnavailableError(f"{others} have not been answered") from None
    try:
        yield
    finally:
        queue.release()


class Turns:
    """One request at a time on each job; the others wait, up to `patience_s` seconds each."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, job_id: str) -> AbstractAsyncContextManager[None]:
        """Wait for the job's turn; raise as `turn`."""
        lock = self._locks.setdefault(job_id, asyncio.Lock())
        return turn(lock, self._patience_s, f"earlier requests on job {job_id}")
