"""Watched metrics: their values in the reports of a plain loop, and the warnings."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest

from tests.support.contract_double import CONVERGED, KEEP_TRAINING, ContractDouble
from tests.support.sessions import JOB, monitor_of, through_a_checkpoint
from zeus_plugins import BatchSizeOptimizer, JobSpec
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.training.arguments import TrialOptions
from zeus_plugins.training.defaults import JobWish, planned
from zeus_plugins.training.session import TrialSession


def training_with(server: ContractDouble) -> BatchSizeOptimizer:
    optimizer = BatchSizeOptimizer(monitor_of(*[(1.0, 50.0)] * 10), None, JOB, client=server.client())
    optimizer.get_batch_size()
    optimizer.on_train_begin()
    return optimizer


def sent(server: ContractDouble) -> list[dict[str, float] | None]:
    return [report["watched"] for report in server.sent("POST", "/report")]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def session_of(server: ContractDouble, *names: str) -> TrialSession:
    session = TrialSession(JOB, server.client(), monitor_of(*[(1.0, 50.0)] * 10), watch=names)
    session.ask()
    session.begin_measurement()
    return session


def test_each_report_has_the_last_value_of_each_watched_metric() -> None:
    server = ContractDouble(KEEP_TRAINING, KEEP_TRAINING, CONVERGED)
    optimizer = training_with(server)
    optimizer.on_evaluate(0.2)
    optimizer.watch(val_loss=2.0, test_acc=0.1)
    optimizer.watch(val_loss=1.5)
    optimizer.on_evaluate(0.5)
    optimizer.watch(test_acc=0.8999999761581421)  # 0.9 in single precision
    optimizer.on_evaluate(0.9)
    assert sent(server) == [None, {"val_loss": 1.5, "test_acc": 0.1}, {"val_loss": 1.5, "test_acc": 0.9}]


def test_non_finite_value_is_not_sent_and_hides_the_previous_value() -> None:
    server = ContractDouble(KEEP_TRAINING, CONVERGED)
    optimizer = training_with(server)
    optimizer.watch(val_loss=2.0, test_acc=0.1)
    optimizer.on_evaluate(0.5)
    optimizer.watch(val_loss=float("nan"), other=float("inf"))
    optimizer.on_evaluate(0.9)
    assert sent(server) == [{"val_loss": 2.0, "test_acc": 0.1}, {"test_acc": 0.1}]


def test_value_after_the_last_report_is_too_late(caplog: pytest.LogCaptureFixture) -> None:
    server = ContractDouble(CONVERGED)
    optimizer = training_with(server)
    optimizer.on_evaluate(0.9)
    assert warnings(caplog) == []
    optimizer.watch(test_acc=0.9)
    assert sent(server) == [None]
    assert warnings(caplog) == [
        "test_acc came after the last report of this run and cannot be recorded: hand watched metrics over before the "
        "evaluation that ends the run"
    ]


def test_single_warning_names_the_metrics_missing_in_every_report(caplog: pytest.LogCaptureFixture) -> None:
    session = session_of(ContractDouble(KEEP_TRAINING, CONVERGED), "val_loss", "test_acc", "f1")
    session.watch({"val_loss": 2.0})
    session.report_evaluation(0.5)
    session.report_evaluation(0.9)
    session.end()
    session.end()
    assert warnings(caplog) == [
        "no report of this run had a finite value of the watched test_acc, f1: log it in an evaluation, under this "
        "name, before the last report. Values logged later, for example by a test after training, cannot be recorded"
    ]


def test_aborted_training_gets_no_warning_about_metrics(caplog: pytest.LogCaptureFixture) -> None:
    session = session_of(ContractDouble(KEEP_TRAINING), "val_loss")
    session.report_evaluation(0.5)
    session.end(RuntimeError("of its own"))
    assert warnings(caplog) == []


def test_checkpoint_keeps_the_watched_values() -> None:
    server = ContractDouble(KEEP_TRAINING, KEEP_TRAINING)
    session = session_of(server, "val_loss")
    session.watch({"val_loss": 2.0})
    state = through_a_checkpoint(session.state_dict())
    resumed = TrialSession(JOB, server.client(), monitor_of((1.0, 50.0)))
    resumed.resume(state)
    resumed.begin_measurement()
    resumed.report_evaluation(0.5)
    assert sent(server) == [{"val_loss": 2.0}]


@pytest.mark.parametrize("names", [("",), ("a\nb",), ("x" * 256,), tuple(map(str, range(33))), (7,)])
def test_invalid_names_are_refused_before_the_training(names: tuple[str, ...]) -> None:
    server = ContractDouble()
    with pytest.raises(ZeusBSOConfigError, match="watch="):
        TrialSession(JOB, server.client(), monitor_of(), watch=names)
    if not isinstance(names[0], int):
        with pytest.raises(ZeusBSOConfigError, match="watch="):
            training_with(server).watch(**dict.fromkeys(names, 1.0))


def test_single_name_needs_no_tuple() -> None:
    session = session_of(ContractDouble(), "val_loss")
    assert session.watched_names == ("val_loss",)
    assert TrialOptions(watch=("val_loss",)).watch == session.watched_names


MARGINS = JOB.model_copy(update={"no_worse_than_default": {"test_acc": 0.005}})


def test_metrics_with_margins_are_watched_without_further_arguments(caplog: pytest.LogCaptureFixture) -> None:
    server = ContractDouble(CONVERGED)
    session = TrialSession(MARGINS, server.client(), monitor_of((1.0, 50.0)), watch=("f1",))
    session.ask()
    session.begin_measurement()
    session.report_evaluation(0.9)
    session.end()
    (warning,) = warnings(caplog)
    assert "the watched f1, test_acc: " in warning


@pytest.mark.parametrize(
    ("monitor", "higher", "margin", "contradicts"),
    [
        *(("score", True, 0.5, False), ("score", True, -0.5, True), ("score", False, 0.5, True)),
        *(("score", False, -0.5, False), ("val_loss", False, 0.5, False), ("val_loss", False, -0.5, False)),
    ],
)
def test_margin_of_the_monitored_metric_has_the_direction_of_the_job(
    monitor: str, higher: bool, margin: float, contradicts: bool
) -> None:
    job = JobSpec(**{**dict(JOB), "higher_is_better_metric": higher, "no_worse_than_default": {monitor: margin}})
    with pytest.raises(ZeusBSOConfigError, match="negative margin") if contradicts else nullcontext():
        assert planned(JobWish(job=job, monitor=monitor)).job == job
