"""A SQLite file: what guards it, and the ways to work on it, in a server's threads or in the thread that calls."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from bso_server.errors import BsoError, DatabaseUnavailableError
from bso_server.storage import migrations
from bso_server.storage.deadlines import PATIENCE_S, Deadline
from bso_server.storage.faults import (
    JobExistsError,
    NoConnectionError,
    Retries,
    UnwritableError,
    described,
    failure_of,
    no_answer,
)
from bso_server.storage.transaction import Transaction

# Seconds that a connection waits for another process's transaction; then the transaction is begun again, while there is
# time.
_BUSY_TIMEOUT_S = 1
READERS = 4

READ_ONLY = "bso_read_only"
"""The key of a flag, that the transaction only reads, in the `info` of its connection."""

# SQLAlchemy would log the cursors of a connection that `SqliteFile.drop` has closed.
_POOL = "bso_server"
logging.getLogger(f"sqlalchemy.pool.impl.NullPool.{_POOL}").setLevel(logging.CRITICAL)

_GONE = "the file of its database was deleted, moved or replaced"
_OPENED = "bso_opened"
# What SQLite keeps beside a file: its write-ahead log, where a commit is until the file has it, and an index to that.
_COMPANIONS = ("-wal", "-shm")

_MOUNTS = Path("/proc/mounts")
# Where file locks and shared memory do not reach the other hosts, so that SQLite's write-ahead log is corrupted.
_NETWORK = re.compile(r"9p|afs|beegfs|ceph|cifs|glusterfs|gpfs|lustre|ncpfs|nfs4?|smb3|smbfs|fuse\.sshfs.*")

_Identity = tuple[int, int]

T = TypeVar("T")

logger = logging.getLogger("bso_server")


@dataclass
class OpenFile:
    """A SQLite file that is open, which must stay in its place with what SQLite keeps beside it.

    A process that has a file open writes on into it after it was deleted, moved or replaced, and SQLite does not look
    after that: each commit would succeed and be lost. Device and inode tell, for they belong to nobody else while the
    file is open.
    """

    path: str
    _file: _Identity | None = field(default=None, init=False)
    _target: str = field(default="", init=False)

    def before_open(self) -> None:
        """Make sure that a file which was open before is still there, for SQLite would make another one.

        Raises:
            UnwritableError: It is not.
        """
        if self._file is not None and _identity(self.path) != self._file:
            raise self._gone()

    def opened(self, connection_info: dict[Any, Any]) -> None:
        """Note what a connection has opened; errors as in `before_open`."""
        # SQLite follows links before it puts files beside a file.
        self._target = os.path.realpath(self.path)
        found = self._found()
        if None in found or self._file not in (None, found[0]):
            raise self._gone()
        self._file = found[0]
        connection_info[_OPENED] = found

    def check(self, connection_info: dict[Any, Any]) -> None:
        """Make sure that what a connection has written is where others will look for it.

        Raises:
            UnwritableError: It is not, until the files are put back.
        """
        if self._found() != connection_info.get(_OPENED):
            raise self._gone()

    def forget(self) -> None:
        """Take any file for the right one; no connection is open."""
        self._file = None

    def _found(self) -> list[_Identity | None]:
        return [_identity(self.path), *(_identity(self._target + suffix) for suffix in _COMPANIONS)]

    def _gone(self) -> UnwritableError:
        return UnwritableError(
            _GONE,
            f"{self.path}, {self.path}-wal and {self.path}-shm must be the files that were opened: put them back, or "
            "stop what uses the file, put a copy there without -wal and -shm, and start again",
        )


class SqliteFile:
    """A SQLite file, worked on in the thread that calls; whoever opens a connection to it keeps and closes that.

    A connection serves one thread at a time and must not be open while its process forks: the child would take its
    parent's locks for its own (https://www.sqlite.org/howtocorrupt.html, 2.6). Arguments as in `open_sqlite_file`.
    """

    def __init__(self, url: URL, *, echo_sql: bool = False, busy_timeout_s: float = _BUSY_TIMEOUT_S) -> None:
        refuse_network(url)
        self.url = url.set(drivername="sqlite")
        self.path = Path(url.database or "")
        self.engine = create_engine(
            self.url,
            echo=echo_sql,
            poolclass=NullPool,
            pool_reset_on_return=None,
            pool_logging_name=_POOL,
            isolation_level="AUTOCOMMIT",
        )
        self._open_file = configure_sqlite(self.engine, busy_timeout_s)
        event.listen(self.engine, "close", _roll_back)

    def connect(self) -> Connection:
        """Open a connection.

        Raises:
            DBAPIError: The file cannot be opened, or is no database.
            UnwritableError: It is another one than before; `forget` makes that all the same.
        """
        return self.engine.connect()

    def transact(self, connection: Connection, work: Callable[[Connection], T], *, read_only: bool = False) -> T:
        """See `Database.transact`; the connection is one of this file's."""
        driver: Any = connection.connection.driver_connection
        try:
            # SQLAlchemy's own transactions cost more, and lose an exception that a signal raises at their end.
            _execute(driver, "BEGIN" if read_only else "BEGIN IMMEDIATE")
            done = work(connection)
            _execute(driver, "COMMIT")
        except BaseException:
            _roll_back(driver)
            raise
        self._open_file.check(connection.info)
        return done

    def forget(self) -> None:
        """Let the next connection open whatever file is there; none is open."""
        self._open_file.forget()

    def drop(self, connection: Connection) -> None:
        """Close a connection that is in use, so that its transaction is rolled back and its user's next step fails."""
        driver: Any = connection.connection.driver_connection
        _roll_back(driver)
        driver.close()


