"""Connections: how work on a database is run, on each kind of database.

Work is a plain function over a synchronous SQLAlchemy connection. It can wait for nothing but the database, so that no
transaction stays open because something else is slow.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.pool import AsyncAdaptedQueuePool, NullPool

from bso_server.storage.async_database import (
    READ_ONLY,
    AsyncDatabase,
    NoConnectionError,
    limit_sessions,
    no_answer,
    ping_after_idle,
)
from bso_server.storage.deadlines import PATIENCE_S, SessionLimits
from bso_server.storage.filesystem import network_filesystem
from bso_server.storage.unwritable import OpenFile
from bso_server.storage.work_queue import WorkQueue

# Seconds that a SQLite connection waits for another process's transaction; then the transaction is begun again, while
# there is time.
_SQLITE_BUSY_TIMEOUT_S = 1
_SQLITE_READERS = 4

# Connections that one server process holds open at most; a request that finds none free waits for one.
_POOL_SIZE = 10

# SQLAlchemy would log the cursors of a connection that `SqliteFile.drop` has closed.
_POOL = "bso_server"
logging.getLogger(f"sqlalchemy.pool.impl.NullPool.{_POOL}").setLevel(logging.CRITICAL)

_DRIVERS = {
    "sqlite": "sqlite",
    "postgresql": "postgresql+asyncpg",
    "mysql": "mysql+asyncmy",
    "mariadb": "mariadb+asyncmy",
}
_AIOSQLITE = "sqlite+aiosqlite"
_OTHER_NAMES = {"postgres": "postgresql"}  # of Heroku and of libpq; SQLAlchemy has dropped it
_EXTRAS = {"sqlite": "server", "postgresql": "postgres", "mysql": "mysql", "mariadb": "mysql"}

# Seconds after which a host that says nothing counts as away.
_CONNECT_TIMEOUT_S = 5
_CONNECT_TIMEOUTS = {"postgresql": "timeout", "mysql": "connect_timeout", "mariadb": "connect_timeout"}

T = TypeVar("T")


class Database(Protocol):
    """A database and the way to work on it."""

    url: URL
    """The place of the database."""

    queues_writers: bool
    """True if writers wait for one another in this process, without a connection each."""

    async def run(
        self,
        work: Callable[[Connection], T],
        *,
        read_only: bool = False,
        waits: bool = True,
        alone: bool = False,
        timeout_s: float = PATIENCE_S,
    ) -> T:
        """Do `work` in a transaction that is committed when it returns, and rolled back when it raises.

        Args:
            work: Reads and writes through the connection.
            read_only: It only reads, and must make no writer wait. All that it reads is of one moment.
            waits: It may wait for locks of others. Other work does not wait behind it for a connection.
            alone: It may take long, or must not be done again: other work does not share its transaction.
            timeout_s: Seconds until it is given up, whatever it is waiting for; its connection is closed then.

        Raises:
            NoConnectionError: The database cannot be reached, can no longer, or does not answer in time.
            UnwritableError: The file of the database was taken away; `work` may be in force.
        """
        ...

    async def close(self) -> None:
        """Close every connection."""
        ...


class SqliteFile:
    """A SQLite file, worked on in the thread that calls; whoever opens a connection to it keeps and closes that.

    A connection serves one thread at a time and must not be open while its process forks: the child would take its
    parent's locks for its own (https://www.sqlite.org/howtocorrupt.html, 2.6). Arguments as in `open_sqlite_file`.
    """

    def __init__(self, url: URL, *, echo_sql: bool = False, busy_timeout_s: float = _SQLITE_BUSY_TIMEOUT_S) -> None:
        _refuse_network(url)
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
        self._open_file = _configure_sqlite(self.engine, busy_timeout_s)
        event.listen(self.engine, "close", _roll_back)

    def connect(self) -> Connection:
        """Open a connection.

        Raises:
            DBAPIError: The file cannot be opened, or is no database.
            UnwritableError: It is another one than before; `forget` makes that all the same.
        """
        return self.engine.connect()

    def run(self, connection: Connection, work: Callable[[Connection], T], *, read_only: bool = False) -> T:
        """See `Database.run`; the connection is one of this file's."""
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
    and fro for each statement, as asynchronous drivers for SQLite do, costs more than the statements. Work that waits
    meanwhile shares the next one (`storage.work_queue`), but for what may take long.
    """

    queues_writers = True

    def __init__(self, file: SqliteFile) -> None:
        self.file, self.url = file, file.url
        self._own = threading.local()
        self._connections: list[Connection] = []
        self._writers = WorkQueue(self._write, threads=1, name="bso-writer", writes=True)
        self._readers = WorkQueue(self._read, threads=_SQLITE_READERS, name="bso-reader", writes=False)

    async def run(
        self,
        work: Callable[[Connection], T],
        *,
        read_only: bool = False,
        waits: bool = True,  # noqa: ARG002 - all writers queue for the file's one lock
        alone: bool = False,
        timeout_s: float = PATIENCE_S,
    ) -> T:
        """See `Database.run`. A transaction that has begun cannot be given up: it may be in force a little later."""
        queue = self._readers if read_only else self._writers
        try:
            async with asyncio.timeout(timeout_s) as limit:
                # Given up while it queues, it is not begun.
                return await queue.do(work, is_long=alone)
        except TimeoutError as error:
            if limit.expired():
                raise no_answer(timeout_s) from error
            raise

    async def close(self) -> None:
        """Let the work in hand end, and close every connection."""
        # All that this event loop still has to do is to end.
        self._writers.close()
        self._readers.close()
        for connection in self._connections:
            connection.close()

    def _write(self, work: Callable[[Connection], T]) -> T:
        return self.file.run(self._connection(), work)

    def _read(self, work: Callable[[Connection], T]) -> T:
        return self.file.run(self._connection(), work, read_only=True)

    def _connection(self) -> Connection:
        """This thread's connection, which it keeps: opening one costs more than a transaction."""
        connection: Connection | None = getattr(self._own, "connection", None)
        if connection is None:
            try:
                connection = self._own.connection = self.file.connect()
            except DBAPIError as error:
                raise NoConnectionError(error) from error
            self._connections.append(connection)
        return connection


