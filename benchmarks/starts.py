"""Starts: how long it takes until a server listens, and until a training's own server has answered."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.errors import BenchmarkError
from benchmarks.processes import bso_server, environment, serving

# Its server is this process; what both sides import comes first.
_EMBEDDED = """
import json, time
imports = time.process_time()
import zeus_plugins.client.local
from zeus_plugins.client import client_from_environment
begin = time.process_time()
client_from_environment().list_jobs()
end = time.process_time()
print(json.dumps({"imports_s": begin - imports, "start_s": end - begin}))
"""


@dataclass(frozen=True, slots=True)
class StartFigures:
    """The quickest of several starts, in seconds.

    Attributes:
        times: How many there were.
        server_s: From the start of `bso-server serve`, on a SQLite file with this version's schema, until it listens.
        server_cpu_s: CPU time of the server until then and until it is quiet, or None.
        embedded_s: CPU time of the first request of a server in a training's process, which makes its file.
        embedded_imports_s: CPU time of the imports before that.
    """

    times: int
    server_s: float
    server_cpu_s: float | None
    embedded_s: float
    embedded_imports_s: float


def run_starts(directory: Path, *, times: int) -> StartFigures:
    """Start a server, and one in a training's process, so often.

    Raises:
        BenchmarkError: One did not start.
    """
    url = f"sqlite:///{directory / 'starts.sqlite3'}"
    bso_server(url, directory, "db", "upgrade")
    servers = [_server_start(url, directory) for _ in range(times)]
    embedded = [_embedded_start(directory / f"embedded-{n}.sqlite3") for n in range(times)]
    cpu_s = [each for _, each in servers if each is not None]
    return StartFigures(
        times=times,
        server_s=min(wall_s for wall_s, _ in servers),
        server_cpu_s=min(cpu_s, default=None),
        embedded_s=min(each["start_s"] for each in embedded),
        embedded_imports_s=min(each["imports_s"] for each in embedded),
    )


def _server_start(url: str, directory: Path) -> tuple[float, float | None]:
    with serving("start", "bso_server", ("serve",), database_url=url, directory=directory) as server:
        return server.start_s, server.meter.cpu_s()


def _embedded_start(file: Path) -> dict[str, float]:
    done = subprocess.run(  # noqa: S603 - the project's own program
        [sys.executable, "-c", _EMBEDDED],
        env=environment(f"sqlite:///{file}"),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BenchmarkError(f"the server in a training's process did not start: {done.stderr.strip()}")
    figures: dict[str, float] = json.loads(done.stdout)
    return figures
