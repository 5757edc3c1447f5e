"""Puts power limits back when a training ends, however it ends.

====================================  ==========================================================
the training                          the limits are put back by
====================================  ==========================================================
ends, or raises                       the caller of `LimitGuard.release` (an adapter's hook)
ends without having called it         `atexit`
gets SIGTERM                          `SystemExit` in the main thread, which leads to one of the rows above; a handler
                                      of the script's own stays and decides
is killed (SIGKILL, out of memory,    a small process beside it, which waits for its end
segmentation fault, `os._exit`)
====================================  ==========================================================

If all processes of the job end at the same instant (a container, a control group, a power cut), the limits stay as they
were. The next training of the same user finds the records (`LimitRecord`) and restores the earlier limits when it ends;
``zeus-plugins doctor --reset-power-limits`` does so at once.
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
from collections.abc import Callable, Sequence
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


class LimitGuard:
    """Remembers the limits of devices, and puts them back; raises `PowerLimitUnavailableError` if they are unknown."""

    def __init__(self, devices: Sequence[PowerLimitDevice]) -> None:
        self._initial = [(device, _initial_limit_w(device)) for device in devices]
        self._owner = os.getpid()
        self._undo_signals: Callable[[], None] | None = None
        self._restorer: subprocess.Popen[bytes] | None = None

    @property
    def initial_limits_w(self) -> tuple[float, ...]:
        """The limits to put back, in watts: those in force at first, or before a training that was killed."""
        return tuple(limit_w for _, limit_w in self._initial)

    def arm(self, limit_w: float) -> None:
        """Ensure that the limits are put back even without `release`; call it before setting `limit_w` watts."""
        for device, initial_w in self._initial:
            remember(_uuid(device), initial_w, limit_w)
        if self._undo_signals is not None or not self._initial:
            return
        self._undo_signals = raise_at_sigterm()
        atexit.register(self.release)
        self._restorer = _start_restorer([found for found in self._initial if found[0].outlives_process])

    def restore(self) -> None:
        """Put the limits back. Never raises: a failure is logged with the remedy."""
        if os.getpid() != self._owner:  # a forked child, such as a data loader's worker
            return
        for device, limit_w in self._initial:
            for is_last in (False, True):  # Nothing comes after this training to try again.
                try:
                    _put_back(device, limit_w)
                    break
                except Exception as error:
                    if is_last:
                        _logger.error(
                            "the power limit of %s could not be put back to %g W (%s): set it, e.g. with nvidia-smi"
                            " -pl %g",
                            device,
                            limit_w,
                            error,
                            limit_w,
                        )

    def release(self) -> None:
        """Put the limits back if `arm` was called since the latest call, and undo `arm`."""
        if self._undo_signals is None or os.getpid() != self._owner:
            return
        self.restore()
        self._undo_signals()
        self._undo_signals = None
        atexit.unregister(self.release)
        if self._restorer is not None:
            self._restorer.kill()
            self._restorer.communicate()
            self._restorer = None


def _put_back(device: PowerLimitDevice, limit_w: float) -> None:
    set_and_check(device, limit_w)
    forget(_uuid(device))


def _uuid(device: PowerLimitDevice) -> str | None:
    """Return the device's UUID; None if it has none, or if its limit ends with this process."""
    return getattr(device, "uuid", None) if device.outlives_process else None


def _initial_limit_w(device: PowerLimitDevice) -> float:
    """Return the limit in force in watts, or the limit before a killed training whose limit is still in force."""
    in_force_w = device.limit_w()
    original_w = _left_behind_w(device, in_force_w)
    if original_w is None:
        return in_force_w
    _logger.warning(
        "%s still has the power limit of %g W that a killed training left behind: restoring %g W when this training "
        "ends",
        device,
        in_force_w,
        original_w,
    )
    return original_w


