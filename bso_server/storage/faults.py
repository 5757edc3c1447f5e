"""The errors of databases: what each means, and which failed attempt at a transaction is followed by another one."""

from __future__ import annotations

import logging
import random
import sqlite3
import time
from collections import Counter
from enum import Enum, auto

from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError

from bso_server.errors import DatabaseUnavailableError
from bso_server.storage.deadlines import PATIENCE_S, Deadline

_FULL = "the disk of its database is full"
_READ_ONLY = "its database takes no writes"
_FAILING = "the disk of its database fails, or its quota is used up"
_DAMAGED = "the file of its database is damaged"

# Codes of databases that answer and can keep nothing. SQLite's extended codes hold these in their last byte.
_SQLITE_UNWRITABLE = {
    sqlite3.SQLITE_FULL: _FULL,
    sqlite3.SQLITE_READONLY: _READ_ONLY,
    sqlite3.SQLITE_IOERR: _FAILING,
    sqlite3.SQLITE_CANTOPEN: _FAILING,
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_NOTADB: _DAMAGED,
}
_POSTGRES_UNWRITABLE = {"25006": _READ_ONLY, "53100": _FULL, "58030": _FAILING}
_MYSQL_UNWRITABLE = {
    3: _FAILING,  # error while writing a file, the disk's own words behind it
    1021: _FULL,
    1026: _FAILING,  # the same for a table's file
    1030: _FAILING,  # the storage engine's own error
    1114: _FULL,  # a table, or the tablespace that holds it
    1290: _READ_ONLY,  # --read-only, as on a replica
    1792: _READ_ONLY,  # a session of read-only transactions
    1836: _READ_ONLY,  # --innodb-read-only
}

# Codes by which databases say that a transaction was broken off through no fault of its own.
_POSTGRES_BROKEN_OFF = {
    "40001",  # serialization failure
    "40P01",  # deadlock
    "55P03",  # lock not available: within lock_timeout
    "57014",  # query canceled: by statement_timeout
}
_MYSQL_BROKEN_OFF = {
    1053,  # shutting down
    1205,  # lock wait timeout
    1213,  # deadlock
    1969,  # MariaDB's max_statement_time
    3024,  # MySQL's max_execution_time
}

logger = logging.getLogger("bso_server")


class NoConnectionError(Exception):
    """There is no connection to the database, or it was lost in the middle of a transaction.

    Whether that transaction is in force is not known: the connection may have been lost after the commit. The text is
    one line that says what happened, without a password.
    """

    def __init__(self, cause: Exception) -> None:
        said = cause.orig if isinstance(cause, DBAPIError) and cause.orig is not None else cause
        super().__init__(" ".join(str(said).split()) or type(said).__name__)


class UnwritableError(Exception):
    """The database can keep nothing until somebody has mended it.

    Attributes:
        fault: What is wrong, for everybody to read; the text says it with the place.
    """

    def __init__(self, fault: str, detail: object) -> None:
        super().__init__(f"{fault}: {' '.join(str(detail).split())}")
        self.fault = fault


class JobExistsError(Exception):
    """Another transaction inserted the same job_id first."""


def no_answer(timeout_s: float) -> NoConnectionError:
    """Return the error of a transaction that has taken too long."""
    return NoConnectionError(TimeoutError(f"no answer within {timeout_s:.1f} s"))


def as_unwritable(error: DBAPIError) -> UnwritableError | None:
    """Return the error as an `UnwritableError` if it says that the database can keep nothing, else None."""
    cause = error.orig
    if isinstance(cause, sqlite3.Error):
        fault = _SQLITE_UNWRITABLE.get(getattr(cause, "sqlite_errorcode", 0) & 0xFF)
    else:
        code = _code_of(error)
        fault = _POSTGRES_UNWRITABLE.get(getattr(cause, "sqlstate", None) or "") or (
            _MYSQL_UNWRITABLE.get(code) if isinstance(code, int) else None
        )
    return None if fault is None else UnwritableError(fault, cause)


def described(url: URL) -> str:
    """Return a URL as a user would write it, without its password."""
    # Drivers take it among the options, too.
    query = {name: "***" if "pass" in name.lower() else value for name, value in url.query.items()}
    shown = url.set(drivername=url.get_backend_name(), query=query)
    return shown.render_as_string(hide_password=True)


