"""SQLite files: their protection, and transactions in the threads of a server or in the calling thread."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import random
import re
import sqlite3
import tempfile
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

from bso_server.errors import BsoError, ComputeFirstError, DatabaseUnavailableError
from bso_server.storage import migrations
from bso_server.storage.deadlines import Deadline
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

# Seconds that a statement waits for another process's transaction before the store retries.
_BUSY_TIMEOUT_S = 1
_READERS = 4

# Longest waits in seconds: for a turn, whose holder may be a stopped process, and for the lock during a turn.
_TURN_S, _LOCK_S = 3.0, 1.0
# Longest pause between two attempts to get the turn: in seconds, and as a share of the time that is left.
_PAUSE_S, _PAUSE_SHARE = 0.02, 0.002

# SQLAlchemy would log an error about the cursors of a connection that `SqliteFile.drop` has closed.
_POOL = "bso_server"
logging.getLogger(f"sqlalchemy.pool.impl.NullPool.{_POOL}").setLevel(logging.CRITICAL)

_GONE = "the file of its database was deleted, moved or replaced"
_OPENED = "bso_opened"
# Companion files of a database: the write-ahead log, which holds commits until a checkpoint, and its index.
_COMPANIONS = ("-wal", "-shm")

_MOUNTS = Path("/proc/mounts")
# Network file systems: without locks and shared memory between hosts, SQLite would corrupt its write-ahead log.
_NETWORK = re.compile(r"9p|afs|beegfs|ceph|cifs|glusterfs|gpfs|lustre|ncpfs|nfs4?|smb3|smbfs|fuse\.sshfs.*")

_Identity = tuple[int, int]

T = TypeVar("T")

logger = logging.getLogger("bso_server")


@dataclass
class OpenFile:
    """Check that an open SQLite file and its companion files stay in place.

    After a file was deleted, moved or replaced, processes that have it open can still write to it, so that commits
    would succeed and be lost; SQLite does not check this. Device and inode identify a file as long as it is open.
    """

    path: str
    _file: _Identity | None = field(default=None, init=False)
    _target: str = field(default="", init=False)

    def before_open(self) -> None:
        """Raise `UnwritableError` if a file that was opened before is missing, because SQLite would create another."""
        if self._file is not None and _identity(self.path) != self._file:
            raise self._gone()

    def opened(self, connection_info: dict[Any, Any]) -> None:
        """Record the files of a new connection; raise `UnwritableError` if they are not the files opened before."""
        # SQLite puts the companion files beside the target of a symbolic link.
        self._target = os.path.realpath(self.path)
        found = self._found()
        if None in found or self._file not in (None, found[0]):
            raise self._gone()
        self._file = found[0]
        connection_info[_OPENED] = found

    def check(self, connection_info: dict[Any, Any]) -> None:
        """Raise `UnwritableError` unless the files that a connection has opened are still in place."""
        if self._found() != connection_info.get(_OPENED):
            raise self._gone()

    def forget(self) -> None:
        """Accept any file at the next opening; at this call, no connection may be open."""
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
    """SQLite file, for transactions in the calling thread; callers keep and close the connections that they open.

    A connection serves one thread at a time and must not be open while its process forks, because the child would take
    the locks of its parent for its own (https://www.sqlite.org/howtocorrupt.html, 2.6).
    """

    def __init__(self, url: URL, *, busy_timeout_s: float = _BUSY_TIMEOUT_S) -> None:
        refuse_network(url)
        self.written, self.url = url, url.set(drivername="sqlite")
        self.path = Path(url.database or "")
        self.engine = create_engine(
            self.url,
            poolclass=NullPool,
            pool_reset_on_return=None,
            pool_logging_name=_POOL,
            # The driver's own transactions would begin only at the first write, after the reads of a decision.
            isolation_level="AUTOCOMMIT",
        )
        self.open_file = configure_sqlite(self.engine, busy_timeout_s)
        self._directory = os.path.dirname(os.path.realpath(self.path))
        event.listen(self.engine, "close", _roll_back)

    def connect(self) -> Connection:
        """Open a connection; raise `DBAPIError` or, if the file has been replaced, `UnwritableError`."""
        return self.engine.connect()

    def transact(
        self, connection: Connection, work: Callable[[Connection], T], *, read_only: bool = False, patience_s: float
    ) -> T:
        """See `AsyncDatabase.transact`; `patience_s` is the time that the caller has left to get the lock."""
        driver: Any = connection.connection.driver_connection
        try:
            # Not SQLAlchemy's transactions, which are slower, and lose an exception that a signal raises at their end.
            if read_only:
                _execute(driver, "BEGIN")
            else:
                self._begin(driver, Deadline(patience_s))
            done = work(connection)
            _execute(driver, "COMMIT")
        except BaseException:
            _roll_back(driver)
            raise
        self.open_file.check(connection.info)
        return done

    def _begin(self, driver: Any, deadline: Deadline) -> None:
        """Take the lock of the file, in turn with the writers of other processes."""
        with _turn(self._directory, deadline):
            limit = Deadline(min(_LOCK_S, deadline.left_s))
            while True:
                try:
                    return _execute(driver, "BEGIN IMMEDIATE")
                except OperationalError as error:
                    if failure_of(error) is None or not limit.left_s:
                        raise

    def drop(self, connection: Connection) -> None:
        """Roll back and close a connection that is in use; the next statement on the connection fails."""
        driver: Any = connection.connection.driver_connection
        _roll_back(driver)
        driver.close()


@contextmanager
def _turn(directory: str, deadline: Deadline) -> Iterator[None]:
    """Hold the turn, which permits to take the lock of a SQLite file in this directory.

    SQLite's writers poll for the file's lock, so that a process that writes without a pause leaves other processes
    hardly a chance. Therefore, a writer first waits for the turn, and keeps it until it has the file's lock. All other
    writers wait for the turn, including the process that has just written. The less time a writer has left, the more
    often it tries; after half of its time, it continues without the turn.

    The turn is a lock of the directory, because closing a descriptor of the file would remove SQLite's own locks.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:  # without the permission
        yield
        return
    limit = Deadline(min(_TURN_S, deadline.left_s / 2))
    try:
        while limit.left_s:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pause_s = min(_PAUSE_S, _PAUSE_SHARE * deadline.left_s)
                time.sleep(random.uniform(0, pause_s))  # nosec B311  # noqa: S311 - no secret
            except OSError:  # a file system without such locks
                break
        yield
    finally:
        os.close(descriptor)


class SqliteDatabase:
    """SQLite file, for transactions in threads.

    SQLite admits one writer at a time, so that one thread executes all writes of a process, in order. The thread
    executes whole transactions, because one thread switch per statement, as in asynchronous drivers for SQLite, would
    take longer than the statements.
    """

    def __init__(self, file: SqliteFile) -> None:
        self.file, self.url, self.written = file, file.url, file.written
        self._own = threading.local()
        self._connections: list[Connection] = []
        self._writer = ThreadPoolExecutor(1, "bso-writer")
        self._readers = ThreadPoolExecutor(_READERS, "bso-reader")

    async def transact(
        self,
        work: Callable[[Connection], T],
        *,
        read_only: bool,
        waits: bool = True,  # noqa: ARG002 - all writers queue for the file's one lock
        timeout_s: float,
    ) -> T:
        """See `AsyncDatabase.transact`; a running transaction cannot be cancelled and may be committed too late."""
        threads = self._readers if read_only else self._writer
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s) as limit:
                # A transaction that times out in the queue is not executed.
                deadline = Deadline(timeout_s)
                return await loop.run_in_executor(threads, self._transact_in_thread, work, read_only, deadline)
        except TimeoutError as error:
            if limit.expired():
                raise no_answer(timeout_s) from error
            raise

    async def close(self) -> None:
        """Wait for the running transactions, and close every connection."""
        self._writer.shutdown()
        self._readers.shutdown()
        for connection in self._connections:
            connection.close()

    def _transact_in_thread(self, work: Callable[[Connection], T], read_only: bool, deadline: Deadline) -> T:
        # Each thread keeps its connection, because opening one takes longer than a transaction.
        connection: Connection | None = getattr(self._own, "connection", None)
        if connection is None:
            try:
                connection = self._own.connection = self.file.connect()
            except DBAPIError as error:
                raise NoConnectionError(error) from error
            self._connections.append(connection)
        return self.file.transact(connection, work, read_only=read_only, patience_s=deadline.left_s)


