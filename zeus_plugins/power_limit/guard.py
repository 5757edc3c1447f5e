"""Restoration of the initial power limits when a training ends, however it ends.

====================================  ==========================================================
the training                          the limits are restored by
====================================  ==========================================================
ends, or raises                       the caller of `LimitGuard.release` (an adapter's hook)
ends without `LimitGuard.release`     `atexit`
gets SIGTERM                          `SystemExit` in the main thread, which leads to one of the rows above; if the
                                      script has its own handler, that handler stays in place instead
is killed (SIGKILL, out of memory,    a small helper process, which waits for the training's end
segmentation fault, `os._exit`)
====================================  ==========================================================

If all processes of the job end at the same instant (a container, a control group, a power cut), no process is left to
restore the limits. The next training of the same user finds the records (`LimitRecord`) and restores the recorded
limits when it ends; ``zeus-plugins doctor`` names them. While the process that wrote a record is running, other
processes do not restore its limit. A limit that another program has set since then stays.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from zeus_plugins.files import state_directory
from zeus_plugins.placement import BOOT_ID, process_start
from zeus_plugins.power_limit.devices import (
    TOLERANCE_W,
    PowerLimitDevice,
    PowerLimitUnavailableError,
    set_and_check,
)
from zeus_plugins.signals import raise_at_sigterm
from zeus_plugins.train_result import write_atomically

_logger = logging.getLogger("zeus_plugins")

# Seconds between two looks of the helper process at the training.
_POLL_S = 0.5

# The helper process's program: runs `restore_after` with the training's process id.
_RESTORER = "import sys; from zeus_plugins.power_limit.guard import restore_after; sys.exit(restore_after(sys.argv[1]))"


@dataclass
class _Guarded:
    """A device and its limits in watts: to restore, requested last, set at the latest look, enforced after a change."""

    device: PowerLimitDevice
    initial_w: float
    asked_w: float
    limit_w: float
    obeyed_w: float
    cap_w: float = math.inf  # set by another program

    @classmethod
    def of(cls, device: PowerLimitDevice) -> _Guarded:
        left, limit_w = left_behind(device), device.limit_w()
        return cls(device, limit_w if left is None else left.original_w, limit_w, limit_w, device.enforced_limit_w())

    def set(self, limit_w: float) -> None:
        self.asked_w = limit_w
        self.remember()
        try:
            set_and_check(self.device, limit_w)
        finally:
            self.limit_w, self.obeyed_w = self.device.limit_w(), self.device.enforced_limit_w()
            if not _is_same(self.limit_w, limit_w):  # Record also the limit that the driver chose instead.
                self.remember()

    def remember(self) -> None:
        remember(self.device.uuid, self.initial_w, self.asked_w, self.limit_w)

    def look(self) -> str | None:
        """Return a message if another program or limiter has changed the limit, else None.

        A limit that another program has set becomes the limit to restore.
        """
        before_w, self.limit_w = self.limit_w, self.device.limit_w()
        if not _is_same(self.limit_w, before_w) and not _is_same(self.limit_w, self.asked_w):
            self.initial_w = self.cap_w = self.limit_w
            return (
                f"another program has changed the power limit of {self.device} from {before_w:g} W to {self.limit_w:g}"
                " W, which stays in force after this training"
            )
        obeyed_w = self.device.enforced_limit_w()
        overruled = f"{self.device} obeys a power limit of {obeyed_w:g} W instead of {self.obeyed_w:g} W"
        return None if _is_same(obeyed_w, self.obeyed_w) else overruled


def check_free(device: PowerLimitDevice) -> None:
    """Raise `PowerLimitUnavailableError` if another live training sets the limit of a device."""
    record = holder(device)
    if record is not None:
        raise PowerLimitUnavailableError(f"{device} is left alone: {record} when it ends")


class LimitGuard:
    """Sets the limits of devices, and restores the earlier limits, unless another program has changed them since.

    Raises `PowerLimitUnavailableError` if a device gives no limit.
    """

    def __init__(self, devices: Sequence[PowerLimitDevice]) -> None:
        self._guarded = [_Guarded.of(device) for device in devices]
        self._owner = os.getpid()
        self._told: set[str] = set()  # causes that were logged
        self._undo_signals: Callable[[], None] | None = None
        self._restorer: subprocess.Popen[bytes] | None = None

    @property
    def initial_limits_w(self) -> tuple[float, ...]:
        """The limits to restore, in watts: at first the limits in force, or the limits before a killed training."""
        return tuple(each.initial_w for each in self._guarded)

    @property
    def limits_w(self) -> tuple[float, ...]:
        """The limits in force at the latest look, in watts."""
        return tuple(each.limit_w for each in self._guarded)

    def claim(self) -> None:
        """Ensure that the limits are restored even without `release`, also after an earlier, killed training."""
        for each in self._guarded:
            if each.initial_w != each.limit_w:
                left = f"{each.device} still has the {each.limit_w:g} W limit of a killed training"
                _logger.warning("%s; restoring %g W when this training ends", left, each.initial_w)
            each.remember()
        if self._undo_signals is None and self._guarded:
            self._undo_signals = raise_at_sigterm()
            atexit.register(self.release)
            lasting = [(each.device, each.initial_w) for each in self._guarded if each.device.uuid]
            self._restorer = _start_restorer(lasting)

    def set_limits(self, limit_w: float) -> None:
        """Set a limit, in watts, on all devices. Call `claim` first.

        Raises:
            PowerLimitUnavailableError: A limit cannot be read or set, or a device does not obey it; another live
                training sets the limit, or another program has set a lower one.
        """
        for each in self._guarded:
            check_free(each.device)
            self._look(each)
            if limit_w > each.cap_w + TOLERANCE_W:
                raise PowerLimitUnavailableError(f"another program has limited {each.device} to {each.cap_w:g} W")
        for each in self._guarded:
            each.set(limit_w)
            if each.obeyed_w < limit_w - TOLERANCE_W:
                raise PowerLimitUnavailableError(
                    f"{each.device} obeys {each.obeyed_w:g} W, not the {limit_w:g} W that were set"
                )

    def change(self) -> str | None:
        """Return the first change of a limit since the latest look, or None; log each cause once.

        If another program has set a limit, `restore` sets this limit instead of the earlier one, and `set_limits` sets
        no higher limit.
        """
        return next(filter(None, [self._look(each) for each in self._guarded]), None)

    def _look(self, each: _Guarded) -> str | None:
        change = each.look()
        if change is not None:
            cause = f"{each.device} {each.initial_w:g}"
            _logger.log(logging.DEBUG if cause in self._told else logging.WARNING, "%s", change)
            self._told.add(cause)
        return change

    def restore(self, *, at_end: bool = False) -> None:
        """Restore the limits. Never raises: a failure is logged with the remedy."""
        if os.getpid() != self._owner:  # a forked child, such as a data loader's worker
            return
        for each in self._guarded:
            for is_last in (False, True):  # Try twice: after this training, nothing tries again.
                try:
                    self._put_back(each, at_end)
                    break
                except Exception as error:
                    if is_last:
                        failed = f"the power limit of {each.device} could not be restored to {each.initial_w:g} W"
                        _logger.error("%s (%s): set it, e.g. with nvidia-smi -pl %g", failed, error, each.initial_w)

    def _put_back(self, each: _Guarded, at_end: bool) -> None:
        if holder(each.device) is not None:
            return
        self._look(each)
        if each.limit_w != each.initial_w:
            each.set(each.initial_w)
        if at_end:
            forget(each.device.uuid)

    def release(self) -> None:
        """Restore the limits and undo `claim`, if `claim` was called after the latest `release`."""
        if os.getpid() != self._owner or self._undo_signals is None:
            return
        self.restore(at_end=True)
        self._undo_signals()
        self._undo_signals = None
        atexit.unregister(self.release)
        if self._restorer is not None:
            self._restorer.kill()
            self._restorer.wait()
            self._restorer = None


def _start_restorer(found: Sequence[tuple[PowerLimitDevice, float]]) -> subprocess.Popen[bytes] | None:
    """Start the process that restores these limits after this process has ended; None if there are no limits.

    Only Linux shows the end of another process.
    """
    if not found or process_start(os.getpid()) is None:
        return None
    try:
        order = pickle.dumps(list(found))
        process = subprocess.Popen(  # nosec B603  # noqa: S603 - this interpreter, on this module
            [sys.executable, "-c", _RESTORER, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            start_new_session=True,  # Ctrl-C in the terminal would go to all processes of its session.
        )
        assert process.stdin is not None  # nosec B101  # noqa: S101 - PIPE, and this is for the type checker
        process.stdin.write(order)
        process.stdin.close()
    except Exception as error:
        _logger.warning("no process could be started to put power limits back should this one be killed: %s", error)
        return None
    return process


def restore_after(training: str) -> int:
    """Wait for the end of the training with this process id, restore its limits, and return the number of failures.

    The limits come from standard input. A training that has restored its limits itself kills this process.
    """
    # A scheduler often ends a job by a signal to all its processes, but this process has to outlive the training.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        # Safe to unpickle: the training that started this process sends the limits through a private pipe.
        found: list[tuple[PowerLimitDevice, float]] = pickle.load(sys.stdin.buffer)  # nosec B301  # noqa: S301
    except (EOFError, pickle.UnpicklingError):  # The training was killed before it changed anything.
        return 0
    started = process_start(int(training))
    while started is not None and process_start(int(training)) == started:
        time.sleep(_POLL_S)
    failures = 0
    for device, limit_w in found:
        try:
            record = recall(device.uuid)
            if record is None:  # The training could not write its record.
                set_and_check(device, limit_w)
            elif record.pid == int(training):  # No later training has written a record.
                if record.names(device.limit_w()):
                    set_and_check(device, record.original_w)
                forget(device.uuid)
        except Exception as error:
            failures += 1
            print(f"the power limit of {device} could not be restored to {limit_w:g} W: {error}", file=sys.stderr)
    return failures


@dataclass(frozen=True)
class LimitRecord:
    """One GPU's limit before a training, and the limit that the training set last, in watts.

    The record's file exists from before the first change until the training ends. A killed training's limit is in force
    only if it is still `set_w` or `before_w` and the machine has not restarted; otherwise something else has set it.

    Attributes:
        pid: Process id of the training; None in a file of an older version.
        started: Start of this process, by `process_start`.
        before_w: Limit in force before `set_w`, for a training that was killed before `set_w` took effect.
    """

    original_w: float
    set_w: float
    boot_id: str
    pid: int | None = None
    started: str | None = None
    before_w: float | None = None

    def __str__(self) -> str:
        return f"the training with process id {self.pid} sets its power limit, and restores {self.original_w:g} W"

    @property
    def is_live(self) -> bool:
        """True if the training's process has not ended."""
        return self.pid is not None and self.started is not None and process_start(self.pid) == self.started

    def names(self, limit_w: float) -> bool:
        """Return True if the training has set this limit, in watts."""
        return any(each_w is not None and _is_same(limit_w, each_w) for each_w in (self.set_w, self.before_w))


