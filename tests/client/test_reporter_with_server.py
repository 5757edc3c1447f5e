"""Trials begun or continued without the server, and heartbeats, with a real server."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.contract_double import ContractDouble
from tests.support.job_bench import seconds_and_joules
from tests.support.reporting import JOB, threads, until, warnings_in
from tests.support.servers import ServerProcess, serving
from zeus_plugins import JobSpec
from zeus_plugins.client.http import BsoClient
from zeus_plugins.client.outbox import Outbox
from zeus_plugins.client.port import NO_RETRIES
from zeus_plugins.protocol import TrialId, TrialState
from zeus_plugins.training.session import TrialSession

# --- starting without the server --------------------------------------------------------------------------------------


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


# --- Resuming without the server --------------------------------------------------------------------------------------


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


# --- heartbeats -------------------------------------------------------------------------------------------------------


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
