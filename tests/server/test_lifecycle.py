"""Trials through time: leases, heartbeats, revival, preemption, crashes, out of memory, repeated requests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bso_server.core.job import LeasePolicy, replay
from bso_server.core.model import Arm
from bso_server.errors import (
    InvalidReportError,
    KeyConflictError,
    NoSurvivorError,
    ReportConflictError,
    UnknownJobError,
    UnknownTrialError,
)
from bso_server.service.loading import load_history
from bso_server.storage.transaction import Transaction
from tests.support.properties import examples
from tests.support.service import HOUR_S, START, JobService, beat_of, job_service, live
from zeus_plugins.protocol import OWN_POLICIES, EndReason, OfflineTrial, ReportResponse, StopRule, TrialId, TrialState

pytestmark = pytest.mark.storage

# --- Leases -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heartbeats", "longest_gap_s", "lease_s"),
    [(True, 5000, 360), (False, 0, 3600), (False, 720, 3600), (False, 800, 4000)],
)
def test_lengths_of_leases(heartbeats: bool, longest_gap_s: float, lease_s: float) -> None:
    assert LeasePolicy().lease_s(heartbeats=heartbeats, longest_gap_s=longest_gap_s) == lease_s


async def test_a_silent_trial_is_abandoned_and_its_size_explored_again(database_url: str) -> None:
    async with job_service(database_url) as server:
        await server.suggest()
        server.wait(HOUR_S)
        assert (await server.suggest()).origin == "concurrent"
        server.wait(1)
        again = await server.suggest()

        assert (again.batch_size, again.origin) == (16, "exploration")
        view = await server.show()
        assert view.trials[0].state is TrialState.ABANDONED
        assert view.trials[0].end_reason is EndReason.LEASE_EXPIRED
        assert "not heard of since 2026-01-01 00:00:00 UTC" in (view.trials[0].message or "")


async def test_the_reaper_finds_silent_trials_without_a_request(database_url: str) -> None:
    async with job_service(database_url) as server:
        await server.suggest()
        assert await server.service.reap() == 0
        server.wait(HOUR_S + 1)
        assert await server.service.reap() == 1
        assert await server.states() == [TrialState.ABANDONED]
        assert await server.service.reap() == 0


async def test_a_lease_of_a_clock_that_was_ahead_ends_as_others_do(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with job_service(database_url) as server:
        server.wait(365 * 24 * HOUR_S)
        await server.suggest()
        server.wait(-365 * 24 * HOUR_S)
        with caplog.at_level("INFO", logger="bso_server"):
            assert await server.service.reap() == 0
        assert "trial 1: the clock was ahead" in caplog.text
        server.wait(HOUR_S - 1)
        assert await server.service.reap() == 0
        assert await server.states() == [TrialState.RUNNING]
        server.wait(2)
        assert await server.service.reap() == 1
        assert await server.states() == [TrialState.ABANDONED]


async def test_reports_renew_the_lease_for_as_long_as_epochs_take(database_url: str) -> None:
    async with job_service(database_url) as server:
        trial = await server.suggest()
        server.wait(HOUR_S)
        await server.report(trial, cost_j=200_000)  # 2,000 s of training: the next lease is 10,000 s
        server.wait(10_000)
        await server.service.reap()
        assert await server.states() == [TrialState.RUNNING]
        server.wait(1)
        await server.service.reap()
        assert await server.states() == [TrialState.ABANDONED]


async def test_heartbeats_keep_a_trial_alive_and_shorten_its_lease(database_url: str) -> None:
    async with job_service(database_url) as server:
        trial = await server.suggest()
        for _ in range(3):
            server.wait(359)
            beat = await server.service.transact(server.service.commands.heartbeat, beat_of(trial))
            assert (beat.state, beat.lease_s, beat.interval_s) == (TrialState.RUNNING, 360, 60)
        server.wait(361)
        assert (await server.suggest()).origin == "exploration"
        assert (await server.states())[0] is TrialState.ABANDONED


async def test_one_heartbeat_that_only_asks_leaves_the_lease_long(database_url: str) -> None:
    async with job_service(database_url) as server:
        trial = await server.suggest()
        beat = await server.service.transact(server.service.commands.heartbeat, beat_of(trial, regular=False))
        assert (beat.state, beat.lease_s) == (TrialState.RUNNING, 3600)
        server.wait(3599)
        assert await server.service.reap() == 0
        assert await server.states() == [TrialState.RUNNING]
        await server.end(trial, TrialState.FAILED)


async def test_a_late_report_brings_an_abandoned_trial_back(database_url: str) -> None:
    async with job_service(database_url) as server:
        late = await server.suggest()
        server.wait(HOUR_S + 1)
        replacement = await server.suggest()
        await server.reach(replacement, 600)

        await server.report(late, cost_j=100)
        assert (await server.states())[0] is TrialState.RUNNING
        await server.reach(late, 500)
        view = await server.show()
        assert [trial.state for trial in view.trials] == [TrialState.COMPLETED] * 2
        assert view.min_cost_j == 500
        assert view.trials[0].end_reason is EndReason.TARGET_REACHED


async def test_an_exploration_that_comes_back_late_does_not_undo_the_pruning(database_url: str) -> None:
    async with job_service(database_url) as server:
        late = await server.suggest()
        server.wait(HOUR_S + 1)
        while (trial := await server.suggest()).origin == "exploration":
            await server.reach(trial)
        await server.report(late, cost_j=100)
        assert (await server.suggest()).origin == "bandit"
        assert not (await server.report(late, cost_j=200, epoch=10)).converged
        assert (await server.suggest()).origin == "bandit"


async def test_nothing_is_heard_of_trials_that_never_were(database_url: str) -> None:
    async with job_service(database_url) as server:
        nobody = TrialId(job_id=server.job_id, batch_size=16, trial_number=1)
        with pytest.raises(UnknownTrialError):
            await server.service.transact(server.service.commands.heartbeat, beat_of(nobody))
        with pytest.raises(UnknownTrialError):
            await server.end(nobody)


# --- Preemption -------------------------------------------------------------------------------------------------------


async def test_a_preempted_trial_goes_on(database_url: str) -> None:
    async with job_service(database_url) as server:
        trial = await server.suggest()
        await server.report(trial, cost_j=100)
        await server.end(trial, TrialState.SUSPENDED)
        server.wait(20 * HOUR_S)
        assert (await server.suggest()).origin == "concurrent"  # its exploration is still to come
        assert (
            await server.service.transact(server.service.commands.heartbeat, beat_of(trial))
        ).state is TrialState.RUNNING
        await server.reach(trial, 200)
        assert (await server.states())[0] is TrialState.COMPLETED


async def test_a_preempted_trial_that_does_not_come_back_is_abandoned(database_url: str) -> None:
    async with job_service(database_url) as server:
        trial = await server.suggest()
        await server.end(trial, TrialState.SUSPENDED)
        await server.end(trial, TrialState.SUSPENDED)
        assert await server.states() == [TrialState.SUSPENDED]
        server.wait(24 * HOUR_S + 1)
        assert (await server.suggest()).origin == "exploration"
        assert (await server.states())[0] is TrialState.ABANDONED


@pytest.mark.parametrize("outcome", [TrialState.FAILED, TrialState.INFEASIBLE, TrialState.SUSPENDED])
async def test_how_an_abandoned_trial_ends_after_all_counts(database_url: str, outcome: JobService.Outcome) -> None:
    async with job_service(database_url) as server:
        trial = await server.suggest()
        server.wait(HOUR_S + 1)
        assert await server.service.reap() == 1
        await server.end(trial, outcome)
        assert await server.states() == [outcome]


# --- Crashes and memory -----------------------------------------------------------------------------------------------


async def test_a_size_that_always_crashes_is_given_up(database_url: str) -> None:
    async with job_service(database_url) as server:
        for expected in (TrialState.FAILED, TrialState.FAILED, TrialState.INFEASIBLE):
            trial = await server.suggest()
            assert trial.batch_size == 16
            await server.end(trial)
            assert (await server.states())[-1] is expected
        # It did not reach the target: the way down ends, and larger sizes are tried.
        assert (await server.suggest()).batch_size == 32
        (arm,) = [arm for arm in (await server.show()).arms if arm.batch_size == 16]
        assert arm.infeasible is EndReason.CRASHED


async def test_crashes_of_a_size_that_has_run_do_not_exclude_it(database_url: str) -> None:
    async with job_service(database_url) as server:
        await server.reach(await server.suggest())
        while len(await server.states()) < 8:
            await server.end(await server.suggest())
        of_16 = [trial.state for trial in (await server.show()).trials if trial.batch_size == 16]
        assert set(of_16[1:]) <= {TrialState.FAILED}


async def test_out_of_memory_excludes_the_size_and_larger_ones(database_url: str) -> None:
    async with job_service(database_url, batch_sizes=(4, 8, 16, 32, 64), default_batch_size=32) as server:
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


async def test_out_of_memory_in_the_bandit_stage_leaves_the_smaller_survivors(database_url: str) -> None:
    async with job_service(database_url) as server:
        while (trial := await server.suggest()).origin == "exploration":
            await server.reach(trial, 1000 - trial.batch_size)  # 32 is the cheapest
        while trial.batch_size != 16:
            await server.reach(trial, 1000 - trial.batch_size)
            trial = await server.suggest()
        await server.end(trial, TrialState.INFEASIBLE)
        for _ in range(6):
            trial = await server.suggest()
            assert trial.batch_size == 8
            await server.reach(trial, 992)


async def test_when_nothing_fits_the_error_says_so(database_url: str) -> None:
    async with job_service(database_url) as server:
        for expected in (16, 8):
            trial = await server.suggest()
            assert trial.batch_size == expected
            await server.end(trial, TrialState.INFEASIBLE)
        with pytest.raises(NoSurvivorError, match="even batch size 8 ran out of memory"):
            await server.suggest()


# --- Repeated requests ------------------------------------------------------------------------------------------------


async def test_a_repeated_request_finds_the_trial_it_started(database_url: str) -> None:
    async with job_service(database_url) as server:
        first = await server.suggest("key-1")
        assert await server.suggest("key-1") == first
        assert (await server.suggest("key-2")).trial_number == 2
        await server.reach(first)
        with pytest.raises(KeyConflictError, match="trial 1, which has ended"):
            await server.suggest("key-1")


async def test_a_key_is_its_jobs_own(database_url: str) -> None:
    async with job_service(database_url) as server:
        other = JobService(server.store)
        await other.service.register(other.job)
        assert (await server.suggest("key")).job_id != (await other.suggest("key")).job_id


async def test_the_same_key_at_the_same_time_starts_one_trial(database_url: str) -> None:
    async with job_service(database_url) as server:
        answers = await asyncio.gather(*(server.suggest("key") for _ in range(10)))
        assert {answer.trial_number for answer in answers} == {1}


async def test_a_repeated_report_changes_nothing(database_url: str) -> None:
    async with job_service(database_url) as server:
        trial = await server.suggest()
        first = await server.report(trial, cost_j=100)
        before = await server.show()
        assert await server.report(trial, cost_j=100) == first
        assert await server.show() == before
        assert await epochs_of(server, trial) == [1]


async def test_one_bad_report_in_a_group_hurts_no_other(database_url: str) -> None:
    async with job_service(database_url) as server:
        trials = [await server.suggest() for _ in range(3)]
        await server.reach(trials[1])
        answers = await asyncio.gather(
            *(server.report(trial, cost_j=100, epoch=epoch) for trial in trials for epoch in (1, 2)),
            return_exceptions=True,
        )
        assert [type(answer) for answer in answers] == [ReportResponse] * 2 + [ReportConflictError] * 2 + [
            ReportResponse
        ] * 2
        assert [trial.epochs for trial in (await server.show()).trials] == [2, 5, 2]


async def epochs_of(server: JobService, trial: TrialId) -> list[float]:
    def read(transaction: Transaction) -> list[float]:
        rows = transaction.connection.exec_driver_sql(
            f"SELECT epoch FROM epochs WHERE job_id = '{trial.job_id}' "  # noqa: S608 - the test's own id
            f"AND trial_number = {trial.trial_number} ORDER BY report_number"
        )
        return [row[0] for row in rows]

    return await server.store.read(read)


async def test_every_epoch_is_kept(database_url: str) -> None:
    async with job_service(database_url) as server:
        trial = await server.suggest()
        for epoch in (0.5, 1, 1.5):
            await server.report(trial, cost_j=100 * epoch, epoch=epoch)
        assert await epochs_of(server, trial) == [0.5, 1, 1.5]


# --- Trainings that were cut off --------------------------------------------------------------------------------------


async def test_the_stop_rule_comes_with_the_trial_and_with_each_verdict(database_url: str) -> None:
    async with job_service(database_url) as server:
        first = await server.suggest()
        assert first.stop_rule == StopRule(max_cost_j=None, max_epochs=10)
        await server.reach(first, cost_j=500)
        second = await server.suggest()
        assert second.stop_rule == StopRule(max_cost_j=1000, max_epochs=10)
        assert (await server.report(second, cost_j=10)).stop_rule == second.stop_rule
        assert (await server.report(second, cost_j=10)).stop_rule == second.stop_rule  # the same report again
        assert (await server.report(second, cost_j=400, metric=0.95, epoch=2)).stop_rule is None
        assert (await server.suggest()).stop_rule == StopRule(max_cost_j=800, max_epochs=10)


async def test_a_training_that_judged_itself_is_judged_by_the_same_rule(database_url: str) -> None:
    async with job_service(database_url) as server:
        own_rule = StopRule(max_cost_j=None, max_epochs=10)
        trial, rival = await server.suggest(), await server.suggest()
        await server.reach(rival, cost_j=100)
        # Above today's bound of 200 J, within that of the time when the training was cut off.
        assert (await server.report(trial, cost_j=300, judged_by=own_rule)).reason is EndReason.KEEP_TRAINING
        verdict = await server.report(trial, cost_j=400, metric=0.95, epoch=2, judged_by=own_rule)
        assert verdict.converged

        strict = await server.suggest()
        rule = StopRule(max_cost_j=50, max_epochs=10)
        verdict = await server.report(strict, cost_j=51, metric=0.95, judged_by=rule)
        assert (verdict.reason, verdict.message) == (
            EndReason.COST_BOUND_CROSSED,
            "stopped: 51 J spent, more than 50 J",
        )

        lasting = await server.suggest()
        rule = StopRule(max_epochs=20)
        assert not (await server.report(lasting, cost_j=10, epoch=9, judged_by=rule)).stop_train
        verdict = await server.report(lasting, cost_j=11, epoch=10, judged_by=rule)
        assert verdict.reason is EndReason.MAX_EPOCHS_REACHED


async def test_an_offline_trial_is_recorded_once_and_counts(database_url: str) -> None:
    async with job_service(database_url) as server:
        trial = await server.offline(32, "key")
        assert (trial.trial_number, trial.batch_size, trial.origin) == (1, 32, "offline")
        assert await server.offline(32, "key") == trial
        await server.reach(trial, cost_j=300)
        assert (await server.offline(32, "key")).trial_number == 1  # even when it has ended
        view = await server.show()
        assert [(each.origin, each.state) for each in view.trials] == [("offline", "completed")]
        assert view.min_cost_j == 300
        # No exploration was asked for, and none is done with.
        assert (await server.suggest()).batch_size == 16


async def test_an_offline_trial_that_cannot_be_is_refused(database_url: str) -> None:
    async with job_service(database_url) as server:
        await server.offline(32, "key")
        with pytest.raises(InvalidReportError, match=r"64 is not one of the job's batch sizes \[8, 16, 32\]"):
            await server.offline(64, "another")
        with pytest.raises(InvalidReportError, match=r"trial 1 .* has batch size 32, not 16"):
            await server.offline(16, "key")
        with pytest.raises(UnknownJobError):
            await server.service.transact(
                server.service.commands.record_offline, OfflineTrial(job_id="nobody", batch_size=8), "key"
            )
        assert len((await server.show()).trials) == 1


# --- Caches -----------------------------------------------------------------------------------------------------------


def assert_caches_equal_a_replay(transaction: Transaction, job_id: str) -> None:
    job = transaction.job(job_id)
    assert job is not None
    trials = transaction.all_trials(job_id)
    replayed = replay(job.registration, trials, job.survivors)
    remembered, _ = load_history(transaction, job)
    assert remembered.arms == replayed.arms
    assert remembered.memory == replayed.memory
    assert remembered.cheapest == replayed.cheapest
    assert remembered.bandit_entered_at == replayed.bandit_entered_at
    assert remembered.in_flight == replayed.in_flight
    if job.survivors is None:
        assert remembered.explorations == replayed.explorations
    assert job.trial_count == len(trials)
    events = [event for trial in trials for event in (trial.started_event, trial.ended_event) if event is not None]
    assert len(events) == len(set(events))
    assert max(events, default=0) <= job.event_count


@given(
    seed=st.integers(0, 2**32),
    window_size=st.sampled_from([0, 1, 3]),
    rounds=st.sampled_from([0, 1, 2]),
    policy=st.sampled_from(OWN_POLICIES),
)
@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_caches_equal_a_replay_of_the_trials(
    database_url: str, seed: int, window_size: int, rounds: int, policy: str
) -> None:
    async with job_service(
        database_url, window_size=window_size, mab_num_explorations=1, num_pruning_rounds=rounds, policy=policy
    ) as server:
        await live(server, random.Random(seed), steps=60)  # noqa: S311 - no secret
        await server.store.read(lambda transaction: assert_caches_equal_a_replay(transaction, server.job_id))


@pytest.fixture(autouse=True)
def _quiet_logs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Hundreds of lines per example would only slow the examples down."""
    with caplog.at_level("WARNING", logger="bso_server"):
        yield


async def test_a_job_from_before_windows_were_bounded_goes_on(database_url: str) -> None:
    """MariaDB's TEXT ends at 64 KiB, which a window of some 2,700 runs fills."""
    runs = 5000
    async with job_service(database_url) as server:
        store, registration = server.store, server.job
        old = registration.model_copy(update={"window_size": runs, "job_id": f"{registration.job_id}-old"})
        arms = [
            Arm(size, window=tuple((number, 123456.789 + number) for number in range(-runs, 0)))
            for size in old.batch_sizes
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
