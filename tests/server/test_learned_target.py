"""A job registered without a target, on each kind of database."""

from __future__ import annotations

import pytest

from bso_server.core.access import UNRESTRICTED
from bso_server.core.model import Cheapest
from bso_server.errors import JobConflictError
from bso_server.service.exports import export
from bso_server.service.reports import ReportBatch
from bso_server.storage.store import Store
from tests.support.exports import exported, import_lines
from tests.support.service import JobService, new_job, result, trial_id
from zeus_plugins.protocol import (
    GP_VOI,
    CreatedJob,
    EndReason,
    JobSpecFromClient,
    StopRule,
    TrainingResult,
    TrialEnd,
    TrialId,
    TrialState,
)

CURVES = ((0.1, 0.6, 0.95, 0.8, 0.9), (0.2, 0.7, 0.91, 0.9, 0.89), (0.1, 0.92, 0.93, 0.94, 0.9))
LEARNED = 0.91  # the worst of the best values in three of five epochs, reached after 3, 3 and 2 epochs of 10 J each


@pytest.fixture
async def unset(store: Store) -> JobService:
    return await new_job(store, target_metric=None, max_epochs=5, default_batch_size=16, policy=GP_VOI)


async def train(bso: JobService, trial: TrialId, metrics: tuple[float, ...], first: int = 1) -> None:
    for epoch, metric in enumerate(metrics, first):
        answer = await bso.report(trial, cost_j=10.0 * epoch, metric=metric, epoch=epoch)
        if answer.stop_train:
            break


def ended_early(trial: TrialId) -> TrialEnd:
    return TrialEnd(**trial_id(trial).model_dump(), ended_early=True, detail="EarlyStopping")


async def learn(bso: JobService) -> None:
    for metrics in CURVES:
        await train(bso, await bso.suggest(), metrics)


def asked(bso: JobService, target: float | None) -> JobSpecFromClient:
    fields = bso.job.model_dump(exclude={"registration_id", "target_runs", "target_metric"})
    return JobSpecFromClient(**fields, target_metric=target)


async def registered(bso: JobService, target: float | None) -> CreatedJob:
    job, is_new = await bso.service.register(asked(bso, target))
    assert not is_new
    return job


async def test_first_three_runs_train_to_the_end_at_the_default_and_set_the_target(unset: JobService) -> None:
    for number, metrics in enumerate(CURVES, 1):
        assert (await registered(unset, None)).target_in_words == "no target yet: the first 3 runs set it"
        trial = await unset.suggest()
        assert (trial.batch_size, trial.stop_rule) == (16, StopRule(max_epochs=5))
        assert trial.reason == f"run {number} of 3 that set the target"
        await train(unset, trial, metrics)
    job = await registered(unset, None)
    assert (job.target_metric, job.target_runs) == (LEARNED, (1, 2, 3))
    assert job.target_in_words == "target 0.91, learned from runs 1 to 3"
    trials = (await unset.show()).trials
    assert [(each.state, each.end_reason) for each in trials] == [(TrialState.COMPLETED, EndReason.TARGET_REACHED)] * 3
    assert [(each.epochs, each.cost_j) for each in trials] == [(3, 30.0), (3, 30.0), (2, 20.0)]
    assert (await unset.history()).cheapest == Cheapest(3, 16, 20.0)
    assert await unset.differences() == []
    assert (await unset.suggest()).batch_size != 16


async def test_no_target_is_learned_from_runs_that_are_best_at_their_first_evaluation(unset: JobService) -> None:
    for _ in range(3):
        await train(unset, await unset.suggest(), (0.9, 0.5, 0.3, 0.2, 0.1))
    for _ in range(2):
        with pytest.raises(
            JobConflictError, match=r"the 3 runs .* best at its first .*: if lower metric is better, say"
        ):
            await unset.suggest()
    job, _ = await unset.service.register(
        asked(unset, None).model_copy(update={"higher_is_better_metric": False, "revise": True, "target_runs": ()})
    )
    assert (job.target_metric, job.target_runs) == (0.3, (1, 2, 3))
    assert [each.epochs for each in (await unset.show()).trials] == [3, 3, 3]
    assert (await unset.suggest()).batch_size != 16
    assert await unset.differences() == []