class Failure(Enum):
    """The failures of a transaction after which the same work, done again, may well succeed.

    BROKEN_OFF: the database ended it, as in a deadlock, or a lock was not had in time. LOST: its connection was lost.
    COLLIDED: it inserted a job at the same time as another transaction, whose row another attempt finds.
    """

    BROKEN_OFF = auto()
    LOST = auto()
    COLLIDED = auto()


def failure_of(error: BaseException) -> Failure | None:
    """Return the failure that an error stands for; None if another attempt would fare no better."""
    if isinstance(error, JobExistsError):
        return Failure.COLLIDED
    if isinstance(error, DatabaseUnavailableError):
        return Failure.LOST if error.fault is None else None
    return Failure.BROKEN_OFF if isinstance(error, DBAPIError) and _is_broken_off(error) else None


# The longest wait in seconds after the first failure, the number of attempts by which it grows, and the number of
# failures at which no other attempt is made.
_FIRST_WAIT_S = {Failure.BROKEN_OFF: 0.05, Failure.LOST: 0.2, Failure.COLLIDED: 0.0}
_GROWS = 8
_MOST_FAILURES = {Failure.LOST: 8, Failure.COLLIDED: 2}


class Retries:
    """The policy of repeated attempts at one transaction: how many there are, and how long each waits.

    The waits are random and grow with the number of attempts, up to eight times the first: transactions that have
    collided must not all come again at once. A database that starts anew needs seconds, so that lost connections are
    waited for longer, but not for as long as a patient caller would wait.

    Args:
        deadline: The time after which no attempt begins.
        level: The level at which the log says that the database has broken an attempt off.
    """

    def __init__(self, deadline: Deadline, level: int = logging.INFO) -> None:
        self._deadline, self._level = deadline, level
        self._lost_deadline = Deadline(PATIENCE_S)
        self._begun = time.monotonic()
        self._failed: Counter[Failure] = Counter()
        self.repeats = 0

    @property
    def attempts(self) -> int:
        """The number of attempts that failed."""
        return self._failed.total()

    def wait_s(self, failure: Failure, error: Exception) -> float | None:
        """Note a failed attempt; return the seconds to wait before the next one, or None if there is to be none."""
        self._failed[failure] += 1
        took_s = time.monotonic() - self._begun
        if failure is Failure.BROKEN_OFF:
            cause = getattr(error, "orig", error)
            logger.log(self._level, "transaction broken off by the database, attempt %d: %s", self.attempts, cause)
        if self._failed[failure] == _MOST_FAILURES.get(failure) or (
            failure is Failure.LOST and not self._lost_deadline.left_s
        ):
            return None
        longest_s = _FIRST_WAIT_S[failure] * min(self.attempts, _GROWS)
        wait_s = longest_s * random.random()  # noqa: S311 - no secret
        # What has waited for a lock in vain would need as long again, and leave its connection in the middle of it.
        if wait_s + took_s >= self._deadline.left_s:
            return None
        self._begun = time.monotonic() + wait_s
        self.repeats += 1
        return wait_s

    def given_up(self, error: Exception) -> Exception:
        """Return the error to raise as there is no other attempt; that the database is away is logged, too."""
        if isinstance(error, JobExistsError):
            return error
        if not isinstance(error, DatabaseUnavailableError):
            error = DatabaseUnavailableError(f"broken off by the database each time: {NoConnectionError(error)}")
        logger.warning("gave up after %d attempts: %s", self.attempts, error.detail)
        return error

    def succeeded(self) -> None:
        """Note that the last attempt has done it."""
        if self._failed[Failure.LOST]:
            logger.info("lost the connection to the database, and found it again at attempt %d", self.attempts + 1)


def _is_broken_off(error: DBAPIError) -> bool:
    code = _code_of(error)
    return (
        getattr(error.orig, "sqlstate", None) in _POSTGRES_BROKEN_OFF
        or code in _MYSQL_BROKEN_OFF
        or (isinstance(code, str) and "database is locked" in code)
    )


def _code_of(error: DBAPIError) -> object:
    return error.orig.args[0] if error.orig is not None and error.orig.args else None
