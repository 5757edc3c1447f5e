"""Two runs of one training that report for the same trial, and results of a deleted and recreated job."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.embedded import GPUS, JOB, monitor, resumed, session_of, the_trial
from tests.support.embedded import CutServer as Server
from tests.support.reporting import until, warnings_in
from zeus_plugins.cli import main
from zeus_plugins.client.delivery import taken_over
from zeus_plugins.client.local import LocalServer
from zeus_plugins.errors import ZeusBSOServerUnreachableError
from zeus_plugins.protocol import JobSpecFromClient, TrialId, TrialState
from zeus_plugins.training.session import TrialSession


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("ZEUS_SERVER_URL", "ZEUS_BSO_TOKEN", "ZEUS_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    return f"embedded://{tmp_path / 'bso.sqlite3'}"


@pytest.fixture
def here(url: str, state_directory: Path) -> Iterator[Server]:
    """Server and outbox as seen by the first run."""
    with Server(url, state_directory / "outbox") as server:
        yield server


@pytest.fixture
def there(url: str, tmp_path: Path) -> Iterator[Server]:
    """The same server as seen by a run elsewhere, with its own outbox."""
    with Server(url, tmp_path / "outbox-there") as server:
        yield server


def begun(server: LocalServer) -> TrialSession:
    session = session_of(server)
    session.ask()
    session.begin_measurement()
    return session


def test_superseded_run_trains_on_and_changes_nothing(
    here: Server, there: Server, caplog: pytest.LogCaptureFixture
) -> None:
    first = begun(here)
    first.report_evaluation(0.1)
    state = first.state_dict()
    second = resumed(there, state)
    assert (first.trial.lease_epoch, second.trial.lease_epoch) == (1, 2)
    second.report_evaluation(0.2)
    known = the_trial(there)
    # The first run is judged by its own stop rule until its end.
    for metric in (0.1, 0.2):
        assert not first.report_evaluation(metric).stop_train
    assert first.report_evaluation(0.95).converged
    first.end()
    assert the_trial(there) == known
    (warning,) = warnings_in(caplog)
    assert "was resumed from a checkpoint by another run of its training" in warning
    assert "The training continues and is judged here, without further reports" in warning
    assert here.outbox.waiting() == []
    assert second.report_evaluation(0.95).converged
    second.end()
    assert the_trial(there).state is TrialState.COMPLETED


def test_heartbeat_informs_the_superseded_run(
    here: Server, there: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEUS_BSO_HEARTBEAT_LEASE_S", "0.3")
    with LocalServer(here.server_url) as impatient:
        first = begun(impatient)
        second = resumed(there, first.state_dict())
        until(lambda: "another run" in caplog.text)
        first.end()
        second.end(KeyboardInterrupt())


def test_sync_sets_aside_results_of_the_superseded_run(
    here: Server,
    there: Server,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = begun(here)
    here.line.is_cut = True
    first.report_evaluation(0.1)
    state = first.state_dict()
    first.end(KeyboardInterrupt())
    second = resumed(there, state)
    second.report_evaluation(0.2)
    known = the_trial(there)
    assert main(["sync"]) == 1
    assert "was resumed from a checkpoint by another run" in capsys.readouterr().out
    assert the_trial(there) == known
    assert here.outbox.waiting() == []
    (aside,) = here.outbox.refused()
    assert '"metric":0.1' in aside.read_text()
    second.end()


def test_waiting_results_of_the_first_run_count_if_the_successor_finds_them(here: Server) -> None:
    first = begun(here)
    here.line.is_cut = True
    first.report_evaluation(0.1)
    state = first.state_dict()
    first.end(KeyboardInterrupt())
    here.line.is_cut = False
    second = resumed(here, state)
    assert second.trial.lease_epoch == 2
    assert (the_trial(here).epochs, the_trial(here).state) == (1, TrialState.RUNNING)
    second.end(KeyboardInterrupt())


def test_run_resumed_offline_takes_over_when_the_server_returns(here: Server, there: Server) -> None:
    first = begun(here)
    first.report_evaluation(0.1)
    there.line.is_cut = True
    second = resumed(there, first.state_dict())
    assert second.trial.lease_epoch is None
    assert not second.report_evaluation(0.2).stop_train
    assert not first.report_evaluation(0.3).stop_train  # the first run cannot know yet
    assert the_trial(here).epochs == 2
    there.line.is_cut = False
    until(lambda: second.trial.lease_epoch == 2 and not there.outbox.waiting())
    first.report_evaluation(0.3)
    assert the_trial(here).metric == 0.2
    first.end(KeyboardInterrupt())
    assert second.report_evaluation(0.95, 9).converged
    second.end()
    assert the_trial(here).state is TrialState.COMPLETED


@pytest.mark.parametrize("reports", [0, 1])
def test_run_without_contact_to_the_server_takes_over_through_the_outbox(
    here: Server, there: Server, reports: int
) -> None:
    first = begun(here)
    state = first.state_dict()
    there.line.is_cut = True
    second = resumed(there, state)
    for _ in range(reports):
        second.report_evaluation(0.2)
    second.end(KeyboardInterrupt())
    there.line.is_cut = False
    for path in there.outbox.waiting():
        there.outbox.open(path).close()  # as found by another process
    last = TrialSession(JOB, there, monitor(), outbox=there.outbox)
    last.ask()
    last.end()
    (known, _) = there.show_job("digits-1").trials
    assert (known.state, known.epochs) == (TrialState.SUSPENDED, 1.0 if reports else None)
    first.report_evaluation(0.1)
    first.end()
    assert there.show_job("digits-1").trials[0] == known


def test_offline_trial_is_taken_over_like_a_dispatched_trial(
    here: Server, there: Server, caplog: pytest.LogCaptureFixture
) -> None:
    here.line.is_cut = there.line.is_cut = True
    first = begun(here)
    first.report_evaluation(0.1)
    state = first.state_dict()
    second = resumed(there, state)
    second.report_evaluation(0.2)
    there.line.is_cut = False
    until(lambda: not there.outbox.waiting())
    assert second.trial.lease_epoch == 2
    known = the_trial(there)
    here.line.is_cut = False
    until(lambda: "(lease epoch 2, not 1)" in caplog.text)  # recorded as the same trial and refused
    assert (len(here.outbox.waiting()), len(here.outbox.refused())) == (0, 1)
    assert the_trial(there) == known
    first.end()
    second.end(KeyboardInterrupt())
    assert the_trial(there).state is TrialState.SUSPENDED


@pytest.fixture
def trial(here: Server) -> TrialId:
    """A trial of a training that sends no heartbeats."""
    here.register(JobSpecFromClient.of(JOB, GPUS))
    return TrialId(**here.request_trial("digits-1").model_dump())


def test_take_over_with_a_lost_answer_is_repeated(here: Server, trial: TrialId) -> None:
    here.line.loses_answers = 1
    with pytest.raises(ZeusBSOServerUnreachableError):
        taken_over(here, trial)
    later, _ = taken_over(here, trial)
    assert later.lease_epoch == 3
    # A run that takes over between the question and the take-over is superseded, too.
    here.line.before = [lambda: taken_over(here, later), lambda: None]
    last, heard = taken_over(here, later.model_copy(update={"lease_epoch": None}))
    assert (last.lease_epoch, heard.lease_epoch) == (5, 5)


def test_ended_trial_is_not_taken_over(here: Server, trial: TrialId) -> None:
    here.end_trial(trial)
    for asked in (trial, trial.model_copy(update={"lease_epoch": None})):
        later, heard = taken_over(here, asked)
        assert (later, heard.state) == (trial, TrialState.FAILED)


# --- Recreated jobs ---------------------------------------------------------------------------------------------------


def test_results_of_a_deleted_job_do_not_count_for_the_recreated_job(
    here: Server, there: Server, caplog: pytest.LogCaptureFixture
) -> None:
    first = begun(here)
    here.line.is_cut = True
    first.report_evaluation(0.1)
    there.delete_job("digits-1")
    anew = begun(there)
    known = the_trial(there)
    assert (known.trial_number, known.batch_size) == (first.trial.trial_number, first.trial.batch_size)
    here.line.is_cut = False
    until(lambda: "was deleted and registered again after trial 1 began" in caplog.text)
    assert len(here.outbox.refused()) == 1
    assert the_trial(there) == known
    assert first.report_evaluation(0.95).converged  # judged by the training
    first.end()
    assert anew.report_evaluation(0.95).converged
    anew.end()


def test_checkpoint_of_a_deleted_job_continues_without_the_server(
    here: Server, there: Server, caplog: pytest.LogCaptureFixture
) -> None:
    first = begun(here)
    state = first.state_dict()
    first.end(KeyboardInterrupt())
    there.delete_job("digits-1")
    anew = begun(there)
    known = the_trial(there)
    session = TrialSession(JOB, here, monitor(), outbox=there.outbox)
    assert not session.resume(state)
    assert "is over (" in caplog.text
    assert "registered again" in caplog.text
    assert the_trial(there) == known
    session.end()
    anew.end()


# --- Restored databases -----------------------------------------------------------------------------------------------


def test_training_lost_by_a_restored_database_does_not_end_the_next(
    here: Server, there: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here.register(JobSpecFromClient.of(JOB, GPUS))
    with closing(sqlite3.connect(tmp_path / "bso.sqlite3")) as database, closing(sqlite3.connect(":memory:")) as backup:
        database.backup(backup)
        first = begun(here)
        until(lambda: database.execute("SELECT heartbeats FROM trials").fetchone() == (1,))
        backup.backup(database)
    second = begun(there)
    assert first.trial.trial_number == second.trial.trial_number
    state = first.state_dict()
    known = the_trial(there)
    assert first.report_evaluation(0.95).converged  # judged by the training
    assert "has no trial 1 of this training: the database was restored" in caplog.text
    first.end()
    assert the_trial(there) == known
    third = TrialSession(JOB, here, monitor(), outbox=there.outbox)
    assert not third.resume(state)
    third.end()
    assert the_trial(there) == known
    assert second.report_evaluation(0.95).converged
    second.end()
