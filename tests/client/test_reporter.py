"""A trial's connection to a server that disappears and returns."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bso_server.core.model import Report, TrialRecord
from bso_server.core.policy import judge
from tests.support.contract_double import CONVERGED, COST_BOUND, KEEP_TRAINING, ContractDouble
from tests.support.job_bench import seconds_and_joules
from tests.support.outboxes import no_more_room, taken_from
from tests.support.reporting import JOB, PATIENCE_S, Flaky, threads, training, until, warnings_in
from tests.support.servers import ServerProcess, serving
from zeus_plugins import JobSpec
from zeus_plugins.client.http import BsoClient
from zeus_plugins.client.outbox import Outbox
from zeus_plugins.client.port import NO_RETRIES
from zeus_plugins.client.reporter import TrialReporter, judged_without_server
from zeus_plugins.files import FileBusyError
from zeus_plugins.protocol import CreatedJob, Evaluation, Origin, StopRule, TrialId, TrialState
from zeus_plugins.training.session import TrialSession

# --- judging without the server ---------------------------------------------------------------------------------------


@given(
    metric=st.floats(min_value=0, max_value=1),
    cost_j=st.floats(min_value=0.1, max_value=200),
    epoch=st.integers(min_value=1, max_value=12),
    bound=st.none() | st.floats(min_value=0, max_value=200),
    max_epochs=st.integers(min_value=1, max_value=10),
    higher=st.booleans(),
    eta=st.floats(min_value=0, max_value=1),
)
def test_training_and_server_reach_the_same_verdict(
    metric: float, cost_j: float, epoch: int, bound: float | None, max_epochs: int, higher: bool, eta: float
) -> None:
    fields = {**JOB.model_dump(), "max_epochs": 10, "higher_is_better_metric": higher, "eta_knob": eta}
    registration = CreatedJob.model_validate({**fields, "max_power": 100, "number_of_gpus": 1, "gpu_model": "A40"})
    rule = StopRule(max_cost_j=bound, max_epochs=max_epochs)
    evaluation = Evaluation(time=cost_j / 100, energy=cost_j, metric=metric, current_epoch=epoch)
    spent_j = registration.cost_j(time_s=evaluation.time, energy_j=evaluation.energy)
    here = judged_without_server(registration, rule, metric=metric, epochs=epoch, cost_j=spent_j)
    trial = TrialRecord(trial_number=1, batch_size=64, state=TrialState.RUNNING, origin=Origin.BANDIT)
    report = Report(evaluation.time, evaluation.energy, epoch, metric)
    there = judge(registration, trial, report, None, judged_by=rule)
    assert (here.stop_train, here.converged, here.reason) == (there.stop, there.converged, there.reason)
    assert here.message == f"{there.message} (judged without the server)"


def test_training_is_judged_by_the_latest_rule(outbox: Outbox) -> None:
    stricter = {**KEEP_TRAINING, "stop_rule": {"max_cost_j": 150, "max_epochs": 4}}
    server = Flaky(stricter)
    session = training(server)  # an epoch costs at least 55 J: the share of time is for 100 W
    assert not session.report_evaluation(0.5).stop_train
    server.down = True
    assert not session.report_evaluation(0.5).stop_train
    verdict = session.report_evaluation(0.95)
    assert (verdict.stop_train, verdict.converged) == (True, False)
    assert "more than 150 J" in verdict.message
    session.end()
    (path,) = outbox.waiting()
    assert path.read_text().count('"max_cost_j":150') == 2  # for the server's judgement


# --- Outage and return ------------------------------------------------------------------------------------------------


def away_after_a_report(*verdicts: dict[str, Any] | int) -> tuple[Flaky, TrialSession]:
    """Return a server that is down before a training's first report, and the training."""
    server = Flaky(*verdicts)
    session = training(server)
    server.down = True
    assert not session.report_evaluation(0.1).stop_train
    return server, session


