"""Deadlines: how long requests wait for the database, and how long its sessions let a statement or a lock wait.

Three limits stand behind one another. A session's own end first, where the database is heard from: a lock that is not
had in time is an error after which the transaction is begun again, without the locks that it held meanwhile. The
transaction's limit is kept on this side, for a network that has fallen silent says nothing at all. The request's limit
is on all its transactions together.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass

PATIENCE_S = 3.0
"""Seconds that a request waits for the database, unless a setting says otherwise. Many clients wait for five only."""

LONG_PATIENCE_S = 60.0
"""The same for each transaction of what reads or writes a whole job, and of commands, which keep nobody waiting."""

MIGRATION_PATIENCE_S = 600.0
"""The same for a change of the schema, which may rewrite tables, or wait for another process that makes it."""

# Seconds that a session may be idle within a transaction: its client has stopped, or is cut off, and keeps its locks.
_IDLE_S = 10.0


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """The limits of a session whose transactions take so many seconds at most."""

    patience_s: float

    @property
    def lock_s(self) -> float:
        """Seconds that a statement waits for a lock; there is time for another attempt, without the locks held then.

        PostgreSQL looks for deadlocks after 1 s, and ends one of two transactions only if they wait for longer.
        """
        return 0.4 * self.patience_s

    def sql(self, backend: str, *, is_local: bool = False) -> str:
        """The statement that sets them, on a kind of database that has sessions.

        Those that are local hold for the transaction at hand, on PostgreSQL; others know nothing of the kind.
        """
        if backend == "postgresql":
            limits = {
                "statement_timeout": self.patience_s,
                "lock_timeout": self.lock_s,
                "idle_in_transaction_session_timeout": self.patience_s + _IDLE_S,
            }
            # One statement, as a prepared one must be.
            return "SELECT " + ", ".join(
                f"set_config('{name}', '{max(1, round(1000 * limit_s))}', {is_local})"
                for name, limit_s in limits.items()
            )
        # Whole seconds. MySQL and MariaDB each read what is written for it in a comment, and have other names for the
        # same; MySQL knows no limit on statements that write, and none on idle transactions.
        lock_s, statement_s = max(1, round(self.lock_s)), max(1, round(self.patience_s))
        idle_s = round(statement_s + _IDLE_S)
        return (
            f"SET innodb_lock_wait_timeout = {lock_s}, lock_wait_timeout = {lock_s}"
            f" /*!50708 , max_execution_time = {1000 * statement_s} */"
            f" /*M!100301 , max_statement_time = {statement_s}, idle_transaction_timeout = {idle_s} */"
        )


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