class SqliteDatabase:
    """A SQLite file, worked on in threads.

    SQLite lets one writer in at a time, and those that wait for its lock poll. One thread for all writes of a process
    queues them fairly; what keeps other processes out is SQLite's own lock. A whole transaction runs in the thread: to
    and fro for each statement, as asynchronous drivers for SQLite do, costs more than the statements.
    """

    def __init__(self, file: SqliteFile) -> None:
        self.file, self.url = file, file.url
        self._own = threading.local()
        self._connections: list[Connection] = []
        self._writer = ThreadPoolExecutor(1, "bso-writer")
        self._readers = ThreadPoolExecutor(READERS, "bso-reader")

    async def transact(
        self,
        work: Callable[[Connection], T],
        *,
        read_only: bool = False,
        waits: bool = True,  # noqa: ARG002 - all writers queue for the file's one lock
        timeout_s: float = PATIENCE_S,
    ) -> T:
        """See `Database.transact`. A transaction that has begun cannot be given up: it may be in force a bit later."""
        threads = self._readers if read_only else self._writer
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s) as limit:
                # Given up while it queues, it is not begun.
                return await loop.run_in_executor(threads, self._transact_in_thread, work, read_only)
        except TimeoutError as error:
            if limit.expired():
                raise no_answer(timeout_s) from error
            raise

    async def close(self) -> None:
        """Let the work in hand end, and close every connection."""
        # All that this event loop still has to do is to end.
        self._writer.shutdown()
        self._readers.shutdown()
        for connection in self._connections:
            connection.close()

    def _transact_in_thread(self, work: Callable[[Connection], T], read_only: bool) -> T:
        # Each thread keeps its connection: opening one costs more than a transaction.
        connection: Connection | None = getattr(self._own, "connection", None)
        if connection is None:
            try:
                connection = self._own.connection = self.file.connect()
            except DBAPIError as error:
                raise NoConnectionError(error) from error
            self._connections.append(connection)
        return self.file.transact(connection, work, read_only=read_only)


