"""Revisions: a job with changed terms keeps its knowledge, on each kind of database."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bso_server.errors import BsoError, InvalidImportError, InvalidJobError, InvalidReportError, JobConflictError
from bso_server.service.reading import explain
from bso_server.storage.store import Store
from bso_server.storage.tables import trials
from bso_server.storage.transaction import Transaction
from tests.support.databases import DATABASES, MYSQL_SNAPSHOTS
from tests.support.exports import exported, import_lines, renamed
from tests.support.properties import examples
from tests.support.service import ACTIONS, JobService, act, new_job, trial_id
from zeus_plugins.protocol import (
    CONTROLS,
    GP_VOI,
    OWN_POLICIES,
    ZEUS,
    CreatedJob,
    EndReason,
    Revision,
    TrainingResult,
    TrialDispatch,
    TrialState,
)

pytestmark = pytest.mark.storage


async def revise(server: JobService, **changes: Any) -> CreatedJob:
    """Register the job again with changed terms, as our client does."""
    known = (await server.show()).job
    asked = CreatedJob.model_validate({**known.model_dump(), **changes, "revise": True})
    registered, is_new = await server.service.register(asked)
    assert not is_new
    return registered


async def test_registration_with_changed_terms_revises_the_job_only_if_requested(bso: JobService) -> None:
    await bso.reach(await bso.suggest())
    other = bso.job.model_copy(update={"max_epochs": 6})
    with pytest.raises(JobConflictError, match=f"max_epochs is 10, not 6. .*bso-server jobs revise {bso.job_id}"):
        await bso.service.register(other)
    revised = await revise(bso, max_epochs=6)
    view = await bso.show()
    assert (revised.max_epochs, view.job, view.trial_count) == (6, revised, 1)
    (revision,) = view.revisions
    assert (revision.revision, revision.trials, revision.in_words) == (1, 1, "max_epochs 10 -> 6")
    # The same registration again changes nothing.
    assert await revise(bso, max_epochs=6) == revised
    assert await bso.service.register(revised) == (revised, False)
    assert (await bso.show()).revisions == (revision,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"target_metric": 0.8, "max_epochs": 6},
            "was begun with target 0.9.*for 0.8 use another job_id, such as '.*-0.8'",
        ),
        ({"higher_is_better_metric": False}, "higher_is_better_metric is True, not False. Use another job_id$"),
        ({"confirm": 2}, "confirm is 1, not 2"),
    ],
)
async def test_changed_target_requires_a_new_job(bso: JobService, changes: dict[str, Any], message: str) -> None:
    await bso.reach(await bso.suggest())
    with pytest.raises(JobConflictError, match=message):
        await revise(bso, **changes)
    assert (await bso.show()).revisions == ()


async def test_dispatch_says_whether_a_run_has_counted(bso: JobService) -> None:
    first = await bso.suggest()
    await bso.end(first)
    second = await bso.suggest()
    await bso.reach(second)
    third = await bso.suggest()
    await bso.end(third)
    assert [each.is_first for each in (first, second, third, await bso.suggest())] == [True, True, False, False]


async def test_direction_is_revised_while_no_run_counts(bso: JobService) -> None:
    await bso.end(await bso.suggest())
    assert not (await revise(bso, higher_is_better_metric=False)).higher_is_better_metric
    assert (await bso.report(await bso.suggest(), cost_j=10.0, metric=0.1)).converged
    with pytest.raises(JobConflictError, match="higher_is_better_metric is False, not True"):
        await revise(bso, higher_is_better_metric=True)
    assert await bso.differences() == []


async def test_terms_unsupported_by_the_policy_are_refused(store: Store) -> None:
    server = await new_job(store, policy=ZEUS)
    for changes in ({"no_worse_than_default": {"val_loss": 0.1}}, {"window_size": 1}):
        with pytest.raises(InvalidJobError):
            await revise(server, **changes)
    assert (await server.show()).revisions == ()


@pytest.mark.parametrize("policy", OWN_POLICIES)
async def test_changed_eta_recomputes_the_cost_of_every_run(store: Store, policy: str) -> None:
    server = await new_job(store, policy=policy)
    # 500 J in 5 s at 16, with the usual helper; then 100 J in 8 s.
    for size, time_s, energy_j in ((16, 5.0, 500.0), (8, 8.0, 100.0)):
        trial = await server.offline(size, f"{size}")
        for epoch in (1, 2):
            took = {"time": time_s * epoch / 2, "energy": energy_j * epoch / 2, "current_epoch": epoch}
            metric, of_trial = (0.5, 0.95)[epoch - 1], trial_id(trial).model_dump()
            result = TrainingResult(**of_trial, **took, metric=metric, judged_by=None)
            await server.service.reports.record_report(result)
    assert (await server.show()).min_cost_j == 0.5 * 100 + 0.5 * 100 * 8.0
    await revise(server, eta_knob=0.0)
    view = await server.show()
    assert [trial.cost_j for trial in view.trials] == [500.0, 800.0]
    assert (view.min_cost_j, view.arms[1].mean_cost_j) == (500.0, 500.0)
    assert await server.differences() == []
    if policy == GP_VOI:
        (run,) = (await server.history()).memory[1].costs
        assert 2.718281828**run.log_cost == pytest.approx(250.0)
    await revise(server, eta_knob=1.0)
    assert (await server.show()).min_cost_j == 100.0
    assert await server.differences() == []


async def test_crash_at_a_size_that_a_revision_has_removed_fails_its_trial(store: Store) -> None:
    server = await new_job(store, policy=GP_VOI)
    trial = await server.offline(8, "removed")
    await revise(server, batch_sizes=[16, 32])
    await server.end(trial)
    assert await server.states() == [TrialState.FAILED]
    assert await server.differences() == []


async def test_running_trial_keeps_the_terms_of_the_dispatch(store: Store) -> None:
    server = await new_job(store, policy=ZEUS, beta_knob=2.0)
    await server.reach(await server.suggest(), 500.0)
    first, other = await server.suggest("first"), await server.offline(16, "other")
    await revise(server, max_epochs=4, beta_knob=1.1, eta_knob=0.5)
    # A repeated request gets the same rule, and a report within the earlier bound continues.
    assert (await server.suggest("first")).stop_rule == first.stop_rule
    answer = await server.report(first, cost_j=900.0, epoch=5)
    assert not answer.stop_train
    assert answer.stop_rule == first.stop_rule
    assert "2 times the cheapest run" in (await server.report(first, cost_j=1001.0, epoch=6)).message
    # A new trial stops by the present terms.
    new = await server.offline(16, "new")
    assert "1.1 times the cheapest run" in (await server.report(new, cost_j=560.0, epoch=1)).message
    assert (await server.report(other, cost_j=800.0, epoch=10)).reason is EndReason.MAX_EPOCHS_REACHED
    assert await server.differences() == []


@pytest.mark.parametrize("policy", OWN_POLICIES)
async def test_raised_max_epochs_repeat_a_missed_default(store: Store, policy: str) -> None:
    """A miss after two epochs does not show that six epochs would miss the target."""
    server = await new_job(store, policy=policy, max_epochs=2)
    missed = await server.suggest()
    assert (await server.report(missed, cost_j=200.0, epoch=2)).reason is EndReason.MAX_EPOCHS_REACHED
    await revise(server, max_epochs=6)
    trial = await server.suggest()
    assert trial.batch_size == missed.batch_size == 16
    for epoch in range(1, 6):
        assert not (await server.report(trial, cost_j=100.0 * epoch, epoch=epoch)).stop_train
    assert (await server.report(trial, cost_j=600.0, epoch=6)).reason is EndReason.MAX_EPOCHS_REACHED
    assert await server.differences() == []


@pytest.mark.parametrize("policy", OWN_POLICIES)
async def test_removed_size_stays_in_the_history_and_added_size_is_tried(store: Store, policy: str) -> None:
    server = await new_job(store, policy=policy, beta_knob=20.0)
    for size in (16, 8, 32):
        await server.reach(await server.offline(size, f"{size}"), 10.0 * size)
    running = await server.offline(8, "running")
    with pytest.raises(ValueError, match="8 is not one of batch_sizes"):
        await revise(server, default_batch_size=8, batch_sizes=[16, 32])
    await revise(server, batch_sizes=[16, 32, 64])
    view = await server.show()
    assert [(arm.batch_size, arm.trials) for arm in view.arms] == [(16, 1), (32, 1), (64, 0)]
    assert (view.trial_count, view.min_cost_j, view.revisions[0].in_words) == (4, 160.0, "batch_sizes +64 -8")
    with pytest.raises(InvalidReportError, match="8 is not one of the job's batch sizes"):
        await server.offline(8, "late")
    await server.reach(running, 70.0)
    chosen = set()
    for _ in range(12):
        trial = await server.suggest()
        chosen.add(trial.batch_size)
        await server.reach(trial, 10.0 * trial.batch_size if trial.batch_size < 64 else 100.0)
    assert 64 in chosen
    assert 8 not in chosen
    assert await server.differences() == []
    # A size that returns is known.
    await revise(server, batch_sizes=[8, 16, 32, 64])
    assert (await server.show()).arms[0].n == 2
    assert await server.differences() == []


async def test_sizes_added_in_the_bandit_stage_are_drawn(store: Store) -> None:
    server = await new_job(store, policy=ZEUS, mab_num_explorations=1)
    for _ in range(4):
        await server.reach(await server.suggest(), 500.0)
    assert (await server.history()).survivors == (8, 16, 32)
    await revise(server, batch_sizes=[8, 16, 64])
    assert (await server.history()).survivors == (8, 16, 64)
    assert (await server.suggest()).batch_size == 64
    await revise(server, batch_sizes=[4], default_batch_size=4)
    assert (await server.suggest()).batch_size == 4
    assert await server.differences() == []


@pytest.mark.parametrize("policy", OWN_POLICIES)
async def test_after_a_change_of_gpus_epochs_count_and_costs_do_not(store: Store, policy: str) -> None:
    server = await new_job(store, policy=policy)
    for size in (16, 8):
        trial = await server.offline(size, f"{size}")
        await server.report(trial, cost_j=2.0 * size, epoch=1)
        await server.reach(trial, 10.0 * size)
    await server.end(await server.offline(32, "too large"), TrialState.INFEASIBLE)
    running = await server.offline(8, "running")
    await revise(server, gpu_model="H100", max_power=700.0)
    view, history = await server.show(), await server.history()
    assert [trial.other_gpus for trial in view.trials] == [True] * 4
    assert (view.min_cost_j, view.arms[0].n, view.savings.recurrences, history.recurrences) == (None, 0, 0, 2)
    assert view.savings.cost_j.spent == 0
    assert 32 in history.runnable_sizes
    if policy == GP_VOI:
        assert [belief.is_observed for belief in history.memory] == [True, True, False]
        assert not any(belief.has_cost for belief in history.memory)
    await server.reach(running, 80.0)
    trial = await server.suggest()
    assert trial.batch_size == 16
    await server.report(trial, cost_j=100.0, epoch=1)
    await server.report(trial, cost_j=200.0, epoch=2)
    await server.reach(trial, 500.0)
    for _ in range(6):
        await server.reach(await server.suggest(), 500.0)
    assert await server.differences() == []
    # On the original GPUs, their costs hold again.
    await revise(server, gpu_model="V100", max_power=100.0)
    view = await server.show()
    assert [trial.other_gpus for trial in view.trials[:5]] == [False] * 4 + [True]
    assert view.min_cost_j == 80.0
    assert await server.differences() == []


async def test_changed_power_limit_of_the_same_gpus_keeps_the_costs(bso: JobService) -> None:
    await bso.reach(await bso.suggest(), 500.0)
    await revise(bso, max_power=200.0)
    assert (await bso.show()).min_cost_j == 0.5 * 500 + 0.5 * 200 * 5
    assert await bso.differences() == []


@pytest.mark.parametrize("database_url", [*DATABASES, MYSQL_SNAPSHOTS], indirect=True, scope="module")
async def test_concurrent_alternating_registrations_leave_a_consistent_job(bso: JobService) -> None:
    """The last registration decides, and each trial keeps its terms."""
    trials = [await bso.suggest() for _ in range(2)]

    async def launches(epochs: int, trial: TrialDispatch) -> None:
        for number in range(3):
            await revise(bso, max_epochs=epochs)
            await bso.report(trial, cost_j=100.0 + number, epoch=number + 1)

    await asyncio.gather(launches(20, trials[0]), launches(30, trials[1]))
    for trial in trials:
        assert not (await bso.report(trial, cost_j=900.0, epoch=9)).stop_train
        assert (await bso.report(trial, cost_j=1000.0, epoch=10)).reason is EndReason.MAX_EPOCHS_REACHED
    view = await bso.show()
    assert view.job.max_epochs in (20, 30)
    assert [each.revision for each in view.revisions] == list(range(1, len(view.revisions) + 1))
    assert await bso.differences() == []


async def test_revised_job_is_exported_and_imported(bso: JobService) -> None:
    for size in (16, 8):
        await bso.reach(await bso.offline(size, f"{size}"), 10.0 * size)
    running = await bso.suggest()
    await revise(bso, batch_sizes=[16, 32], gpu_model="H100", max_epochs=20)
    await bso.reach(await bso.suggest(), 400.0)
    lines = renamed(await exported(bso.store, bso.job_id))
    copy = JobService(bso.store)
    copy.job_id = lines[0]["job"]["job_id"]
    await import_lines(bso.store, lines)
    before, after = await bso.show(), await copy.show()
    assert after.model_copy(update={"job": before.job}) == before
    assert await copy.differences() == []
    lines[4]["started_event"] = lines[0]["revisions"][0]["event"]
    with pytest.raises(InvalidImportError, match=r"line 5, started_event: event .* is taken already"):
        await import_lines(bso.store, renamed(lines))
    twin = running.model_copy(update={"job_id": copy.job_id})
    for server, trial in ((bso, running), (copy, twin)):
        assert (await server.report(trial, cost_j=1000.0, epoch=10)).reason is EndReason.MAX_EPOCHS_REACHED


async def test_verdict_on_savings_is_relearned_after_a_revision(store: Store) -> None:
    server = await new_job(store, policy=GP_VOI)
    for number in range(5):
        for size, time_s, energy_j in ((16, 5.0, 500.0), (8, 5.0, 100.0)):
            trial = trial_id(await server.offline(size, f"{size} {number}")).model_dump()
            totals = {"time": time_s, "energy": energy_j, "metric": 0.95, "current_epoch": 5}
            await server.service.reports.record_report(TrainingResult(**trial, **totals, judged_by=None))
    before = (await server.show()).savings.cost_j.now
    await revise(server, eta_knob=1.0)
    view = await server.show()
    after = view.savings.cost_j.now
    assert before is not None
    assert after is not None
    expected = {arm.batch_size: arm.expected_cost_j or 0.0 for arm in view.arms}
    assert expected[16] == pytest.approx(expected[8] / (1 - after.middle))
    decision = (await store.read(explain, server.job_id)).decision
    assert decision is not None
    assert {size.batch_size: size.expected_cost_j for size in decision.sizes}[16] == pytest.approx(
        expected[16], rel=1e-3
    )
    assert (before.middle, after.middle) == pytest.approx((0.4, 0.8), abs=0.05)


async def test_changed_seed_restarts_the_random_draws(store: Store) -> None:
    server = await new_job(store, policy=ZEUS, mab_num_explorations=1)
    for number in range(6):
        await server.reach(await server.suggest(), 500.0 + number)
    drawn = await server.store.read(Transaction.job, server.job_id)
    await revise(server, mab_seed=2)
    revised = await server.store.read(Transaction.job, server.job_id)
    assert drawn is not None
    assert revised is not None
    assert (drawn.rng_state is None, revised.rng_state) == (False, None)


async def test_job_with_runs_without_epochs_keeps_policy_zeus(store: Store) -> None:
    server = await new_job(store, policy=ZEUS)
    await server.reach(await server.suggest())
    unknown = sa.update(trials).where(trials.c.job_id == server.job_id).values(epoch=None, first_epoch=None)
    await server.store.write(lambda transaction: transaction.connection.execute(unknown).rowcount)
    with pytest.raises(JobConflictError, match="cannot become 'gp_voi', which learns from epochs: trial 1 has none"):
        await revise(server, policy=GP_VOI)


CHANGES = st.one_of(
    st.fixed_dictionaries({"eta_knob": st.sampled_from([0.0, 0.3, 1.0])}),
    st.fixed_dictionaries({"beta_knob": st.sampled_from([None, 1.5, 3.0]), "max_epochs": st.integers(5, 20)}),
    st.sampled_from([{"batch_sizes": [8, 16, 32]}, {"batch_sizes": [16, 64]}, {"batch_sizes": [16]}]),
    st.sampled_from([{"gpu_model": "H100"}, {"gpu_model": "V100"}, {"max_power": 300.0}, {"number_of_gpus": 2}]),
    st.sampled_from([{"policy": ZEUS, "controls": CONTROLS}, {"policy": GP_VOI}, {"controls": "off"}]),
    st.fixed_dictionaries({"window_size": st.sampled_from([0, 3]), "mab_seed": st.integers(0, 3)}),
)


@pytest.mark.parametrize("database_url", DATABASES, indirect=True, scope="module")
@pytest.mark.hypothesis
@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(policy=st.sampled_from(OWN_POLICIES), seed=st.integers(0, 2**32 - 1), changes=st.lists(CHANGES, max_size=8))
async def test_caches_equal_a_replay_after_any_revisions_and_trials(
    store: Store, policy: str, seed: int, changes: list[dict[str, Any]]
) -> None:
    random_source = random.Random(seed)  # noqa: S311 - no secret
    server = await new_job(store, policy=policy)
    open_trials: list[TrialDispatch] = []
    for change in [{}, *changes]:
        if change:
            await revise(server, **change)
        assert await server.differences() == []
        for _ in range(8):
            try:
                action = random_source.choice(ACTIONS)
                if action in ("suggest", "offline", "wait") or not open_trials:
                    open_trials.append(await server.suggest())
                else:
                    await act(server, random_source, action, random_source.choice(open_trials))
            except BsoError:
                continue  # a refusal, which must not change the job
        assert await server.differences() == []
    known = await server.store.read(Transaction.revisions, server.job_id)
    assert [each.revision for each in known] == list(range(1, len(known) + 1))
    assert all(isinstance(each, Revision) for each in known)


# --- Rules of learning rates ------------------------------------------------------------------------------------------


async def begun(store: Store, scaling: str | None = None, **fields: Any) -> JobService:
    """Return a job with a completed run at its default size and one at another size."""
    bso = await new_job(store, scaling=scaling, **fields)
    for _ in range(2):
        await bso.reach(await bso.suggest())
    return bso


async def states(bso: JobService) -> list[TrialState]:
    assert await bso.differences() == []
    return [trial.state for trial in (await bso.show()).trials]


@pytest.mark.parametrize("policy", OWN_POLICIES)
async def test_two_rules_in_turn_leave_each_other_their_runs(store: Store, policy: str) -> None:
    bso = await begun(store, "rate auto", policy=policy)
    first = (await bso.show()).trials[1]
    await revise(bso, scaling="rate linear")
    assert await states(bso) == [TrialState.COMPLETED, TrialState.WITHDRAWN]
    # A client that knows no scaling, such as Zeus's, changes nothing.
    assert (await revise(bso, scaling=None)).scaling == "rate linear"
    (revision,) = (await bso.show()).revisions
    assert revision.in_words == (
        "rates and steps now follow the batch size by 'rate linear': other runs count at the default size only"
    )
    await bso.reach(await bso.suggest())
    for scaling, second, third in [
        ("rate auto", TrialState.COMPLETED, TrialState.WITHDRAWN),
        ("rate linear", TrialState.WITHDRAWN, TrialState.COMPLETED),
        ("rate auto", TrialState.COMPLETED, TrialState.WITHDRAWN),
    ]:
        await revise(bso, scaling=scaling)
        assert await states(bso) == [TrialState.COMPLETED, second, third]
    view = await bso.show()
    assert view.trials[1] == first
    assert (view.trials[2].message or "").startswith("not counted, as its learning rates and steps followed")
    measured = {arm.batch_size for arm in view.arms if arm.mean_cost_j is not None}
    assert measured == {view.job.default_batch_size, first.batch_size}


async def test_run_under_way_counts_for_the_rule_under_which_it_began(store: Store) -> None:
    bso = await begun(store, "rate auto", policy=ZEUS)
    running = await bso.suggest()
    await bso.report(running, cost_j=40.0)
    await revise(bso, scaling="rate none, steps samples")
    before = (await bso.show()).min_cost_j
    await bso.reach(running, 50.0)
    # Its training still gets the verdict, and may repeat its last report.
    await bso.reach(running, 50.0)
    assert (await states(bso))[2] is TrialState.WITHDRAWN
    assert (await bso.show()).min_cost_j == before
    await revise(bso, scaling="rate auto")
    assert (await states(bso))[2] is TrialState.COMPLETED
    assert (await bso.show()).min_cost_j == 50.0


@pytest.mark.parametrize(
    ("before", "after", "counts"),
    [
        (None, "rate none, steps samples", True),
        (None, "rate auto, steps samples", False),
        (None, "master linear", True),
        (None, "master auto", False),
        ("rate none, steps samples", "rate none, steps unchanged", False),
    ],
)
async def test_jobs_of_earlier_versions_had_the_defaults_of_their_time(
    store: Store, before: str | None, after: str, counts: bool
) -> None:
    bso = await begun(store, before)
    await revise(bso, scaling=after)
    assert ((await states(bso))[1] is TrialState.COMPLETED) is counts


async def test_sizes_crashed_by_another_rule_are_tried_again(store: Store) -> None:
    bso = await new_job(store, scaling="rate auto", policy=ZEUS)
    await bso.reach(await bso.suggest())
    for _ in range(3):
        trial = await bso.suggest()
        await bso.end(trial)
    assert (await bso.show()).trials[-1].state is TrialState.INFEASIBLE
    await revise(bso, scaling="rate none")
    assert (await states(bso))[-1] is TrialState.WITHDRAWN
    assert (await bso.suggest()).batch_size == trial.batch_size
    await revise(bso, scaling="rate auto")
    assert (await states(bso))[-2] is TrialState.INFEASIBLE


async def test_discarded_run_stays_discarded_when_the_earlier_rule_returns(store: Store) -> None:
    bso = await begun(store, "rate auto")
    await revise(bso, scaling="rate none")
    await bso.discard((await bso.show()).trials[1].model_copy())
    await revise(bso, scaling="rate auto")
    assert await states(bso) == [TrialState.COMPLETED, TrialState.WITHDRAWN]


async def test_export_keeps_the_rules_of_runs(store: Store) -> None:
    bso = await begun(store, "rate auto")
    await revise(bso, scaling="rate none")
    copy = renamed(await exported(store, bso.job_id))
    await import_lines(bso.store, copy)
    bso.job_id = copy[0]["job"]["job_id"]
    assert await states(bso) == [TrialState.COMPLETED, TrialState.WITHDRAWN]
    await revise(bso, scaling="rate auto")
    assert await states(bso) == [TrialState.COMPLETED, TrialState.COMPLETED]


async def test_target_set_later_judges_runs_of_every_rule(store: Store) -> None:
    bso = await new_job(store, target_metric=None, scaling="rate auto", policy=GP_VOI)
    for trial in (await bso.suggest(), await bso.offline(32, "away")):
        await bso.report(trial, cost_j=100.0, metric=0.5, epoch=9)
        await bso.report(trial, cost_j=120.0, metric=0.6, epoch=10)
    await revise(bso, scaling="rate none")
    await revise(bso, target_metric=0.5, target_runs=None)
    assert await states(bso) == [TrialState.COMPLETED, TrialState.WITHDRAWN]
    # The report beyond the target is deleted: an import would refuse it.
    assert [len(trial["epochs"]) for trial in (await exported(store, bso.job_id))[1:]] == [0, 0]
    await revise(bso, scaling="rate auto")
    assert await states(bso) == [TrialState.COMPLETED, TrialState.COMPLETED]
    assert [trial.epochs for trial in (await bso.show()).trials] == [9, 9]
