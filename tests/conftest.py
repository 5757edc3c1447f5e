"""Fixtures shared by several folders: real databases, and real servers in separate processes."""

from __future__ import annotations

import gc
import os
import signal
import ssl
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import httpx._transports.default
import hypothesis
import pytest

from tests.support import dashboards, warm
from tests.support.databases import DATABASES, empty_database
from tests.support.servers import ServerProcess
from tests.support.threads import heartbeat_threads
from tests.zeus_peer.peer import Peer, PeerMissingError, install
from zeus_plugins.client.port import Retries

IN_CI = bool(os.environ.get("CI"))

# During the import of test files, garbage collection finds almost nothing in ever more objects.
gc.disable()

# No test loads anything from a model hub; this stops the libraries from trying, also in child processes.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Networks and matrices of this size gain nothing from several threads, which compete with other tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Servers and commands in this process wait longer for their database than the default, because parallel tests turn
# milliseconds into seconds.
os.environ.setdefault("ZEUS_BSO_DATABASE_TIMEOUT_S", "60")

_contexts: dict[tuple[object, ...], ssl.SSLContext] = {}


def _ssl_context(*args: Any, **kwargs: Any) -> ssl.SSLContext:
    """Make each context once per certificates: otherwise each of httpx's clients reads them again, for 30 ms."""
    key = (args, tuple(sorted(kwargs.items())), os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
    if key not in _contexts:
        _contexts[key] = _create_ssl_context(*args, **kwargs)
    return _contexts[key]


_create_ssl_context = httpx.create_ssl_context
httpx._transports.default.create_ssl_context = _ssl_context  # type: ignore[attr-defined]  # where its transports look

# A shell lets its background jobs ignore Ctrl-C, and child processes inherit ignored signals.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# `make test` uses the first profile (``--hypothesis-profile fast``), with the same examples each time; `make test-all`
# uses the second, with new examples each time except in CI, where only the change itself may cause a refusal. Tests set
# other numbers of examples by tests.support.properties.examples.
hypothesis.settings.register_profile("fast", max_examples=20, deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile(
    "thorough", max_examples=100, deadline=None, **({"derandomize": True, "database": None} if IN_CI else {})
)
hypothesis.settings.load_profile("thorough")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests as slow on database servers except in the files about storage, and there only for random examples."""
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        is_random = isinstance(item, pytest.Function) and hypothesis.is_hypothesis_test(item.obj)
        if marks & {"postgresql", "mysql"} and (is_random or "storage" not in marks):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers() -> int:
    """Run three processes on two cores, because they wait a third of the time for their child processes."""
    return max(1, (os.cpu_count() or 1) * 3 // 2)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Fork while this process has imported everything and run nothing, see tests/support/warm.py."""
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
    """Give each test its own, missing directory of results that wait for a server."""
    directory = _state_directories / uuid.uuid4().hex
    monkeypatch.setenv("ZEUS_STATE_DIR", str(directory))
    return directory


@pytest.fixture(autouse=True)
def _idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trainings in this process measure an idle machine, however many tests run in parallel."""
    monkeypatch.setattr("zeus_plugins.energy.processes.waits_s", lambda: {1: 0.0})


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trainings in this process retry an absent server twenty times sooner."""
    wait_s = Retries.wait_s
    monkeypatch.setattr(Retries, "wait_s", lambda retries, attempt: wait_s(retries, attempt) / 20)
    monkeypatch.setattr("zeus_plugins.client.reporter._FIRST_RETRY_S", 0.05)


@pytest.fixture(autouse=True)
def _no_heartbeats_go_on() -> Iterator[None]:
    """Check that an ended training leaves no thread, which would keep its trial alive as long as this process."""
    before = set(heartbeat_threads())
    yield
    assert [thread for thread in heartbeat_threads() if thread not in before] == []


@pytest.fixture(autouse=True)
def _sigterm_is_put_back() -> Iterator[None]:
    """Restore the SIGTERM handler after a command such as `zeus-plugins master`, which keeps its own handler."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module", params=DATABASES)
def database_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of an empty database, of each kind in turn; tests of a module share the database."""
    with empty_database(request.param, tmp_path_factory.mktemp("database")) as url:
        yield url


@pytest.fixture(scope="session")
def _servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], ServerProcess]]:
    """Servers shared by all tests of this process, by kind of database; each starts on demand."""
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
    """A server on each kind of database in turn, shared by all tests, which use separate jobs."""
    return _servers(request.param)


@pytest.fixture(scope="session")
def shared_server(_servers: Callable[[str], ServerProcess]) -> ServerProcess:
    """A server on SQLite, shared by all tests, which use separate jobs and leave the server running."""
    return _servers("sqlite")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server on a separate SQLite file, for a test that kills the server or inspects its whole content."""
    server = ServerProcess(f"sqlite:///{tmp_path / 'bso.sqlite3'}", tmp_path / "server.log")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def dashboard_database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """URL of a database with all kinds of jobs for the dashboard, used read-only."""
    url = f"sqlite:///{tmp_path_factory.mktemp('full') / 'bso.sqlite3'}"
    dashboards.filled(url, dashboards.everything)
    return url


@pytest.fixture
def new_database(tmp_path: Path) -> str:
    """URL of a database that does not exist yet."""
    return f"sqlite:///{tmp_path / 'bso.sqlite3'}"


@pytest.fixture(scope="session")
def peer(request: pytest.FixtureRequest) -> Peer:
    """Zeus, installed beside the caches of the checkout."""
    try:
        return install(request.config.rootpath / ".zeus-peer")
    except PeerMissingError as error:
        pytest.skip(f"Zeus 0.16 cannot be installed: {error}")
