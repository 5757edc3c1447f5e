"""A thread that reads a device regularly while something is measured."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable

from zeus_plugins.errors import ZeusBSOOperationOrderError

logger = logging.getLogger("zeus_plugins.energy")


class Sampler:
    """Calls a function in a daemon thread, every so many seconds between `start` and `stop`.

    What the function raises is logged, and the next call tries again. `lock` is held during each call, and is None
    before the first `start`. A thread does not survive a fork, and a lock that it held stays locked in the child for
    ever. So a forked process has to ask `is_inherited` first, and `start` makes a thread and a lock of its own. An
    unused sampler can be pickled.
    """

    def __init__(self, sample: Callable[[], None], interval_s: float | None) -> None:
        self.interval_s = interval_s
        self.lock: threading.Lock | None = None
        self._sample = sample
        self._thread: threading.Thread | None = None
        self._stopped: threading.Event | None = None
        self._process_id: int | None = None

    @property
    def is_inherited(self) -> bool:
        """True when it was started by another process, of which this one is a fork: there is no thread here."""
        return self._process_id is not None and self._process_id != os.getpid()

    def require_own_process(self) -> None:
        """Refuse to go on with what another process has begun (`ZeusBSOOperationOrderError` if `is_inherited`)."""
        if self.is_inherited:
            raise ZeusBSOOperationOrderError(
                f"the measurement was begun by process {self._process_id}, and the thread that reads the device did "
                f"not come along into its forked process {os.getpid()}: begin and end a window in one process"
            )

    def start(self) -> None:
        """Begin to sample; the first call comes after one interval. Nothing without one, or where it runs already."""
        if self.interval_s is None or (self._process_id == os.getpid() and self._thread is not None):
            return
        self._process_id = os.getpid()
        self.lock, self._stopped = threading.Lock(), threading.Event()
        arguments = (weakref.ref(self), self._stopped, self.interval_s)
        self._thread = threading.Thread(target=_run, args=arguments, name="zeus-energy-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Sample no more; returns when the thread has ended. Nothing where it does not run."""
        thread, self._thread = self._thread, None
        if thread is None or self._stopped is None or self.is_inherited:
            return
        self._stopped.set()
        thread.join()

    def sample_or_log(self, *, again: bool) -> bool:
        """Sample once; returns whether that failed. What fails `again` is logged for developers alone."""
        try:
            with self.lock or contextlib.nullcontext():
                self._sample()
        except Exception as error:
            # The reading at the window's end raises what lasts; a thread that dies would lose what comes between.
            logger.log(logging.DEBUG if again else logging.WARNING, "could not read a device's energy: %s", error)
            return True
        return False


# The thread holds no reference while it waits: a monitor that is dropped with a window open would be read for ever.
def _run(sampler_of: weakref.ref[Sampler], stopped: threading.Event, interval_s: float) -> None:
    has_failed = False
    while not stopped.wait(interval_s):
        sampler = sampler_of()
        if sampler is None:
            return
        has_failed = sampler.sample_or_log(again=has_failed) or has_failed
        del sampler
