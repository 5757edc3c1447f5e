"""SIGTERM as an exception, so that a preempted training can say so before it ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

# What was raised at SIGTERM: the interpreter keeps no note of a SystemExit that nobody has caught.
_raised: list[SystemExit] = []


def termination() -> SystemExit | None:
    """The exception raised in this process since `raise_at_sigterm` was last called, or None."""
    return _raised[-1] if _raised else None


def raise_at_sigterm() -> Callable[[], None]:
    """Let SIGTERM raise `SystemExit` in the main thread, with the status that a shell gives a process it ends.

    Without this the process ends at once, and its trial blocks others until its lease runs out. A handler that is there
    already, the script's own or the framework's, stays; so does everything when this is not the main thread.

    Returns:
        What takes this back; safe to call more than once, from any thread.
    """
    # Who begins another training has caught what was raised before.
    _raised.clear()
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return lambda: None
    owner = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature is Python's
        if os.getpid() == owner:
            _raised.append(SystemExit(128 + number))
            raise _raised[-1]
        # A forked child (a data loader's worker) has inherited this and is no training.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, handle)

    def undo() -> None:
        is_in_place = signal.getsignal(signal.SIGTERM) is handle
        if is_in_place and os.getpid() == owner and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    return undo
