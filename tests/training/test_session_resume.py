"""A trial that a checkpoint keeps, and one whose training ends on another rank."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from tests.support.contract_double import CONVERGED, COST_BOUND, KEEP_TRAINING, ContractDouble
from tests.support.servers import ServerProcess
from tests.support.sessions import JOB, TRIAL, monitor_of, running_session, session_of, through_a_checkpoint
from zeus_plugins.client.delivery import deliver_waiting
from zeus_plugins.client.http import BsoClient
from zeus_plugins.client.outbox import Outbox
from zeus_plugins.client.port import NO_RETRIES
from zeus_plugins.energy import EnergyMonitor
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOOperationOrderError, ZeusBSORuntimeError
from zeus_plugins.protocol import ReportResponse, TrialState
from zeus_plugins.training.outcomes import end_trial_from_another_rank
from zeus_plugins.training.session import TrialSession
from zeus_plugins.training.trial import TrialInfo

# --- checkpoints ----------------------------------------------------------------------------------------------------


def test_a_resumed_trial_continues_its_totals_with_the_open_window() -> None:
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
    source = {"energy_source": "nvml + estimate: 65 W stated"}
    assert server.requests == [("POST", "/report", TRIAL | report | source)]


def test_a_checkpoint_of_a_finished_trial_stays_finished() -> None:
    session = running_session(ContractDouble(COST_BOUND | {"reason": "cost_bound_crossed"}), (1.0, 1.0))
    session.report_evaluation(0.5, 1)
    assert session.finished
    assert session.failed
    server = ContractDouble()
    resumed = session_of(server)
    assert not resumed.resume(through_a_checkpoint(session.state_dict()))
    assert resumed.failed
    assert resumed.trial == session.trial
    with pytest.raises(ZeusBSOOperationOrderError, match="cost bound crossed"):
        resumed.begin_measurement()
    resumed.end()
    assert server.requests == []


def test_without_a_trial_there_is_no_state_and_a_state_without_one_is_refused() -> None:
    assert session_of(ContractDouble()).state_dict() == {}
    with pytest.raises(ZeusBSOConfigError, match="trial_number"):
        session_of(ContractDouble()).resume({"job_id": "mnist-1", "batch_size": 32})


def test_resuming_a_trial_of_another_job_warns(caplog: pytest.LogCaptureFixture) -> None:
    session_of(ContractDouble()).resume(TRIAL)
    assert caplog.text == ""
    session_of(ContractDouble()).resume(TRIAL | {"job_id": "mnist-2"})
    assert "the checkpoint belongs to job mnist-2, not to job mnist-1" in caplog.text


def test_a_long_list_of_sources_fits_the_wire() -> None:
    server = ContractDouble(KEEP_TRAINING)
    session = session_of(server, monitor_of((1.0, 1.0), source="b" * 200))
    session.resume(TRIAL | {"energy_source": "a" * 200})
    session.begin_measurement()
    session.report_evaluation(0.5, 1)
    assert server.sent("POST", "/report")[0]["energy_source"] == "a" * 200 + " + " + "b" * 52


# --- resuming, on a real server -------------------------------------------------------------------------------------


@pytest.fixture
def client(server: ServerProcess) -> Iterator[BsoClient]:
    with BsoClient(server.url) as client:
        yield client


def session_on(client: BsoClient, monitor: EnergyMonitor) -> TrialSession:
    job = JOB.model_copy(update={"job_id": f"mnist-{uuid.uuid4().hex[:8]}", "target_metric": 0.9})
    return TrialSession(job, client, monitor)


def interrupted(client: BsoClient) -> TrialSession:
    """A session whose training reported once and was then preempted."""
    session = session_on(client, monitor_of((1.0, 10.0), (2.0, 20.0), (0.0, 0.0)))
    session.ask()
    session.begin_measurement()
    session.report_evaluation(0.5, 1)
    return session


def test_a_preempted_trial_goes_on_with_its_totals(client: BsoClient) -> None:
    first = interrupted(client)
    state = through_a_checkpoint(first.state_dict())
    first.end(KeyboardInterrupt())
    assert [trial.state for trial in client.show_job(first.trial.job_id).trials] == [TrialState.SUSPENDED]

    second = session_on(client, monitor_of((4.0, 40.0)))
    assert second.resume(state)
    assert [trial.state for trial in client.show_job(first.trial.job_id).trials] == [TrialState.RUNNING]
    second.begin_measurement()
    assert second.report_evaluation(0.95, 2).converged
    second.end()
    (trial,) = client.show_job(first.trial.job_id).trials
    assert (trial.state, trial.time_s, trial.energy_j, trial.epochs) == (TrialState.COMPLETED, 7.0, 70.0, 2)


def test_a_trial_that_is_over_on_the_server_is_not_reported_on(
    client: BsoClient, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_a_trial_that_the_server_knows_no_more_is_not_reported_on(
    client: BsoClient, caplog: pytest.LogCaptureFixture
) -> None:
    first = interrupted(client)
    client.delete_job(first.trial.job_id)
    assert not session_on(client, monitor_of()).resume(first.state_dict())
    assert "has no trial 1" in caplog.text
    first.end()


def test_a_proxy_without_its_server_does_not_end_a_trial(client: BsoClient) -> None:
    first = interrupted(client)
    state = first.state_dict()
    first.end(KeyboardInterrupt())
    proxy = httpx.MockTransport(lambda _: httpx.Response(404, text="404 page not found"))
    resumed = session_on(BsoClient("http://bso", transport=proxy), monitor_of())
    with pytest.raises(ZeusBSORuntimeError, match="Is this a batch size optimization server"):
        resumed.resume(state)


# --- other ranks ----------------------------------------------------------------------------------------------------


def test_another_rank_says_what_ended_its_training(client: BsoClient) -> None:
    session = interrupted(client)
    end_trial_from_another_rank(client, session.trial, torch.OutOfMemoryError("CUDA out of memory"))
    session.end(RuntimeError("Connection closed by peer [127.0.0.1]:42191"))
    assert [trial.state for trial in client.show_job(session.trial.job_id).trials] == [TrialState.INFEASIBLE]


@pytest.mark.parametrize(
    ("is_offline", "who_ends_first", "is_back"),
    [(False, "rank 1", True), (False, "rank 0", False), (True, "rank 1", False)],
    ids=["the server is back at the end", "rank 0 has had its word", "begun without the server"],
)
def test_memory_that_ran_out_on_another_rank_while_the_server_was_away(
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


def test_another_rank_that_lost_the_first_leaves_the_word_to_it(client: BsoClient) -> None:
    session = interrupted(client)
    session.end(KeyboardInterrupt())
    end_trial_from_another_rank(client, session.trial, RuntimeError("Connection closed by peer [127.0.0.1]:42191"))
    assert [trial.state for trial in client.show_job(session.trial.job_id).trials] == [TrialState.SUSPENDED]


def test_another_rank_has_nothing_to_say_after_the_verdict() -> None:
    server = ContractDouble()
    trial = TrialInfo(**TRIAL, verdict=ReportResponse(**CONVERGED))
    end_trial_from_another_rank(server.client(), trial, ValueError("no such label"))
    assert server.requests == []


def test_another_rank_never_raises_but_warns(caplog: pytest.LogCaptureFixture) -> None:
    server = ContractDouble()
    server.down = True
    end_trial_from_another_rank(server.client(), TrialInfo(**TRIAL), ValueError("no such label"))
    assert "could not end trial 7 of job mnist-1" in caplog.text
