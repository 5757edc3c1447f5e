"""Real trainings of a job without a target."""

from __future__ import annotations

import pytest

from tests.support.frameworks import FrameworkBench
from tests.support.job_bench import EPOCH_OF_48
from zeus_plugins.protocol import EndReason, TrialState


def test_three_runs_train_to_end_of_script_and_set_target(
    bench: FrameworkBench, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    job = bench.job(0.0, max_epochs=3).model_copy(update={"target_metric": None})
    for number, scores in enumerate(((0.1, 0.9, 0.8), (0.1, 0.95, 0.7), (0.85, 0.9, 0.99)), 1):
        callback = bench.callback(job)
        training = bench.training(callback, epochs=4, scores=scores)
        with caplog.at_level("INFO"):
            training.train()
        # The runs continue to the end of the script even if the job has fewer epochs.
        assert training.sizes == EPOCH_OF_48 * 4
        trial = callback.trial
        assert trial.reason == f"run {number} of 3 that set the target"
        assert (trial.verdict.converged, trial.verdict.reason) == (True, EndReason.NO_TARGET)
    view = bench.view()
    assert (view.job.target_metric, view.job.target_runs) == (0.9, (1, 2, 3))
    assert [(each.state, each.epochs) for each in view.trials] == [(TrialState.COMPLETED, 2)] * 3
    callback = bench.callback(job)
    training = bench.training(callback, epochs=4, scores=(0.1, 0.9))
    with caplog.at_level("INFO"):
        training.train()
    assert training.epochs == 2
    shown = capsys.readouterr()
    said = caplog.text + shown.out + shown.err
    # Two lines come from the ends of the first two runs, the next one from the end of the third run.
    assert said.count("No target yet: the first 3 runs set it.") == 2
    assert said.lower().count("target 0.9, learned from runs 1 to 3") == 1
