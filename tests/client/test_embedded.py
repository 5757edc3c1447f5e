"""The embedded server in the training's process, on a SQLite file."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pickle
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from bso_server.core.model import History, Suggestion
from bso_server.core.policy import Policy
from tests.support import ROOT, warm
from tests.support.embedded import (
    GPUS,
    JOB,
    final_report,
    is_open,
    monitor,
    session_of,
    trial_to_its_end,
    written_without_pause,
)
from tests.support.policies import given
from tests.support.servers import bso_server, serving
from zeus_plugins import BatchSizeOptimizer
from zeus_plugins.cli import main
from zeus_plugins.client import client_from_environment
from zeus_plugins.client.http import BsoClient
from zeus_plugins.client.port import NO_RETRIES
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOServerUnreachableError
from zeus_plugins.protocol import JobSpecFromClient, OfflineTrial, Origin, TrialDispatch, TrialState

pytestmark = pytest.mark.usefixtures("file")


def url_of(file: Path) -> str:
    return f"sqlite:///{file}"


def run(program: str, *arguments: str, check: bool = True, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with warnings as errors."""
    command = [sys.executable, *LOUD, "-c", program, *arguments]
    return subprocess.run(command, env=environment(**environ), capture_output=True, text=True, check=check, timeout=120)


LOUD = ["-W", "error"]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def shown(file: Path) -> list[dict[str, object]]:
    """Return the job's trials as printed by the command."""
    done = bso_server("jobs", "show", "digits-1", "--json", "--database-url", url_of(file))
    assert done.returncode == 0, done.stderr
    trials: list[dict[str, object]] = json.loads(done.stdout)["trials"]
    return trials


# --- one process ----------------------------------------------------------------------------------------------------


def test_training_without_a_server_url_stores_a_readable_job(file: Path) -> None:
    with BatchSizeOptimizer(monitor(), None, JOB) as optimizer:
        assert optimizer.get_batch_size() == 32
        optimizer.on_train_begin()
        optimizer.on_evaluate(0.1)
        optimizer.on_evaluate(0.9)
        assert optimizer.training_finished
    (trial,) = shown(file)
    # Cost = η · energy + (1 − η) · max_power · time: half of 20 J plus half of 100 W · 2 s.
    assert (trial["trial_number"], trial["state"], trial["cost_j"]) == (1, "completed", 110.0)


def test_file_is_open_from_first_request_to_close_without_any_thread(file: Path) -> None:
    threads = threading.active_count()
    client = client_from_environment()
    assert client.server_url == f"embedded://{file}"
    assert repr(client) == f"LocalServer('embedded://{file}')"
    assert not file.exists()
    for _ in range(2):
        assert client.list_jobs().jobs == ()
        assert is_open(file)
        assert threading.active_count() == threads
        client.close()
        assert not is_open(file)
        # Closing a connection writes its log into the file.
        assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_closing_a_client_does_not_affect_clients_of_the_same_file() -> None:
    with client_from_environment() as client:
        client.register(JobSpecFromClient.of(JOB, GPUS))
        with client.with_retries(NO_RETRIES) as other, client_from_environment() as third:
            trial = client.request_trial("digits-1")
            other.heartbeat(trial)
            third.end_trial(trial)
        assert client.show_job("digits-1").trials[0].state is TrialState.FAILED


def test_decision_does_not_block_a_second_training_and_counts_concurrent_trials() -> None:
    begun, may_end = threading.Event(), threading.Event()
    seen: list[int] = []

    def suggest(history: History, rng: np.random.Generator) -> Suggestion:  # noqa: ARG001 - the interface's signature
        seen.append(len(history.in_flight))
        begun.set()
        may_end.wait(60)
        return Suggestion(history.job.default_batch_size, Origin.EXPLORATION, "slow")

    job = JobSpecFromClient.of(JOB.model_copy(update={"policy": "slow"}), GPUS)
    with given("slow", Policy(version="1", suggest=suggest)), client_from_environment() as client:
        client.register(job)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(client.request_trial, "digits-1")
            try:
                assert begun.wait(60)
                client.record_offline(OfflineTrial(job_id="digits-1", batch_size=32), "key")
                assert not asked.done()
            finally:
                may_end.set()
            assert asked.result().trial_number == 2
    assert seen == [0, 1]


@pytest.mark.parametrize("is_used", [False, True])
def test_client_of_a_file_can_be_pickled_before_and_after_the_first_request(is_used: bool) -> None:
    with client_from_environment() as client:
        if is_used:
            trial_to_its_end(client)
        twin = pickle.loads(pickle.dumps(client))  # noqa: S301 - pickled in this test
        assert twin.server_url == client.server_url
    with twin:
        assert trial_to_its_end(twin) == 1 + is_used