class SyncStore:
    """Counterpart of `Store` for a SQLite file and blocking callers.

    It runs one transaction at a time on one connection, which it opens on demand; then it also upgrades the schema.

    A signal handler, or a finalizer of the garbage collector, may interrupt a transaction and use the store in the same
    thread. Neither of the two transactions can wait for the other. So the store rolls back the interrupted transaction,
    and repeats it afterwards.

    The store logs a server's INFO lines only if the user has set a level for the logger ``bso_server``. While another
    process has the file locked, the thread handles no signals for up to the busy timeout of the file. The store holds
    the reentrant `lock` during each attempt at a transaction.
    """

    def __init__(self, file: SqliteFile, lock: AbstractContextManager[object]) -> None:
        self._file = file
        self._lock = lock
        self._connection: Connection | None = None
        # Number of transactions under way: more than one if a handler has interrupted a transaction of its thread.
        self._depth = 0
        self._is_broken_in = False

    def write(self, work: Callable[[Transaction], T], *, timeout_s: float) -> T:
        """Execute `work` in a transaction as `Store.write` does; wait up to `timeout_s` seconds for other processes.

        Raises:
            DatabaseUnavailableError: The file stays locked, or cannot be read or written.
            DatabaseNotReadyError: A newer version has written the file's schema.
        """
        return self._transact(work, read_only=False, timeout_s=timeout_s)

    def read(self, work: Callable[[Transaction], T], *, timeout_s: float) -> T:
        """Execute `work`, which only reads, in a transaction that blocks no writer; otherwise like `write`."""
        return self._transact(work, read_only=True, timeout_s=timeout_s)

    def close(self, *, keeps_file: bool = False) -> None:
        """Close the connection, if it is open; with `keeps_file`, the next connection must open the same file."""
        with self._lock:
            connection, self._connection = self._connection, None
            _close(connection)
            if not keeps_file:
                self._file.open_file.forget()

    def _transact(self, work: Callable[[Transaction], T], *, read_only: bool, timeout_s: float) -> T:
        deadline = Deadline(timeout_s)
        retries = Retries(deadline, level=logging.DEBUG)
        while True:
            try:
                return self._attempt(work, read_only=read_only, patience_s=deadline.left_s)
            except _BrokenInError:
                continue
            except ComputeFirstError as needed:
                compute = self._transact(needed.read, read_only=True, timeout_s=timeout_s)
                self._transact(compute(), read_only=False, timeout_s=timeout_s)
            except UnwritableError as error:
                raise DatabaseUnavailableError(str(error), fault=error.fault) from error
            except (DBAPIError, JobExistsError) as error:
                failure = failure_of(error)
                if failure is None:
                    raise DatabaseUnavailableError(str(NoConnectionError(error))) from error
                wait_s = retries.wait_s(failure, error)
                if wait_s is None:
                    raise DatabaseUnavailableError(
                        f"timed out after {timeout_s:.3g} s, because another process has the file locked"
                    ) from error
                time.sleep(wait_s)

    def _attempt(self, work: Callable[[Transaction], T], *, read_only: bool, patience_s: float) -> T:
        def work_on(connection: Connection) -> tuple[T, Transaction]:
            transaction = Transaction(connection)
            return work(transaction), transaction

        with self._lock:
            depth = self._depth
            if depth:
                # This makes the next statement of the interrupted transaction fail.
                self._drop()
            self._depth, self._is_broken_in = depth + 1, False
            connection: Connection | None = None
            try:
                connection = self._connection or self._open(patience_s)
                # Do not wait for the turn, because the interrupted transaction may hold it.
                limit_s = 0.0 if depth else patience_s
                done, transaction = self._file.transact(connection, work_on, read_only=read_only, patience_s=limit_s)
            except BaseException as error:
                if not isinstance(error, (BsoError, JobExistsError)):
                    # An exception from a signal handler can leave the connection in any state.
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
                # If this transaction has interrupted another one, mark the other one as interrupted.
                self._depth, self._is_broken_in = depth, depth > 0

    def _drop(self) -> None:
        """Close the connection, even during a statement."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(SQLAlchemyError, sqlite3.Error):
                self._file.drop(connection)

    def _open(self, patience_s: float) -> Connection:
        try:
            connection = self._connection = self._file.connect()
            found = self._file.transact(connection, migrations.current, read_only=True, patience_s=patience_s)
            if found != migrations.HEAD:
                migrations.refuse_newer(found, described(self._file.written))
                if found is not None:
                    back_up_old_schema(self._file.path)
                with _unlogged():
                    self._file.transact(connection, migrations.upgrade, patience_s=patience_s)
        except BaseException:
            unusable = self._connection
            self._drop()
            _close(unusable)
            raise
        return connection


@contextmanager
def _unlogged() -> Iterator[None]:
    """Keep INFO lines of a migration out of a training's log, unless the user has set a level."""
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
        # Errors of the disk, or of a dropped connection, no longer matter.
        with suppress(SQLAlchemyError, sqlite3.Error):
            connection.close()