def open_database(
    database_url: str,
    *,
    user: str | None = None,
    password: str | None = None,
    echo_sql: bool = False,
    patience_s: float = PATIENCE_S,
) -> Database:
    """Open a database, and make the directory of a SQLite file if need be; nothing is connected yet.

    Args:
        database_url: An SQLAlchemy URL. ``sqlite+aiosqlite://``, ``postgresql+asyncpg://`` and ``mysql+asyncmy://`` run
            over that driver; ``sqlite://`` on Python's own, in threads; ``postgresql://`` and ``mysql://`` over the
            driver of this project's extras.
        user: User, where the URL names none.
        password: Password, where the URL holds none.
        echo_sql: Log every statement.
        patience_s: Seconds that transactions take at most; the sessions' limits are set by it.

    Raises:
        ValueError: The URL cannot be read, its driver is not installed, or it is a SQLite file that several hosts
            could open.
    """
    url = _url(database_url)
    if url.get_backend_name() == "sqlite":
        if url.drivername != _AIOSQLITE:
            return SqliteDatabase(SqliteFile(url, echo_sql=echo_sql))
        _refuse_network(url)
        options: dict[str, Any] = {"pool_size": _SQLITE_READERS + 1}
    else:
        url = url.set(username=url.username or user, password=url.password or password)
        timeout = _CONNECT_TIMEOUTS[url.get_backend_name()]
        options = {
            "connect_args": {} if timeout in url.query else {timeout: _CONNECT_TIMEOUT_S},
            "pool_size": _POOL_SIZE,
            # Whoever waits for one has a deadline of its own.
            "pool_timeout": None,
        }
    # Loaded where it is needed: a training on a SQLite file does not wait for it.
    from sqlalchemy.ext.asyncio import create_async_engine

    try:
        engine = create_async_engine(
            url,
            echo=echo_sql,
            # SQLAlchemy before 2.0.38 has another default for aiosqlite.
            poolclass=AsyncAdaptedQueuePool,
            max_overflow=0,
            # Each transaction has ended when its connection returns. A rollback to make sure would be a round trip, and
            # a traceback in the log where the connection is lost.
            pool_reset_on_return=None,
            **options,
        )
    except ModuleNotFoundError as error:
        extra = _EXTRAS[url.get_backend_name()]
        raise ValueError(f"{error.name} is not installed: pip install 'zeus-plugins[{extra}]'") from error
    open_file = None
    if url.drivername == _AIOSQLITE:
        open_file = _configure_sqlite(engine.sync_engine)
        event.listen(engine.sync_engine, "begin", _begin)
    else:
        limit_sessions(engine.sync_engine, SessionLimits(patience_s))
        ping_after_idle(engine.sync_engine)
    return AsyncDatabase(engine, open_file, patience_s=patience_s)


