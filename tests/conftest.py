"""What several test files share: real databases, and real servers in processes of their own."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import create_async_engine

from bso_server.cli import main

SERVER_START_S = 60.0
HEARTBEATS = "zeus-bso-heartbeat"

# No test loads anything from a model hub; this keeps the libraries that could from trying, in child processes too.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shell has its background jobs ignore Ctrl-C, and ignored signals are inherited by all that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Where the databases of the test run are made; a user points these elsewhere by the environment.
POSTGRES_URL = os.environ.get("ZEUS_TEST_POSTGRES_URL", "postgresql+asyncpg://postgres@127.0.0.1:5432/postgres")
MYSQL_URL = os.environ.get("ZEUS_TEST_MYSQL_URL", "mysql+asyncmy://root@127.0.0.1:3306/")


@pytest.fixture(scope="session")
def _state_directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(autouse=True)
def state_directory(_state_directories: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where results wait for a server that is away: for each test another place, which nothing has made yet."""
    directory = _state_directories / uuid.uuid4().hex
    monkeypatch.setenv("ZEUS_STATE_DIR", str(directory))
    return directory


@pytest.fixture(autouse=True)
def _no_heartbeats_go_on() -> Iterator[None]:
    """A training that is over keeps no thread: one left behind would keep its trial alive as long as this process."""
    before = set(threading.enumerate())
    yield
    assert [thread for thread in threading.enumerate() if thread.name == HEARTBEATS and thread not in before] == []


def administer(admin_url: str, statement: str) -> None:
    async def run() -> None:
        engine = create_async_engine(admin_url, isolation_level="AUTOCOMMIT")
        try:
            async with engine.connect() as connection:
                await connection.execute(text(statement))
        finally:
            await engine.dispose()

    asyncio.run(run())


def fresh_database(admin_url: str) -> Iterator[str]:
    """A database of its own on a running server; without one the test is skipped, except in CI, where it fails."""
    name = f"zeus_test_{uuid.uuid4().hex[:12]}"
    try:
        administer(admin_url, f"CREATE DATABASE {name}")
    except (OSError, SQLAlchemyError) as error:
        reason = f"no database at {make_url(admin_url).render_as_string()}: {error}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    yield make_url(admin_url).set(database=name).render_as_string(hide_password=False)
    force = " WITH (FORCE)" if admin_url.startswith("postgresql") else ""
    administer(admin_url, f"DROP DATABASE {name}{force}")


@pytest.fixture(scope="module", params=["sqlite", "postgresql", "mysql"])
def database_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an empty database, of each kind in turn; tests of a module share it."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path_factory.mktemp('database') / 'bso.sqlite3'}"
    else:
        yield from fresh_database(POSTGRES_URL if request.param == "postgresql" else MYSQL_URL)


@dataclass
class Server:
    """A `bso-server serve` process that can be killed and started again at the same address."""

    database_url: str
    log: Path
    port: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, *arguments: str) -> None:
        self.port = self.port or free_port()
        command = [sys.executable, "-m", "bso_server", "serve", "--port", str(self.port)]
        with self.log.open("a") as output:
            self.process = subprocess.Popen(
                [*command, "--database-url", self.database_url, *arguments], stdout=output, stderr=subprocess.STDOUT
            )
        wait_until_up(self.process, self.url, self.log)

    def kill(self) -> None:
        """End it with SIGKILL: no chance to tidy up."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        """End it with SIGTERM, which a parent of several workers passes on."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
            self.process = None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_up(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + SERVER_START_S
    while True:
        try:
            httpx.get(f"{url}/health/live").raise_for_status()
        except httpx.HTTPError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the server did not start: {log.read_text()}") from None
            time.sleep(0.05)
        else:
            return


def bso_server(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a `bso-server` command to its end.

    It runs in this process, for starting another one takes longer than the command; not so `serve`, which sets up
    logging and the environment of its process.
    """
    if arguments[0] == "serve":
        command = [sys.executable, "-m", "bso_server", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            status = main(arguments)
        except SystemExit as usage:
            status = int(usage.code or 0)
        except Exception:
            traceback.print_exc()
            status = 1
    return subprocess.CompletedProcess(arguments, status, output.getvalue(), errors.getvalue())


@pytest.fixture(scope="module")
def any_server(database_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on each kind of database in turn; tests of a module share it."""
    upgrade = bso_server("db", "upgrade", "--database-url", database_url)
    assert upgrade.returncode == 0, upgrade.stderr
    server = Server(database_url, tmp_path_factory.mktemp("server") / "server.log")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server on a SQLite file of its own."""
    server = Server(f"sqlite:///{tmp_path / 'bso.sqlite3'}", tmp_path / "server.log")
    server.start()
    yield server
    server.kill()
