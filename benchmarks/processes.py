"""The servers under test, each in a process of its own, and what they use."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.errors import BenchmarkError

ROOT = Path(__file__).parent.parent
HOST = "127.0.0.1"
START_LIMIT_S = 60.0
STOP_LIMIT_S = 10.0
# A started server is quiet when it used less than this share of a core for this long: its imports are done.
QUIET_WINDOW_S = 0.25
QUIET_SHARE = 0.05


class Meter:
    """CPU time and memory of a process and of all its descendants (the workers), as Linux counts them.

    Args:
        pid: The process; None if unknown, as with a server elsewhere.
    """

    def __init__(self, pid: int | None) -> None:
        self._pid = pid if sys.platform == "linux" else None

    def cpu_s(self) -> float | None:
        """User and system time of the processes that live, in seconds; None where it cannot be known.

        Read from the processes' CPU clocks, which count nanoseconds: `/proc/PID/stat` counts hundredths of a second, in
        which dozens of requests are served.
        """
        return None if self._pid is None else sum(_cpu_s(pid) for pid in _family(self._pid))

    def rss_mib(self) -> float | None:
        """Resident memory in MiB; pages that workers share count once for each. None where it cannot be known."""
        return None if self._pid is None else sum(_rss_kib(pid) for pid in _family(self._pid)) / 1024


def _family(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for task in tasks for child in _read(task).split()]
    return [pid, *(member for child in children for member in _family(child))]


def _cpu_s(pid: int) -> float:
    clock = ctypes.c_int()
    gone = ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock))
    return 0.0 if gone else time.clock_gettime(clock.value)


def _rss_kib(pid: int) -> int:
    lines = _read(Path(f"/proc/{pid}/status")).splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def _read(path: Path) -> str:
    """The text, or none: a thread or process may end between being listed and being read."""
    try:
        return path.read_text()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Target:
    """A server to measure.

    Attributes:
        name: What the tables call it.
        host: Its address.
        port: Its port.
        meter: What it uses.
        start_s: Seconds from its start until it listened; 0 where somebody else has started it.
    """

    name: str
    host: str
    port: int
    meter: Meter
    start_s: float = 0.0


def bso_server(database_url: str, directory: Path, *arguments: str) -> str:
    """Run a `bso-server` command to its end.

    Returns:
        What it wrote to its standard output.

    Raises:
        BenchmarkError: It failed.
    """
    done = subprocess.run(  # noqa: S603 - the project's own program
        [sys.executable, "-m", "bso_server", *arguments],
        env=environment(database_url),
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BenchmarkError(f"bso-server {' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def serving(
    name: str,
    module: str,
    arguments: Sequence[str],
    *,
    database_url: str,
    directory: Path,
    settings: Mapping[str, str] | None = None,
) -> Iterator[Target]:
    """A server that runs within the block: ``python -m module arguments --port …``.

    Args:
        name: What the tables call it.
        module: The module to run.
        arguments: Its arguments, without the port.
        database_url: Its database.
        directory: Where it runs and where its log goes.
        settings: More environment variables of the server.

    Raises:
        BenchmarkError: It did not start.
    """
    port = _free_port()
    log = directory / f"{port}.log"
    command = [sys.executable, "-m", module, *arguments, "--port", str(port)]
    begin = time.perf_counter()
    with _process(
        command, env=environment(database_url) | dict(settings or {}), directory=directory, log=log
    ) as process:
        _await_listening(process, port, log)
        start_s = time.perf_counter() - begin
        meter = Meter(process.pid)
        _await_quiet(meter)
        yield Target(name, HOST, port, meter, start_s)


def environment(database_url: str) -> dict[str, str]:
    """The environment without the user's own server settings. A URL may hold a password, which arguments would show."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ZEUS_BSO_")}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return kept | {"ZEUS_BSO_DATABASE_URL": database_url, "PYTHONPATH": os.pathsep.join(paths)}


@contextmanager
def _process(
    command: Sequence[str], *, env: Mapping[str, str], directory: Path, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("w") as output:
        process = subprocess.Popen(  # noqa: S603 - the project's own programs
            command, env=env, cwd=directory, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _await_listening(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        try:
            socket.create_connection((HOST, port), timeout=1).close()
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                tail = "\n".join(log.read_text().splitlines()[-20:])
                raise BenchmarkError(f"the server did not start; the end of its log:\n{tail}") from None
            time.sleep(0.01)
        else:
            return


def _await_quiet(meter: Meter) -> None:
    """Wait for workers that still start, whose imports would count as requests. Gives up on a server never quiet."""
    deadline = time.monotonic() + START_LIMIT_S
    used = meter.cpu_s()
    while used is not None and time.monotonic() < deadline:
        time.sleep(QUIET_WINDOW_S)
        before, used = used, meter.cpu_s()
        if used is not None and used - before < QUIET_SHARE * QUIET_WINDOW_S:
            return