class SyncStore:
    """A SQLite file for callers that wait: `Store` without an event loop.

    It runs one transaction at a time, on one connection, which it opens when it needs one; opening it brings the file
    to this version's schema.

    A transaction may be broken in upon by a signal's handler, or by a finalizer of the garbage collector, that uses the
    store in the same thread. Neither can wait for the other: the transaction is rolled back, and begun again after that
    of the handler.

    What a server logs at INFO is not logged here, unless the user has set a level for its logger. The file's busy
    timeout is how long the thread takes no signal while another process has it locked. `lock`, which is reentrant, is
    held during each attempt at a transaction, and not between two of them.
    """

    def __init__(self, file: SqliteFile, lock: AbstractContextManager[object]) -> None:
        self._file = file
        self._lock = lock
        self._connection: Connection | None = None
        # Transactions of one thread that have begun: more than one where a handler broke in.
        self._depth = 0
        self._is_broken_in = False

    def write(self, work: Callable[[Transaction], T], *, timeout_s: float) -> T:
        """Do `work` in a transaction as `Store.write` does; another process is waited for `timeout_s` seconds at most.

        Raises:
            DatabaseUnavailableError: The file is locked for so long, or cannot be read or written.
            DatabaseNotReadyError: It was made by a newer version.
        """
        return self._transact(work, read_only=False, timeout_s=timeout_s)

    def read(self, work: Callable[[Transaction], T], *, timeout_s: float) -> T:
        """Do `work`, which only reads, in a transaction that makes nobody wait; arguments and errors as in `write`."""
        return self._transact(work, read_only=True, timeout_s=timeout_s)

    def close(self, *, keeps_file: bool = False) -> None:
        """Close the connection, if one is open; the next transaction opens another, perhaps to the same file alone."""
        with self._lock:
            connection, self._connection = self._connection, None
            _close(connection)
            if not keeps_file:
                self._file.forget()

    def _transact(self, work: Callable[[Transaction], T], *, read_only: bool, timeout_s: float) -> T:
        retries = Retries(Deadline(timeout_s), level=logging.DEBUG)
        while True:
            try:
                return self._attempt(work, read_only=read_only)
            except _BrokenInError:
                continue
            except UnwritableError as error:
                raise DatabaseUnavailableError(str(error), fault=error.fault) from error
            except (DBAPIError, JobExistsError) as error:
                failure = failure_of(error)
                if failure is None:
                    raise DatabaseUnavailableError(str(NoConnectionError(error))) from error
                wait_s = retries.wait_s(failure, error)
                if wait_s is None:
                    raise DatabaseUnavailableError(
                        f"timed out after {timeout_s:g} s, as another process has it locked"
                    ) from error
                time.sleep(wait_s)

    def _attempt(self, work: Callable[[Transaction], T], *, read_only: bool) -> T:
        def work_on(connection: Connection) -> tuple[T, Transaction]:
            transaction = Transaction(connection)
            return work(transaction), transaction

        with self._lock:
            depth = self._depth
            if depth:
                # Under the feet of the other transaction, whose next step fails.
                self._drop()
            self._depth, self._is_broken_in = depth + 1, False
            connection: Connection | None = None
            try:
                connection = self._connection or self._open()
                done, transaction = self._file.transact(connection, work_on, read_only=read_only)
            except BaseException as error:
                if not isinstance(error, (BsoError, JobExistsError)):
                    # A signal's exception may have been raised anywhere, and leave the connection in any state.
                    self._drop()
                    _close(connection)
                if self._is_broken_in and isinstance(error, (SQLAlchemyError, sqlite3.Error, UnwritableError)):
                    raise _BrokenInError from None
                raise
            else:
                if self._is_broken_in:
                    _close(connection)
                    raise _BrokenInError
                if logger.level != logging.NOTSET:
                    transaction.publish()
                return done
            finally:
                # Read by the transaction that this one broke in upon.
                self._depth, self._is_broken_in = depth, depth > 0

    def _drop(self) -> None:
        """Close the connection whatever is under way on it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(SQLAlchemyError, sqlite3.Error):
                self._file.drop(connection)

    def _open(self) -> Connection:
        try:
            connection = self._connection = self._file.connect()
            found = self._file.transact(connection, migrations.current, read_only=True)
            if found != migrations.HEAD:
                migrations.refuse_newer(found, described(self._file.url))
                if found is not None:
                    back_up(self._file.path)
                with _unlogged():
                    self._file.transact(connection, migrations.upgrade)
        except BaseException:
            unusable = self._connection
            self._drop()
            _close(unusable)
            raise
        return connection


@contextmanager
def _unlogged() -> Iterator[None]:
    """Keep out of a training's log what a migration logs at INFO; a level that the user has set stays."""
    loggers = [logging.getLogger(name) for name in ("bso_server", "alembic")]
    chosen = [each for each in loggers if each.level == logging.NOTSET]
    for each in chosen:
        each.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for each in chosen:
            each.setLevel(logging.NOTSET)