class _BrokenInError(Exception):
    """Another transaction of the same thread has interrupted this one."""


def back_up(file: Path, copy: Path) -> None:
    """Copy a SQLite file as of one moment, even while other processes write to it.

    `copy` appears, or is replaced, only when the copy is complete, checked and on the disk.

    Raises:
        OSError: The file cannot be read or is damaged, or the copy cannot be written.
    """
    # The copy is private from the beginning, like the database; SQLite accepts an empty file as its target.
    descriptor, partial = tempfile.mkstemp(".partial", f"{copy.name}.", copy.parent)
    os.close(descriptor)
    try:
        with closing(sqlite3.connect(file)) as source:
            source.execute("VACUUM INTO ?", (partial,))
        with closing(sqlite3.connect(partial)) as made:
            (found,) = made.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(f"the copy is damaged: {found}")
        with open(partial, "rb+") as written:
            os.fsync(written.fileno())
        os.replace(partial, copy)
    except sqlite3.Error as error:
        raise OSError(f"{file} cannot be copied to {copy}: {error}") from error
    finally:
        Path(partial).unlink(missing_ok=True)


def back_up_old_schema(file: Path) -> None:
    """Copy a SQLite file to a backup beside it, before its schema is upgraded."""
    copy = Path(f"{file}.{datetime.now(UTC):%Y%m%dT%H%M%SZ}.backup")
    back_up(file, copy)
    logger.info("the database was copied to %s before its schema is upgraded", copy)


