"""Trials with impossible numbers, or set aside by an administrator: stored but not counted."""

from __future__ import annotations

import pytest

from bso_server.errors import IllegalTransitionError, UnknownTrialError
from bso_server.storage.store import Store
from tests.support.service import JobService, new_job
from zeus_plugins.protocol import GP_VOI, OWN_POLICIES, EndReason, TrialState


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
