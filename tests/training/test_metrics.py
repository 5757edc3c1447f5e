"""Selection of the reported number from literal dictionaries."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.training.metrics import EpochCount, EvaluationMetric, LoggedMetric, as_written

# Evaluations


@pytest.mark.parametrize(
    ("metrics", "is_evaluation"),
    [
        ({"eval_loss": 0.5}, True),
        ({"epoch": 1.0, "eval_score": 0.5}, True),
        ({"train_loss": 0.5}, False),
        ({"loss": 0.5, "evaluations": 3}, False),
        ({}, False),
    ],
)
def test_evaluation_is_recognized_by_the_names_of_metrics(metrics: dict[str, Any], is_evaluation: bool) -> None:
    assert EvaluationMetric.is_evaluation(metrics) is is_evaluation


@pytest.mark.parametrize(
    ("monitor", "value"),
    [("score", 0.75), ("eval_score", 0.75), ("epoch", 2.0), ("right_score", 0.25), ("eval_right_score", 0.25)],
)
def test_metric_is_found_with_and_without_a_prefix(monitor: str, value: float) -> None:
    metrics = {"eval_score": 0.75, "eval_right_score": 0.25, "epoch": 2}
    found = EvaluationMetric(monitor).value(metrics, step=4)
    assert found == value
    assert isinstance(found, float)


def test_returned_metrics_override_the_log() -> None:
    metric = EvaluationMetric("score")
    metric.note({"eval_score": 0.25})
    assert metric.value({"eval_score": 0.75}, step=4) == 0.75


def test_log_belongs_to_a_single_evaluation() -> None:
    metric = EvaluationMetric("added")
    metric.note({"eval_loss": 0.5, "eval_added": 0.25})
    metric.note({"loss": 1.0, "eval": 0.5})  # a log of the training
    assert metric.value({"eval_loss": 0.5}, step=4) == 0.25
    with pytest.raises(ZeusBSOConfigError):
        metric.value({"eval_loss": 0.5}, step=8)


def test_metric_can_wait_for_the_last_data_set() -> None:
    metric = EvaluationMetric("left_score")
    for step, left in ((4, 0.25), (8, 0.5)):
        assert metric.value({"eval_left_score": left}, step=step, data_sets=2, waits=True) is None
        assert metric.value({"eval_right_score": 0.75}, step=step, data_sets=2, waits=True) == left
    # An additional evaluation by the script at the same step does not report the metric again.
    assert metric.value({"eval_other": 1.0}, step=8, data_sets=2, waits=True) is None


def test_any_of_several_data_sets_may_contain_the_metric() -> None:
    metric = EvaluationMetric("right_score")
    assert metric.value({"eval_left_score": 0.25}, step=4, data_sets=2) is None
    assert metric.value({"eval_right_score": 0.75}, step=4, data_sets=2) == 0.75
    # The next evaluation starts a new count.
    assert metric.value({"eval_left_score": 0.5}, step=8, data_sets=2) is None
    assert metric.value({"eval_right_score": 1.0}, step=8, data_sets=2) == 1.0


@pytest.mark.parametrize(
    ("evaluations", "names"),
    [
        ([{"eval_loss": 0.5, "epoch": 1.0}], "['epoch', 'eval_loss']"),
        ([{"eval_left_loss": 0.5}, {"eval_right_loss": 0.5}], "['eval_left_loss', 'eval_right_loss']"),
    ],
)
def test_metric_missing_in_every_evaluation_is_an_error_listing_the_metrics(
    evaluations: list[dict[str, float]], names: str
) -> None:
    metric = EvaluationMetric("f1")
    *others, last = evaluations
    assert metric.value({"eval_old": 0.5}, step=2, data_sets=2) is None  # names of an earlier step are not listed
    for each in others:
        assert metric.value(each, step=4, data_sets=len(evaluations)) is None
    with pytest.raises(ZeusBSOConfigError) as raised:
        metric.value(last, step=4, data_sets=len(evaluations))
    assert str(raised.value) == (
        f"monitor='f1' is not among the metrics of the evaluation {names}: return it from compute_metrics, or name one "
        "of these"
    )


# Logs of a training without evaluations


def test_log_following_an_epoch_is_reported_for_the_epoch() -> None:
    metric = LoggedMetric("loss")
    assert not metric.note({"loss": 2.0}, step=3)
    assert metric.awaits_log(step=4)
    assert not metric.note({"learning_rate": 0.1}, step=4)
    assert metric.note({"loss": 1.0}, step=4)
    assert metric.value() == 1.0
    assert not metric.note({"loss": 0.5}, step=6)


def test_log_at_the_last_step_of_the_epoch_needs_no_waiting() -> None:
    metric = LoggedMetric("loss")
    metric.note({"loss": 1.0}, step=4)
    assert not metric.awaits_log(step=4)
    assert metric.value() == 1.0
    assert not metric.note({"loss": 0.5}, step=5)


@pytest.mark.parametrize(
    ("monitor", "is_owed"), [("loss", True), ("grad_norm", True), ("learning_rate", True), ("progress", False)]
)
def test_only_metrics_logged_by_every_trainer_are_awaited(monitor: str, is_owed: bool) -> None:
    metric = LoggedMetric(monitor)
    metric.note({monitor: 0.5}, step=1)
    assert metric.awaits_log(step=4) is is_owed


def test_metric_never_logged_is_an_error() -> None:
    metric = LoggedMetric("speed")
    metric.note({"loss": 1.0}, step=4)
    with pytest.raises(ZeusBSOConfigError) as raised:
        metric.value()
    assert str(raised.value) == (
        "monitor='speed' was not logged in the first epoch, and TrainingArguments(eval_strategy='no') makes no "
        "evaluations: log it with trainer.log({…}), or monitor 'loss'"
    )


# Epochs


@pytest.mark.parametrize(
    ("before", "trained", "reported", "after"),
    [
        (None, [1.0, 2.0], [1.0, 2.0], False),
        (None, [0.5, 1.0, 1.25], [0.5, 1.0, 1.25], True),
        (None, [1.0, 1.5, 1.75, 2.5], [1.0, 2.0, 2.0, 3.0], False),
        (True, [3.0, 3.5], [3.0, 3.5], True),
        (False, [3.5], [4.0], False),
        (None, [3], [3.0], False),
    ],
)
def test_epochs_are_rounded_up_after_whole_epochs_were_reported(
    before: bool | None, trained: list[float], reported: list[float], after: bool
) -> None:
    count = EpochCount(before)
    assert [count.reported(epochs) for epochs in trained] == reported
    assert count.has_fractions is after


# Numbers


@pytest.mark.parametrize(
    ("metric", "written"),
    [
        (0.8999999761581421, 0.9),  # 0.9 in single precision
        (0.9, 0.9),
        (0.30000001192092896, 0.3),
        (0.1234567890123, 0.1234567890123),  # not representable in single precision
        (0.5, 0.5),
        (0.0, 0.0),
        (-0.10000000149011612, -0.1),
        (16777216.0, 16777216.0),
        (123456792.0, 123456790.0),
        (9.999999974752427e-07, 1e-06),
        (1.401298464324817e-45, 1e-45),
        (3.4028234663852886e38, 3.4028235e38),
        (1e300, 1e300),
        (math.inf, math.inf),
        (-math.inf, -math.inf),
    ],
)
def test_single_precision_is_written_with_significant_digits_only(metric: float, written: float) -> None:
    assert as_written(metric) == written


def test_single_precision_is_written_like_numpy() -> None:
    assert math.isnan(as_written(math.nan))
    draw = random.Random(1)  # noqa: S311 - not for secrets
    for _ in range(5000):
        single = np.float32(draw.uniform(-1, 1) * 10.0 ** draw.randint(-12, 12))
        assert as_written(float(single)) == float(str(single))
