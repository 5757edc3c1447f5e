"""Real servers in processes of their own, and the command line of the server in this process."""

from __future__ import annotations

import io
import os
import secrets
import signal
import socket
import subprocess
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path

import httpx

from bso_server.cli import main
from tests.support import warm

SERVER_START_S = 120.0
# Each process of the tests has a thousand of them for itself, and begins anywhere among these, as runs beside it do.
_OWN_PORTS = range(*(10_000 + 1000 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 20 + n) for n in (0, 1)))
_PORTS = islice(cycle(_OWN_PORTS), secrets.randbelow(len(_OWN_PORTS)), None)
# What a server imports.
NEEDED = ("bso_server.app", "bso_server.cli", "uvicorn.protocols.http.httptools_impl", "uvloop", "alembic.command")


@dataclass
class ServerProcess:
    """A `bso-server serve` process that can be killed and started again at the same address."""

    database_url: str
    log: Path
    port: int = 0
    # Longer than by default: where tests run side by side, what takes milliseconds elsewhere may take seconds.
    database_timeout_s: float = 60.0
    process: warm.Process | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, *arguments: str) -> None:
        self.port = self.port or free_port()
        command = ["bso_server", "serve", "--port", str(self.port), "--database-url", self.database_url, *arguments]
        environ = {**os.environ, "ZEUS_BSO_DATABASE_TIMEOUT_S": str(self.database_timeout_s)}
        self.process = warm.start(*command, modules=NEEDED, output=self.log, environ=environ)
        wait_until_up(self.process, self.url, self.log)

    def kill(self) -> None:
        """End it with SIGKILL: no chance to tidy up."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it with SIGTERM, which a parent of several workers passes on."""
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait()
            self.process = None


@contextmanager
def serving(database_url: str, folder: Path, *arguments: str) -> Iterator[ServerProcess]:
    """A server on this database, with its log in the folder, that is killed in the end."""
    server = ServerProcess(database_url, folder / "server.log")
    try:
        server.start(*arguments)
        yield server
    finally:
        server.kill()


def free_port() -> int:
    """A port that nobody listens on, and that this process has named to nobody lately.

    It lies below those that the system gives away itself, to outgoing connections and to who listens on port 0: one of
    these could have it before the server that it is for, or while that is being started again.
    """
    for port in _PORTS:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("the ports are without end")


def wait_until_up(
    process: warm.Process | subprocess.Popen[bytes], url: str, log: Path, path: str = "/health/live"
) -> None:
    deadline = time.monotonic() + SERVER_START_S
    while True:
        try:
            httpx.get(f"{url}{path}").raise_for_status()
        except httpx.HTTPError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the server did not start: {log.read_text()}") from None
            time.sleep(0.02)
        else:
            return


def is_alive(pid: int) -> bool:
    """False for a process that has ended, though its parent has not asked for its status."""
    status = Path(f"/proc/{pid}/status")
    try:
        os.kill(pid, 0)
        return not status.exists() or "\nState:\tZ" not in status.read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_for_workers(server: ServerProcess, number: int) -> None:
    """Wait until so many processes of a server take requests; `ServerProcess.start` waits for the first."""
    deadline = time.monotonic() + SERVER_START_S
    while server.log.read_text().count("Application startup complete") < number:
        assert time.monotonic() < deadline, server.log.read_text()
        time.sleep(0.05)


def bso_server(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a `bso-server` command to its end.

    It runs in this process, for starting another one takes longer than the command; not so `serve`, which sets up
    logging and the environment of its process.
    """
    if arguments[0] == "serve":
        return warm.run("bso_server", *arguments, modules=NEEDED)
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            # The command has an event loop of its own, and one may be running in this thread.
            with ThreadPoolExecutor(1) as pool:
                status = pool.submit(main, arguments).result()
        except SystemExit as usage:
            status = int(usage.code or 0)
        except Exception:
            traceback.print_exc()
            status = 1
    return subprocess.CompletedProcess(arguments, status, output.getvalue(), errors.getvalue())