def test_waiting_results_arrive_in_order_when_the_server_returns(
    outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    server = Flaky(KEEP_TRAINING, KEEP_TRAINING, KEEP_TRAINING, CONVERGED)
    session = training(server)
    session.report_evaluation(0.1)
    server.down = True
    for metric in (0.2, 0.3):
        assert not session.report_evaluation(metric).stop_train
    assert len(warnings_in(caplog)) == 1
    assert "Connection refused" in warnings_in(caplog)[0]
    assert str(outbox.directory) in warnings_in(caplog)[0]
    server.down = False
    until(lambda: not outbox.waiting())
    assert session.report_evaluation(0.95).converged
    session.end()
    sent = server.sent("POST", "/report")
    facts = [(body["metric"], body["current_epoch"], body["time"]) for body in sent]
    assert facts == [(0.1, 1, 1), (0.2, 2, 2), (0.3, 3, 3), (0.95, 4, 4)]
    assert [body["judged_by"] is not None for body in sent] == [False, True, True, False]
    assert len(warnings_in(caplog)) == 1


def test_no_result_overtakes_waiting_results(outbox: Outbox) -> None:
    server, session = away_after_a_report(KEEP_TRAINING, KEEP_TRAINING, CONVERGED)
    session.report_evaluation(0.2)
    server.down = False  # the training does not know yet
    session.report_evaluation(0.95)
    session.end()
    assert outbox.waiting() == []
    assert [body["current_epoch"] for body in server.sent("POST", "/report")] == [1, 2, 3]


def test_waiting_results_arrive_at_a_returning_zeus_server(outbox: Outbox) -> None:
    server = ContractDouble(KEEP_TRAINING, CONVERGED)
    session = training(server, server.client().with_retries(NO_RETRIES))
    server.down = True
    session.report_evaluation(0.1)
    server.down = False
    until(lambda: not outbox.waiting())
    assert session.report_evaluation(0.95).converged
    session.end()
    assert "/trials/heartbeat" not in {path for _, path, _ in server.requests}


def test_report_does_not_wait_for_the_next_heartbeat(outbox: Outbox) -> None:
    server = Flaky(KEEP_TRAINING, CONVERGED)
    server.interval_s = 1e5
    session = training(server, server.client(timeout_s=1e5))
    until(lambda: server.heartbeats)
    server.down = True
    session.report_evaluation(0.1)
    server.down = False
    until(lambda: not outbox.waiting())
    assert session.report_evaluation(0.95).converged
    ending = threading.Thread(target=session.end, daemon=True)
    ending.start()
    until(lambda: not ending.is_alive())


def test_late_rule_is_applied(outbox: Outbox) -> None:
    server, session = away_after_a_report({**KEEP_TRAINING, "stop_rule": {"max_cost_j": 150, "max_epochs": 4}})
    server.down = False
    until(lambda: not outbox.waiting())
    assert session.trial.stop_rule == StopRule(max_cost_j=150, max_epochs=4)
    session.end()


def test_end_of_a_trial_is_sent_once(outbox: Outbox) -> None:
    attempts: list[httpx.Request] = []

    class Away(Flaky):
        def __call__(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == "/trials":
                attempts.append(request)
                raise httpx.ConnectError("Connection refused", request=request)
            return super().__call__(request)

    session = training(Away())
    session.end(KeyboardInterrupt())
    assert len(attempts) == 1  # the client repeats its ordinary requests once
    assert len(outbox.waiting()) == 1


def test_training_ends_where_no_thread_can_start(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in exit functions since Python 3.12."""
    session = training(ContractDouble(*[503] * 9))
    error = RuntimeError("can't start new thread at interpreter shutdown")
    monkeypatch.setattr("threading.Thread.start", mock.Mock(side_effect=error))
    assert not session.report_evaluation(0.5).stop_train
    session.end()
    assert len(outbox.waiting()) == 1


@pytest.mark.parametrize("waiting", [1, 3])
@pytest.mark.usefixtures("outbox")
def test_closing_a_training_waits_at_most_twice_the_timeout(waiting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, limits_s = [0.0], list[float]()
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    monkeypatch.setattr(TrialReporter, "_wake_thread", lambda _self: None)

    class Slow(Flaky):
        is_slow = False

        def __call__(self, request: httpx.Request) -> httpx.Response:
            if self.is_slow:
                limits_s.append(request.extensions["timeout"]["read"])
                now_s[0] += min(8.0, limits_s[-1])
                if limits_s[-1] < 8.0:
                    raise httpx.ReadTimeout("as the test asked", request=request)
            return super().__call__(request)

    server = Slow(*[KEEP_TRAINING] * waiting)
    session = training(server)
    server.down = True
    for _ in range(waiting):
        session.report_evaluation(0.1)
    server.down, server.is_slow = False, True
    session.end(ValueError())
    # Three requests are pending: the waiting result, the end of the trial, and the query of the job.
    assert limits_s == [10.0, 10.0, 4.0]
    assert now_s == [20.0]


def test_refused_waiting_result_is_set_aside(outbox: Outbox) -> None:
    server, session = away_after_a_report(404)
    server.down = False
    until(outbox.refused)
    assert outbox.waiting() == []
    assert not session.report_evaluation(0.2).stop_train
    session.end()
    assert len(server.sent("POST", "/report")) == 1


def test_trial_ended_elsewhere_gets_no_more_heartbeats() -> None:
    server = Flaky(KEEP_TRAINING)
    session = training(server)
    until(lambda: server.heartbeats > 1)
    server.state = "failed"
    before = server.heartbeats
    until(lambda: server.heartbeats > before)
    heard = server.heartbeats
    session.report_evaluation(0.1)
    time.sleep(0.5)  # ten heartbeat intervals
    assert server.heartbeats == heard
    session.end()


def test_late_verdict_stops_the_training(outbox: Outbox) -> None:
    server, session = away_after_a_report(COST_BOUND)
    server.down = False
    until(lambda: not outbox.waiting())
    verdict = session.report_evaluation(0.2)
    assert (verdict.stop_train, verdict.message) == (True, COST_BOUND["message"])
    assert len(server.sent("POST", "/report")) == 1
    session.end()


def test_each_kind_of_failure_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    server = Flaky(503, 503, 500, 500, KEEP_TRAINING)
    session = training(server)
    session.report_evaluation(0.1)
    until(lambda: len(warnings_in(caplog)) == 2)
    first, second = warnings_in(caplog)
    assert "failed (503)" in first
    assert "failed (500)" in second
    server.down = True
    session.report_evaluation(0.2)
    until(lambda: len(warnings_in(caplog)) == 3)
    assert "Connection refused" in warnings_in(caplog)[2]
    server.down = False
    server.verdicts[:] = [KEEP_TRAINING, KEEP_TRAINING]
    session.end()
    assert len(warnings_in(caplog)) == 3


def test_waiting_for_the_server_is_not_measured_as_training() -> None:
    measured: list[bool] = []

    class Watching(Flaky):
        def __call__(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == "/report":
                measured.append(session._measuring)
            return super().__call__(request)

    server = Watching(500, KEEP_TRAINING, KEEP_TRAINING)
    session = training(server)
    session.report_evaluation(0.1)
    session.report_evaluation(0.2)
    assert measured == [False] * 3
    assert session._measuring
    session.end()


@pytest.mark.parametrize("status", [400, 404, 409, 422])
def test_refusal_ends_the_reports_but_not_the_training(
    status: int, outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    server = Flaky(status)
    session = training(server)
    assert not session.report_evaluation(0.5).stop_train
    (warning,) = warnings_in(caplog)
    assert "the server refuses this trial" in warning
    assert "as the test asked" in warning
    assert session.report_evaluation(0.95).converged
    session.end()
    assert len(server.sent("POST", "/report")) == 1
    assert outbox.waiting() == []
    assert len(warnings_in(caplog)) == 1


def test_revoked_token_loses_no_result(outbox: Outbox, caplog: pytest.LogCaptureFixture) -> None:
    server = Flaky(*[401] * 50)
    session = training(server)
    assert session.report_evaluation(0.95).converged
    session.end()
    assert len(outbox.waiting()) == 1
    assert "does not accept the token" in warnings_in(caplog)[0]
    assert f"wait in {outbox.waiting()[0]}" in warnings_in(caplog)[1]


@pytest.fixture
def no_outbox(outbox: Outbox) -> None:
    """Make the disk unusable, so that results can only be kept in memory."""
    outbox.directory.parent.mkdir(parents=True)
    outbox.directory.write_text("not a directory")


@pytest.mark.usefixtures("no_outbox")
def test_results_are_kept_in_memory_if_the_disk_is_unusable(caplog: pytest.LogCaptureFixture) -> None:
    server, session = away_after_a_report(KEEP_TRAINING, CONVERGED)
    assert any("are lost if this process ends before it is back" in warning for warning in warnings_in(caplog))
    server.down = False
    until(lambda: server.sent("POST", "/report"))
    until(lambda: session.report_evaluation(0.95).converged)
    session.end()


@pytest.mark.usefixtures("no_outbox")
def test_results_lost_with_the_process_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    _, session = away_after_a_report()
    session.end(KeyboardInterrupt())
    assert "2 results of job digits-1 are lost" in warnings_in(caplog)[-1]
    assert "sync" not in warnings_in(caplog)[-1]


@pytest.mark.parametrize("is_freed", [False, True])
def test_final_message_on_a_full_disk_is_true(is_freed: bool, outbox: Outbox, caplog: pytest.LogCaptureFixture) -> None:
    _, session = away_after_a_report()
    (path,) = outbox.waiting()
    with no_more_room(path):
        session.report_evaluation(0.2)
        session.report_evaluation(0.3)
        if not is_freed:
            session.end(KeyboardInterrupt())
    session.end(KeyboardInterrupt())
    words = [warning for warning in warnings_in(caplog) if warning[0].isdigit()]
    kept = [line for line in path.read_text().splitlines() if '"evaluation"' in line or '"ending"' in line]
    if is_freed:
        assert [word.split(" of job")[0] for word in words] == ["4 results"]
        assert len(kept) == 4
    else:
        starts = [" ".join(word.split()[:6]) for word in words]
        assert starts == ["1 results of job digits-1 wait", "3 results of job digits-1 are"]
        assert len(kept) == 1


@pytest.mark.parametrize("signalled", [KeyboardInterrupt, SystemExit])
def test_report_interrupted_by_a_signal_is_delivered_before_the_end(signalled: type[BaseException]) -> None:
    class Interrupting(Flaky):
        def __call__(self, request: httpx.Request) -> httpx.Response:
            answer = super().__call__(request)
            if request.url.path == "/report" and len(self.sent("POST", "/report")) == 1:
                raise signalled
            return answer

    server = Interrupting(KEEP_TRAINING, KEEP_TRAINING)
    session = training(server)
    with pytest.raises(signalled):
        session.report_evaluation(0.5)
    session.end(signalled())
    first, again = server.sent("POST", "/report")
    assert first == again  # the server recognizes the repetition
    paths = [path for _, path, _ in server.requests]
    assert paths.index("/trials") > paths.index("/report")
    assert server.sent("PATCH", "/trials")[0]["outcome"] == "suspended"


# --- Ending during a hanging request ----------------------------------------------------------------------------------


class Hanging(Flaky):
    """Leave heartbeats unanswered until a test releases them."""

    def __init__(self, *verdicts: dict[str, Any] | int) -> None:
        super().__init__(*verdicts)
        self.asked, self.go_on = threading.Event(), threading.Event()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/trials/heartbeat":
            self.asked.set()
            assert self.go_on.wait(PATIENCE_S)
        return super().__call__(request)


def test_ending_is_on_disk_before_any_wait(outbox: Outbox) -> None:
    server = Hanging()
    session = TrialSession(JOB, server.client(timeout_s=1000), seconds_and_joules(1.0, 10.0))
    session.ask()
    assert server.asked.wait(PATIENCE_S)
    ending = threading.Thread(target=session.end, args=(KeyboardInterrupt(),))
    ending.start()
    try:
        until(lambda: any('"suspended"' in path.read_text() for path in outbox.waiting()))
        assert ending.is_alive()
    finally:
        server.go_on.set()
        ending.join()
    assert outbox.waiting() == []
    assert len(server.sent("PATCH", "/trials")) == 1


def test_file_left_to_a_hanging_thread_is_released_afterwards(outbox: Outbox) -> None:
    server = Hanging()
    client = server.client(timeout_s=1000)
    session = TrialSession(JOB, client, seconds_and_joules(1.0, 10.0))
    session.ask()
    assert server.asked.wait(PATIENCE_S)
    client.timeout_s = 0.01  # the end waits as long for the thread, which has a client with the old timeout
    session.end(KeyboardInterrupt())
    (path,) = outbox.waiting()
    with pytest.raises(FileBusyError):
        outbox.open(path)
    server.go_on.set()
    until(lambda: threads() == [])
    assert len(taken_from(outbox, path)) == 1


def test_zeus_server_gets_no_heartbeats() -> None:
    server = ContractDouble(KEEP_TRAINING)
    session = training(server)
    session.report_evaluation(0.1)
    assert threads() == []
    session.end()
    assert {path for _, path, _ in server.requests} == {"/jobs", "/jobs/batch_size", "/report", "/trials"}


# --- With a real server: starting without the server, resuming, heartbeats --------------------------------------------


def named_job(**fields: Any) -> JobSpec:
    return JOB.model_copy(update={"job_id": f"digits-{uuid.uuid4().hex[:8]}", **fields})


def session_of(client: BsoClient, job: JobSpec) -> TrialSession:
    return TrialSession(job, client, seconds_and_joules(1.0, 10.0))


def begun(client: BsoClient, job: JobSpec) -> TrialSession:
    session = session_of(client, job)
    session.ask()
    session.begin_measurement()
    return session


def test_unreachable_server_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    server = ContractDouble()
    server.down = True
    client = server.client().with_retries(NO_RETRIES)
    session = session_of(client, JOB)
    session.ask()
    asked = server.attempts_while_down
    until(lambda: server.attempts_while_down > asked + 1)
    (warning,) = warnings_in(caplog)
    assert "This training takes the default batch size 64 of job digits-1" in warning
    state = session.state_dict()
    session.end()

    caplog.clear()
    session = session_of(client, JOB)
    assert session.resume(state)
    asked = server.attempts_while_down
    until(lambda: server.attempts_while_down > asked + 1)
    (warning,) = warnings_in(caplog)
    assert "continues with the checkpoint's trial" in warning
    session.end()


def test_nameless_job_begun_offline_gets_a_name(client: BsoClient, server: ServerProcess) -> None:
    server.kill()
    session = session_of(client, JOB.model_copy(update={"job_id": None}))
    session.ask()
    assert session.trial.job_id.startswith("digits-")
    session.end()


def test_resumed_training_includes_waiting_results(server: ServerProcess, client: BsoClient, outbox: Outbox) -> None:
    session = begun(client, named_job())
    state = session.state_dict()
    server.kill()
    for metric in (0.1, 0.2):
        session.report_evaluation(metric)
    session.end(KeyboardInterrupt())

    # The checkpoint is older than the waiting results, but their cost was spent.
    resumed = session_of(client, named_job(job_id=session.trial.job_id))
    assert resumed.resume(state)
    assert (resumed.trial.time_s, resumed.trial.energy_j) == (2 + 1, 20 + 10)
    resumed.begin_measurement()
    assert not resumed.report_evaluation(0.1).stop_train
    server.start()
    until(lambda: not outbox.waiting())
    assert resumed.report_evaluation(0.95).converged
    resumed.end()
    (trial,) = client.show_job(session.trial.job_id).trials
    assert (trial.state, trial.epochs, trial.energy_j) == (TrialState.COMPLETED, 2, 50)


def test_resumed_offline_trial_keeps_the_identity(server: ServerProcess, client: BsoClient, outbox: Outbox) -> None:
    job = named_job()
    server.kill()
    session = begun(client, job)
    session.report_evaluation(0.1)
    state = session.state_dict()
    session.end(KeyboardInterrupt())
    server.start()
    resumed = session_of(client, job)
    assert resumed.resume(state)
    assert resumed.trial.trial_number == 1
    assert outbox.waiting() == []
    resumed.begin_measurement()
    assert resumed.report_evaluation(0.95).converged
    resumed.end()
    assert [trial.state for trial in client.show_job(job.job_id or "").trials] == [TrialState.COMPLETED]


@pytest.fixture
def impatient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BsoClient]:
    """A server that abandons trials after two seconds, or six heartbeats."""
    monkeypatch.setenv("ZEUS_BSO_HEARTBEAT_LEASE_S", "2")
    monkeypatch.setenv("ZEUS_BSO_REAP_INTERVAL_S", "0.1")
    with serving(f"sqlite:///{tmp_path / 'bso.sqlite3'}", tmp_path) as server, BsoClient(server.url) as client:
        yield client


def state_of(client: BsoClient, trial: TrialId | None) -> TrialState:
    assert trial is not None
    return client.show_job(trial.job_id).trials[trial.trial_number - 1].state


def test_heartbeats_keep_a_trial_alive_until_the_end(impatient: BsoClient) -> None:
    alone, beating = (session_of(impatient, named_job()) for _ in range(2))
    alone.ask()
    beating.ask()
    assert len(threads()) == 2
    assert alone._reporter is not None
    alone._reporter._stopped.set()  # simulates the death of the process
    until(lambda: state_of(impatient, alone.trial.trial_id) is TrialState.ABANDONED)
    assert state_of(impatient, beating.trial.trial_id) is TrialState.RUNNING
    beating.end()
    assert threads() == []
    assert state_of(impatient, beating.trial.trial_id) is TrialState.FAILED
    alone.end()


def test_heartbeat_does_not_wake_a_suspended_trial(impatient: BsoClient) -> None:
    session = session_of(impatient, named_job())
    session.ask()
    session.end(KeyboardInterrupt())
    assert threads() == []
    assert state_of(impatient, session.trial.trial_id) is TrialState.SUSPENDED
