"""Errors of databases: their meaning, and which failed transactions are retried."""

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
DAMAGED = "its database is damaged"
DENIED = "the user of its database lacks rights on it"
_POOLED = "a pooler changes the session of its database after each transaction: let it pool sessions (pool_mode)"

# Error codes of databases that answer, but accept no writes or are damaged. Of SQLite's codes, only the last byte
# counts.
_SQLITE_UNWRITABLE = {
    sqlite3.SQLITE_FULL: _FULL,
    sqlite3.SQLITE_READONLY: _READ_ONLY,
    sqlite3.SQLITE_IOERR: _FAILING,
    sqlite3.SQLITE_CANTOPEN: _FAILING,
    sqlite3.SQLITE_CORRUPT: DAMAGED,
    sqlite3.SQLITE_NOTADB: DAMAGED,
}
_UNWRITABLE: dict[object, str] = {
    "25006": _READ_ONLY,  # texts are SQLSTATEs of PostgreSQL, numbers are codes of MySQL and MariaDB
    "26000": _POOLED,  # a prepared statement is missing, as behind PgBouncer in transaction mode
    "42P05": _POOLED,  # another process has prepared it
    "42501": DENIED,
    "53100": _FULL,
    "58030": _FAILING,
    "XX001": DAMAGED,  # data corrupted
    "XX002": DAMAGED,  # index corrupted
    3: _FAILING,  # error writing a file
    1021: _FULL,
    1026: _FAILING,  # error writing the file of a table
    1030: _FAILING,  # error of the storage engine
    1034: DAMAGED,  # index of a table
    1114: _FULL,  # a table or its tablespace
    1142: DENIED,  # a command on a table
    1143: DENIED,  # a column
    1290: _READ_ONLY,  # --read-only, as on a replica
    1712: DAMAGED,  # index of InnoDB
    1792: _READ_ONLY,  # a session of read-only transactions
    1836: _READ_ONLY,  # --innodb-read-only
    1877: DAMAGED,  # table missing or corrupt
}

# Codes of databases that have aborted a transaction which may succeed when it is retried.
_BROKEN_OFF = {
    "40001",  # serialization failure
    "40P01",  # deadlock
    "55P03",  # lock not available: within lock_timeout
    "57014",  # query canceled: by statement_timeout
    1020,  # the row has changed since the transaction's snapshot: MariaDB's innodb_snapshot_isolation
    1053,  # shutting down
    1205,  # lock wait timeout
    1213,  # deadlock
    1969,  # MariaDB's max_statement_time
    3024,  # MySQL's max_execution_time
}

logger = logging.getLogger("bso_server")


class NoConnectionError(Exception):
    """The connection to the database failed, or was lost during a transaction, which may have been committed.

    The text is one line without a password.
    """

    def __init__(self, cause: Exception) -> None:
        said = cause.orig if isinstance(cause, DBAPIError) and cause.orig is not None else cause
        super().__init__(" ".join(str(said).split()) or type(said).__name__)


class UnwritableError(Exception):
    """The database accepts no writes, or is damaged, until an operator has repaired it.

    Attributes:
        fault: Description of the fault, in words for every client; the text of the error adds details.
    """

    def __init__(self, fault: str, detail: object) -> None:
        super().__init__(f"{fault}: {' '.join(str(detail).split())}")
        self.fault = fault


class JobExistsError(Exception):
    """Another transaction has inserted the same job_id first."""


def no_answer(timeout_s: float) -> NoConnectionError:
    """Return the error of a transaction that has timed out."""
    return NoConnectionError(TimeoutError(f"no answer within {timeout_s:.1f} s"))


def as_unwritable(error: DBAPIError) -> UnwritableError | None:
    """Return an `UnwritableError` if the error means that the database accepts no writes or is damaged, else None."""
    cause = error.orig
    if isinstance(cause, sqlite3.Error):
        fault = _SQLITE_UNWRITABLE.get(getattr(cause, "sqlite_errorcode", 0) & 0xFF)
    else:
        fault = next((_UNWRITABLE[code] for code in _codes_of(error) if code in _UNWRITABLE), None)
    return None if fault is None else UnwritableError(fault, cause)


