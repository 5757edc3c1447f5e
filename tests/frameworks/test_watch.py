"""Metrics that real trainings watch beside the monitored one."""

from __future__ import annotations

import logging

import pytest

from tests.support.frameworks import FrameworkBench
from zeus_plugins.protocol import TrialState

# Both benches log this name in each validation beside the score: the Trainer its loss, Lightning's module its accuracy.
LOGGED = {"lightning": "val_acc", "huggingface": "loss"}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and "watched" in record.getMessage()
    ]


@pytest.fixture
def logged(request: pytest.FixtureRequest) -> str:
    return next(name for framework, name in LOGGED.items() if framework in request.node.name)


def test_last_values_of_watched_metrics_reach_trial(
    bench: FrameworkBench, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    callback = bench.callback(bench.job(0.9, max_epochs=4), watch=(logged, "score"))
    bench.training(callback, epochs=4, scores=(0.1, 0.9)).train()
    trial = bench.only_trial()
    assert trial.state is TrialState.COMPLETED
    # The monitored metric is not watched a second time.
    assert trial.watched is not None
    assert list(trial.watched) == [logged]
    assert (trial.metric, trial.watched) == (0.9, callback.trial.watched)
    (shown,) = [arm.metrics for arm in bench.view().arms if arm.n]
    assert [(each.name, each.runs) for each in shown] == [(None, 1), (logged, 1)]
    assert warnings(caplog) == []
