"""Policy `gp_voi` through the service, on each kind of database: storage, messages and views."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from bso_server.cli.jobs import job_text
from bso_server.service.pages import Pages
from bso_server.service.views import Tariff
from bso_server.storage.store import Store
from bso_server.storage.tables import policy_memories
from bso_server.storage.transaction import Transaction
from tests.support.service import JobService, new_job, trial_id
from zeus_plugins.protocol import GP_VOI, EndReason, Origin, StopRule, TrialDispatch, TrialEnd, TrialState


@pytest.fixture
async def bso(store: Store) -> JobService:
    """A job with sizes 8, 16 and 32, default 16, η = 0.5, 100 W and at most 10 epochs."""
    return await new_job(store, policy=GP_VOI, controls="off")


async def ran(server: JobService, trial: TrialDispatch, needed: int, epoch_j: float) -> EndReason | None:
    """Run a trial that needs `needed` epochs; return the reason of its end."""
    for epoch in range(1, 11):
        metric = 0.95 if epoch >= needed else 0.5
        answer = await server.report(trial, cost_j=epoch * epoch_j, epoch=epoch, metric=metric)
        if answer.stop_train:
            return answer.reason
    raise AssertionError("a trial has 10 epochs at most")


async def test_job_is_stuck_after_every_size_missed_the_target_until_a_success(bso: JobService) -> None:
    for metric, size in ((0.5, 16), (0.7, 8), (0.6, 32), (0.4, 16)):
        assert ((await bso.show()).stuck is None) is (metric > 0.4)
        trial = await bso.suggest()
        assert trial.batch_size == size
        assert (await bso.report(trial, cost_j=100, metric=metric, epoch=10)).stop_train
    view = await bso.show()
    assert view.stuck == (
        "no batch size has reached the target, 0.9; the best run reached 0.7 at 8: lower the target or raise max_epochs"
    )
    assert f"\nStuck: {view.stuck}.\n" in job_text(view)
    trial = await bso.suggest()
    assert (trial.batch_size, trial.reason) == (
        16,
        "every batch size has missed the target: lower the target or raise max_epochs",
    )
    await bso.reach(trial)
    view = await bso.show()
    assert view.stuck is None
    assert "Stuck" not in job_text(view)


async def test_equal_crashes_of_neighbours_exclude_larger_sizes_in_the_database(
    store: Store,
) -> None:
    bso = await new_job(store, policy=GP_VOI, batch_sizes=(8, 16, 32, 64), default_batch_size=8, controls="off")
    while len((await bso.show()).trials) < 8:
        trial = await bso.suggest()
        if trial.batch_size == 8:
            await bso.reach(trial)
            continue
        end = TrialEnd(**trial_id(trial).model_dump(), detail=f"RuntimeError: shape [{trial.batch_size}]")
        await bso.service.transact(bso.service.commands.end_trial, end)
    view = await bso.show()
    assert {arm.batch_size for arm in view.arms if arm.infeasible is EndReason.CRASHED_ALIKE} >= {64}
    assert {arm.batch_size for arm in view.arms if arm.infeasible is None} == {8}
    assert sum(trial.batch_size > 8 for trial in view.trials) <= 3
    assert await bso.differences() == []


async def test_stop_rule_is_sent_as_soon_as_known(bso: JobService) -> None:
    trial = await bso.suggest("key")
    assert trial.stop_rule == StopRule(max_epochs=10)
    await ran(bso, trial, needed=3, epoch_j=100)
    offered = await bso.suggest("second")
    # The cost of an epoch at 32 is not known yet.
    assert (offered.batch_size, offered.stop_rule) == (32, StopRule(max_epochs=10))
    # Nor is the start-up, so that only the second report shows the cost.
    assert not (await bso.report(offered, cost_j=1000, epoch=1)).stop_train
    second = await bso.report(offered, cost_j=2000, epoch=2)
    assert (second.stop_train, second.reason) == (True, EndReason.EPOCH_BOUND_REACHED)
    assert second.stop_rule is None
    assert (await bso.report(offered, cost_j=2000, epoch=2)) == second

    # A single run may have been slowed, so that the size is tried again, with a bound from the start.
    again = await bso.suggest("again")
    assert (again.batch_size, again.origin) == (32, Origin.EXPLORATION)
    assert again.stop_rule is not None
    assert again.stop_rule.max_epochs < 10
    assert await ran(bso, again, needed=11, epoch_j=1000) is EndReason.EPOCH_BOUND_REACHED

    safe = await bso.suggest("third")
    assert (safe.batch_size, safe.origin) == (16, Origin.INCUMBENT)
    assert safe.stop_rule is not None
    assert safe.stop_rule.max_epochs < 10
    assert await bso.suggest("third") == safe
    answer = await bso.report(safe, cost_j=100, epoch=1)
    assert answer.stop_rule == safe.stop_rule
    assert f"it has {safe.stop_rule.max_epochs} epochs" in answer.message
    assert (await bso.show()).trials[1].state is TrialState.EARLY_STOPPED


async def test_bound_of_a_trial_stays_despite_later_trials(bso: JobService) -> None:
    await ran(bso, await bso.suggest(), needed=4, epoch_j=100)
    trial = await bso.suggest()
    for epoch in (1, 2):
        answer = await bso.report(trial, cost_j=epoch * 90.0, epoch=epoch)
    rule = answer.stop_rule
    other = await bso.suggest()
    await bso.report(other, cost_j=10, metric=0.95, epoch=1)
    assert (await bso.report(trial, cost_j=270, epoch=3)).stop_rule == rule


async def test_stored_memory_does_not_grow(bso: JobService) -> None:
    def remembered(transaction: Transaction) -> list[int]:
        kept = select(policy_memories.c.memory).where(policy_memories.c.job_id == bso.job_id)
        return [len(row[0]) for row in transaction.tuples(kept)]

    assert await bso.store.read(remembered) == []
    lengths: list[int] = []
    for _ in range(40):
        trial = await bso.suggest()
        await bso.report(trial, cost_j=400, epoch=4, metric=0.95)
        lengths.append(sum(await bso.store.read(remembered)))
    # Constant after eight runs of a size, except for the number of digits.
    assert 300 < lengths[10] < 2000
    assert max(lengths) < 3000
    assert lengths[-1] < 1.1 * lengths[-10]


async def test_means_forget_the_same_runs_as_the_beliefs_after_a_change_of_costs(bso: JobService) -> None:
    """From run 13 on, every epoch costs 2.5 times as much."""
    pages = Pages(Tariff(), lambda: bso.now)
    numbers = []
    for run in range(20):
        epochs = {8: 4, 16: 5, 32: 8}
        trial = await bso.suggest()
        numbers.append(trial.trial_number)
        await ran(bso, trial, epochs[trial.batch_size], 100.0 if run < 12 else 250.0)
    view = await bso.show()
    _, page = await bso.store.read(pages.job, bso.job_id)
    best = view.arm_of(view.best_batch_size)
    assert page is not None
    assert best is not None
    assert view.since == numbers[12]
    assert best.mean_cost_j == pytest.approx(250 * epochs[best.batch_size])
    assert best.expected_cost_j == pytest.approx(best.mean_cost_j, rel=0.05)
    (mean,) = (each for each in page.means if each.batch_size == best.batch_size)
    assert mean.energy_j == pytest.approx(best.mean_cost_j)