def described(url: URL) -> str:
    """Return a URL without its password."""
    # Drivers accept a password among the options too.
    query = {name: "***" if "pass" in name.lower() else value for name, value in url.query.items()}
    return url.set(query=query).render_as_string(hide_password=True)


class Failure(Enum):
    """Failures of a transaction after which a retry may succeed.

    BROKEN_OFF: The database aborted it, for example after a deadlock or a lock that was not free in time.
    LOST: Its connection was lost.
    COLLIDED: Another transaction inserted the same job; a retry will find its row.
    """

    BROKEN_OFF = auto()
    LOST = auto()
    COLLIDED = auto()


def failure_of(error: BaseException) -> Failure | None:
    """Return the kind of failure of an error; None if a retry would fail too."""
    if isinstance(error, JobExistsError):
        return Failure.COLLIDED
    if isinstance(error, DatabaseUnavailableError):
        return Failure.LOST if error.fault is None else None
    if not isinstance(error, DBAPIError):
        return None
    is_broken_off = any(code in _BROKEN_OFF or "database is locked" in str(code) for code in _codes_of(error))
    return Failure.BROKEN_OFF if is_broken_off else None


# Longest wait in seconds after the first failure, the number of attempts during which the wait grows, and the number of
# failures after which the store gives up.
_FIRST_WAIT_S = {Failure.BROKEN_OFF: 0.05, Failure.LOST: 0.2, Failure.COLLIDED: 0.0}
_GROWS = 8
_MOST_FAILURES = {Failure.LOST: 8, Failure.COLLIDED: 2}


class Retries:
    """Retries of one transaction.

    The waits are random, so that transactions that have collided do not retry together. Their maximum grows with the
    attempts, up to eight times the first. After a lost connection, waits are longer, because a database needs seconds
    to restart; but even for patient callers, such retries end after `PATIENCE_S`.

    Args:
        deadline: Time by which the last attempt must end.
        level: Level of the log lines about aborted attempts.
    """

    def __init__(self, deadline: Deadline, level: int = logging.INFO) -> None:
        self._deadline, self._level = deadline, level
        self._lost_deadline = Deadline(PATIENCE_S)
        self._begun = time.monotonic()
        self._failed: Counter[Failure] = Counter()

    @property
    def attempts(self) -> int:
        """Number of failed attempts."""
        return self._failed.total()

    def wait_s(self, failure: Failure, error: Exception) -> float | None:
        """Record a failed attempt; return the seconds until the next one, or None to give up."""
        self._failed[failure] += 1
        took_s = time.monotonic() - self._begun
        if failure is Failure.BROKEN_OFF:
            cause = getattr(error, "orig", error)
            logger.log(self._level, "the database aborted a transaction, attempt %d: %s", self.attempts, cause)
        if self._failed[failure] == _MOST_FAILURES.get(failure) or (
            failure is Failure.LOST and not self._lost_deadline.left_s
        ):
            return None
        longest_s = _FIRST_WAIT_S[failure] * min(self.attempts, _GROWS)
        wait_s = longest_s * random.random()  # nosec B311  # noqa: S311 - no secret
        # A retry is expected to take as long as the failed attempt; then the deadline would cut it off.
        if wait_s + took_s >= self._deadline.left_s:
            return None
        self._begun = time.monotonic() + wait_s
        return wait_s

    def given_up(self, error: Exception) -> Exception:
        """Return the error to raise after the last attempt; log it if the database is unavailable."""
        if isinstance(error, JobExistsError):
            return error
        if not isinstance(error, DatabaseUnavailableError):
            error = DatabaseUnavailableError(f"aborted by the database each time: {NoConnectionError(error)}")
        logger.warning("gave up after %d attempts: %s", self.attempts, error.detail)
        return error

    def succeeded(self) -> None:
        """Log the reconnection, if the connection was lost."""
        if self._failed[Failure.LOST]:
            logger.info("lost the connection to the database, and found it again at attempt %d", self.attempts + 1)


def _codes_of(error: DBAPIError) -> list[object]:
    """Return the SQLSTATE and the number of a driver's error, if it has them; for SQLite, return the error's text."""
    return [] if error.orig is None else [getattr(error.orig, "sqlstate", None), *error.orig.args[:1]]
