"""Jobs of thousands of runs, whose policy's memory no transaction can compute, on each kind of database."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bso_server.core.model import History, Suggestion, TrialRecord
from bso_server.core.policy import Memory, Policy, given
from bso_server.service.loading import known_job
from bso_server.storage.queries import latest_trials
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from tests.support.service import JobService, new_job
from zeus_plugins.protocol import CreatedJob, Origin, TrialState

pytestmark = pytest.mark.storage

RUNS = 60
# Longer than any step takes on a busy machine.
LONG_S = 120.0
AT = "2026-01-01T00:00:00+00:00"


class Slow:
    """A policy whose memory counts runs; after `hold`, learning them waits for `go`.

    While it waits, it must not hold a transaction: learning then raises in the loop's thread and in those of SQLite.
    """

    def __init__(self) -> None:
        self.learned = 0
        self.is_held = False
        self._has_begun, self._may_go = threading.Event(), threading.Event()
        self._loop = threading.current_thread()

        def after(memory: int, job: CreatedJob, trial: TrialRecord) -> int:  # noqa: ARG001 - the interface's
            if self.is_held:
                here = threading.current_thread()
                if here is self._loop or here.name.startswith("bso-"):
                    raise RuntimeError("a transaction computes the memory")
                self._has_begun.set()
                assert self._may_go.wait(LONG_S)
            self.learned += 1
            return memory + (trial.state is TrialState.COMPLETED)

        def suggest(history: History, rng: np.random.Generator) -> Suggestion:  # noqa: ARG001 - the interface's
            return Suggestion(history.job.default_batch_size, Origin.EXPLORATION, f"after {history.memory} runs")

        self.policy = Policy(version="1", suggest=suggest, memory=Memory(int, lambda _: 0, after))

    def hold(self) -> None:
        self.learned, self.is_held = 0, True

    async def begun(self, *waiting: asyncio.Task[Any]) -> None:
        """Wait until a computation waits, while none of these tasks may end."""
        async with asyncio.timeout(LONG_S):
            while not self._has_begun.is_set():
                assert not any(task.done() for task in waiting)
                await asyncio.sleep(0.01)

    def go(self) -> None:
        self.is_held = False
        self._may_go.set()


@pytest.fixture
async def slow() -> AsyncIterator[Slow]:
    slow = Slow()
    with given("slow", slow.policy):
        try:
            yield slow
        finally:
            slow.go()


async def long_job(store: Store, runs: int = RUNS) -> JobService:
    """Return a job with these completed runs, of which no memory is stored; all but the first are copies of it."""
    server = await new_job(store, policy="slow")
    await server.reach(await server.suggest())

    def fill(transaction: Transaction) -> None:
        (first,) = latest_trials(transaction, server.job_id, limit=1)
        copies = [
            replace(first, trial_number=n, idempotency_key=f"copy-{n}", started_event=2 * n - 1, ended_event=2 * n)
            for n in range(2, runs + 1)
        ]
        transaction.insert_trials(copies)
        stored = transaction.locked_job(server.job_id)
        assert stored is not None
        transaction.update_jobs([replace(stored, trial_count=runs, event_count=2 * runs)])
        arms = transaction.arms(server.job_id)
        arm = arms[first.batch_size]
        transaction.update_arms(server.job_id, [replace(arm, trials=runs)])
        transaction.forget_memory(server.job_id)

    await store.write(fill)
    return server


async def revise(server: JobService, **changes: Any) -> CreatedJob:
    known = await server.store.read(lambda transaction: known_job(transaction, server.job_id).registration)
    asked = CreatedJob.model_validate({**known.model_dump(), **changes, "revise": True})
    return (await server.service.register(asked))[0]


async def memory_of(server: JobService, slow: Slow) -> Any:
    stored = await server.store.read(Transaction.memory, server.job_id, slow.policy)
    return None if stored is None else stored.memory


async def test_revision_leaves_the_memory_to_the_next_decision(store: Store, slow: Slow) -> None:
    server = await long_job(store)
    slow.hold()
    assert (await revise(server, max_power=200.0)).max_power == 200.0
    assert slow.learned == 0
    slow.go()
    assert (await server.suggest()).reason == f"after {RUNS} runs"
    assert await memory_of(server, slow) == RUNS
    assert await server.differences() == []


@pytest.mark.usefixtures("slow")
async def test_discarded_run_leaves_no_trace_in_a_memory_computed_before(store: Store) -> None:
    server = await long_job(store)
    await server.show()
    await server.store.write(Transaction.forget_memory, server.job_id)
    await server.service.transact(server.service.commands.discard, server.job_id, RUNS)
    assert await server.differences() == []
