"""Deadlines of requests that wait for the database.

There are three kinds of limits. The limits of a database session (`database.session_limits`) are the shortest: if a
lock is not free in time, the database aborts the transaction, and the store retries it without the locks that it held.
The limit of a transaction is measured in this process, because a broken network reports no error. The limit of a
request covers all of its transactions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

PATIENCE_S = 3.0
"""Default number of seconds that a request waits for the database; many clients wait only five for their answer."""

LONG_PATIENCE_S = 60.0
"""Seconds for each transaction of commands, and of work on whole jobs."""

MIGRATION_PATIENCE_S = 600.0
"""Seconds for a change of the schema, which may wait for another process, and for a check of the whole database."""


class Deadline:
    """End of a wait for the database."""

    def __init__(self, patience_s: float) -> None:
        self._end = time.monotonic() + patience_s

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; 0 after it."""
        return max(0.0, self._end - time.monotonic())


# Seconds that the current request has waited for the database, as the only item of a list; None outside of requests.
_waited_s: ContextVar[list[float] | None] = ContextVar("waited_s", default=None)


def begin_request() -> None:
    """Make all further waits of this asyncio task share one limit, because they belong to one request."""
    _waited_s.set([0.0])


@contextmanager
def waiting(patience_s: float, *, alone: bool = False) -> Iterator[Deadline]:
    """Yield the deadline of a wait for the database.

    The wait may last `patience_s` seconds, less the time that this request has already waited for the database; with
    `alone`, earlier waits do not count. Time in which the request waits for its body, for example, never counts.
    """
    waited_s, begun = None if alone else _waited_s.get(), time.monotonic()
    try:
        yield Deadline(patience_s - (waited_s[0] if waited_s else 0.0))
    finally:
        if waited_s:
            waited_s[0] += time.monotonic() - begun
