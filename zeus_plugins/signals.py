"""SIGTERM as an exception, so that a preempted training ends its trial."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

# The interpreter does not record an uncaught SystemExit.
_raised: list[SystemExit] = []


def termination() -> SystemExit | None:
    """Return the exception that SIGTERM has raised since the last call of `raise_at_sigterm`, or None."""
    return _raised[-1] if _raised else None


def raise_at_sigterm() -> Callable[[], None]:
    """Make SIGTERM raise `SystemExit` in the main thread, and return a function that restores the default.

    Without this, SIGTERM ends the process at once, and its trial blocks others until the lease expires. Do nothing
    outside the main thread, or if the script or the framework has a handler of its own. The returned function may be
    called more than once and from any thread.
    """
    _raised.clear()  # a new training begins, so the last exception was caught
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return lambda: None
    owner = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature is Python's
        if os.getpid() == owner:
            _raised.append(SystemExit(128 + number))
            raise _raised[-1]
        # A forked child, such as a data loader's worker, has inherited the handler and is no training.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, handle)

    def undo() -> None:
        is_in_place = signal.getsignal(signal.SIGTERM) is handle
        if is_in_place and os.getpid() == owner and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    return undo
