"""Real servers in processes of their own, and the command line of the server in this process."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bso_server.cli import main
from tests.support import warm

SERVER_START_S = 60.0
# What a server imports.
NEEDED = ("bso_server.app", "bso_server.cli", "uvicorn.protocols.http.httptools_impl", "uvloop", "alembic.command")


@dataclass
class Server:
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


def wait_until_up(process: warm.Process, url: str, log: Path) -> None:
    deadline = time.monotonic() + SERVER_START_S
    while True:
        try:
            httpx.get(f"{url}/health/live").raise_for_status()
        except httpx.HTTPError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the server did not start: {log.read_text()}") from None
            time.sleep(0.02)
        else:
            return


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
            status = main(arguments)
        except SystemExit as usage:
            status = int(usage.code or 0)
        except Exception:
            traceback.print_exc()
            status = 1
    return subprocess.CompletedProcess(arguments, status, output.getvalue(), errors.getvalue())
