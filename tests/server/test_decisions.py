"""Decisions are made outside the write lock: concurrent events, concurrent jobs, and repeated requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bso_server.core.model import History, Suggestion
from bso_server.core.policy import Policy
from bso_server.errors import DatabaseUnavailableError
from bso_server.service import commands
from bso_server.service.decisions import TRIES, Basis, Decided, decide, turn
from bso_server.service.loading import known_job
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from tests.support.policies import given
from tests.support.service import JobService, new_job
from zeus_plugins.protocol import GP_VOI, OWN_POLICIES, ZEUS, CreatedJob, Origin

pytestmark = pytest.mark.storage

# Longest wait of a running decision, so that a test of a server that waits for the decision fails, too.
PATIENCE_S = 60.0

Event = Callable[[], Coroutine[Any, Any, object]]


class Interruptions:
    """Run events during a decision: after the decision has read the job, and before the decision is saved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[Event] = []
        self.seen: list[History] = []
        monkeypatch.setattr(commands, "decide", self._decide)

    def _decide(self, basis: Basis) -> Decided:
        self.seen.append(basis.loaded.history()[0])
        if self.events and threading.current_thread() is not threading.main_thread():
            event = self.events.pop(0)
            # The event has its own transaction in the test's event loop, for which this thread waits.
            asyncio.run_coroutine_threadsafe(event(), self.loop).result(PATIENCE_S)
        return decide(basis)

    async def during(self, server: JobService, *events: Event, key: str | None = None) -> Any:
        """Return the trial suggested while these events happen, one per decision."""
        self.loop, self.events = asyncio.get_running_loop(), list(events)
        self.seen.clear()
        return await server.suggest(key)


@pytest.fixture
def interruptions(monkeypatch: pytest.MonkeyPatch) -> Interruptions:
    return Interruptions(monkeypatch)


# --- Events between the decision and its transaction ------------------------------------------------------------------


@pytest.mark.parametrize("policy", OWN_POLICIES)
async def test_end_of_a_trial_during_a_decision_causes_a_new_decision(
    store: Store, interruptions: Interruptions, policy: str
) -> None:
    server = await new_job(store, policy=policy)
    first = await server.suggest()
    trial = await interruptions.during(server, lambda: server.reach(first))
    assert [history.recurrences for history in interruptions.seen] == [0, 1]
    # Without the end, both policies would have chosen the default again.
    assert first.batch_size == 16
    assert trial.batch_size != 16
    assert (await server.show()).trial_count == 2
    assert await server.differences() == []


async def test_trial_started_by_another_process_causes_a_new_decision(
    bso: JobService, interruptions: Interruptions
) -> None:
    trial = await interruptions.during(bso, lambda: bso.offline(8, "offline"))
    assert trial.trial_number == 2
    assert [len(history.in_flight) for history in interruptions.seen] == [0, 1]
    assert await bso.differences() == []


@pytest.mark.parametrize("policy", OWN_POLICIES)
async def test_trial_discarded_during_a_decision_is_not_used(
    store: Store, interruptions: Interruptions, policy: str
) -> None:
    """The trial is not the cheapest, and its end was counted long before."""
    server = await new_job(store, policy=policy)
    trials = []
    for cost_j in (100.0, 150.0, 160.0):
        trials.append(await server.suggest())
        await server.reach(trials[-1], cost_j)
    await server.discard(trials[2])
    await interruptions.during(server, lambda: server.discard(trials[1]))
    assert [history.recurrences for history in interruptions.seen] == [2, 1]
    assert await server.differences() == []


@pytest.mark.parametrize("policy", OWN_POLICIES)
async def test_revision_during_a_decision_causes_a_new_decision(
    store: Store, interruptions: Interruptions, policy: str
) -> None:
    server = await new_job(store, policy=policy)
    other = {"batch_sizes": (8, 64), "default_batch_size": 64, "revise": True}
    trial = await interruptions.during(server, lambda: server.service.register(server.job.model_copy(update=other)))
    assert [history.job.batch_sizes for history in interruptions.seen] == [(8, 16, 32), (8, 64)]
    assert trial.batch_size == 64
    assert await server.differences() == []


async def test_constantly_changing_job_is_decided_under_the_lock(bso: JobService, interruptions: Interruptions) -> None:
    def ended(number: int) -> Event:
        return lambda: bso.offline(8, f"offline {number}")

    trial = await interruptions.during(bso, *map(ended, range(TRIES)))
    assert trial.trial_number == TRIES + 1
    assert [len(history.in_flight) for history in interruptions.seen] == [0, 1, 2, 3]
    assert await bso.differences() == []


async def test_job_recreated_during_a_decision_is_decided_again(bso: JobService, interruptions: Interruptions) -> None:
    other = bso.job.model_copy(update={"batch_sizes": (64,), "default_batch_size": 64})

    async def replaced() -> None:
        await bso.service.delete_job(bso.job_id)
        await bso.service.register(other)

    assert (await interruptions.during(bso, replaced)).batch_size == 64


