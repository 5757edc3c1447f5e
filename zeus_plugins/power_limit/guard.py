"""Puts power limits back when a training ends, however it ends.

====================================  ==========================================================
the training                          the limits are put back by
====================================  ==========================================================
ends, or raises                       who called `LimitGuard.release` (an adapter's hook)
ends without having called it         `atexit`
gets SIGTERM                          `SystemExit` in the main thread, which ends it in one of the ways above; a handler
                                      of the script's own stays and decides
is killed (SIGKILL, out of memory,    a small process beside it, which waits for its end
segmentation fault, `os._exit`)
====================================  ==========================================================

What ends all processes of the job at the same instant (a container, a control group, a power cut) leaves the limits as
they were then. The next training of the same user knows it from the records (`LimitRecord`) and puts the earlier limits
back when it ends; so does ``zeus-plugins doctor --reset-power-limits``.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import pickle
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from zeus_plugins.files import state_directory
from zeus_plugins.placement import BOOT_ID
from zeus_plugins.power_limit.devices import (
    TOLERANCE_W,
    PowerLimitDevice,
    PowerLimitUnavailableError,
    default_limit_w,
    set_and_check,
)
from zeus_plugins.signals import raise_at_sigterm
from zeus_plugins.train_result import write_atomically

_logger = logging.getLogger("zeus_plugins")

# Runs `restore_after` beside the training, with its process id.
_RESTORER = "import sys; from zeus_plugins.power_limit.guard import restore_after; sys.exit(restore_after(sys.argv[1]))"
_STDIN = 0


class LimitGuard:
    """Remembers the limits that devices have when it is made, and puts them back.

    Raises:
        PowerLimitUnavailableError: A device does not tell its limit.
    """

    def __init__(self, devices: Sequence[PowerLimitDevice]) -> None:
        self._initial = [(device, _limit_to_come_back_to(device)) for device in devices]
        self._owner = os.getpid()
        self._undo_signals: Callable[[], None] | None = None
        self._restorer: subprocess.Popen[bytes] | None = None

    @property
    def initial_limits_w(self) -> tuple[float, ...]:
        """The limits that were in force at first, or before a training that has left its own behind; watts."""
        return tuple(limit_w for _, limit_w in self._initial)

    def arm(self, limit_w: float) -> None:
        """Make sure that the limits are put back even if `release` is not called.

        Args:
            limit_w: The limit, watts, that is set on all devices after this call.
        """
        for device, initial_w in self._initial:
            remember(_uuid(device), initial_w, limit_w)
        if self._undo_signals is not None or not self._initial:
            return
        self._undo_signals = raise_at_sigterm()
        atexit.register(self.release)
        self._restorer = _start_restorer([found for found in self._initial if found[0].outlives_process])

    def restore(self) -> None:
        """Put the limits back. What cannot be is logged, with what to do: it never raises."""
        if os.getpid() != self._owner:  # a forked child, such as a data loader's worker
            return
        for device, limit_w in self._initial:
            problem: Exception | None = None
            for _ in range(2):  # nobody comes after to try again
                try:
                    set_and_check(device, limit_w)
                    forget(_uuid(device))
                    break
                except Exception as error:
                    problem = error
            else:
                _logger.error(
                    "the power limit of %s could not be put back to %g W (%s): set it, e.g. with nvidia-smi -pl %g",
                    device,
                    limit_w,
                    problem,
                    limit_w,
                )

    def release(self) -> None:
        """Put the limits back, if they may have been changed, and stand down; nothing the second time."""
        if self._undo_signals is None or os.getpid() != self._owner:
            return
        self.restore()
        self._undo_signals()
        self._undo_signals = None
        atexit.unregister(self.release)
        if self._restorer is not None:
            # It has nothing left to do, and might still be starting.
            self._restorer.kill()
            self._restorer.communicate()
            self._restorer = None


def _uuid(device: PowerLimitDevice) -> str | None:
    """The name of a device beyond this process; None for one that nobody meets again."""
    return getattr(device, "uuid", None) if device.outlives_process else None


def _limit_to_come_back_to(device: PowerLimitDevice) -> float:
    """The limit in force, watts, or the one before a training that was killed together with who puts limits back."""
    in_force_w, record = device.limit_w(), recall(_uuid(device))
    if record is None or not record.holds(in_force_w):
        return in_force_w
    _logger.warning(
        "%s still has the power limit of %g W that a killed training left behind: restoring %g W when this training "
        "ends",
        device,
        in_force_w,
        record.original_w,
    )
    return record.original_w


def _start_restorer(found: Sequence[tuple[PowerLimitDevice, float]]) -> subprocess.Popen[bytes] | None:
    """Start the process that puts limits back when this one is gone; None where there is nothing to put back."""
    if not found:
        return None
    try:
        order = pickle.dumps(list(found))
        process = subprocess.Popen(  # noqa: S603 - this interpreter, on this module
            [sys.executable, "-c", _RESTORER, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            # The same modules as here; and Ctrl-C in the terminal, which goes to all of a group, is not for it.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            start_new_session=True,
        )
        assert process.stdin is not None  # noqa: S101 - PIPE, and this is for the type checker
        process.stdin.write(len(order).to_bytes(8) + order)
        process.stdin.flush()
    except Exception as error:
        _logger.warning("no process could be started to put power limits back should this one be killed: %s", error)
        return None
    return process


def restore_after(training: str) -> int:
    """Wait for the end of a training, then put its limits back: the process beside it.

    It reads from its standard input what to put back. The training holds that open, and kills the process when there is
    nothing left to put back.

    Args:
        training: Its process id.

    Returns:
        How many limits could not be put back.
    """
    # Who wants to end a job often signals all its processes; this one ends by itself, after the training.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    order = _read(int.from_bytes(_read(8)))
    # From the training that has started this process, over a pipe of their own.
    found: list[tuple[PowerLimitDevice, float]] = pickle.loads(order)  # noqa: S301
    _wait_for_the_end_of(int(training))
    failures = 0
    for device, limit_w in found:
        try:
            set_and_check(device, limit_w)
            forget(getattr(device, "uuid", None))
        except Exception as error:
            failures += 1
            print(f"the power limit of {device} could not be put back to {limit_w:g} W: {error}", file=sys.stderr)
    return failures


def _read(length: int) -> bytes:
    received = b""
    while len(received) < length:
        part = os.read(_STDIN, length - len(received))
        if not part:  # killed before it had said all, and so before it changed anything
            sys.exit(0)
        received += part
    return received


def _wait_for_the_end_of(training: int) -> None:
    """Return when the training has ended.

    Its end closes the pipe, unless its children (data loaders' workers) have inherited it and live on; Linux therefore
    tells of the process itself, too.
    """
    signs: list[int] = [_STDIN]
    if hasattr(os, "pidfd_open"):
        try:
            signs.append(os.pidfd_open(training))
        except ProcessLookupError:
            return
        except OSError:  # a kernel or a sandbox that does not allow it
            pass
        if os.getppid() != training:
            return
    select.select(signs, [], [])


@dataclass(frozen=True)
class LimitRecord:
    """One GPU's limit before a training, and the one that the training has set last; watts.

    A file keeps it from before the limit is changed until it was put back. Whoever finds one whose limit is still in
    force knows the limit that was there before; any other limit was set by somebody else since, and counts as it is.

    Attributes:
        boot_id: The start of the machine in which it was set: none survives that.
    """

    original_w: float
    set_w: float
    boot_id: str

    def holds(self, in_force_w: float) -> bool:
        """True when the limit in force is the one that the training has set."""
        return self.boot_id == _boot_id() and abs(in_force_w - self.set_w) <= TOLERANCE_W


def remember(uuid: str | None, original_w: float, set_w: float) -> None:
    """Keep a GPU's limit before a training, and the one that is about to be set; watts. It never raises."""
    if not uuid:
        return
    path = _path(uuid)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(LimitRecord(original_w, set_w, _boot_id()))) + "\n")
    except OSError as error:
        _logger.debug("the power limit to come back to could not be kept in a file: %s", error)


