"""Metrics that real trainings watch beside the monitored one."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.support.frameworks import FrameworkBench
from zeus_plugins.protocol import GP_VOI, TrialState

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


def test_watched_metric_without_logs_is_warned_about_once(
    bench: FrameworkBench, caplog: pytest.LogCaptureFixture
) -> None:
    callback = bench.callback(bench.job(0.9, max_epochs=4), watch=("test_acc",))
    bench.training(callback, epochs=4, scores=(0.1, 0.9)).train()
    assert bench.only_trial().watched is None
    (warning,) = warnings(caplog)
    assert "the watched test_acc: log it in an evaluation" in warning


def test_empty_name_of_watched_metric_is_refused_immediately(bench: FrameworkBench) -> None:
    options: dict[str, Any] = {"watch": ("",)}
    with pytest.raises(Exception, match="watch="):
        bench.callback(bench.job(), **options)


def test_metrics_with_margins_are_watched_without_naming(bench: FrameworkBench, logged: str) -> None:
    job = bench.job(0.9, max_epochs=4, policy=GP_VOI, no_worse_than_default={logged: 0.01})
    bench.training(bench.callback(job), epochs=4, scores=(0.1, 0.9)).train()
    watched = bench.only_trial().watched
    assert watched is not None
    assert list(watched) == [logged]


def test_margin_of_monitored_metric_makes_no_second_row(
    bench: FrameworkBench, caplog: pytest.LogCaptureFixture
) -> None:
    job = bench.job(0.9, max_epochs=4, policy=GP_VOI, no_worse_than_default={"score": 0.01})
    bench.training(bench.callback(job), epochs=4, scores=(0.1, 0.9)).train()
    assert bench.only_trial().watched is None
    (shown,) = [arm.metrics for arm in bench.view().arms if arm.n]
    assert [(each.name, each.margin) for each in shown] == [(None, 0.01)]
    assert warnings(caplog) == []
