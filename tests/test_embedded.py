"""The server in the training's own process, on a SQLite file."""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.embedded import GPUS, JOB, monitor, session_of, trial_to_its_end
from tests.support.servers import Server, bso_server
from zeus_plugins import BatchSizeOptimizer
from zeus_plugins.client.http import EMBEDDED, NO_RETRIES, BsoClient, client_from_environment
from zeus_plugins.client.local import EmbeddedTransport
from zeus_plugins.errors import (
    ZeusBSOConfigError,
    ZeusBSORuntimeError,
    ZeusBSOServerUnreachableError,
)
from zeus_plugins.protocol import JobRegistration, TrainingResult, TrialDispatch, TrialId, TrialState

REPOSITORY = Path(__file__).parent.parent
THREADS = ("zeus-bso-embedded", "bso-writer", "bso-reader")


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The SQLite file, which is also the default one here, in child processes too; nothing has made it yet."""
    file = tmp_path / "data" / "bso.sqlite3"
    monkeypatch.setenv("ZEUS_BSO_DATABASE_URL", f"sqlite:///{file}")
    for name in ("ZEUS_SERVER_URL", "ZEUS_BSO_TOKEN", "ZEUS_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    return file


@pytest.fixture(autouse=True)
def _nothing_is_left_running() -> Iterator[None]:
    yield
    assert server_threads() == []


def server_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(THREADS)]


def url_of(file: Path) -> str:
    return f"sqlite:///{file}"


def run(program: str, *arguments: str, check: bool = True, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; any warning in it is an error."""
    command = [sys.executable, *LOUD, "-c", program, *arguments]
    return subprocess.run(command, env=environment(**environ), capture_output=True, text=True, check=check, timeout=120)


# How Litestar 2 reads signatures is deprecated in Litestar 3, and Python deprecates what PyTorch does with the like.
LOUD = ["-W", "error", "-W", "ignore::DeprecationWarning"]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), **more}


def shown(file: Path) -> list[dict[str, object]]:
    """The job's trials, as the command shows them."""
    done = bso_server("jobs", "show", "digits-1", "--json", "--database-url", url_of(file))
    assert done.returncode == 0, done.stderr
    trials: list[dict[str, object]] = json.loads(done.stdout)["trials"]
    return trials


# --- one process ----------------------------------------------------------------------------------------------------


def test_without_a_server_url_a_training_runs_and_its_job_can_be_looked_at(file: Path) -> None:
    with BatchSizeOptimizer(monitor(), None, JOB) as optimizer:
        assert optimizer.get_batch_size() == 32
        optimizer.on_train_begin()
        optimizer.on_evaluate(0.1)
        optimizer.on_evaluate(0.9)
        assert optimizer.training_finished
    (trial,) = shown(file)
    # η · energy + (1 − η) · max_power · time: half of 20 J, and half of 100 W · 2 s.
    assert (trial["trial_number"], trial["state"], trial["cost_j"]) == (1, "completed", 110.0)


def test_nothing_starts_before_the_first_request_and_nothing_runs_after_the_close(file: Path) -> None:
    client = client_from_environment()
    assert client.server_url == f"embedded://{file}"
    assert repr(client) == f"BsoClient('embedded://{file}')"
    assert server_threads() == []
    assert not file.exists()
    assert client.list_jobs().jobs == ()
    assert "zeus-bso-embedded" in server_threads()
    client.close()
    assert server_threads() == []
    assert client.list_jobs().jobs == ()
    client.close()


def test_a_copy_of_a_client_is_closed_alone_and_shares_the_server() -> None:
    with client_from_environment() as client:
        client.list_jobs()
        before = server_threads()
        with client.with_retries(NO_RETRIES) as other, client_from_environment() as third:
            other.list_jobs()
            third.list_jobs()
            assert server_threads().count("zeus-bso-embedded") == 1
        assert set(before) <= set(server_threads())
        client.list_jobs()


@pytest.mark.parametrize("is_used", [False, True])
def test_a_client_can_be_pickled_before_and_after_its_first_request(is_used: bool) -> None:
    with client_from_environment() as client:
        if is_used:
            trial_to_its_end(client)
        twin = pickle.loads(pickle.dumps(client))  # noqa: S301 - made here
        assert twin.server_url == client.server_url
    assert server_threads() == []
    with twin:
        assert trial_to_its_end(twin) == 1 + is_used