def remember(uuid: str | None, original_w: float, set_w: float, before_w: float | None = None) -> None:
    """Write a GPU's record before setting `set_w`. Never raises."""
    if not uuid:
        return
    path, pid = _path(uuid), os.getpid()
    record = LimitRecord(original_w, set_w, _boot_id(), pid, process_start(pid), before_w)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(record)) + "\n")
    except OSError as error:
        _logger.debug("the power limit to come back to could not be kept in a file: %s", error)


def recall(uuid: str | None) -> LimitRecord | None:
    """Read a GPU's record; return None if it is absent, damaged, or from before the machine's latest start."""
    try:
        record = LimitRecord(**json.loads(_path(uuid).read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError):
        return None
    return record if record.boot_id == _boot_id() else None


def holder(device: PowerLimitDevice) -> LimitRecord | None:
    """Return the record of another live training that sets the limit of a GPU, or None."""
    record = recall(device.uuid)
    return record if record is not None and record.pid != os.getpid() and record.is_live else None


def left_behind(device: PowerLimitDevice) -> LimitRecord | None:
    """Return the record of a killed training if its limit is still in force, or None.

    An earlier training of this process that did not release its guard counts as killed.
    """
    record, limit_w = recall(device.uuid), device.limit_w()
    if record is None or (record.is_live and record.pid != os.getpid()):
        return None
    return record if record.names(limit_w) and not _is_same(limit_w, record.original_w) else None


def forget(uuid: str | None) -> None:
    """Remove a GPU's record after its limit was restored. Never raises."""
    try:
        _path(uuid).unlink(missing_ok=True)
    except OSError as error:
        _logger.debug("the record of a power limit could not be removed: %s", error)


def _path(uuid: str | None) -> Path:
    """Return the file of a GPU's record; for None, a file that never exists."""
    return state_directory() / "power-limits" / f"{re.sub('[^0-9A-Za-z-]', '_', uuid or '')}.json"


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):  # other systems than Linux
        return ""


def _is_same(limit_w: float, other_w: float) -> bool:
    return abs(limit_w - other_w) <= TOLERANCE_W