def network_filesystem(path: Path, mounts: str | None = None) -> str | None:
    """Return the type of the network file system that holds `path`, or None if it is local or unknown.

    The file need not exist. `mounts` has the format of ``/proc/mounts``, which is the default.
    """
    if mounts is None:
        mounts = _MOUNTS.read_text() if _MOUNTS.exists() else ""
    resolved = path.resolve()
    best, kind = -1, ""
    for line in mounts.splitlines():
        _device, mount_point, filesystem, *_ = line.split()
        # The kernel writes blanks and backslashes as octal escapes.
        point = Path(mount_point.encode().decode("unicode_escape"))
        # A later mount on the same point hides an earlier one.
        if resolved.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), filesystem
    return kind if _NETWORK.fullmatch(kind) else None


def refuse_network(url: URL) -> None:
    """Raise `ValueError` for a database in memory or on a network file system; otherwise create its directory."""
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
    # If a connection closes during a statement, SQLite keeps the lock as long as the statement is referenced.
    with suppress(sqlite3.Error):
        driver.rollback()


def configure_sqlite(engine: Engine, busy_timeout_s: float = _BUSY_TIMEOUT_S) -> OpenFile:
    """Set up each connection of an engine, and return the check of its file."""
    open_file = OpenFile(engine.url.database or "")

    @event.listens_for(engine, "do_connect")
    def _make(*_arguments: Any) -> None:
        open_file.before_open()
        # Create a private file, because it names jobs and owners; SQLite gives its companion files this mode. If the
        # file exists, or cannot be created, SQLite handles that.
        with suppress(OSError):
            os.close(os.open(engine.url.database or "", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))

    @event.listens_for(engine, "connect")
    def _configure(connection: Any, record: Any) -> None:
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {round(busy_timeout_s * 1000)}")
        cursor.execute("PRAGMA journal_mode = WAL")
        # FULL: a committed report survives a power cut.
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.execute("PRAGMA foreign_keys = ON")
        # Bytes to which a log is cut that grew beside a long read.
        cursor.execute("PRAGMA journal_size_limit = 4194304")
        # The first read creates the companion files.
        cursor.execute("SELECT 1 FROM sqlite_master LIMIT 1")
        cursor.close()
        open_file.opened(record.info)

    return open_file


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
