"""Real servers in separate processes, and the server's command line in this process."""

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
# Each process of the tests has a thousand ports and starts at a random port, because concurrent runs do the same.
_OWN_PORTS = range(*(10_000 + 1000 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 20 + n) for n in (0, 1)))
_PORTS = islice(cycle(_OWN_PORTS), secrets.randbelow(len(_OWN_PORTS)), None)
# URL of the database of each server that was started, by the server's URL.
DATABASE_OF: dict[str, str] = {}
# Prepares processes for servers, which then start in half the time.
NEEDED = ("tests.support.warm_server",)


@dataclass
class ServerProcess:
    """A `bso-server serve` process that can be killed and restarted at the same address."""

    database_url: str
    log: Path
    port: int = 0
    # Longer than the default, because parallel tests turn milliseconds into seconds.
    database_timeout_s: float = 60.0
    process: warm.Process | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, *arguments: str) -> None:
        self.port = self.port or free_port()
        DATABASE_OF[self.url] = self.database_url
        command = ["bso_server", "serve", "--port", str(self.port), "--database-url", self.database_url, *arguments]
        environ = {**os.environ, "ZEUS_BSO_DATABASE_TIMEOUT_S": str(self.database_timeout_s)}
        self.process = warm.start(*command, modules=NEEDED, output=self.log, environ=environ)
        wait_until_up(self.process, self.url, self.log)

    def kill(self) -> None:
        """End the process with SIGKILL, without any cleanup."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End the process with SIGTERM."""
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait()
            self.process = None


@contextmanager
def serving(database_url: str, folder: Path, *arguments: str) -> Iterator[ServerProcess]:
    """Run a server on this database, with its log in the folder, until the end of the block."""
    server = ServerProcess(database_url, folder / "server.log")
    try:
        server.start(*arguments)
        yield server
    finally:
        server.kill()


def free_port() -> int:
    """Return an unused port that this process has not returned recently.

    The port is below the system's ephemeral ports, which outgoing connections or listeners on port 0
    could take before the server starts or restarts.
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
    """Return False for a process that has ended, even if its parent has not collected its status."""
    status = Path(f"/proc/{pid}/status")
    try:
        os.kill(pid, 0)
        return not status.exists() or "\nState:\tZ" not in status.read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


def bso_server(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a `bso-server` command to its end.

    The command runs in this process, because starting a process takes longer; only `serve` needs a separate process,
    because it sets up logging and the environment.
    """
    if arguments[0] == "serve":
        return warm.run("bso_server", *arguments, modules=NEEDED)
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            # The command has its own event loop, and this thread may already run an event loop.
            with ThreadPoolExecutor(1) as pool:
                status = pool.submit(main, arguments).result()
        except SystemExit as usage:
            status = int(usage.code or 0)
        except Exception:
            traceback.print_exc()
            status = 1
    return subprocess.CompletedProcess(arguments, status, output.getvalue(), errors.getvalue())


def memory_of(server: ServerProcess, line: str) -> int:
    """Return bytes: ``VmRSS`` for the present memory of the server, ``VmHWM`` for its maximum."""
    assert server.process is not None
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    (kilobytes,) = (words[1] for words in map(str.split, status.splitlines()) if words[0] == f"{line}:")
    return int(kilobytes) * 1024
