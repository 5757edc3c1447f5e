"""The execution of a run's command, as a process that continues if its master is killed.

Each command leads a process group of its own, so that Ctrl-C at the terminal reaches only the master, which then ends
the command. When a command ends, the rest of its group is killed.

A run writes its output to its log, not to a pipe of the master, and locks a file until it ends. By the lock, a resumed
master recognises that a killed master's run is still running, and waits for the run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from zeus_plugins.errors import ZeusBSOConfigError

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
    # The command has inherited the lock.
    try:
        _wait_unreaped(process)
    except BaseException:
        _end(process)
        raise
    finally:
        if process.returncode is None:
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
        launch.marker.unlink(missing_ok=True)
    return process.returncode


def wait_for_end(launch: Launch) -> None:
    """Wait for a command that a killed master has left running, if there is one; Ctrl-C ends only the wait."""
    if launch.marker.exists():
        with lock_file(launch.marker) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
        launch.marker.unlink(missing_ok=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let a process group end by SIGINT, then by SIGTERM; return at another Ctrl-C, or when time is up."""
    with contextlib.suppress(KeyboardInterrupt):
        for number in (signal.SIGINT, signal.SIGTERM):
            _signal_group(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
                return


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
