"""Jobs with a target that two consecutive evaluations must reach, on each kind of database."""

from __future__ import annotations

import pytest

from bso_server.errors import JobConflictError
from bso_server.service.exports import export
from bso_server.storage.store import Store
from tests.support.service import JobService, new_job
from zeus_plugins.protocol import JobSpecFromClient, StopRule, TrialState


@pytest.fixture
async def twice(store: Store) -> JobService:
    return await new_job(store, confirm=2, target_metric=0.9)


async def test_count_of_confirmations_is_stored_and_exported(twice: JobService) -> None:
    trial = await twice.suggest()
    answer = await twice.report(trial, cost_j=10, metric=0.95, epoch=1)
    assert not answer.stop_train
    assert answer.stop_rule is not None
    assert (answer.stop_rule.confirmed, answer.stop_rule.confirmed_epoch) == (1, 1.0)
    assert b'"confirmed":1' in b"".join([line async for line in export(twice.store, twice.job_id)])
    assert not (await twice.report(trial, cost_j=20, metric=0.5, epoch=2)).stop_train
    assert not (await twice.report(trial, cost_j=30, metric=0.95, epoch=3)).stop_train
    assert (await twice.report(trial, cost_j=40, metric=0.95, epoch=4)).converged
    (view,) = (await twice.show()).trials
    assert (view.state, view.cost_j) == (TrialState.COMPLETED, 40)


async def test_repeated_report_counts_once(twice: JobService) -> None:
    trial = await twice.suggest()
    for _ in range(2):
        assert not (await twice.report(trial, cost_j=10, metric=0.95, epoch=1)).stop_train


async def test_report_judged_by_the_training_keeps_the_trainings_count(twice: JobService) -> None:
    trial = await twice.suggest()
    counted = StopRule(max_epochs=100, confirmed=1, confirmed_epoch=1.0)
    assert (await twice.report(trial, cost_j=20, metric=0.95, epoch=2, judged_by=counted)).converged


async def test_confirm_is_part_of_the_configuration(twice: JobService) -> None:
    asked = JobSpecFromClient(**twice.job.model_dump(exclude={"confirm", "registration_id"}))
    with pytest.raises(JobConflictError, match="confirm is 2, not 1"):
        await twice.service.register(asked)