def recall(uuid: str | None) -> LimitRecord | None:
    """The record of a GPU's limit; None where there is none that can be read."""
    try:
        return LimitRecord(**json.loads(_path(uuid).read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError):
        return None


def forget(uuid: str | None) -> None:
    """Remove the record of a GPU's limit, which was put back. It never raises."""
    try:
        _path(uuid).unlink(missing_ok=True)
    except OSError as error:
        _logger.debug("the record of a power limit could not be removed: %s", error)


def _path(uuid: str | None) -> Path:
    """The file of a GPU's record; that of a GPU without a UUID never exists."""
    return state_directory() / "power-limits" / f"{re.sub('[^0-9A-Za-z-]', '_', uuid or '')}.json"


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):  # other systems than Linux
        return ""


@dataclass(frozen=True)
class Reset:
    """One GPU's limits, watts: that in force, and the one that it was to get; the problem, if it did not."""

    device: PowerLimitDevice
    found_w: float | None
    wanted_w: float | None
    problem: str | None = None


def reset_limits(devices: Sequence[PowerLimitDevice]) -> Iterator[Reset]:
    """Give each GPU the limit that it had before a training that left its own behind, else its default limit."""
    for device in devices:
        found_w = wanted_w = None
        uuid = getattr(device, "uuid", None)
        try:
            found_w, record = device.limit_w(), recall(uuid)
            is_left_behind = record is not None and record.holds(found_w)
            wanted_w = record.original_w if record is not None and is_left_behind else default_limit_w(device)
            if wanted_w is None:
                raise PowerLimitUnavailableError(f"{device} does not tell its default limit")
            set_and_check(device, wanted_w)
        except PowerLimitUnavailableError as error:
            yield Reset(device, found_w, wanted_w, str(error))
        else:
            forget(uuid)
            yield Reset(device, found_w, wanted_w)