@pytest.mark.parametrize("learned", [True, False])
async def test_running_trial_is_completed_at_the_epoch_reaching_the_later_target(
    unset: JobService, learned: bool
) -> None:
    early = await unset.suggest()
    await train(unset, early, (0.97, 0.5))
    if learned:
        await learn(unset)
    else:
        await registered(unset, 0.95)
    view = (await unset.show()).trials[0]
    assert (view.state, view.epochs, view.cost_j) == (TrialState.COMPLETED, 1, 10.0)
    assert (await unset.history()).cheapest == Cheapest(1, 16, 10.0)
    assert await unset.differences() == []
    assert (await unset.beat(early)).state is TrialState.COMPLETED
    # The next evaluation stops the run although it misses the target; its answer may be lost.
    for cost_j in (30.0, 30.0, 31.0):
        answer = await unset.report(early, cost_j=cost_j, metric=0.94, epoch=3)
        assert (answer.stop_train, answer.converged, answer.reason) == (True, True, EndReason.TARGET_REACHED)
    # The answer to the previous evaluation may be lost, too, and EarlyStopping may be faster.
    assert (await unset.report(early, cost_j=20.0, metric=0.5, epoch=2)).converged
    await unset.service.transact(unset.service.commands.end_trial, ended_early(early))
    assert (await unset.show()).trials[0] == view


async def test_evaluations_before_the_target_was_set_count_as_confirmation(store: Store) -> None:
    bso = await new_job(store, target_metric=None, max_epochs=5, confirm=2, policy=GP_VOI)
    trial = await bso.suggest()
    await train(bso, trial, (0.5, 0.97))
    await registered(bso, 0.95)
    answer = await bso.report(trial, cost_j=30.0, metric=0.96, epoch=3)
    assert answer.converged
    assert [(each.state, each.epochs) for each in (await bso.show()).trials] == [(TrialState.COMPLETED, 3)]


async def in_one_transaction(bso: JobService, *results: TrainingResult) -> None:
    reports, moment = [(each, UNRESTRICTED) for each in results], bso.service.commands.moment()
    await bso.store.write(lambda transaction: ReportBatch(transaction, reports, moment).take())


async def test_cheapest_of_two_running_trials_ending_together_is_kept(unset: JobService) -> None:
    first, second = await unset.suggest(), await unset.suggest()
    await train(unset, first, (0.97, 0.5))
    await train(unset, second, (0.5, 0.97))
    await registered(unset, 0.95)
    ends = [result(trial, cost_j=30.0, metric=0.96, epoch=3) for trial in (first, second)]
    await in_one_transaction(unset, *ends)
    assert (await unset.history()).cheapest == Cheapest(1, 16, 10.0)
    assert await unset.differences() == []


async def test_runs_ending_together_set_the_target_once(unset: JobService) -> None:
    runs = [await unset.suggest() for _ in range(4)]
    for trial, metrics in zip(runs, (*CURVES, (0.99, 0.1, 0.1, 0.1, 0.1)), strict=True):
        await train(unset, trial, metrics[:4])
    ends = zip(runs, (*CURVES, (0.1,)), strict=True)
    await in_one_transaction(unset, *(result(each, cost_j=50.0, metric=last[-1], epoch=5) for each, last in ends))
    job = await registered(unset, None)
    assert (job.target_metric, job.target_runs) == (LEARNED, (1, 2, 3))
    assert [each.epochs for each in (await unset.show()).trials] == [3, 3, 2, 1]
    assert (await unset.history()).cheapest == Cheapest(4, 16, 10.0)
    assert await unset.differences() == []


async def test_last_report_before_the_target_may_be_repeated(unset: JobService) -> None:
    await learn(unset)
    trial = (await unset.show()).trials[0]
    again = TrialId(job_id=unset.job_id, batch_size=16, trial_number=trial.trial_number)
    assert (await unset.report(again, cost_j=50.0, metric=0.9, epoch=5)).converged


