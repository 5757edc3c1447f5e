"""Runs at other batch sizes than the default count for the rule of learning rates and steps under which they began."""

from __future__ import annotations

from typing import Any

import pytest

from bso_server.storage.store import Store
from tests.server.test_revisions import revise
from tests.support.exports import exported, import_lines, renamed
from tests.support.service import JobService, new_job
from zeus_plugins.protocol import GP_VOI, OWN_POLICIES, ZEUS, TrialState

pytestmark = pytest.mark.storage


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
