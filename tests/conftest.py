"""What several test files share: real databases, and real servers in processes of their own."""

from __future__ import annotations

import gc
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import hypothesis
import pytest

from tests.support import dashboards, warm
from tests.support.databases import DATABASES, empty_database
from tests.support.servers import ServerProcess
from tests.support.threads import heartbeat_threads
from tests.zeus_peer.peer import Peer, PeerMissingError, install
from zeus_plugins.client.port import Retries

IN_CI = bool(os.environ.get("CI"))

# Until all test files are imported there is next to nothing to collect, in ever more to look through.
gc.disable()

# No test loads anything from a model hub; this keeps the libraries that could from trying, in child processes too.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Networks and matrices of this size gain nothing from several threads, which only wait for those of other tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell has its background jobs ignore Ctrl-C, and ignored signals are inherited by all that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# `make test` takes the first (``--hypothesis-profile fast``), whose examples are the same each time; `make test-all`
# takes the second, which draws others each time, but in CI: there a change is refused for what it does, and not by
# chance. A test that wants another number of examples says it by tests.support.properties.examples.
hypothesis.settings.register_profile("fast", max_examples=20, deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile(
    "thorough", max_examples=100, deadline=None, **({"derandomize": True, "database": None} if IN_CI else {})
)
hypothesis.settings.load_profile("thorough")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests of other databases than SQLite as slow, outside of the files about storage."""
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if marks & {"aiosqlite", "postgresql", "mysql"} and "storage" not in marks:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers() -> int:
    """Run three processes on two cores: a third of the time they wait for processes of their own."""
    return max(1, (os.cpu_count() or 1) * 3 // 2)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Fork while this process has imported everything and done nothing, see tests/support/warm.py."""
    gc.enable()
    distributes = session.config.getoption("dist", "no") != "no" and not hasattr(session.config, "workerinput")
    if hasattr(os, "fork") and not session.config.option.collectonly and not distributes:
        warm.warm()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run `async def` tests and fixtures on asyncio, which the server needs."""
    return "asyncio"


@pytest.fixture(scope="session")
def _state_directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(autouse=True)
def state_directory(_state_directories: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test its own, missing directory of results that wait for a server, and no summary file."""
    directory = _state_directories / uuid.uuid4().hex
    monkeypatch.setenv("ZEUS_STATE_DIR", str(directory))
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)  # of the workflow that runs the tests
    return directory


@pytest.fixture(autouse=True)
def _idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trainings in this process wait for no core, however many tests run beside them."""
    monkeypatch.setattr("zeus_plugins.energy.processes.waits_s", lambda: {1: 0.0})


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trainings in this process ask an absent server again twenty times as soon."""
    wait_s = Retries.wait_s
    monkeypatch.setattr(Retries, "wait_s", lambda retries, attempt: wait_s(retries, attempt) / 20)
    monkeypatch.setattr("zeus_plugins.client.reporter._FIRST_RETRY_S", 0.05)


@pytest.fixture(autouse=True)
def _no_heartbeats_go_on() -> Iterator[None]:
    """A training that is over keeps no thread: one left behind would keep its trial alive as long as this process."""
    before = set(heartbeat_threads())
    yield
    assert [thread for thread in heartbeat_threads() if thread not in before] == []


@pytest.fixture(autouse=True)
def _sigterm_is_put_back() -> Iterator[None]:
    """Undo the handler of a command such as `zeus-plugins master`, which keeps it until its process ends."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module", params=DATABASES)
def database_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an empty database, of each kind in turn; tests of a module share it."""
    with empty_database(request.param, tmp_path_factory.mktemp("database")) as url:
        yield url


@pytest.fixture(scope="session")
def _servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], ServerProcess]]:
    """The servers that all tests of this process share, by kind of database; each starts when it is needed."""
    with ExitStack() as until_the_end:

        @cache
        def server_on(kind: str) -> ServerProcess:
            folder = tmp_path_factory.mktemp("server")
            server = ServerProcess(until_the_end.enter_context(empty_database(kind, folder)), folder / "server.log")
            until_the_end.callback(server.kill)
            server.start("--migrate")
            return server

        yield server_on


@pytest.fixture(scope="module", params=DATABASES)
def any_server(request: pytest.FixtureRequest, _servers: Callable[[str], ServerProcess]) -> ServerProcess:
    """A server on each kind of database in turn, which everybody uses: a test has jobs of its own there."""
    return _servers(request.param)


@pytest.fixture(scope="session")
def shared_server(_servers: Callable[[str], ServerProcess]) -> ServerProcess:
    """A server on SQLite, which everybody uses: a test has jobs of its own there, and leaves it running."""
    return _servers("sqlite")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server on a SQLite file of its own, for a test that kills it, or looks at all that it has."""
    server = ServerProcess(f"sqlite:///{tmp_path / 'bso.sqlite3'}", tmp_path / "server.log")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def dashboard_database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a database with all kinds of jobs, for the dashboard to show; nobody writes to it."""
    url = f"sqlite:///{tmp_path_factory.mktemp('full') / 'bso.sqlite3'}"
    dashboards.filled(url, dashboards.everything)
    return url


@pytest.fixture
def new_database(tmp_path: Path) -> str:
    """The URL of a database that nothing has made yet."""
    return f"sqlite:///{tmp_path / 'bso.sqlite3'}"


@pytest.fixture(scope="session")
def peer(request: pytest.FixtureRequest) -> Peer:
    """Zeus, installed beside the caches of the checkout."""
    try:
        return install(request.config.rootpath / ".zeus-peer")
    except PeerMissingError as error:
        pytest.skip(f"Zeus 0.16 cannot be installed: {error}")
