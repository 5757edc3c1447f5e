"""The threads that work on a SQLite file, and the transactions that waiting work shares.

A commit costs as much as the statements of a small transaction, or more where the disk is slow, and a file takes one
writer at a time. Work that waits when a thread gets free therefore shares the next transaction. No delay is added for
that: with nobody else at work there is nothing to share, and under load the groups grow by themselves.

Work must not suffer for other work in its group:

- Each has a savepoint of its own. One that is refused leaves nothing behind, and the others go on.
- A transaction that fails as a whole is repeated, a transaction for each work: that which is to blame gets the error.
  Where the file was taken away it may be in force, and is not repeated.
- Work that may take long is never in a group, and a group that has taken long takes no more.
- Work is taken when its turn has come: what waits behind slow work is free for other threads.
- No answer precedes the commit.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from sqlalchemy import Connection

from bso_server.errors import BsoError
from bso_server.storage.unwritable import UnwritableError

# A group must not keep its members waiting for long.
_LARGEST_GROUP = 100
_LONGEST_GROUP_S = 0.05

T = TypeVar("T")
Work = Callable[[Connection], Any]


class Run(Protocol):
    """Does work in a transaction, on a connection of the thread that calls."""

    def __call__(self, work: Callable[[Connection], T], /) -> T:
        """The result of `work`, once it is committed; when it raises, nothing is in force."""


@dataclass(slots=True, eq=False)
class _Entry:
    number: int
    work: Work
    is_long: bool
    future: asyncio.Future[Any]

    @property
    def is_wanted(self) -> bool:
        """True as long as somebody waits for it."""
        return not self.future.cancelled()


class WorkQueue:
    """Hands work to threads, each of which takes all that waits in one transaction.

    Args:
        run: Called in the threads.
        threads: The largest number of threads; each is started when those before are busy.
        name: Their name.
        writes: Whether work writes; what only reads needs no savepoints.
    """

    def __init__(self, run: Run, *, threads: int, name: str, writes: bool) -> None:
        self._run, self._most, self._name, self._writes = run, threads, name, writes
        self._lock = threading.Lock()
        self._waiting: deque[_Entry] = deque()
        self._numbers = count()
        # True for each entry of `_waiting`, which may have been taken with another one by then; False ends a thread.
        self._calls: SimpleQueue[bool] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._under_way = 0

    async def do(self, work: Callable[[Connection], T], *, is_long: bool = False) -> T:
        """The result of `work`; it is not begun any more once nobody waits for it.

        Raises:
            Exception: The work's own error, or that of its transaction.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._under_way += 1
        try:
            if len(self._threads) < min(self._under_way, self._most):
                self._start_thread()
            self._waiting.append(_Entry(next(self._numbers), work, is_long, future))
            self._calls.put(True)
            return await future
        finally:
            self._under_way -= 1

    def close(self) -> None:
        """Let the work in hand end, and the threads."""
        for _ in self._threads:
            self._calls.put(False)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._serve, name=f"{self._name}-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        while self._calls.get():
            first, last = self._first()
            if first is None:
                continue
            if first.is_long or last == first.number:
                self._take_alone(first)
            else:
                self._take(first, last)

    def _first(self) -> tuple[_Entry | None, int]:
        """The first work that waits, which waits no more, and the number of the last one that waits by now."""
        with self._lock:
            # Others are only added meanwhile.
            while self._waiting:
                first = self._waiting.popleft()
                if first.is_wanted:
                    return first, self._waiting[-1].number if self._waiting else first.number
        return None, 0

    def _next(self, last: int) -> _Entry | None:
        """The next work for the transaction that others began, if there is any up to this number."""
        with self._lock:
            # A transaction that reads may see nothing of what was committed after it began.
            while self._waiting and self._waiting[0].number <= last and not self._waiting[0].is_long:
                following = self._waiting.popleft()
                if following.is_wanted:
                    return following
        return None

    def _group(self, first: _Entry, last: int, group: list[_Entry]) -> Iterator[_Entry]:
        """Each work of a group, which holds it from then on."""
        ends = time.monotonic() + _LONGEST_GROUP_S
        following: _Entry | None = first
        while following is not None:
            group.append(following)
            yield following
            has_room = len(group) < _LARGEST_GROUP and time.monotonic() < ends
            following = self._next(last) if has_room else None

    def _take(self, first: _Entry, last: int) -> None:
        group: list[_Entry] = []
        try:
            outcomes = self._run(partial(_outcomes, self._group(first, last, group), writes=self._writes))
        except UnwritableError as error:
            # Repeated, it would perhaps be done twice, and fare no better.
            outcomes = [error] * max(1, len(group))
        except BaseException:
            # One of them is to blame: the others must not suffer for it. None was taken if it could not be begun.
            for each in group or [first]:
                if each.is_wanted:
                    self._take_alone(each)
            return
        for each, outcome in zip(group or [first], outcomes, strict=True):
            _tell(each, outcome)

    def _take_alone(self, entry: _Entry) -> None:
        outcome: Any
        try:
            outcome = self._run(entry.work)
        except BaseException as error:
            # The thread must outlive whatever work raises: nobody else would serve the queue.
            outcome = error
        _tell(entry, outcome)


def _outcomes(group: Iterator[_Entry], connection: Connection, *, writes: bool) -> list[Any]:
    """The result of each work, or the error with which it was refused."""
    driver: Any = connection.connection.driver_connection
    outcomes: list[Any] = []
    for each in group:
        if writes:
            driver.execute("SAVEPOINT work")
        try:
            outcomes.append(each.work(connection))
        except BsoError as error:
            outcomes.append(error)
            if writes:
                driver.execute("ROLLBACK TO work")
        if writes:
            driver.execute("RELEASE work")
    return outcomes


def _tell(entry: _Entry, outcome: Any) -> None:
    # A loop that has ended has nobody left who waits.
    with suppress(RuntimeError):
        entry.future.get_loop().call_soon_threadsafe(_settle, entry.future, outcome)


def _settle(future: asyncio.Future[Any], outcome: Any) -> None:
    # Who has left, or was told that the time is over, hears of nothing.
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
