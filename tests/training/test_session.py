"""A trial from the request for a batch size to its end, with an in-memory server."""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.support.contract_double import CONVERGED, COST_BOUND, KEEP_TRAINING, ContractDouble
from tests.support.replay import ReplayMonitor
from tests.support.servers import ServerProcess
from tests.support.sessions import (
    GPUS,
    JOB,
    NO_LIMIT,
    TRIAL,
    monitor_of,
    running_session,
    session_of,
    through_a_checkpoint,
)
from zeus_plugins.client.delivery import deliver_waiting
from zeus_plugins.client.http import BsoClient
from zeus_plugins.client.local import LocalServer
from zeus_plugins.client.outbox import Outbox
from zeus_plugins.client.port import NO_RETRIES
from zeus_plugins.energy import EnergyMonitor, EnergyUnavailableError, Measurement
from zeus_plugins.errors import (
    ZeusBSOBadOperationError,
    ZeusBSOConfigError,
    ZeusBSOOperationOrderError,
    ZeusBSORuntimeError,
)
from zeus_plugins.protocol import JobSpec, ReportResponse, StopRule, TrialDispatch, TrialState
from zeus_plugins.training.defaults import JobPlan
from zeus_plugins.training.outcomes import end_trial_from_another_rank
from zeus_plugins.training.session import TrialSession
from zeus_plugins.training.trial import TrialInfo

UNNAMED_JOB = JobSpec(job_id_prefix="mnist", batch_sizes=(32, 64), default_batch_size=32)
UNKNOWN = {"startup_s": None, "watched": None, **NO_LIMIT}
MEASURED = {"energy_source": "nvml", "judged_by": None, "waited_share": 0.0, **UNKNOWN}


# --- Asking ---------------------------------------------------------------------------------------------------------


