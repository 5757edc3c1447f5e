"""The decision on a job's next trial, in two steps: read its basis, then decide without the database.

So no lock is held, and no event loop waits, while a policy works. `Commands.begin_decided` saves the decision, unless
the job's row has changed since it was read. In each process, the requests on one job take turns.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

import numpy as np

from bso_server.core.model import Suggestion
from bso_server.errors import DatabaseUnavailableError
from bso_server.service.loading import LoadedJob, OpenTrials, Unsaved, load
from bso_server.service.savings import Learned, evidence_for, suggestion_for
from bso_server.storage.deadlines import waiting
from bso_server.storage.rows import StoredJob
from bso_server.storage.transaction import Transaction

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
