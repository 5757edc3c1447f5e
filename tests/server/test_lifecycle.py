"""Trials through time: leases, heartbeats, revival, preemption, crashes, out of memory, repeated requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import sqlalchemy as sa

from bso_server.core.job import LeasePolicy
from bso_server.core.model import Arm
from bso_server.errors import (
    NoSurvivorError,
    ReportConflictError,
    UnknownTrialError,
)
from bso_server.storage.store import Store
from bso_server.storage.tables import metadata
from bso_server.storage.transaction import Transaction
from tests.support.service import HOUR_S, START, JobService, new_job, trial_id
from zeus_plugins.protocol import (
    GP_VOI,
    EndReason,
    Heartbeat,
    ReportResponse,
    StopRule,
    TrainingResult,
    TrialEnd,
    TrialId,
    TrialState,
)

pytestmark = pytest.mark.storage

# --- Leases -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heartbeats", "longest_gap_s", "lease_s"),
    [(True, 5000, 360), (False, 0, 3600), (False, 720, 3600), (False, 800, 4000)],
)
def test_lease_lengths_are_literal(heartbeats: bool, longest_gap_s: float, lease_s: float) -> None:
    assert LeasePolicy().lease_s(heartbeats=heartbeats, longest_gap_s=longest_gap_s) == lease_s


async def test_silent_trial_is_abandoned_and_the_size_explored_again(bso: JobService) -> None:
    await bso.suggest()
    bso.wait(HOUR_S)
    assert (await bso.suggest()).origin == "concurrent"
    bso.wait(1)
    again = await bso.suggest()

    assert (again.batch_size, again.origin) == (16, "exploration")
    view = await bso.show()
    assert view.trials[0].state is TrialState.ABANDONED
    assert view.trials[0].end_reason is EndReason.LEASE_EXPIRED
    assert "not heard of since 2026-01-01 00:00:00 UTC" in (view.trials[0].message or "")


async def test_lease_from_a_clock_ahead_ends_after_the_usual_time(
    bso: JobService, caplog: pytest.LogCaptureFixture
) -> None:
    bso.wait(365 * 24 * HOUR_S)
    await bso.suggest()
    bso.wait(-365 * 24 * HOUR_S)
    with caplog.at_level("INFO", logger="bso_server"):
        assert await bso.service.reap() == 0
    assert "trial 1: the clock was ahead" in caplog.text
    bso.wait(HOUR_S - 1)
    assert await bso.service.reap() == 0
    assert await bso.states() == [TrialState.RUNNING]
    bso.wait(2)
    assert await bso.service.reap() == 1
    assert await bso.states() == [TrialState.ABANDONED]
    assert await bso.service.reap() == 0


async def test_reports_renew_the_lease_according_to_the_duration_of_epochs(bso: JobService) -> None:
    trial = await bso.suggest()
    bso.wait(HOUR_S)
    await bso.report(trial, cost_j=200_000)  # 2,000 s of training: the next lease is 10,000 s
    bso.wait(10_000)
    await bso.service.reap()
    assert await bso.states() == [TrialState.RUNNING]
    bso.wait(1)
    await bso.service.reap()
    assert await bso.states() == [TrialState.ABANDONED]


async def test_heartbeats_keep_a_trial_alive_and_shorten_the_lease(bso: JobService) -> None:
    trial = await bso.suggest()
    for _ in range(3):
        bso.wait(359)
        beat = await bso.beat(trial)
        assert (beat.state, beat.lease_s, beat.interval_s) == (TrialState.RUNNING, 360, 60)
    bso.wait(361)
    assert (await bso.suggest()).origin == "exploration"
    assert (await bso.states())[0] is TrialState.ABANDONED


async def test_single_irregular_heartbeat_does_not_shorten_the_lease(bso: JobService) -> None:
    trial = await bso.suggest()
    beat = await bso.beat(trial, regular=False)
    assert (beat.state, beat.lease_s) == (TrialState.RUNNING, 3600)
    bso.wait(3599)
    assert await bso.service.reap() == 0
    assert await bso.states() == [TrialState.RUNNING]
    await bso.end(trial, TrialState.FAILED)


async def test_exploration_revived_late_does_not_undo_the_pruning(bso: JobService) -> None:
    late = await bso.suggest()
    bso.wait(HOUR_S + 1)
    while (trial := await bso.suggest()).origin == "exploration":
        await bso.reach(trial)
    await bso.report(late, cost_j=100)
    assert (await bso.suggest()).origin == "bandit"
    assert not (await bso.report(late, cost_j=200, epoch=10)).converged
    assert (await bso.suggest()).origin == "bandit"


# --- Preemption -------------------------------------------------------------------------------------------------------


async def test_preempted_trial_continues(bso: JobService) -> None:
    trial = await bso.suggest()
    await bso.report(trial, cost_j=100)
    await bso.end(trial, TrialState.SUSPENDED)
    bso.wait(20 * HOUR_S)
    assert (await bso.suggest()).origin == "concurrent"  # its exploration has not ended
    assert (await bso.beat(trial)).state is TrialState.RUNNING
    await bso.reach(trial, 200)
    assert (await bso.states())[0] is TrialState.COMPLETED


@pytest.mark.parametrize("outcome", [TrialState.FAILED, TrialState.INFEASIBLE, TrialState.SUSPENDED])
async def test_end_of_a_revived_trial_counts(bso: JobService, outcome: JobService.Outcome) -> None:
    trial = await bso.suggest()
    bso.wait(HOUR_S + 1)
    assert await bso.service.reap() == 1
    await bso.end(trial, outcome)
    assert await bso.states() == [outcome]


# --- Crashes and memory -----------------------------------------------------------------------------------------------


async def test_out_of_memory_excludes_the_size_and_larger_sizes(store: Store) -> None:
    server = await new_job(store, batch_sizes=(4, 8, 16, 32, 64), default_batch_size=32)
    too_large = await server.suggest()
    assert too_large.batch_size == 32
    await server.end(too_large, TrialState.INFEASIBLE)
    sizes = []
    for _ in range(8):
        trial = await server.suggest()
        sizes.append(trial.batch_size)
        await server.reach(trial, 1000.0 + trial.batch_size)
    assert sizes[:3] == [16, 8, 4]
    assert 32 not in sizes
    assert 64 not in sizes


async def test_out_of_memory_in_the_bandit_stage_leaves_smaller_survivors(bso: JobService) -> None:
    while (trial := await bso.suggest()).origin == "exploration":
        await bso.reach(trial, 1000 - trial.batch_size)  # 32 is the cheapest
    while trial.batch_size != 16:
        await bso.reach(trial, 1000 - trial.batch_size)
        trial = await bso.suggest()
    await bso.end(trial, TrialState.INFEASIBLE)
    for _ in range(6):
        trial = await bso.suggest()
        assert trial.batch_size == 8
        await bso.reach(trial, 992)


async def test_error_without_a_fitting_size_explains_the_reason(bso: JobService) -> None:
    for expected in (16, 8):
        trial = await bso.suggest()
        assert trial.batch_size == expected
        await bso.end(trial, TrialState.INFEASIBLE)
    with pytest.raises(NoSurvivorError, match="even batch size 8 ran out of memory"):
        await bso.suggest()


# --- Repeated requests ------------------------------------------------------------------------------------------------


async def test_idempotency_key_is_local_to_a_job(bso: JobService) -> None:
    other = JobService(bso.store)
    await other.service.register(other.job)
    assert (await bso.suggest("key")).job_id != (await other.suggest("key")).job_id


# --- Restored databases -----------------------------------------------------------------------------------------------

Rows = dict[sa.Table, list[dict[str, Any]]]


def copied(connection: sa.Connection) -> Rows:
    return {table: list(map(dict, connection.execute(sa.select(table)).mappings())) for table in metadata.sorted_tables}


def restored(connection: sa.Connection, rows: Rows) -> None:
    """Replace the content of a database by a copy."""
    for table in reversed(rows):
        connection.execute(sa.delete(table))
    for table, copy in rows.items():
        if copy:
            connection.execute(sa.insert(table), copy)


async def test_lost_trial_says_nothing_about_a_later_trial_of_the_same_number(bso: JobService) -> None:
    async def transact(work: Callable[[sa.Connection], Any]) -> Any:
        return await bso.store._database.transact(work, read_only=False, timeout_s=60.0)

    def messages_of(trial: TrialId) -> list[Callable[[], Awaitable[object]]]:
        named = trial.model_dump(include=set(TrialId.model_fields))
        report = TrainingResult(**named, time=1.0, energy=1.0, metric=0.95, current_epoch=1)
        commands = bso.service.commands
        return [
            lambda: bso.service.transact(commands.heartbeat, Heartbeat(**named)),
            lambda: bso.service.transact(commands.heartbeat, Heartbeat(**named, resumes=True)),
            lambda: bso.service.transact(commands.end_trial, TrialEnd(**named)),
            lambda: bso.service.reports.record_report(report),
        ]

    backup = await transact(copied)
    lost = await bso.suggest("lost")
    await transact(lambda connection: restored(connection, backup))
    trial = await bso.suggest("later")
    assert (trial.trial_number, trial.lease_epoch) == (lost.trial_number, lost.lease_epoch)

    before = await bso.show()
    for say in messages_of(lost):
        with pytest.raises(UnknownTrialError, match="has no trial 1 of this training: the database was restored"):
            await say()
    assert await bso.show() == before
    # A repeated request of the lost training starts a trial of its own, and clients without the id are not checked.
    assert (await bso.suggest("lost")).trial_number == 2
    await messages_of(trial)[0]()
    for say in messages_of(trial_id(trial))[::3]:
        await say()
    assert (await bso.states())[0] is TrialState.COMPLETED


async def test_bad_report_in_a_group_does_not_affect_the_rest(bso: JobService) -> None:
    trials = [await bso.suggest() for _ in range(3)]
    await bso.reach(trials[1])
    answers = await asyncio.gather(
        *(bso.report(trial, cost_j=100, epoch=epoch) for trial in trials for epoch in (1, 2)),
        return_exceptions=True,
    )
    kinds = [ReportResponse, ReportConflictError, ReportResponse]
    assert [type(answer) for answer in answers] == [kind for kind in kinds for _ in range(2)]
    assert [trial.epochs for trial in (await bso.show()).trials] == [2, 5, 2]


# --- Trainings without a connection -----------------------------------------------------------------------------------


async def test_stop_rule_arrives_with_the_trial_and_each_verdict(bso: JobService) -> None:
    first = await bso.suggest()
    assert first.stop_rule == StopRule(max_cost_j=None, max_epochs=10)
    await bso.reach(first, cost_j=500)
    second = await bso.suggest()
    assert second.stop_rule == StopRule(max_cost_j=1000, max_epochs=10)
    assert (await bso.report(second, cost_j=10)).stop_rule == second.stop_rule
    assert (await bso.report(second, cost_j=10)).stop_rule == second.stop_rule  # the same report again
    assert (await bso.report(second, cost_j=400, metric=0.95, epoch=2)).stop_rule is None
    assert (await bso.suggest()).stop_rule == StopRule(max_cost_j=800, max_epochs=10)


async def test_offline_verdict_is_judged_by_the_trainings_own_rule(bso: JobService) -> None:
    own_rule = StopRule(max_cost_j=None, max_epochs=10)
    trial, rival = await bso.suggest(), await bso.suggest()
    await bso.reach(rival, cost_j=100)
    # Above today's bound of 200 J, but within the bound of the time when the connection was lost.
    assert (await bso.report(trial, cost_j=300, judged_by=own_rule)).reason is EndReason.KEEP_TRAINING
    verdict = await bso.report(trial, cost_j=400, metric=0.95, epoch=2, judged_by=own_rule)
    assert verdict.converged

    strict = await bso.suggest()
    rule = StopRule(max_cost_j=50, max_epochs=10)
    verdict = await bso.report(strict, cost_j=51, metric=0.95, judged_by=rule)
    assert verdict.reason is EndReason.COST_BOUND_CROSSED
    assert verdict.message == "stopped after 1 epoch: 51 J spent, more than 50 J; metric 0.95, target 0.9"

    lasting = await bso.suggest()
    rule = StopRule(max_epochs=20)
    assert not (await bso.report(lasting, cost_j=10, epoch=9, judged_by=rule)).stop_train
    verdict = await bso.report(lasting, cost_j=11, epoch=10, judged_by=rule)
    assert verdict.reason is EndReason.MAX_EPOCHS_REACHED


async def test_offline_trial_is_recorded_once_and_counts(bso: JobService) -> None:
    trial = await bso.offline(32, "key")
    assert (trial.trial_number, trial.batch_size, trial.origin) == (1, 32, "offline")
    assert await bso.offline(32, "key") == trial
    await bso.reach(trial, cost_j=300)
    assert (await bso.offline(32, "key")).trial_number == 1  # even after its end
    view = await bso.show()
    assert [(each.origin, each.state) for each in view.trials] == [("offline", "completed")]
    assert view.min_cost_j == 300
    # The offline trial neither replaces nor completes an exploration.
    assert (await bso.suggest()).batch_size == 16


# --- Caches -----------------------------------------------------------------------------------------------------------


async def test_imported_job_with_a_longer_window_continues(store: Store) -> None:
    """MariaDB's TEXT ends at 64 KiB, the size of a window of about 2,700 runs."""
    runs = 5000
    server = await new_job(store)
    store, registration = server.store, server.job
    old = registration.model_copy(update={"window_size": runs, "job_id": f"{registration.job_id}-old"})
    arms = [
        Arm(size, window=tuple((number, 123456.789 + number) for number in range(-runs, 0))) for size in old.batch_sizes
    ]

    def insert(transaction: Transaction) -> None:
        transaction.insert_job(old, START)
        transaction.update_arms(old.job_id, arms)

    await store.write(insert)
    assert await server.service.register(old) == (old, False)
    server.job, server.job_id = old, old.job_id
    await server.reach(await server.suggest())
    await server.suggest()
    windows = [arm.window for arm in (await store.read(lambda found: found.arms(server.job_id))).values()]
    assert [len(window) for window in windows] == [runs] * len(arms)
    assert sum((1, 500.0) in window for window in windows) == 1


async def test_report_is_judged_after_last_size_ran_out_of_memory(store: Store) -> None:
    bso = await new_job(store, policy=GP_VOI)
    await bso.reach(await bso.offline(8, "first"))
    other = await bso.offline(16, "other")
    await bso.end(await bso.offline(8, "second"), TrialState.INFEASIBLE)
    for epoch in (1, 2):
        assert not (await bso.report(other, cost_j=100 * epoch, epoch=epoch)).stop_train
