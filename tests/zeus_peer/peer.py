"""Zeus 0.16 in a separate virtual environment: its training client and its server, as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.servers import free_port, wait_until_up

_HERE = Path(__file__).parent
# Time limit of an installation, which takes half a minute with a nearby package index.
_INSTALL_S = 240.0
# Modules are compiled when they are imported, which few of them are.
_PIP = ["--no-deps", "--no-compile", "--only-binary=:all:", "--timeout=15", "--retries=1"]
_SERVER = "zeus.optimizer.batch_size.server.router:app"


class PeerMissingError(Exception):
    """Zeus cannot be installed here; the text states the reason."""


@dataclass(frozen=True)
class Launch:
    """Outcome of a launch of `training.py`; see its docstring."""

    batch_size: int | None
    ended: str
    message: str | None


@dataclass(frozen=True)
class Peer:
    """Zeus 0.16, installed for the interpreter `python`."""

    python: Path

    def train(self, server_url: str, job: Mapping[str, Any], epochs: Mapping[int, int], *arguments: str) -> Launch:
        """Launch a training optimized by Zeus's client, on simulated GPUs."""
        words = [server_url, json.dumps(job), json.dumps(epochs), *arguments]
        printed = self._run("training.py", *words, PYTHONPATH=str(_HERE / "fake"))
        return Launch(**json.loads(printed.splitlines()[-1]))

    @contextmanager
    def server(self, directory: Path, database_url: str | None = None, port: int | None = None) -> Iterator[str]:
        """Run Zeus's server on an empty database, by default a new one in `directory`; yield its URL."""
        database_url = database_url or f"sqlite+aiosqlite:///{directory / 'zeus.sqlite3'}"
        log, port = directory / "zeus.log", port or free_port()
        self._run("make_tables.py", database_url)
        with log.open("w") as output:
            process = subprocess.Popen(
                [self.python, "-m", "uvicorn", _SERVER, "--port", str(port)],
                env=_environment(ZEUS_BSO_DATABASE_URL=database_url),
                cwd=directory,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until_up(process, url, log, "/openapi.json")
            yield url
        finally:
            process.terminate()
            process.wait()

    def _run(self, script: str, *words: str, **variables: str) -> str:
        result = subprocess.run(
            [self.python, _HERE / script, *words],
            env=_environment(**variables),
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout


def install(directory: Path) -> Peer:
    """Install Zeus into a virtual environment in `directory`, unless already installed.

    Raises:
        PeerMissingError: Zeus cannot be installed here.
    """
    with _alone(directory.with_suffix(".lock")):
        return _installed(directory)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Wait for tests in other processes that may install Zeus at the same time."""
    if os.name != "posix":
        yield
        return
    import fcntl

    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _installed(directory: Path) -> Peer:
    python = directory / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    requirements = _HERE / "requirements.txt"
    # Written last, so that an interrupted installation is repeated; changed requirements or a new Python repeat it,
    # too.
    stamp = directory / "installed.txt"
    wanted = f"# Python {sys.version}\n{requirements.read_text()}"
    if not stamp.exists() or stamp.read_text() != wanted:
        deadline = time.monotonic() + _INSTALL_S
        _install(["venv", "--clear", "--without-pip", str(directory)], deadline)
        _install(["pip", "--python", str(python), "install", *_PIP, "-r", str(requirements)], deadline)
        stamp.write_text(wanted)
    return Peer(python)


def _install(arguments: list[str], deadline: float) -> None:
    seconds_left = max(1.0, deadline - time.monotonic())
    try:
        result = subprocess.run(
            [sys.executable, "-m", *arguments],
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=seconds_left,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerMissingError(str(error)) from error
    if result.returncode != 0:
        last_lines = " ".join(result.stderr.split("\n")[-4:]).strip()
        raise PeerMissingError(f"{' '.join(arguments[:3])} failed: {last_lines}")


def _environment(**variables: str) -> dict[str, str]:
    """Return this process's environment without this project's variables, plus `variables`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("ZEUS_", "PYTHONPATH"))}
    return inherited | variables
