"""Jobs of thousands of runs, of which no transaction can compute the policy's memory, on each kind of database."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bso_server.core.model import History, Suggestion, TrialRecord
from bso_server.core.policy import Memory, Policy
from bso_server.errors import ComputeFirstError
from bso_server.service import reading
from bso_server.service.loading import known_job
from bso_server.storage.database import open_sqlite_file
from bso_server.storage.queries import latest_trials
from bso_server.storage.sqlite import SyncStore
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from tests.support.policies import given
from tests.support.service import JobService, new_job, open_store, run_apart
from zeus_plugins.protocol import CreatedJob, Origin, TrialState

pytestmark = pytest.mark.storage

RUNS = 60
# More than SQLite has threads for reads.
VIEWS = 8
# Longer than any step takes on a busy machine.
LONG_S = 120.0


class Slow:
    """A policy with a memory that counts runs; after `hold`, learning them waits for `go`.

    While it waits, it must not hold a transaction: learning then raises in the threads of the loop and of SQLite.
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
async def slow(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Slow]:
    slow = Slow()
    monkeypatch.setattr("bso_server.storage.store._COMPUTING", LONG_S)
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


async def test_trials_continue_while_the_memory_is_computed_after_a_revision(store: Store, slow: Slow) -> None:
    server, other = await long_job(store), await new_job(store)
    open_trial, ending, others = await server.suggest(), await server.suggest(), await other.suggest()
    slow.hold()
    assert (await revise(server, max_power=200.0)).max_power == 200.0
    assert slow.learned == 0
    asking = asyncio.create_task(server.suggest())
    await slow.begun(asking)
    await server.beat(open_trial)
    await server.reach(ending)
    await other.beat(others)
    await other.reach(others)
    assert not asking.done()
    slow.go()
    # The run that has ended during the computation is added to its result.
    assert (await asking).reason == f"after {RUNS + 1} runs"
    assert (await memory_of(server, slow), slow.learned) == (RUNS + 1, RUNS + 1)
    assert await server.differences() == []


async def test_readers_share_one_computation_beside_all_requests(store: Store, slow: Slow) -> None:
    server, other = await long_job(store), await new_job(store)
    trial = await other.suggest()
    slow.hold()
    views = [asyncio.create_task(server.show()) for _ in range(VIEWS)]
    asking = asyncio.create_task(server.suggest())
    await slow.begun(asking, *views)
    assert (await other.show()).trial_count == 1
    assert await store.read(reading.list_jobs)
    await other.beat(trial)
    assert not any(view.done() for view in views)
    slow.go()
    assert {view.trial_count for view in await asyncio.gather(*views)} <= {RUNS, RUNS + 1}
    assert (await asking).reason == f"after {RUNS} runs"
    await server.show()
    assert (await memory_of(server, slow), slow.learned) == (RUNS, RUNS)


async def test_memory_computed_before_a_run_is_discarded_is_not_saved(store: Store, slow: Slow) -> None:
    server = await long_job(store)
    slow.hold()
    viewing = asyncio.create_task(server.show())
    await slow.begun(viewing)
    await server.service.transact(server.service.commands.discard, server.job_id, RUNS)
    slow.go()
    await viewing
    assert await memory_of(server, slow) == RUNS - 1
    assert await server.differences() == []


async def test_request_gets_an_error_if_a_computation_takes_too_long(
    store: Store, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await long_job(store)
    slow.hold()
    with monkeypatch.context() as patch:
        patch.setattr("bso_server.storage.store._COMPUTING", 0)
        with pytest.raises(ComputeFirstError, match=f"the runs of job {server.job_id!r} are being summarised"):
            await server.show()
    slow.go()
    # The computation has continued.
    assert (await server.show()).trial_count == slow.learned == RUNS


def test_training_without_a_server_computes_the_memory(tmp_path: Path) -> None:
    url, slow = f"sqlite:///{tmp_path / 'bso.sqlite3'}", Slow()

    async def filled() -> str:
        async with open_store(url) as store:
            return (await long_job(store)).job_id

    with given("slow", slow.policy):
        job_id = run_apart(filled)
        file = open_sqlite_file(url, busy_timeout_s=1)
        assert file is not None
        store = SyncStore(file, threading.RLock())
        try:
            view = store.read(lambda transaction: reading.show_job(transaction, job_id), timeout_s=LONG_S)
        finally:
            store.close()
    assert (view.trial_count, slow.learned) == (RUNS, RUNS)
