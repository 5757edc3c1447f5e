"""Threads that work until the interpreter is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_Work = Callable[[], None]


class DaemonThreads(Executor):
    """An executor that still works while the interpreter calls its exit functions.

    Python's own takes no work from then on. But a training whose server runs in the same process may end its trial in
    an exit function.

    Args:
        threads: Number of threads; they are started at the first work.
        name: Prefix of their names.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._names = [f"{name}_{number}" for number in range(threads)]
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_shut_down = False

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See `Executor.submit`."""
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            if self._is_shut_down:
                raise RuntimeError("these threads take no more work: they were shut down")
            if not self._threads:
                self._start()
            self._work.put(work)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See `Executor.shutdown`. Work that waits is always done: `cancel_futures` changes nothing."""
        del cancel_futures
        with self._lock:
            if not self._is_shut_down:
                self._is_shut_down = True
                for _ in self._threads:
                    self._work.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _start(self) -> None:
        self._threads = [
            threading.Thread(target=_run, args=(self._work,), name=name, daemon=True) for name in self._names
        ]
        for thread in self._threads:
            thread.start()


def _run(work: SimpleQueue[_Work | None]) -> None:
    while (todo := work.get()) is not None:
        todo()
        # Nothing of it is kept until the next work comes.
        del todo