def back_up(file: Path) -> None:
    """Copy a SQLite file beside itself before its schema is upgraded, consistently even while others write to it."""
    copy = Path(f"{file}.{datetime.now(UTC):%Y%m%dT%H%M%SZ}.backup")
    with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    logging.getLogger("bso_server").info("the database was copied to %s before its schema is upgraded", copy)


def open_sqlite_file(database_url: str, *, echo_sql: bool = False, busy_timeout_s: float) -> SqliteFile | None:
    """The SQLite file that a URL names; None where it names another kind of database. Errors as in `open_database`.

    A statement waits for another connection's lock as many seconds as `busy_timeout_s` says.
    """
    url = _url(database_url)
    if url.get_backend_name() != "sqlite":
        return None
    return SqliteFile(url, echo_sql=echo_sql, busy_timeout_s=busy_timeout_s)


# Codes by which databases say that a transaction was broken off through no fault of its own.
_POSTGRES_PASSING = {
    "40001",  # serialization failure
    "40P01",  # deadlock
    "55P03",  # lock not available: within lock_timeout
    "57014",  # query canceled: by statement_timeout
}
_MYSQL_PASSING = {
    1053,  # shutting down
    1205,  # lock wait timeout
    1213,  # deadlock
    1969,  # MariaDB's max_statement_time
    3024,  # MySQL's max_execution_time
}


def is_passing(error: DBAPIError) -> bool:
    """Whether the same work, done again, may well succeed."""
    cause = error.orig
    if getattr(cause, "sqlstate", None) in _POSTGRES_PASSING:
        return True
    code = cause.args[0] if cause is not None and cause.args else None
    return code in _MYSQL_PASSING or (isinstance(code, str) and "database is locked" in code)


def _url(database_url: str) -> URL:
    try:
        url = make_url(database_url)
    except ArgumentError:
        # The URL is not repeated: it may hold a password.
        raise ValueError(
            "the database URL cannot be read; it looks like sqlite:////var/lib/bso.sqlite3 "
            "or postgresql://user:password@host/database"
        ) from None
    backend = _OTHER_NAMES.get(url.get_backend_name(), url.get_backend_name())
    if backend not in _DRIVERS:
        raise ValueError(f"{backend} databases are not supported: use SQLite, PostgreSQL, MySQL or MariaDB")
    if url.drivername not in {*_DRIVERS, *_DRIVERS.values(), _AIOSQLITE, "sqlite+pysqlite"}:
        written = url.set(drivername=backend, query={}).render_as_string(hide_password=True)
        raise ValueError(
            f"the database URL begins with {url.drivername}://, a driver that this server does not use: write "
            f"{written} (with your password), and the server's own driver is used"
        )
    return url.set(drivername=_DRIVERS.get(url.drivername, url.drivername))


def described(url: URL) -> str:
    """A URL as a user would write it, without its password."""
    # Drivers take it there, too.
    query = {name: "***" if "pass" in name.lower() else value for name, value in url.query.items()}
    shown = url.set(drivername=url.get_backend_name(), query=query)
    return shown.render_as_string(hide_password=True)


def _refuse_network(url: URL) -> None:
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


def _configure_sqlite(engine: Engine, busy_timeout_s: float = _SQLITE_BUSY_TIMEOUT_S) -> OpenFile:
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


def _begin(connection: Connection) -> None:
    # Through SQLAlchemy it would cost a sixth of a small transaction.
    _execute(connection.connection.cursor(), "BEGIN" if connection.info.get(READ_ONLY) else "BEGIN IMMEDIATE")


def _execute(driver: Any, statement: str) -> None:
    try:
        driver.execute(statement)
    except sqlite3.Error as error:
        raise OperationalError(statement, None, error) from error