async def test_run_ended_by_early_stopping_counts(unset: JobService) -> None:
    for metrics in CURVES:
        trial = await unset.suggest()
        await train(unset, trial, metrics[:4])
        await unset.service.transact(unset.service.commands.end_trial, ended_early(trial))
    assert (await registered(unset, None)).target_metric == 0.6  # two thirds of four epochs
    assert [each.epochs for each in (await unset.show()).trials] == [2, 2, 2]
    assert await unset.differences() == []


async def test_crashed_runs_do_not_set_the_target(unset: JobService) -> None:
    trial = await unset.suggest()
    await train(unset, trial, (0.5,))
    await unset.end(trial)
    await learn(unset)
    assert (await registered(unset, None)).target_runs == (2, 3, 4)


async def test_run_too_short_to_confirm_a_target_does_not_set_the_target(store: Store) -> None:
    bso = await new_job(store, target_metric=None, max_epochs=5, default_batch_size=16, confirm=2, policy=GP_VOI)
    short = await bso.suggest()
    await bso.report(short, cost_j=50.0, metric=0.99, epoch=5)
    await learn(bso)
    job = await registered(bso, None)
    assert (job.target_metric, job.target_runs) == (0.6, (2, 3, 4))
    trials = (await bso.show()).trials
    assert [each.state for each in trials] == [TrialState.EXHAUSTED, *[TrialState.COMPLETED] * 3]
    assert await bso.differences() == []


@pytest.mark.parametrize("learned", [True, False])
async def test_user_may_set_the_target_later(unset: JobService, learned: bool) -> None:
    if learned:
        await learn(unset)
    else:
        await train(unset, await unset.suggest(), CURVES[0])
    job = await registered(unset, 0.94)
    assert (job.target_metric, job.target_runs) == (0.94, ())
    assert (await registered(unset, None)).target_metric == 0.94
    states = [(each.state, each.epochs) for each in (await unset.show()).trials]
    # Trials that reached the new target count up to there; the others ended at the learned target.
    assert states[0] == (TrialState.COMPLETED, 3)
    assert states[1:] == ([(TrialState.WITHDRAWN, 3), (TrialState.WITHDRAWN, 2)] if learned else [])
    assert await unset.differences() == []
    assert (await registered(unset, 0.6)).target_metric == 0.6
    assert (await unset.show()).trials[0].epochs == 2
    assert await unset.differences() == []


async def test_late_registration_with_the_learned_target_does_not_override_the_users_target(unset: JobService) -> None:
    await learn(unset)
    known = await registered(unset, None)
    await registered(unset, 0.94)
    again, _ = await unset.service.register(JobSpecFromClient(**known.model_dump(exclude={"registration_id"})))
    assert again.target_metric == 0.94


async def test_job_keeps_a_registered_target(store: Store) -> None:
    bso = await new_job(store, target_metric=0.9)
    assert (await registered(bso, None)).target_metric == 0.9
    with pytest.raises(JobConflictError, match=r"begun with target 0\.9, .* for 0\.8 use another"):
        await bso.service.register(asked(bso, 0.8))


async def test_imported_job_keeps_the_learned_target(unset: JobService) -> None:
    await learn(unset)
    head, *trials = lines = await exported(unset.store, unset.job_id)
    assert (head["job"]["target_metric"], head["job"]["target_runs"]) == (LEARNED, [1, 2, 3])
    assert [len(trial["epochs"]) for trial in trials] == [2, 2, 1]
    await unset.service.delete_job(unset.job_id)
    await import_lines(unset.store, lines)
    job = await registered(unset, None)
    assert (job.target_metric, job.target_runs) == (LEARNED, (1, 2, 3))
    assert await unset.differences() == []
    assert (await registered(unset, 0.94)).target_metric == 0.94


# --- Targets that two consecutive evaluations must reach --------------------------------------------------------------


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
