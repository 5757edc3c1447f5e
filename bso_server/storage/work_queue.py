"""The threads that work on a SQLite file, and the transactions that waiting work shares.

A commit costs as much as the statements of a small transaction, or more where the disk is slow, and a file takes one
writer at a time. Work that waits when a thread gets free therefore shares the next transaction. No delay is added for
that: with nobody else at work there is nothing to share, and under load the groups grow by themselves.

Work must not suffer for other work in its group:

- Each has a savepoint of its own. One that is refused leaves nothing behind, and the others go on.
- A transaction that fails as a whole is repeated, a transaction for each work: that which is to blame gets the error.
- Work that may take long is never in a group.
- No answer precedes the commit.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from sqlalchemy import Connection

from bso_server.errors import BsoError

# A group must not keep its members waiting for long.
_LARGEST_GROUP = 100

T = TypeVar("T")
Work = Callable[[Connection], Any]


class Run(Protocol):
    """Does work in a transaction, on a connection of the thread that calls."""

    def __call__(self, work: Callable[[Connection], T], /) -> T:
        """The result of `work`, once it is committed; when it raises, nothing is in force."""


@dataclass(slots=True, eq=False)
class _Entry:
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
        self._waiting: deque[_Entry] = deque()
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
            self._waiting.append(_Entry(work, is_long, future))
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
            taken = self._taken()
            self._take([each for each in taken if not each.is_long])
            for each in taken:
                if each.is_long:
                    self._take([each])

    def _taken(self) -> list[_Entry]:
        taken: list[_Entry] = []
        # Another thread may take some meanwhile.
        with suppress(IndexError):
            while len(taken) < _LARGEST_GROUP:
                taken.append(self._waiting.popleft())
        return taken

    def _take(self, group: Sequence[_Entry]) -> None:
        group = [each for each in group if each.is_wanted]
        if not group:
            return
        outcomes: Sequence[Any]
        try:
            if len(group) > 1:
                outcomes = self._run(partial(_outcomes, group, writes=self._writes))
            else:
                outcomes = [self._run(group[0].work)]
        except Exception as error:
            if len(group) > 1:
                # One of them is to blame: the others must not suffer for it.
                for each in group:
                    self._take([each])
                return
            outcomes = [error]
        for each, outcome in zip(group, outcomes, strict=True):
            # A loop that has ended has nobody left who waits.
            with suppress(RuntimeError):
                each.future.get_loop().call_soon_threadsafe(_settle, each.future, outcome)


def _outcomes(group: Sequence[_Entry], connection: Connection, *, writes: bool) -> list[Any]:
    """The result of each work, or the error with which it was refused."""
    driver: Any = connection.connection.driver_connection
    outcomes: list[Any] = []
    for each in group:
        if not each.is_wanted:
            outcomes.append(None)
            continue
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


def _settle(future: asyncio.Future[Any], outcome: Any) -> None:
    # Who has left, or was told that the time is over, hears of nothing.
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