def _close(connection: Connection | None) -> None:
    if connection is not None:
        # What a disk, or a connection that was dropped, has to say at this point changes nothing any more.
        with suppress(SQLAlchemyError, sqlite3.Error):
            connection.close()


class _BrokenInError(Exception):
    """A transaction was broken in upon by another one of the same thread."""


def back_up(file: Path) -> None:
    """Copy a SQLite file beside itself before its schema is upgraded, consistently even while others write to it."""
    copy = Path(f"{file}.{datetime.now(UTC):%Y%m%dT%H%M%SZ}.backup")
    with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    logger.info("the database was copied to %s before its schema is upgraded", copy)


def network_filesystem(path: Path, mounts: str | None = None) -> str | None:
    """The type of the network file system that holds `path`, or None when it is local or nobody can tell.

    The file need not exist; without `mounts`, what ``/proc/mounts`` says counts.
    """
    if mounts is None:
        mounts = _MOUNTS.read_text() if _MOUNTS.exists() else ""
    resolved = path.resolve()
    best, kind = -1, ""
    for line in mounts.splitlines():
        _device, mount_point, filesystem, *_ = line.split()
        # The kernel escapes blanks and backslashes as octal numbers.
        point = Path(mount_point.encode().decode("unicode_escape"))
        # Of two mounts on the same point the later one is what one sees.
        if resolved.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), filesystem
    return kind if _NETWORK.fullmatch(kind) else None


def refuse_network(url: URL) -> None:
    """Raise `ValueError` for a file in memory or on a network file system; make the directory of any other."""
    if not url.database or url.database == ":memory:":
        raise ValueError("a SQLite database in memory is lost with its connection: name a file")
    path = Path(url.database)
    kind = network_filesystem(path)
    if kind is not None:
        raise ValueError(
            f"{path} is on a network file system ({kind}), where SQLite's locks do not hold: put the file on a local "
            "disk, or use PostgreSQL or MySQL"
        )
    path.parent.mkdir(parents=True, exist_ok=True)


def _roll_back(driver: Any, _record: object = None) -> None:
    # Closed while a statement is under way, SQLite would keep the lock for as long as somebody refers to the statement.
    with suppress(sqlite3.Error):
        driver.rollback()


def configure_sqlite(engine: Engine, busy_timeout_s: float = _BUSY_TIMEOUT_S) -> OpenFile:
    """Have each connection of the engine opened and set up alike, whatever its driver; return the file's guard."""
    open_file = OpenFile(engine.url.database or "")

    @event.listens_for(engine, "do_connect")
    def _make(*_arguments: Any) -> None:
        open_file.before_open()
        # It holds who trains what; SQLite gives the files beside it the same rights.
        with suppress(OSError):  # it is there, or SQLite says why it cannot be
            os.close(os.open(engine.url.database or "", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))

    @event.listens_for(engine, "connect")
    def _configure(connection: Any, record: Any) -> None:
        # The driver's own transactions begin at the first write, after the reads that a decision rests on. None turns
        # them off, so that `_begin` below says when a transaction starts.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {round(busy_timeout_s * 1000)}")
        cursor.execute("PRAGMA journal_mode = WAL")
        # FULL: a committed report survives a power cut.
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.execute("PRAGMA foreign_keys = ON")
        # The files beside it are made by the first read.
        cursor.execute("SELECT 1 FROM sqlite_master LIMIT 1")
        cursor.close()
        open_file.opened(record.info)

    return open_file


def begin(connection: Connection) -> None:
    """Begin a transaction, which locks the file unless it only reads."""
    # Through SQLAlchemy it would cost a sixth of a small transaction.
    _execute(connection.connection.cursor(), "BEGIN" if connection.info.get(READ_ONLY) else "BEGIN IMMEDIATE")


def _execute(driver: Any, statement: str) -> None:
    try:
        driver.execute(statement)
    except sqlite3.Error as error:
        raise OperationalError(statement, None, error) from error


def _identity(path: str) -> _Identity | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
