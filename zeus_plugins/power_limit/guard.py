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
they were then. The next training of the same user knows it from the records (`records`) and puts the earlier limits
back when it ends; so does ``zeus-plugins doctor --reset-power-limits``.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence

from zeus_plugins.power_limit import records
from zeus_plugins.power_limit.devices import PowerLimitDevice, set_and_check
from zeus_plugins.training.signals import raise_at_sigterm

_logger = logging.getLogger("zeus_plugins")


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
            records.remember(_uuid(device), initial_w, limit_w)
        if self._undo_signals is not None:
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
                    records.forget(_uuid(device))
                    break
                except Exception as error:
                    problem = error
            else:
                _logger.error(
                    "the power limit of %s could not be put back to %g W (%s): set it, e.g. with nvidia-smi -pl %g",
                    *(device, limit_w, problem, limit_w),
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
    in_force_w, record = device.limit_w(), records.recall(_uuid(device))
    if record is None or not record.holds(in_force_w):
        return in_force_w
    _logger.warning(
        "the power limit of %g W of %s was left behind by a training that was killed: afterwards it gets %g W again",
        *(in_force_w, device, record.original_w),
    )
    return record.original_w


def _start_restorer(found: Sequence[tuple[PowerLimitDevice, float]]) -> subprocess.Popen[bytes] | None:
    """Start the process that puts limits back when this one is gone; None where there is nothing to put back."""
    if not found:
        return None
    try:
        order = pickle.dumps(list(found))
        process = subprocess.Popen(  # noqa: S603 - this interpreter, on a module of ours
            [sys.executable, "-m", "zeus_plugins.power_limit.restorer", str(os.getpid())],
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