def _start_restorer(found: Sequence[tuple[PowerLimitDevice, float]]) -> subprocess.Popen[bytes] | None:
    """Start the process that puts these limits back when this process is gone; None if it needs none."""
    if not found:
        return None
    try:
        order = pickle.dumps(list(found))
        process = subprocess.Popen(  # nosec B603  # noqa: S603 - this interpreter, on this module
            [sys.executable, "-c", _RESTORER, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            start_new_session=True,  # Ctrl-C in the terminal goes to all processes of the session.
        )
        assert process.stdin is not None  # nosec B101  # noqa: S101 - PIPE, and this is for the type checker
        process.stdin.write(order)
        process.stdin.flush()
    except Exception as error:
        _logger.warning("no process could be started to put power limits back should this one be killed: %s", error)
        return None
    return process


def restore_after(training: str) -> int:
    """Wait for the end of the training with this process id, put its limits back, and return the number of failures.

    The limits come from standard input, which the training holds open. When it has put them back itself, it kills this
    process.
    """
    # A job is often ended by a signal to all its processes; this one has to outlive the training.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        # From the training that has started this process, over a pipe of their own.
        found: list[tuple[PowerLimitDevice, float]] = pickle.load(sys.stdin.buffer)  # nosec B301  # noqa: S301
    except (EOFError, pickle.UnpicklingError):  # The training was killed before it changed anything.
        return 0
    _wait_for_the_end_of(int(training))
    failures = 0
    for device, limit_w in found:
        try:
            _put_back(device, limit_w)
        except Exception as error:
            failures += 1
            print(f"the power limit of {device} could not be put back to {limit_w:g} W: {error}", file=sys.stderr)
    return failures


def _wait_for_the_end_of(training: int) -> None:
    """Return when the training has ended.

    Its end closes the pipe, unless its children (data loaders' workers) have inherited it and live on, so Linux also
    watches the process.
    """
    signs: list[int] = [sys.stdin.fileno()]
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
    """One GPU's limit before a training, and the limit that the training set last; watts.

    Its file exists from before the first change until the limit is put back. A limit is left behind only if it is still
    `set_w` in the same start of the machine; otherwise something else has set it since.
    """

    original_w: float
    set_w: float
    boot_id: str


def remember(uuid: str | None, original_w: float, set_w: float) -> None:
    """Write a GPU's record before setting `set_w`. Never raises."""
    if not uuid:
        return
    path = _path(uuid)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(LimitRecord(original_w, set_w, _boot_id()))) + "\n")
    except OSError as error:
        _logger.debug("the power limit to come back to could not be kept in a file: %s", error)


def recall(uuid: str | None) -> LimitRecord | None:
    """Read a GPU's record; return None if it has none, or a damaged one."""
    try:
        return LimitRecord(**json.loads(_path(uuid).read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError):
        return None


def forget(uuid: str | None) -> None:
    """Remove a GPU's record after its limit was put back. Never raises."""
    try:
        _path(uuid).unlink(missing_ok=True)
    except OSError as error:
        _logger.debug("the record of a power limit could not be removed: %s", error)


def _left_behind_w(device: PowerLimitDevice, in_force_w: float) -> float | None:
    """Return the limit before a killed training, in watts, if the limit in force is still the training's."""
    record = recall(_uuid(device))
    if record is None or record.boot_id != _boot_id() or abs(in_force_w - record.set_w) > TOLERANCE_W:
        return None
    return record.original_w


def _path(uuid: str | None) -> Path:
    """Return the file of a GPU's record; for None, a file that never exists."""
    return state_directory() / "power-limits" / f"{re.sub('[^0-9A-Za-z-]', '_', uuid or '')}.json"


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):  # other systems than Linux
        return ""


def reset_limit(device: PowerLimitDevice) -> tuple[float, float]:
    """Set a GPU to its limit before a killed training, or else to its default; return the old and new limit in watts.

    Raises:
        PowerLimitUnavailableError: The GPU gives no default limit, or its limit cannot be set.
    """
    found_w = device.limit_w()
    wanted_w = _left_behind_w(device, found_w)
    wanted_w = default_limit_w(device) if wanted_w is None else wanted_w
    if wanted_w is None:
        raise PowerLimitUnavailableError(f"{device} does not tell its default limit")
    _put_back(device, wanted_w)
    return found_w, wanted_w