def test_the_file_stays_the_same_whatever_the_working_directory(
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


def test_a_file_can_be_named_by_the_server_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    other = tmp_path / "an other.sqlite3"
    monkeypatch.setenv("ZEUS_SERVER_URL", f"embedded://{other}")
    with client_from_environment() as client:
        assert client.server_url == f"embedded://{other}"
        trial_to_its_end(client)
    assert len(shown(other)) == 1
    assert not file.exists()


def test_the_file_comes_from_a_dotenv_file_as_the_servers_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZEUS_BSO_DATABASE_URL")
    monkeypatch.chdir(tmp_path)
    Path(".env").write_text("ZEUS_BSO_DATABASE_URL=sqlite:///of-dotenv.sqlite3\n")
    assert client_from_environment().server_url == f"embedded://{tmp_path / 'of-dotenv.sqlite3'}"


def test_the_log_says_once_where_the_file_is_and_nothing_of_the_servers_everyday_life(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(2):
        with client_from_environment() as client:
            trial_to_its_end(client)
    (line,) = [record for record in caplog.records if str(file) in record.getMessage()]
    assert line.levelno == logging.INFO
    assert line.getMessage().endswith("look at it with: bso-server jobs list")
    assert {record.name.partition(".")[0] for record in caplog.records} == {"zeus_plugins", "httpx"}
    assert logging.getLogger("bso_server").level == logging.NOTSET


def test_a_command_for_a_file_that_is_not_the_default_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with BsoClient(f"embedded://{tmp_path / 'mine.sqlite3'}") as client:
        client.list_jobs()
    assert f"bso-server jobs list --database-url 'sqlite:///{tmp_path / 'mine.sqlite3'}'" in caplog.text


def test_no_token_is_needed_on_a_file_whose_server_asks_for_one(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    for command in (["db", "upgrade"], ["token", "create", "--name", "others"]):
        assert bso_server(*command, "--database-url", url_of(file)).returncode == 0
    with client_from_environment(token="of-elsewhere") as client:  # noqa: S106 - of no server
        assert "there is a token" in caplog.text
        trial_to_its_end(client)
    with client_from_environment(f"embedded://{file}", token="of-elsewhere") as client:  # noqa: S106 - of no server
        trial_to_its_end(client)


def test_limits_for_callers_from_outside_do_not_hold_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEUS_BSO_RATE_LIMIT_PER_MINUTE", "1")
    monkeypatch.setenv("ZEUS_BSO_ALLOWED_HOSTS", "bso.example")
    with client_from_environment() as client:
        assert [trial_to_its_end(client) for _ in range(3)] == [1, 2, 3]


def test_refusals_of_the_server_are_those_of_every_server() -> None:
    with client_from_environment() as client:
        with pytest.raises(ZeusBSORuntimeError, match="unknown job") as caught:
            client.suggest("nobody")
        assert caught.value.status == 404


def test_a_server_that_is_told_to_end_answers_what_it_was_asked_before(file: Path) -> None:
    client = client_from_environment().with_retries(NO_RETRIES)
    client.register(JobRegistration.of(JOB, GPUS))
    trials = [client.suggest("digits-1") for _ in range(4)]
    verdicts: list[bool] = []

    def report(trial: TrialDispatch) -> None:
        name = trial.model_dump(include=set(TrialId.model_fields))
        result = TrainingResult(**name, time=1.0, energy=1.0, metric=1.0, current_epoch=1)
        verdicts.append(client.report(result).converged)

    reporting = [threading.Thread(target=report, args=[trial]) for trial in trials]
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        # The first report waits for this lock, and the others for the first: they are committed in groups.
        other.execute("BEGIN IMMEDIATE")
        for thread in reporting:
            thread.start()
        time.sleep(0.5)
        ending = threading.Thread(target=client.close)
        ending.start()
        time.sleep(0.5)
        other.execute("ROLLBACK")
    for thread in [*reporting, ending]:
        thread.join()
    assert verdicts == [True] * 4


# --- what cannot work -----------------------------------------------------------------------------------------------


def made_by_a_newer_version(file: Path) -> None:
    assert bso_server("db", "upgrade", "--database-url", url_of(file)).returncode == 0
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")


def test_a_file_that_a_newer_version_made_is_refused_before_the_training(file: Path) -> None:
    made_by_a_newer_version(file)
    with (
        BatchSizeOptimizer(monitor(), None, JOB) as optimizer,
        pytest.raises(ZeusBSOConfigError, match="made by a newer version"),
    ):
        optimizer.get_batch_size()


def test_a_file_that_is_no_database_is_an_outage_that_a_training_survives(
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
        assert session.report(1.0).converged
        file.unlink()
        session.end()
    assert "in this process" in caplog.text


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgresql://postgres@127.0.0.1/bso", "works on a SQLite file"),
        ("sqlite://", "in memory"),
        ("sqlite:////proc/bso/bso.sqlite3", "cannot keep its data"),
    ],
)
def test_a_place_where_no_file_can_be_is_refused_at_once(url: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEUS_BSO_DATABASE_URL", url)
    with pytest.raises(ZeusBSOConfigError, match=f"{says}(.|\n)*ZEUS_SERVER_URL"):
        client_from_environment()


def test_a_wrong_setting_of_the_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEUS_BSO_CRASH_RETRIES", "none")
    with pytest.raises(ZeusBSOConfigError, match="ZEUS_BSO_CRASH_RETRIES"):
        client_from_environment()


def test_a_request_waits_no_longer_than_its_timeout(file: Path) -> None:
    impatient = client_from_environment(timeout_s=0.2).with_retries(NO_RETRIES)
    with client_from_environment() as client, impatient:
        trial_to_its_end(client)
        with closing(sqlite3.connect(file, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(ZeusBSOServerUnreachableError, match=r"timed out after 0\.2 s"):
                impatient.suggest("digits-1")
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


def test_without_the_extra_the_error_names_the_installation_and_the_alternative() -> None:
    error, fine = run(WITHOUT_THE_EXTRA, ZEUS_ESTIMATED_POWER_W="65").stdout.splitlines()
    assert "pip install 'zeus-plugins[server]'" in error
    assert "ZEUS_SERVER_URL=http" in error
    assert fine == "a server elsewhere is fine"


# --- several processes ----------------------------------------------------------------------------------------------

FIFTY_TRIALS = """
import sys
from itertools import repeat
from zeus_plugins.client.http import client_from_environment
from tests.support.embedded import trial_to_its_end

print("ready", flush=True)
sys.stdin.readline()
with client_from_environment() as client:
    print(*[trial_to_its_end(client) for _ in range(50)])
"""


def test_two_processes_play_fifty_trials_each_while_others_look(file: Path, tmp_path: Path) -> None:
    trainings = [
        subprocess.Popen(
            [sys.executable, *LOUD, "-c", FIFTY_TRIALS],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for training in trainings:
        assert training.stdout is not None
        assert training.stdout.readline() == "ready\n"
    for training in trainings:
        assert training.stdin is not None
        training.stdin.write("go\n")
        training.stdin.flush()
    viewer = Server(url_of(file), tmp_path / "server.log")
    viewer.start()
    try:
        ended = [training.communicate(timeout=120) for training in trainings]
        assert [error for _, error in ended] == ["", ""]
        assert [training.returncode for training in trainings] == [0, 0]
        with BsoClient(viewer.url) as client:
            seen = client.show_job("digits-1").trials
    finally:
        viewer.stop()
    numbers = [int(number) for output, _ in ended for number in output.split()]
    assert sorted(numbers) == list(range(1, 101))
    assert sorted(trial.trial_number for trial in seen) == list(range(1, 101))
    assert {trial["state"] for trial in shown(file)} == {"completed"}
    with closing(sqlite3.connect(file)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


UNFINISHED = """
import os, signal, sys
from tests.support.embedded import JOB, monitor
from zeus_plugins import BatchSizeOptimizer

optimizer = BatchSizeOptimizer(monitor(), None, JOB)
optimizer.get_batch_size()
optimizer.on_train_begin()
optimizer.on_evaluate(0.1)
"""


@pytest.mark.parametrize(
    ("ending", "state"),
    [("", "failed"), ("raise ValueError('out of luck')", "failed"), ("sys.exit(3)", "failed")],
    ids=["runs-off-the-end", "dies-of-an-exception", "exits"],
)
def test_a_process_that_ends_fails_its_unfinished_trial_and_leaves_no_noise(
    file: Path, ending: str, state: str
) -> None:
    done = run(UNFINISHED + ending, check=False)
    assert [trial["state"] for trial in shown(file)] == [state]
    noise = [line for line in done.stderr.splitlines() if "ValueError" not in line]
    assert [line for line in noise if not line.startswith(("Traceback", "  File"))] == []
    # A server that was ended has written its log into the file.
    assert [path.name for path in file.parent.iterdir()] == [file.name]


NEVER_CLOSED = """
from zeus_plugins.client.http import client_from_environment
client = client_from_environment()
client.list_jobs()
"""


def test_a_client_that_nobody_closes_leaves_no_noise_either(file: Path) -> None:
    assert run(NEVER_CLOSED).stderr == ""
    assert [path.name for path in file.parent.iterdir()] == [file.name]


BEAT_AND_DIE = """
session = optimizer._session
session._client.heartbeat(session.trial.trial_id)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_after_a_kill_the_next_process_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEUS_BSO_HEARTBEAT_INTERVAL_S", "0.1")
    monkeypatch.setenv("ZEUS_BSO_HEARTBEAT_LEASE_S", "0.5")
    done = run(UNFINISHED + BEAT_AND_DIE, check=False)
    assert done.returncode == -signal.SIGKILL
    time.sleep(0.6)
    with client_from_environment() as client:
        assert trial_to_its_end(client) == 2
        states = {trial.trial_number: trial.state for trial in client.show_job("digits-1").trials}
    assert states == {1: TrialState.ABANDONED, 2: TrialState.COMPLETED}


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


def test_parent_and_forked_child_each_have_a_server_of_their_own(file: Path) -> None:
    done = run(UNFINISHED + FORK)
    # The child's threads: its main one, its server, that one's writer and four readers.
    assert done.stdout == "child 1 7\nparent True\n"
    assert done.stderr == ""
    assert [trial["state"] for trial in shown(file)] == ["completed"]


# What is registered first is called last, just before the fork. But from its own call on logging holds a lock, which
# would keep a server from starting in that time.
TIME_BEFORE_A_FORK = """
import logging, os, time
os.register_at_fork(before=lambda: time.sleep(1))
"""
FORK_DURING_REQUESTS = """
import threading
from zeus_plugins.client.http import NO_RETRIES, client_from_environment

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


def test_no_forked_child_holds_the_file_though_other_threads_ask_on() -> None:
    done = run(TIME_BEFORE_A_FORK + UNFINISHED + FORK_DURING_REQUESTS)
    assert done.stderr == ""


RANK_1 = """
import pickle, sys
from zeus_plugins.client.http import client_from_environment
from zeus_plugins.training.session import end_trial_from_another_rank

with client_from_environment() as client:
    end_trial_from_another_rank(client, pickle.loads(bytes.fromhex(sys.argv[1])), MemoryError("rank 1"))
"""


def test_another_rank_ends_the_trial_through_the_same_file() -> None:
    with client_from_environment() as client:
        session = session_of(client)
        session.ask()
        done = run(RANK_1, pickle.dumps(session.trial).hex())
        assert done.stderr == ""
        (trial,) = client.show_job("digits-1").trials
        session.end()
    assert trial.state is TrialState.INFEASIBLE


def test_results_that_waited_for_the_file_are_delivered_by_the_next_training(file: Path) -> None:
    with client_from_environment() as client:
        session = session_of(client.with_retries(NO_RETRIES))
        file.parent.mkdir(exist_ok=True)
        file.mkdir()  # Where the file should be.
        assert session.ask() == 32
        session.begin_measurement()
        assert session.report(1.0).converged
        session.end()
    file.rmdir()
    with client_from_environment() as client:
        trial_to_its_end(client)
    offline, other = shown(file)
    assert [offline["origin"], offline["state"], other["state"]] == ["offline", "completed", "completed"]


def left_waiting(file: Path) -> str:
    """A training has ended that could not reach the file; the URL of its server."""
    with client_from_environment() as client:
        session = session_of(client.with_retries(NO_RETRIES))
        file.mkdir(parents=True)  # Where the file should be.
        session.ask()
        session.begin_measurement()
        assert session.report(1.0).converged
        session.end()
        file.rmdir()
        return client.server_url


SYNC = "from zeus_plugins.cli import main; raise SystemExit(main(['sync']))"


def test_results_that_waited_for_the_file_are_delivered_by_sync(
    file: Path, tmp_path: Path, state_directory: Path
) -> None:
    url = left_waiting(file)
    # Whatever file is the default one where the command runs, and whichever token is for a server elsewhere.
    elsewhere = {"ZEUS_BSO_DATABASE_URL": url_of(tmp_path / "other.sqlite3"), "ZEUS_BSO_TOKEN": "of-another-server"}
    done = run(SYNC, **elsewhere)
    assert (done.stdout, done.stderr) == (f"job digits-1 for {url}: 1 delivered\n", "")
    (trial,) = shown(file)
    assert [trial["origin"], trial["state"]] == ["offline", "completed"]
    assert not (tmp_path / "other.sqlite3").exists()
    again = run(SYNC, **elsewhere)
    assert again.stdout == f"nothing waits in {state_directory / 'outbox'}\n"


def test_results_for_a_file_that_a_newer_version_made_go_on_waiting(file: Path, state_directory: Path) -> None:
    left_waiting(file)
    made_by_a_newer_version(file)
    done = run(SYNC, check=False)
    assert done.returncode == 1
    assert "1 waiting (" in done.stdout
    assert "made by a newer version" in done.stdout
    assert [path.suffix for path in (state_directory / "outbox").iterdir()] == [".jsonl"]


def test_copies_of_a_transport_belong_to_one_file(file: Path) -> None:
    transport = EmbeddedTransport(EMBEDDED)
    assert copy.copy(transport).server_url == transport.server_url == f"embedded://{file}"
