"""Trials that are stored but not counted: they finish another run, have impossible numbers, or are set aside."""

from __future__ import annotations

import pytest

from bso_server.errors import IllegalTransitionError, InvalidReportError, UnknownTrialError
from bso_server.service.pages import Pages
from bso_server.service.views import Tariff
from bso_server.storage.queries import completed_runs
from bso_server.storage.store import Store
from tests.support.service import JobService, new_job
from zeus_plugins.protocol import (
    GP_VOI,
    OWN_POLICIES,
    ZEUS,
    EndReason,
    OfflineTrial,
    Origin,
    StopRule,
    TrialDispatch,
    TrialState,
)


@pytest.fixture(params=[GP_VOI, ZEUS])
async def bso(store: Store, request: pytest.FixtureRequest) -> JobService:
    return await new_job(store, policy=request.param, mab_seed=1, eta_knob=1.0)


async def finish(bso: JobService, missed: int, size: int = 16, key: str = "finish") -> TrialDispatch:
    offline = OfflineTrial(job_id=bso.job_id, batch_size=size, continues=missed)
    return await bso.service.transact(bso.service.commands.record_offline, offline, key)


async def missed_run(bso: JobService, cost_j: float = 1000.0) -> TrialDispatch:
    """Run a recurrence that uses all its epochs without reaching the target."""
    trial = await bso.suggest()
    await bso.report(trial, cost_j=cost_j, epoch=10, metric=0.5)
    return trial


async def test_finishing_trial_changes_no_decision_and_counts_as_exploration(bso: JobService) -> None:
    await bso.reach(await bso.suggest(), cost_j=400)
    missed = await missed_run(bso, cost_j=700)
    before, history = await bso.show(), await bso.history()

    trial = await finish(bso, missed.trial_number)
    assert (trial.trial_number, trial.origin) == (3, Origin.FINISH)
    assert trial.reason == f"finishes the run of trial 2, which ended at {missed.batch_size} without the target"
    assert trial.stop_rule == StopRule(max_epochs=10)
    assert await bso.history() == history  # also while it runs
    # Neither the bound of policy zeus nor the bound of gp_voi stops the trial, which converges at any cost.
    assert not (await bso.report(trial, cost_j=5000, epoch=1, metric=0.6)).stop_train
    assert (await bso.report(trial, cost_j=5001, epoch=2, metric=0.95)).converged

    after = await bso.show()
    assert await bso.history() == history
    assert (after.arms, after.min_cost_j, after.best_batch_size) == (
        before.arms,
        before.min_cost_j,
        before.best_batch_size,
    )
    assert after.savings.recurrences == 1
    assert after.savings.exploration_cost_j == before.savings.exploration_cost_j + 5001
    assert after.savings.cost_j.spent == before.savings.cost_j.spent + 5001
    assert after.savings.cost_j.now == before.savings.cost_j.now
    assert after.trials[-1].epoch_bound is None
    assert [each.state for each in after.trials[1:]] == [TrialState.EXHAUSTED, TrialState.COMPLETED]
    assert await bso.differences() == []


async def test_finishing_trial_is_no_run_of_means(bso: JobService) -> None:
    await bso.reach(await bso.suggest(), cost_j=400)
    missed = await missed_run(bso, cost_j=1000)
    await bso.reach(await finish(bso, missed.trial_number), cost_j=100)
    assert (await bso.show()).min_cost_j == 400
    assert len(await bso.store.read(completed_runs, bso.job_id, since=0)) == 1  # the evidence for savings
    _, page = await bso.store.read(Pages(Tariff()).job, bso.job_id)
    assert page is not None
    assert [mean.runs for mean in page.means] == [1]
    assert page.view.arms[1].mean_cost_j == 400


@pytest.mark.parametrize("outcome", [TrialState.FAILED, TrialState.INFEASIBLE])
async def test_crash_of_finishing_trial_excludes_no_size(bso: JobService, outcome: TrialState) -> None:
    missed = await missed_run(bso)
    history = await bso.history()
    for number in range(4):
        await bso.end(await finish(bso, missed.trial_number, size=8, key=f"finish-{number}"), outcome)
    view = await bso.show()
    assert {(each.state, each.end_reason) for each in view.trials[1:]} == {(TrialState.FAILED, EndReason.CRASHED)}
    assert {arm.infeasible for arm in view.arms} == {None}
    assert await bso.history() == history
    await bso.end(await bso.offline(8, "whole"))
    assert (await bso.states())[-1] is TrialState.FAILED  # the first crash of a whole run


async def test_finishing_completed_or_unknown_trial_is_refused(bso: JobService) -> None:
    await bso.reach(await bso.suggest())
    with pytest.raises(InvalidReportError, match="trial 1 has reached the target: there is nothing to finish"):
        await finish(bso, 1)
    with pytest.raises(UnknownTrialError):
        await finish(bso, 2)
    assert len((await bso.show()).trials) == 1


@pytest.mark.parametrize(("metric", "epoch"), [(0.95, 1), (0.5, 10)])
async def test_impossible_cost_is_stored_but_not_counted(bso: JobService, metric: float, epoch: float) -> None:
    absurd = await bso.suggest()
    first = await bso.report(absurd, cost_j=2e-7, metric=metric, epoch=epoch)
    assert (first.stop_train, first.converged) == (True, metric > 0.9)
    assert "not counted, as a run cannot cost 2e-07 J" in first.message
    assert await bso.report(absurd, cost_j=2e-7, metric=metric, epoch=epoch) == first
    # Its exploration is repeated, and its cost does not stop later trials.
    again = await bso.suggest()
    assert (again.batch_size, again.origin) == (absurd.batch_size, absurd.origin)
    await bso.reach(again, 500.0)
    # Compared with earlier runs: no size saves more than 99.999 %.
    last = await bso.report(await bso.suggest(), cost_j=0.004, metric=metric, epoch=epoch)
    assert "and the cheapest run 500 J" in last.message
    shown = await bso.show()
    assert shown.min_cost_j == 500.0
    assert [(trial.state, trial.end_reason, trial.cost_j) for trial in shown.trials] == [
        (TrialState.WITHDRAWN, EndReason.DISCARDED, 2e-7),
        (TrialState.COMPLETED, EndReason.TARGET_REACHED, 500.0),
        (TrialState.WITHDRAWN, EndReason.DISCARDED, 0.004),
    ]


@pytest.mark.parametrize("policy", OWN_POLICIES)
async def test_discarded_trial_no_longer_counts(store: Store, policy: str) -> None:
    server = await new_job(store, policy=policy)
    wrong = await server.suggest()
    with pytest.raises(IllegalTransitionError, match="trial 1 is running"):
        await server.discard(wrong)
    await server.reach(wrong, 0.01)
    later = await server.suggest()
    await server.report(later, cost_j=500.0, metric=0.95, epoch=5)
    await server.suggest()
    await server.discard(wrong)
    before = await server.show()
    assert (await server.discard(wrong)).end_reason is EndReason.DISCARDED  # repeated
    assert await server.show() == before
    # Under policy zeus the later trial was too expensive.
    assert before.min_cost_j == (500.0 if policy == GP_VOI else None)
    assert await server.differences() == []
    with pytest.raises(UnknownTrialError):
        await server.service.transact(server.service.commands.discard, server.job_id, 99)
