"""Deadlines: how long requests wait for the database.

Three limits stand behind one another. Those of a session (`database.session_limits`) end first, where the database is
heard from: a lock that is not had in time is an error after which the transaction is begun again, without the locks
that it held meanwhile. The transaction's limit is kept on this side, because a network that has fallen silent says
nothing at all. The request's limit is on all its transactions together.
"""

from __future__ import annotations

import time
from contextvars import ContextVar

PATIENCE_S = 3.0
"""Seconds that a request waits for the database, unless a setting says otherwise. Many clients wait for five only."""

LONG_PATIENCE_S = 60.0
"""Seconds for each transaction of what reads or writes a whole job, and of commands, which keep nobody waiting."""

MIGRATION_PATIENCE_S = 600.0
"""Seconds for a change of the schema, which may rewrite tables, or wait for another process that makes it."""


class Deadline:
    """The end of a wait for the database."""

    def __init__(self, patience_s: float) -> None:
        self._end = time.monotonic() + patience_s

    @property
    def left_s(self) -> float:
        """Seconds until then; 0 once it is over."""
        return max(0.0, self._end - time.monotonic())


# Seconds that the request at hand has waited for the database, alone in a list; None outside of requests.
_waited_s: ContextVar[list[float] | None] = ContextVar("waited_s", default=None)


def begin_request() -> None:
    """Have all waits from now on, in this task, share one patience: they belong to one request."""
    _waited_s.set([0.0])


class waiting:  # noqa: N801 - used as a function is; a generator would cost each report twice as much
    """Wait for the database so many seconds at most, less what this request has waited for it before, unless `alone`.

    Only that time counts: a client may take its own to send a body.
    """

    __slots__ = ("_begun", "_patience_s", "_waited_s")

    def __init__(self, patience_s: float, *, alone: bool = False) -> None:
        self._patience_s = patience_s
        self._waited_s, self._begun = None if alone else _waited_s.get(), time.monotonic()

    def __enter__(self) -> Deadline:
        return Deadline(self._patience_s - (self._waited_s[0] if self._waited_s else 0.0))

    def __exit__(self, *_: object) -> None:
        if self._waited_s:
            self._waited_s[0] += time.monotonic() - self._begun
