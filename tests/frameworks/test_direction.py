"""Nights of a job whose metric moves away from the target, or reaches it at the first evaluation."""

from __future__ import annotations

import pytest

from tests.support.frameworks import STEPS_OF_16, FrameworkBench, Work
from tests.support.job_bench import EPOCH_OF_48, SERVERS_SIZE
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import GP_VOI, TrialState

ERROR_MEASURE = (0.5, 0.3, 0.05)


def test_wrong_direction_ends_each_night_until_the_mode_is_right(bench: FrameworkBench) -> None:
    for _ in range(2):
        training = bench.training(bench.guessing(0.06), epochs=3, scores=ERROR_MEASURE)
        with pytest.raises(ZeusBSOConfigError, match=r"and then fell to 0\.3: if lower is better, say mode='min'"):
            training.train()
        assert len(training.sizes) == 2 * STEPS_OF_16
    assert [each.state for each in bench.view().trials] == [TrialState.WITHDRAWN] * 2
    callback = bench.guessing(0.06, mode="min")
    bench.training(callback, epochs=3, scores=ERROR_MEASURE).train()
    assert (callback.converged, callback.trial.epochs) == (True, 3)
    assert [each.in_words for each in bench.view().revisions] == ["higher_is_better_metric True -> False"]
    with pytest.raises(ZeusBSOConfigError, match="higher_is_better_metric is False, not True"):
        bench.training(bench.guessing(0.06), epochs=3, scores=ERROR_MEASURE).train()


def test_target_reached_at_the_first_evaluation_counts_once_the_second_has_confirmed_it(bench: FrameworkBench) -> None:
    job = bench.job(0.8, max_epochs=3, policy=GP_VOI)
    for epochs in (2, 1):
        callback = bench.callback(job)
        training = bench.training(callback, epochs=3, scores=(0.9, 0.95))
        training.train()
        assert callback.converged
        assert training.epochs == epochs
    # The cost until the first evaluation.
    assert [(each.epochs, each.metric, each.time_s) for each in bench.view().trials] == [(1, 0.9, 1.0)] * 2


def test_run_without_a_second_evaluation_counts_at_the_end(bench: FrameworkBench) -> None:
    callback = bench.callback(bench.job(0.8, max_epochs=2, batch_sizes=(SERVERS_SIZE,)), steps="unchanged")
    training = bench.training(callback, epochs=2, scores=(0.9,), max_steps=len(EPOCH_OF_48) + 1)
    training.train()
    assert callback.converged
    assert bench.only_trial().state is TrialState.COMPLETED


def test_target_reached_before_a_crash_counts(bench: FrameworkBench) -> None:
    work = Work({len(EPOCH_OF_48) + 1: RuntimeError("the user's own")})
    callback = bench.callback(bench.job(0.8, max_epochs=3, batch_sizes=(SERVERS_SIZE,)), energy_monitor=work.monitor)
    with pytest.raises(RuntimeError, match="the user's own"):
        bench.training(callback, work=work, epochs=3, scores=(0.9,)).train()
    trial = bench.only_trial()
    assert (trial.state, trial.epochs, trial.metric) == (TrialState.COMPLETED, 1, 0.9)