async def test_reports_during_a_decision_cause_no_new_decision(bso: JobService, interruptions: Interruptions) -> None:
    first = await bso.suggest()
    await interruptions.during(bso, lambda: bso.report(first, cost_j=100, epoch=1))
    assert len(interruptions.seen) == 1


async def test_repeated_request_returns_the_same_trial_despite_a_concurrent_duplicate(
    bso: JobService, interruptions: Interruptions
) -> None:
    async def same() -> None:
        await bso.service.transact(bso.service.commands.begin_trial, bso.job_id, "key")

    trial = await interruptions.during(bso, same, key="key")
    assert trial.trial_number == 1
    assert await bso.suggest("key") == trial
    assert (await bso.show()).trial_count == 1
    assert len(interruptions.seen) == 2  # in the two first requests


# Copies of jobs on each database draw alike in test_exports.py.
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True, scope="module")
async def test_random_draws_continue_from_the_last_saved_decision(store: Store, interruptions: Interruptions) -> None:
    """A job with repeatedly outdated decisions decides like its undisturbed twin."""
    fields = {"policy": ZEUS, "mab_seed": 3, "mab_num_explorations": 1, "batch_sizes": [8, 16, 32, 64]}
    chosen = []
    for disturbed in (False, True):
        server = await new_job(store, **fields)

        def toggle(transaction: Transaction, job_id: str = server.job_id) -> None:
            transaction.update_jobs(
                [replace(found, shared=not found.shared) for found in [known_job(transaction, job_id)]]
            )

        async def shared() -> None:
            await store.write(toggle)

        trials = []
        for number in range(12):
            trials.append(await interruptions.during(server, *([shared, shared] if disturbed else [])))
            assert len(interruptions.seen) == 1 + 2 * disturbed
            await server.reach(trials[-1], cost_j=500.0 + 40 * (number * 7 % 11))
        chosen.append([(trial.batch_size, trial.origin) for trial in trials])
    assert chosen[0] == chosen[1]
    drawn = [size for size, origin in chosen[0] if origin is Origin.BANDIT]
    assert len(set(drawn)) > 1


# --- Concurrent jobs --------------------------------------------------------------------------------------------------


class SlowPolicy:
    """A policy with decisions that last as long as the test wants."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.policy = Policy(version="1", suggest=self._suggest)

    def _suggest(self, history: History, rng: np.random.Generator) -> Suggestion:  # noqa: ARG002 - the signature is the interface's
        self.begun.set()
        self.may_end.wait(PATIENCE_S)
        return Suggestion(history.job.default_batch_size, Origin.EXPLORATION, "slow")


@pytest.fixture
def slow() -> Iterator[SlowPolicy]:
    slow = SlowPolicy()
    with given("slow", slow.policy):
        yield slow
        slow.may_end.set()


async def ask_others(server: JobService) -> None:
    """Request a suggestion, reports and the end of a trial of another job."""
    other = CreatedJob.model_validate({**server.job.model_dump(), "job_id": f"{server.job_id}-other", "policy": GP_VOI})
    await server.service.register(other)
    trial = await server.service.begin_trial(other.job_id)
    assert not (await server.report(trial, cost_j=100, epoch=1)).stop_train
    assert (await server.report(trial, cost_j=500, epoch=5, metric=0.95)).converged


async def test_slow_decisions_and_explanations_do_not_delay_a_second_job(store: Store, slow: SlowPolicy) -> None:
    server = await new_job(store, policy="slow")
    asked = [asyncio.create_task(server.suggest()) for _ in range(8)]
    explained = asyncio.create_task(server.service.explain_next(server.job_id))
    assert await asyncio.to_thread(slow.begun.wait, PATIENCE_S)
    await ask_others(server)
    assert [each.done() for each in (*asked, explained)] == [False] * 9
    slow.may_end.set()
    assert sorted([(await each).trial_number for each in asked]) == list(range(1, 9))
    assert (await explained).batch_size == 16


async def test_slow_decision_does_not_block_trials_of_the_same_job(store: Store, slow: SlowPolicy) -> None:
    """Trials report, send heartbeats and end during the decision."""
    server = await new_job(store, policy="slow")
    trial = await server.offline(8, "offline")
    asked = asyncio.create_task(server.suggest())
    assert await asyncio.to_thread(slow.begun.wait, PATIENCE_S)
    await server.report(trial, cost_j=100, epoch=1)
    await server.beat(trial)
    await server.end(trial)
    assert not asked.done()
    slow.may_end.set()
    assert (await asked).trial_number == 2
    assert await server.differences() == []


async def test_decision_queued_behind_slow_decisions_is_refused_at_the_deadline() -> None:
    threads = asyncio.Semaphore(1)
    async with turn(threads, PATIENCE_S, "others"):
        with pytest.raises(DatabaseUnavailableError) as told:
            async with turn(threads, 0.01, "decisions on other jobs"):
                pass
        assert told.value.detail == "decisions on other jobs have not been answered"
    async with turn(threads, 0.01, "others"):
        assert threads.locked()
    assert not threads.locked()