def test_ask_registers_the_job_with_hardware_and_returns_the_dispatched_size(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = ContractDouble(batch_size=64)
    session = session_of(server)
    assert not session.has_trial
    assert session.ask() == 64
    assert session.has_trial
    assert [request[:2] for request in server.requests] == [("POST", "/jobs"), ("GET", "/jobs/batch_size")]
    (registration,) = server.sent("POST", "/jobs")
    assert registration == JOB.model_dump(mode="json") | GPUS.model_dump() | {
        "target_runs": None,
        "scaling": None,
        "revise": False,
    }
    assert session.trial == TrialInfo(**TRIAL, stop_rule=StopRule(max_epochs=100), cost_j=0.0)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(("job", "job_id"), [(UNNAMED_JOB, "mnist-nightly"), (JOB, "mnist-1")])
def test_job_id_of_the_environment_names_an_unnamed_job(
    job: JobSpec, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEUS_JOB_ID", "mnist-nightly")
    server = ContractDouble()
    session_of(server, job=job).ask()
    assert server.sent("POST", "/jobs")[0]["job_id"] == job_id


def test_job_id_of_the_environment_must_fit_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEUS_JOB_ID", "cifar-1")
    with pytest.raises(ZeusBSOConfigError, match=r"ZEUS_JOB_ID=cifar-1 .*does not start with job_id_prefix 'mnist'"):
        session_of(ContractDouble(), job=UNNAMED_JOB)


def test_missing_job_id_causes_a_single_warning_with_the_generated_id(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEUS_JOB_ID", "")
    session = session_of(ContractDouble(), job=UNNAMED_JOB)
    session.ask()
    assert session.trial.job_id == "mnist-0badcafe"
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "ZEUS_JOB_ID=mnist-0badcafe" in warning.getMessage()


class DispatchFails(ContractDouble):
    """Fail between the registration and the dispatch."""

    def __call__(self, request: Any) -> Any:
        self.down = request.method == "GET"
        return super().__call__(request)


def test_training_without_a_dispatch_belongs_to_the_generated_job() -> None:
    session = session_of(DispatchFails(), job=UNNAMED_JOB)
    assert session.ask() == 32
    assert session.trial.job_id == "mnist-0badcafe"
    session.end()


class Raced(LocalServer):
    """Another launch registers its rule between this launch's registration and its request for a trial."""

    races = 1

    def request_trial(self, job_id: str, key: str | None = None) -> TrialDispatch:
        self.races -= 1
        if self.races >= 0:
            self.register(self.show_job(job_id).job.model_copy(update={"scaling": "rate none", "revise": True}))
        return super().request_trial(job_id, key)


def test_trial_of_another_rule_is_given_back(tmp_path: Path) -> None:
    with Raced(f"embedded://{tmp_path / 'bso.sqlite3'}") as client:
        session = TrialSession(JobPlan(job=JOB, scaling="rate auto"), client, monitor_of((1.0, 50.0)))
        session.ask()
        view = client.show_job(JOB.job_id or "")
        session.end()
    assert view.job.scaling == "rate auto"
    assert [trial.state for trial in view.trials] == [TrialState.WITHDRAWN, TrialState.RUNNING]
    assert session.trial.trial_number == 2


def test_launches_changing_the_rule_again_and_again_are_refused(tmp_path: Path) -> None:
    with Raced(f"embedded://{tmp_path / 'bso.sqlite3'}") as client:
        client.races = 100
        session = TrialSession(JobPlan(job=JOB, scaling="rate auto"), client, monitor_of((1.0, 50.0)))
        with pytest.raises(ZeusBSOConfigError, match=f"launches of job {JOB.job_id} with different lr_scaling"):
            session.ask()
        states = [trial.state for trial in client.show_job(JOB.job_id or "").trials]
    assert set(states) == {TrialState.WITHDRAWN}


# --- reporting ------------------------------------------------------------------------------------------------------


def test_reports_contain_the_totals_since_the_trial_began() -> None:
    server = ContractDouble(KEEP_TRAINING, CONVERGED)
    session = running_session(server, (2.0, 100.0), (3.0, 50.0))
    assert session.report_evaluation(0.5, 1) == ReportResponse(**KEEP_TRAINING)
    assert not session.finished
    assert session.report_evaluation(0.75, 1.5) == ReportResponse(**CONVERGED)
    assert server.sent("POST", "/report") == [
        TRIAL | {"time": 2.0, "energy": 100.0, "metric": 0.5, "current_epoch": 1, **MEASURED},
        TRIAL | {"time": 5.0, "energy": 150.0, "metric": 0.75, "current_epoch": 1.5, **MEASURED},
    ]
    assert session.trial == TrialInfo(
        **TRIAL,
        stop_rule=StopRule(max_epochs=100),
        time_s=5.0,
        energy_j=150.0,
        cost_j=1575.0,
        energy_source="nvml",
        waited_s=0.0,
        epoch=1.5,
        metric=0.75,
        verdict=ReportResponse(**CONVERGED),
    )
    assert session.finished
    assert session.trial.converged


def test_report_without_an_epoch_counts_as_the_next_epoch() -> None:
    server = ContractDouble(KEEP_TRAINING, KEEP_TRAINING, KEEP_TRAINING)
    session = running_session(server, (1.0, 1.0), (1.0, 1.0), (1.0, 1.0))
    session.report_evaluation(0.1)
    session.report_evaluation(0.1, 4)
    session.report_evaluation(0.1)
    assert [body["current_epoch"] for body in server.sent("POST", "/report")] == [1, 4, 5]


def test_no_report_follows_a_stop_verdict() -> None:
    server = ContractDouble(CONVERGED, CONVERGED)
    session = running_session(server, (1.0, 1.0), (1.0, 1.0))
    session.report_evaluation(0.9, 1)
    with pytest.raises(ZeusBSOOperationOrderError, match="the server said stop: target reached"):
        session.report_evaluation(0.9, 2)
    assert len(server.sent("POST", "/report")) == 1
    session.end()
    assert server.sent("PATCH", "/trials") == []


def test_time_below_the_clock_resolution_is_sent_as_positive() -> None:
    server = ContractDouble(KEEP_TRAINING)
    session = running_session(server, (0.0, 0.0))
    session.report_evaluation(0.1, 1)
    assert server.sent("POST", "/report")[0]["time"] == 1e-6
    assert session.trial.time_s == 0.0


@pytest.mark.parametrize("metric", [math.nan, math.inf, -math.inf])
def test_diverged_training_ends_the_trial_as_failed(metric: float) -> None:
    server = ContractDouble()
    session = running_session(server, (2.0, 100.0))
    verdict = session.report_evaluation(metric, 1)
    assert (verdict.stop_train, verdict.converged) == (True, False)
    assert verdict.message == f"the metric is {metric}: training diverged with batch size 64"
    assert session.finished
    session.end()
    assert server.sent("POST", "/report") == []
    assert server.sent("PATCH", "/trials") == [
        TRIAL
        | NO_LIMIT
        | {
            "outcome": "failed",
            "refused_size": False,
            "ended_early": False,
            "detail": f"the metric is {metric}: training diverged",
        }
    ]


def test_diverged_training_stops_even_during_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    server = ContractDouble()
    session = running_session(server, (2.0, 100.0))
    server.down = True
    assert session.report_evaluation(math.nan, 1).stop_train
    assert "1 results of job mnist-1 wait in" in caplog.text


@pytest.mark.parametrize("epoch", [0, -1, math.nan, math.inf])
def test_epoch_must_be_positive(epoch: float) -> None:
    session = running_session(ContractDouble(), (1.0, 1.0))
    with pytest.raises(ZeusBSOBadOperationError, match="epoch"):
        session.report_evaluation(0.5, epoch)


def test_window_is_open_exactly_from_begin_to_the_final_verdict() -> None:
    monitor = monitor_of((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (1.0, 1.0))
    session = session_of(ContractDouble(KEEP_TRAINING, CONVERGED), monitor)
    session.ask()
    session.begin_measurement()
    session.report_evaluation(0.1, 1)
    with pytest.raises(ZeusBSOOperationOrderError):
        monitor.begin_window("zeus_bso_trial")
    session.report_evaluation(0.9, 2)
    monitor.begin_window("zeus_bso_trial")


# --- Failing monitors -----------------------------------------------------------------------------------------------


class Failing(ReplayMonitor):
    """Lose the GPU after `calls` requests to open or close a window."""

    def __init__(self, calls: int, **lost: float) -> None:
        super().__init__([Measurement(2.0, 100.0, "nvml")] * 10, GPUS)
        self.calls = calls
        self.lost = lost

    def _count(self) -> None:
        self.calls -= 1
        if self.calls < 0 and not self.lost:
            raise EnergyUnavailableError("GPU 0 is lost")

    def begin_window(self, name: str) -> None:
        self._count()
        super().begin_window(name)

    def end_window(self, name: str) -> Measurement:
        self._count()
        measured = super().end_window(name)
        return replace(measured, **self.lost) if self.calls < 0 else measured


@pytest.mark.parametrize(
    "monitor",
    [
        pytest.param(Failing(2), id="when a window opens"),
        pytest.param(Failing(3), id="when a window closes"),
        pytest.param(Failing(3, energy_j=math.nan), id="which gives no number"),
        pytest.param(Failing(3, energy_j=-5.0), id="which counts backwards"),
        pytest.param(Failing(3, time_s=math.inf), id="whose clock is broken"),
    ],
)
def test_training_with_lost_energy_continues_and_the_trial_has_failed(
    monitor: Failing, caplog: pytest.LogCaptureFixture
) -> None:
    server = ContractDouble(KEEP_TRAINING)
    session = running_session(server, monitor=copy(monitor))
    session.report_evaluation(0.1, 1)
    verdict = session.report_evaluation(0.2, 2)
    assert (verdict.stop_train, verdict.converged) == (False, False)
    verdict = session.report_evaluation(0.9, 3)
    assert (verdict.stop_train, verdict.converged) == (True, True)
    assert session.trial.cost_j is None
    session.end()
    assert [body["current_epoch"] for body in server.sent("POST", "/report")] == [1]
    (end,) = server.sent("PATCH", "/trials")
    assert end["outcome"] == "failed"
    assert end["detail"].startswith("the energy could not be measured: ")
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "the energy of trial 7 of job mnist-1 can no longer be measured" in warning
    assert "The training continues" in warning


@pytest.mark.parametrize(("metric", "epoch"), [(0.1, 100), (math.nan, 2)], ids=["its last epoch", "diverged"])
def test_training_with_lost_energy_ends_with_the_last_epoch_or_a_divergence(metric: float, epoch: int) -> None:
    server = ContractDouble()
    session = running_session(server, monitor=Failing(1))
    assert not session.report_evaluation(0.1, epoch - 1).stop_train
    verdict = session.report_evaluation(metric, epoch)
    assert (verdict.stop_train, verdict.converged, session.finished) == (True, False, True)
    session.end()
    assert len(server.sent("PATCH", "/trials")) == 1


@pytest.mark.parametrize("calls", [1, 2])
def test_checkpoint_with_lost_energy_is_written_and_the_trial_has_ended(
    calls: int, caplog: pytest.LogCaptureFixture
) -> None:
    session = running_session(ContractDouble(), monitor=Failing(calls))
    state = through_a_checkpoint(session.state_dict())
    session.end()
    server = ContractDouble()
    resumed = session_of(server)
    assert not resumed.resume(state)
    assert "its energy could not be measured: EnergyUnavailableError: GPU 0 is lost" in caplog.text
    resumed.end()
    assert server.requests == []


def test_checkpoint_after_an_unmeasured_end_is_not_resumed() -> None:
    session = running_session(ContractDouble(), monitor=Failing(1))
    session.end(KeyboardInterrupt())
    assert not session_of(ContractDouble()).resume(session.state_dict())


def test_monitor_failing_before_the_training_is_an_error() -> None:
    session = session_of(ContractDouble(), Failing(0))
    session.ask()
    with pytest.raises(EnergyUnavailableError, match="GPU 0 is lost"):
        session.begin_measurement()
    session.end()


# --- order ----------------------------------------------------------------------------------------------------------


CALLS: dict[str, Callable[[TrialSession], object]] = {
    "ask": TrialSession.ask,
    "begin": TrialSession.begin_measurement,
    "report": lambda session: session.report_evaluation(0.5, 1),
    "end": TrialSession.end,
    "look": lambda session: session.trial,
    "load": lambda session: session.resume(TRIAL),
}


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ("begin", "ask for a batch size first"),
        ("report", "ask for a batch size first"),
        ("look", "ask for a batch size first"),
        ("ask ask", "make a new session"),
        ("ask report", "begin the measurement before"),
        ("load report", "begin the measurement before"),
        ("ask begin begin", "begun already"),
        ("ask begin end report", "the trial is over"),
        ("ask end begin", "the trial is over"),
        ("ask end ask", "make a new session"),
        ("end ask", "make a new session"),
        ("load ask", "make a new session"),
        ("end load", "into a new session"),
        ("ask load", "into a new session"),
    ],
)
def test_call_out_of_order_is_refused(calls: str, message: str) -> None:
    session = session_of(ContractDouble(KEEP_TRAINING), monitor_of((1.0, 1.0), (1.0, 1.0)))
    *before, last = calls.split()
    for call in before:
        CALLS[call](session)
    with pytest.raises(ZeusBSOOperationOrderError, match=message):
        CALLS[last](session)


# --- ending ---------------------------------------------------------------------------------------------------------


def test_ending_warns_instead_of_raising(caplog: pytest.LogCaptureFixture) -> None:
    server = ContractDouble()
    session = running_session(server)  # no measurement to replay, so closing the window fails, too
    server.down = True
    session.end()
    away, waits = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert away.startswith("no answer from")
    assert waits.startswith("1 results of job mnist-1 wait in")


# --- checkpoints ----------------------------------------------------------------------------------------------------


def test_resumed_trial_continues_the_totals_with_the_open_window() -> None:
    session = running_session(ContractDouble(KEEP_TRAINING), (2.0, 100.0), (0.5, 10.0))
    session.report_evaluation(0.5, 1)
    state = through_a_checkpoint(session.state_dict())
    assert state["time_s"] == 2.5
    assert session.trial.time_s == 2.5

    server = ContractDouble(CONVERGED)
    resumed = session_of(server, monitor_of((3.0, 50.0), source="estimate: 65 W stated"))
    assert resumed.resume(state)
    assert resumed.has_trial
    assert resumed.trial == session.trial
    resumed.begin_measurement()
    resumed.report_evaluation(0.9)
    report = {"time": 5.5, "energy": 160.0, "metric": 0.9, "current_epoch": 2, "judged_by": None}
    source = {"energy_source": "nvml + estimate: 65 W stated", "waited_share": 0.0}
    assert server.requests == [("POST", "/report", TRIAL | report | source | UNKNOWN)]


def test_checkpoint_of_a_finished_trial_stays_finished() -> None:
    session = running_session(ContractDouble(COST_BOUND | {"reason": "cost_bound_crossed"}), (1.0, 1.0))
    session.report_evaluation(0.5, 1)
    assert session.finished
    assert not session.trial.converged
    server = ContractDouble()
    resumed = session_of(server)
    assert not resumed.resume(through_a_checkpoint(session.state_dict()))
    assert resumed.finished
    assert resumed.trial == session.trial.known_as(session.trial.trial_id, cost_j=None)
    with pytest.raises(ZeusBSOOperationOrderError, match="cost bound crossed"):
        resumed.begin_measurement()
    resumed.end()
    assert server.requests == []


def test_state_without_a_trial_is_empty_and_cannot_be_resumed() -> None:
    assert session_of(ContractDouble()).state_dict() == {}
    with pytest.raises(ZeusBSOConfigError, match="trial_number"):
        session_of(ContractDouble()).resume({"job_id": "mnist-1", "batch_size": 32})


def test_resuming_a_trial_of_a_different_job_warns(caplog: pytest.LogCaptureFixture) -> None:
    session_of(ContractDouble()).resume(TRIAL)
    assert caplog.text == ""
    session_of(ContractDouble()).resume(TRIAL | {"job_id": "mnist-2"})
    assert "the checkpoint belongs to job mnist-2, not to job mnist-1" in caplog.text


@pytest.mark.parametrize("job", [JOB, UNNAMED_JOB])
def test_trial_of_a_job_with_a_different_prefix_continues(job: JobSpec) -> None:
    session = session_of(ContractDouble(), job=job)
    assert session.resume(TRIAL | {"job_id": "cifar-1"})
    assert session.sender is not None
    assert session.sender.registration.job_id == "cifar-1"


def test_long_list_of_energy_sources_fits_into_the_message() -> None:
    server = ContractDouble(KEEP_TRAINING)
    session = session_of(server, monitor_of((1.0, 1.0), source="b" * 200))
    session.resume(TRIAL | {"energy_source": "a" * 200})
    session.begin_measurement()
    session.report_evaluation(0.5, 1)
    assert server.sent("POST", "/report")[0]["energy_source"] == "a" * 200 + " + " + "b" * 52


# --- Resuming, on a real server -------------------------------------------------------------------------------------


@pytest.fixture
def client(server: ServerProcess) -> Iterator[BsoClient]:
    with BsoClient(server.url) as client:
        yield client


def session_on(client: BsoClient, monitor: EnergyMonitor) -> TrialSession:
    job = JOB.model_copy(update={"job_id": f"mnist-{uuid.uuid4().hex[:8]}", "target_metric": 0.9})
    return TrialSession(job, client, monitor)


def interrupted(client: BsoClient) -> TrialSession:
    """Return a session that reported once and was then preempted."""
    session = session_on(client, monitor_of((1.0, 10.0), (2.0, 20.0), (0.0, 0.0)))
    session.ask()
    session.begin_measurement()
    session.report_evaluation(0.5, 1)
    return session


def test_trial_ended_on_the_server_gets_no_reports(client: BsoClient, caplog: pytest.LogCaptureFixture) -> None:
    first = interrupted(client)
    state = through_a_checkpoint(first.state_dict())
    first.end(ValueError("no such label"))

    second = session_on(client, monitor_of())
    assert not second.resume(state)
    assert second.trial.batch_size == first.trial.batch_size
    assert "it is failed" in caplog.text
    with pytest.raises(ZeusBSOOperationOrderError, match="the trial is over"):
        second.begin_measurement()
    second.end(KeyboardInterrupt())
    (trial,) = client.show_job(first.trial.job_id).trials
    assert trial.state is TrialState.FAILED
    assert "no such label" in (trial.message or "")


def test_trial_unknown_to_the_server_gets_no_reports(client: BsoClient, caplog: pytest.LogCaptureFixture) -> None:
    first = interrupted(client)
    client.delete_job(first.trial.job_id)
    assert not session_on(client, monitor_of()).resume(first.state_dict())
    assert "has no trial 1" in caplog.text
    first.end()


def test_proxy_without_a_server_does_not_end_a_trial(client: BsoClient) -> None:
    first = interrupted(client)
    state = first.state_dict()
    first.end(KeyboardInterrupt())
    proxy = httpx.MockTransport(lambda _: httpx.Response(404, text="404 page not found"))
    resumed = session_on(BsoClient("http://bso", transport=proxy), monitor_of())
    with pytest.raises(ZeusBSORuntimeError, match="Is this a batch size optimization server"):
        resumed.resume(state)


# --- Further ranks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_offline", "who_ends_first", "is_back"),
    [(False, "rank 1", True), (False, "rank 0", False), (True, "rank 1", False)],
    ids=["the server is back at the end", "rank 0 has had its word", "begun without the server"],
)
def test_out_of_memory_on_a_further_rank_is_recorded_despite_an_outage(
    server: ServerProcess, is_offline: bool, who_ends_first: str, is_back: bool, state_directory: Path
) -> None:
    outbox = Outbox(state_directory / "outbox")
    with BsoClient(server.url, retries=NO_RETRIES) as client:
        if is_offline:
            server.kill()
        session = session_on(client, monitor_of((1.0, 10.0), (1.0, 10.0), (1.0, 10.0)))
        session.ask()
        session.begin_measurement()
        server.kill()
        session.report_evaluation(0.1, 1)
        trial, sender = session.trial, session.sender

        def rank_1_ends() -> None:
            end_trial_from_another_rank(client, trial, torch.OutOfMemoryError("CUDA out of memory"), sender)

        if who_ends_first == "rank 1":
            rank_1_ends()
            if is_back:
                server.start()
        session.end(RuntimeError("Connection closed by peer [127.0.0.1]:42191"))
        if who_ends_first == "rank 0":
            rank_1_ends()
        if server.process is None:
            server.start()
        delivered = list(deliver_waiting(outbox, lambda _: client))
        assert all(file.set_aside is None and file.left == 0 for file in delivered), delivered
        (shown,) = client.show_job(trial.job_id).trials
        assert (shown.state, shown.epochs) == (TrialState.INFEASIBLE, 1)
        assert outbox.waiting() == []


def test_further_rank_after_the_loss_of_rank_0_leaves_the_ending_to_rank_0(client: BsoClient) -> None:
    session = interrupted(client)
    session.end(KeyboardInterrupt())
    end_trial_from_another_rank(client, session.trial, RuntimeError("Connection closed by peer [127.0.0.1]:42191"))
    assert [trial.state for trial in client.show_job(session.trial.job_id).trials] == [TrialState.SUSPENDED]


def test_further_rank_sends_nothing_after_the_verdict() -> None:
    server = ContractDouble()
    trial = TrialInfo(**TRIAL, verdict=ReportResponse(**CONVERGED))
    end_trial_from_another_rank(server.client(), trial, ValueError("no such label"))
    assert server.requests == []


def test_further_rank_warns_instead_of_raising(caplog: pytest.LogCaptureFixture) -> None:
    server = ContractDouble()
    server.down = True
    end_trial_from_another_rank(server.client(), TrialInfo(**TRIAL), ValueError("no such label"))
    assert "could not end trial 7 of job mnist-1" in caplog.text
