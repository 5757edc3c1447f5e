"""The server under test in its own process, and the CPU time and memory that it uses."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
HOST = "127.0.0.1"
START_LIMIT_S = 60.0
STOP_LIMIT_S = 10.0
# A server has finished its imports when it has used less than `QUIET_SHARE` of a core for this time.
QUIET_WINDOW_S = 0.25
QUIET_SHARE = 0.05


class BenchmarkError(Exception):
    """A benchmark failed: a server did not start or did not answer as planned, or a training broke."""


class Meter:
    """CPU time and memory of a process and of all its descendants (the workers), as Linux counts them.

    Args:
        pid: Id of the process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def cpu_s(self) -> float | None:
        """Return user and system time of the living processes in seconds; None on systems other than Linux.

        The time comes from the processes' CPU clocks, which count nanoseconds. `/proc/PID/stat` counts hundredths of a
        second, which is too coarse: a server answers dozens of requests in a hundredth.
        """
        return sum(_cpu_s(pid) for pid in _family(self._pid)) if sys.platform == "linux" else None

    def rss_mib(self) -> float | None:
        """Return resident memory in MiB, with shared pages counted once per worker; None if not on Linux."""
        return sum(_rss_kib(pid) for pid in _family(self._pid)) / 1024 if sys.platform == "linux" else None


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
    """Return the text of a file, or "" if it is gone: a process or thread may end after it was listed."""
    try:
        return path.read_text()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Target:
    """A server to measure: its address, and the meter of its processes."""

    host: str
    port: int
    meter: Meter


def bso_server(database_url: str, directory: Path, *arguments: str) -> None:
    """Run a `bso-server` command and wait until it has finished.

    Raises:
        BenchmarkError: The command failed.
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


@contextmanager
def serving_bso(database_url: str, directory: Path, *arguments: str, launcher: Sequence[str] = ()) -> Iterator[Target]:
    """Upgrade the schema of a database, and run `bso-server serve` on it during the `with` block.

    Args:
        database_url: The database.
        directory: The server's working directory, which gets its log.
        arguments: Arguments of `bso-server serve`.
        launcher: A module, with its own arguments, that starts the server's module.

    Raises:
        BenchmarkError: The server did not start.
    """
    bso_server(database_url, directory, "db", "upgrade")
    command = [sys.executable, "-m", *launcher, "bso_server", "serve", *arguments]
    port = _free_port()
    log = directory / f"{port}.log"
    with log.open("w") as output:
        process = subprocess.Popen(  # noqa: S603 - the project's own program
            [*command, "--port", str(port)],
            env=environment(database_url),
            cwd=directory,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _await_listening(process, port, log)
        meter = Meter(process.pid)
        _await_quiet(meter)
        yield Target(HOST, port, meter)
    finally:
        process.terminate()
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def environment(database_url: str) -> dict[str, str]:
    """Return the environment without the user's own server settings, for a server on this database.

    The environment contains the URL because command-line arguments would show its password to all users of the machine.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ZEUS_BSO_")}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return kept | {"ZEUS_BSO_DATABASE_URL": database_url, "PYTHONPATH": os.pathsep.join(paths)}


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
    """Wait, `START_LIMIT_S` at most, for a server to finish its imports, which would count as cost of requests."""
    deadline = time.monotonic() + START_LIMIT_S
    used = meter.cpu_s()
    while used is not None and time.monotonic() < deadline:
        time.sleep(QUIET_WINDOW_S)
        before, used = used, meter.cpu_s()
        if used is not None and used - before < QUIET_SHARE * QUIET_WINDOW_S:
            return
