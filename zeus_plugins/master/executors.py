"""The execution of a run's command, as a process that continues if its master is killed.

Each command leads a process group of its own, so that Ctrl-C at the terminal reaches only the master, which then ends
the command. When a command ends, the rest of its group is killed.

A run writes its output to its log, not to a pipe of the master, and locks a file until it ends. By the lock, a resumed
master recognises that a killed master's run is still running, and waits for the run.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from zeus_plugins.errors import ZeusBSOConfigError

_POLL_S = 0.2

# Time for a command to end after SIGINT, and again after SIGTERM.
_GRACE_S = 10.0


@dataclass(frozen=True)
class Launch:
    """A command with its directory (None: the master's), additional environment variables, and log to append to."""

    command: Sequence[str]
    workdir: Path | None
    environ: Mapping[str, str]
    log: Path

    @property
    def marker(self) -> Path:
        """The file by which a resumed master finds the run again."""
        return self.log.with_suffix(".running")


def execute(launch: Launch) -> int:
    """Execute a command to its end; return its exit status, −n after signal n.

    If an exception, such as KeyboardInterrupt, interrupts the wait, end the command.

    Raises:
        ZeusBSOConfigError: The command cannot be started.
    """
    with lock_file(launch.marker) as lock:
        if not try_lock(lock):
            raise ZeusBSOConfigError(f"the run of {launch.log} is still running: resume its master to wait for it")
        process = _started(launch, lock)
        os.truncate(lock, 0)
        os.pwrite(lock, str(process.pid).encode(), 0)
    # The command has inherited the lock.
    try:
        _wait_unreaped(process)
    except BaseException:
        _end(process.pid, lambda timeout_s: _has_ended(process, timeout_s))
        raise
    finally:
        if process.returncode is None:
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
        launch.marker.unlink(missing_ok=True)
    return process.returncode


def adopt(launch: Launch) -> None:
    """Wait for a command that a killed master has left running, if there is one; interrupted as `execute`."""
    if not launch.marker.exists():
        return
    with lock_file(launch.marker) as lock:
        if try_lock(lock):
            return
        try:
            _lock_within(lock, math.inf)
        except BaseException:
            pid = os.pread(lock, 20, 0)
            if pid:
                _end(int(pid), lambda timeout_s: _lock_within(lock, timeout_s))
            raise
    launch.marker.unlink(missing_ok=True)


def _end(pid: int, ended_within: Callable[[float], bool]) -> None:
    """End a process group by SIGINT, SIGTERM and SIGKILL in turn; at another Ctrl-C, by SIGKILL at once."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            _signal_group(pid, number)
            if ended_within(_GRACE_S):
                return
    except KeyboardInterrupt:
        pass
    _signal_group(pid, signal.SIGKILL)
    ended_within(_GRACE_S)


def _started(launch: Launch, lock: int) -> subprocess.Popen[bytes]:
    # By default, Python buffers output to a file, so that its reader would see it late.
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", **launch.environ}
    try:
        with launch.log.open("ab") as log:
            return subprocess.Popen(  # nosec B603  # noqa: S603 - running what the user says is what this is for
                list(launch.command),
                cwd=launch.workdir,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(lock,),
            )
    except OSError as error:
        where = launch.workdir or Path.cwd()
        raise ZeusBSOConfigError(
            f"{launch.command[0]} cannot be started in {where} ({error.strerror}): check the job's command and workdir"
        ) from None


def _wait_unreaped(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process and, if possible, leave it a zombie, so that no other process group can get its id."""
    if hasattr(os, "waitid"):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    else:
        process.wait()


def _has_ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses to signal zombies
        os.killpg(pid, number)


@contextmanager
def lock_file(path: Path) -> Iterator[int]:
    """Open or create a file for `try_lock`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Lock a file for this process and its heirs of the descriptor; return False if another process holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_within(descriptor: int, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not (is_locked := try_lock(descriptor)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return is_locked