def test_file_does_not_depend_on_the_working_directory(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(file.parent.parent)
    monkeypatch.setenv("ZEUS_BSO_DATABASE_URL", "sqlite:///data/bso.sqlite3")
    client = client_from_environment()
    assert client.server_url == f"embedded://{file}"
    monkeypatch.chdir(tmp_path / "there")
    with client:
        trial_to_its_end(client)
    assert len(shown(file)) == 1


def test_server_url_can_name_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    other = tmp_path / "an other.sqlite3"
    monkeypatch.setenv("ZEUS_SERVER_URL", f"embedded://{other}")
    with client_from_environment() as client:
        assert client.server_url == f"embedded://{other}"
        trial_to_its_end(client)
    assert f"bso-server jobs list --database-url 'sqlite:///{other}'" in caplog.text
    assert len(shown(other)) == 1
    assert not file.exists()


def test_dotenv_file_sets_the_file_as_for_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZEUS_BSO_DATABASE_URL")
    monkeypatch.chdir(tmp_path)
    Path(".env").write_text("ZEUS_BSO_DATABASE_URL=sqlite:///of-dotenv.sqlite3\n")
    assert client_from_environment().server_url == f"embedded://{tmp_path / 'of-dotenv.sqlite3'}"


def test_log_states_the_file_once_without_the_servers_routine_lines(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(2):
        with client_from_environment() as client:
            trial_to_its_end(client)
    (line,) = [record for record in caplog.records if str(file) in record.getMessage()]
    assert line.levelno == logging.INFO
    assert line.getMessage().endswith("look at it with: bso-server jobs list")
    assert {record.name for record in caplog.records} == {"zeus_plugins"}
    assert logging.getLogger("bso_server").level == logging.NOTSET


def test_file_with_tokens_needs_no_token(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    for command in (["db", "upgrade"], ["token", "create", "--name", "others"]):
        assert bso_server(*command, "--database-url", url_of(file)).returncode == 0
    with client_from_environment(token="of-elsewhere") as client:  # noqa: S106 - no real token
        assert "there is a token" in caplog.text
        trial_to_its_end(client)
    with client_from_environment(f"embedded://{file}", token="of-elsewhere") as client:  # noqa: S106 - no real token
        trial_to_its_end(client)


def test_limits_for_remote_callers_do_not_apply_to_the_embedded_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEUS_BSO_ALLOWED_HOSTS", "bso.example")
    with client_from_environment() as client:
        assert [trial_to_its_end(client) for _ in range(3)] == [1, 2, 3]


def test_server_log_is_shown_at_level_info(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "bso_server"), client_from_environment() as client:
        trial_to_its_end(client)
    assert "job digits-1 trial 1: target reached" in caplog.text


def test_concurrent_reports_all_get_verdicts_despite_a_close(file: Path) -> None:
    client = client_from_environment().with_retries(NO_RETRIES)
    client.register(JobSpecFromClient.of(JOB, GPUS))
    trials = [client.request_trial("digits-1") for _ in range(4)]
    verdicts: list[bool] = []

    def report(trial: TrialDispatch) -> None:
        verdicts.append(client.send_report(final_report(trial)).converged)

    reporting = [threading.Thread(target=report, args=[trial]) for trial in trials]
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for thread in reporting:
            thread.start()
        time.sleep(0.5)
        client.close()
        assert verdicts == []
        other.execute("ROLLBACK")
    for thread in reporting:
        thread.join()
    client.close()
    assert verdicts == [True] * 4


# --- Errors ---------------------------------------------------------------------------------------------------------


def made_by_a_newer_version(file: Path) -> None:
    assert bso_server("db", "upgrade", "--database-url", url_of(file)).returncode == 0
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")


def test_file_from_a_newer_version_is_refused_before_the_training(file: Path) -> None:
    made_by_a_newer_version(file)
    with (
        BatchSizeOptimizer(monitor(), None, JOB) as optimizer,
        pytest.raises(ZeusBSOConfigError, match="made by a newer version"),
    ):
        optimizer.get_batch_size()


def test_invalid_database_file_is_an_outage_survived_by_the_training(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.parent.mkdir()
    file.write_text("no database " * 100)
    with client_from_environment() as client, pytest.raises(ZeusBSOServerUnreachableError, match="not a database"):
        client.with_retries(NO_RETRIES).list_jobs()
    with client_from_environment() as client:
        session = session_of(client.with_retries(NO_RETRIES))
        assert session.ask() == 32
        session.begin_measurement()
        assert session.report_evaluation(1.0).converged
        file.unlink()
        session.end()
    assert "in this process" in caplog.text


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        (
            "ZEUS_BSO_DATABASE_URL",
            "postgresql://postgres@127.0.0.1/bso",
            "works on a SQLite file(.|\n)*ZEUS_SERVER_URL",
        ),
        ("ZEUS_BSO_DATABASE_URL", "sqlite://", "in memory(.|\n)*ZEUS_SERVER_URL"),
        ("ZEUS_BSO_DATABASE_URL", "sqlite:////proc/bso/bso.sqlite3", "cannot keep its data(.|\n)*ZEUS_SERVER_URL"),
        ("ZEUS_BSO_SILENT_LEASE_S", "none", "ZEUS_BSO_SILENT_LEASE_S"),
    ],
)
def test_unusable_setting_is_refused_immediately(
    variable: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ZeusBSOConfigError, match=says):
        client_from_environment()


def test_request_waits_up_to_the_timeout_and_sixfold_at_the_start(file: Path) -> None:
    impatient = client_from_environment(timeout_s=0.2).with_retries(NO_RETRIES)
    with client_from_environment() as client, impatient:
        trial_to_its_end(client)
        with closing(sqlite3.connect(file, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(ZeusBSOServerUnreachableError, match=r"timed out after 1\.2 s"):
                impatient.request_trial("digits-1")
            with pytest.raises(ZeusBSOServerUnreachableError, match=r"timed out after 0\.2 s"):
                impatient.record_offline(OfflineTrial(job_id="digits-1", batch_size=32), "key")
            other.execute("ROLLBACK")
        assert trial_to_its_end(client) > 1


WITHOUT_THE_EXTRA = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("litestar", "sqlalchemy", "alembic", "pydantic_settings", "platformdirs"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from zeus_plugins import BatchSizeOptimizer, JobSpec
from zeus_plugins.errors import ZeusBSOConfigError

job = JobSpec(job_id="digits-1", job_id_prefix="digits", batch_sizes=(32, 64), default_batch_size=32)
try:
    BatchSizeOptimizer(None, None, job)
except ZeusBSOConfigError as error:
    print(error)
with BatchSizeOptimizer(None, "http://127.0.0.1:9", job):
    print("a server elsewhere is fine")
"""


def test_missing_extra_is_reported_with_installation_and_alternative() -> None:
    error, fine = run(WITHOUT_THE_EXTRA, ZEUS_ESTIMATED_POWER_W="65").stdout.splitlines()
    assert "pip install 'zeus-plugins[server]'" in error
    assert "ZEUS_SERVER_URL=http" in error
    assert fine == "a server elsewhere is fine"


# --- several processes ----------------------------------------------------------------------------------------------


def test_continuous_writer_leaves_turns_to_concurrent_processes(file: Path) -> None:
    with client_from_environment(timeout_s=60.0) as client:
        client.register(JobSpecFromClient.of(JOB, GPUS))
        trial = client.request_trial("digits-1")
        with written_without_pause(file) as others:
            before = len(others)
            for _ in range(20):
                client.heartbeat(trial)
            meanwhile = len(others) - before
    # About one write of 50 ms for each heartbeat. Without turns, a heartbeat waits for hundreds of writes; in a process
    # that waits five seconds for a processor, for a hundred.
    assert 0 < meanwhile < 120


@pytest.mark.parametrize("hindrance", ["held", "unreadable", "without locks"])
def test_unavailable_turn_delays_a_writer_without_stopping_the_request(
    hindrance: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client_from_environment(timeout_s=1.0) as client:
        client.register(JobSpecFromClient.of(JOB, GPUS))
        directory = os.open(file.parent, os.O_RDONLY)
        try:
            if hindrance == "held":
                fcntl.flock(directory, fcntl.LOCK_EX)
            elif hindrance == "unreadable":
                monkeypatch.setattr("os.open", mock.Mock(side_effect=PermissionError))
            else:
                monkeypatch.setattr("fcntl.flock", mock.Mock(side_effect=OSError("Function not implemented")))
            assert client.request_trial("digits-1").trial_number == 1
        finally:
            os.close(directory)


@pytest.mark.slow
def test_twenty_processes_lose_nothing_beside_a_continuous_writer(file: Path, tmp_path: Path) -> None:
    with client_from_environment() as client:
        client.register(JobSpecFromClient.of(JOB, GPUS))
    outputs = [tmp_path / f"{n}.log" for n in range(20)]
    modules = ("tests.support.embedded", "zeus_plugins.client.local")
    with written_without_pause(file), serving(url_of(file), tmp_path) as server, BsoClient(server.url) as viewer:
        trainings = [warm.start("tests.support.embedded", "2", modules=modules, output=output) for output in outputs]
        assert [training.wait() for training in trainings] == [0] * 20
        seen = viewer.show_job("digits-1").trials
    # Without a warning, each training has written to the file immediately.
    numbers = [int(number) for output in outputs for number in output.read_text().split()]
    assert sorted(numbers) == [trial.trial_number for trial in seen] == list(range(1, 41))
    assert {trial["state"] for trial in shown(file)} == {"completed"}
    with closing(sqlite3.connect(file)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


UNFINISHED = """
import os, signal, sys
from tests.support.embedded import JOB, monitor
from zeus_plugins import BatchSizeOptimizer
from zeus_plugins.cli import main

optimizer = BatchSizeOptimizer(monitor(), None, JOB)
optimizer.get_batch_size()
optimizer.on_train_begin()
optimizer.on_evaluate(0.1)
"""


NEVER_CLOSED = """
from zeus_plugins.client import client_from_environment
client = client_from_environment()
client.list_jobs()
sys.exit(3)
"""


def test_ending_process_fails_the_unfinished_trial_without_noise(file: Path) -> None:
    done = run(UNFINISHED + NEVER_CLOSED, check=False)
    assert (done.returncode, done.stderr) == (3, "")
    assert [trial["state"] for trial in shown(file)] == ["failed"]
    # A terminated process has written its log into the file.
    assert [path.name for path in file.parent.iterdir()] == [file.name]


FORK = """
child = os.fork()
if child == 0:
    with optimizer._session._client as client:
        view = client.show_job(JOB.job_id)
        print("child", len(view.trials), len(__import__("threading").enumerate()), flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
optimizer.on_evaluate(0.9)
optimizer.close()
print("parent", optimizer.training_finished, flush=True)
"""


@pytest.mark.slow
def test_parent_and_forked_child_have_separate_connections(file: Path) -> None:
    done = run(UNFINISHED + FORK)
    # The child has only its main thread.
    assert done.stdout == "child 1 1\nparent True\n"
    assert done.stderr == ""
    assert [trial["state"] for trial in shown(file)] == ["completed"]


# The handler registered first is called last, immediately before the fork.
TIME_BEFORE_A_FORK = """
import logging, os, time
os.register_at_fork(before=lambda: time.sleep(1))
"""
FORK_DURING_REQUESTS = """
import threading
from zeus_plugins.client import client_from_environment
from zeus_plugins.client.port import NO_RETRIES

is_over = threading.Event()
asked = []

def ask_on():
    with client_from_environment().with_retries(NO_RETRIES) as client:
        while not is_over.is_set():
            asked.append(len(client.show_job(JOB.job_id).trials))

asking = threading.Thread(target=ask_on, daemon=True)
asking.start()
for _ in range(3):
    child = os.fork()
    if child == 0:
        open_files = [os.readlink(f"/proc/self/fd/{number}") for number in range(3, 40)
                      if os.path.islink(f"/proc/self/fd/{number}")]
        os._exit(any("bso.sqlite3" in name for name in open_files))
    assert os.waitpid(child, 0)[1] == 0
is_over.set()
asking.join()
assert set(asked) == {1}
optimizer.close()
"""


@pytest.mark.slow
def test_forked_child_never_holds_the_file_during_requests_of_parent_threads() -> None:
    done = run(TIME_BEFORE_A_FORK + UNFINISHED + FORK_DURING_REQUESTS)
    assert done.stderr == ""


def left_waiting(file: Path) -> str:
    """Run a training that cannot write to the file; return the URL of the file."""
    with client_from_environment() as client:
        session = session_of(client.with_retries(NO_RETRIES))
        file.mkdir(parents=True)  # A directory blocks the place of the file.
        assert session.ask() == 32
        session.begin_measurement()
        assert session.report_evaluation(1.0).converged
        session.end()
        file.rmdir()
        return client.server_url


def test_results_waiting_for_the_file_are_delivered_by_sync(
    file: Path,
    tmp_path: Path,
    state_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = left_waiting(file)
    # Independent of the default file and of the token for another server.
    monkeypatch.setenv("ZEUS_BSO_DATABASE_URL", url_of(tmp_path / "other.sqlite3"))
    monkeypatch.setenv("ZEUS_BSO_TOKEN", "of-another-server")
    assert main(["sync"]) == 0
    assert capsys.readouterr() == (f"job digits-1 for {url}: 1 delivered\n", "")
    (trial,) = shown(file)
    assert [trial["origin"], trial["state"]] == ["offline", "completed"]
    assert not (tmp_path / "other.sqlite3").exists()
    assert main(["sync"]) == 0
    assert capsys.readouterr().out == f"nothing waits in {state_directory / 'outbox'}\n"
