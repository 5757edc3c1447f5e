"""Databases of all kinds: their URLs, and how a transaction runs on each kind.

Work is a plain function over a synchronous SQLAlchemy connection. It can wait for nothing but the database, so that no
transaction stays open because something else is slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.pool import AsyncAdaptedQueuePool

from bso_server.storage.deadlines import PATIENCE_S
from bso_server.storage.faults import NoConnectionError, UnwritableError, no_answer
from bso_server.storage.sqlite import (
    READ_ONLY,
    READERS,
    OpenFile,
    SqliteDatabase,
    SqliteFile,
    begin,
    configure_sqlite,
    refuse_network,
)

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

# Connections that one server process holds open at most; a request that finds none free waits for one.
_POOL_SIZE = 10

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

# Transactions that may wait for other clients' locks, of which so many run at once. The other connections are for those
# that wait for no lock, which would else wait with them.
_POOL_OF_WAITING = 6

# Seconds after which a transaction that was given up is told once more to end, and for which its end is waited for when
# the database is closed.
_END_S = 5.0

T = TypeVar("T")


class Database(Protocol):
    """A database and the way to work on it."""

    url: URL
    """The place of the database."""

    async def transact(
        self,
        work: Callable[[Connection], T],
        *,
        read_only: bool = False,
        waits: bool = True,
        timeout_s: float = PATIENCE_S,
    ) -> T:
        """Do `work` in a transaction that is committed when it returns, and rolled back when it raises.

        Args:
            work: Reads and writes through the connection.
            read_only: It only reads, and must make no writer wait. All that it reads is of one moment.
            waits: It may wait for locks of others. Other work does not wait behind it for a connection.
            timeout_s: Seconds until it is given up, whatever it is waiting for; its connection is closed then.

        Raises:
            NoConnectionError: The database cannot be reached, can no longer, or does not answer in time.
            UnwritableError: The file of the database was taken away; `work` may be in force.
        """
        ...

    async def close(self) -> None:
        """Close every connection."""
        ...


# Seconds that a session may be idle within a transaction: its client has stopped, or is cut off, and keeps its locks.
_IDLE_S = 10.0


def session_limits(backend: str, patience_s: float, *, is_local: bool = False) -> str:
    """Return the statement that limits a session's transactions to so many seconds, on a database that has sessions.

    A lock is waited for only 0.4 of that: there is time for another attempt, without the locks held then. PostgreSQL
    looks for deadlocks after 1 s, and ends one of two transactions only if they wait for longer. There, local limits
    hold for the transaction at hand; other databases know nothing of the kind.
    """
    lock_s = 0.4 * patience_s
    if backend == "postgresql":
        limits = {
            "statement_timeout": patience_s,
            "lock_timeout": lock_s,
            "idle_in_transaction_session_timeout": patience_s + _IDLE_S,
        }
        # One statement, as a prepared one must be.
        return "SELECT " + ", ".join(
            f"set_config('{name}', '{max(1, round(1000 * limit_s))}', {is_local})" for name, limit_s in limits.items()
        )
    # Whole seconds. MySQL and MariaDB each read what is written for it in a comment, and have other names for the same;
    # MySQL knows no limit on statements that write, and none on idle transactions.
    whole_lock_s, statement_s = max(1, round(lock_s)), max(1, round(patience_s))
    idle_s = round(statement_s + _IDLE_S)
    return (
        f"SET innodb_lock_wait_timeout = {whole_lock_s}, lock_wait_timeout = {whole_lock_s}"
        f" /*!50708 , max_execution_time = {1000 * statement_s} */"
        f" /*M!100301 , max_statement_time = {statement_s}, idle_transaction_timeout = {idle_s} */"
    )


class AsyncDatabase:
    """A database over an asynchronous driver: PostgreSQL, MySQL, MariaDB, or a SQLite file over aiosqlite.

    A transaction is a task of its own, so that one that is given up need not be waited for: to break off its statement
    and to close its connection may take seconds more.

    Args:
        engine: The connections.
        open_file: The SQLite file that they are to.
        patience_s: Seconds that a transaction may take without its session's limits being raised for it.
    """

    def __init__(
        self, engine: AsyncEngine, open_file: OpenFile | None = None, *, patience_s: float = PATIENCE_S
    ) -> None:
        self._engine, self.url, self._open_file = engine, engine.url, open_file
        self._patience_s = patience_s
        self._is_sqlite = engine.dialect.name == "sqlite"
        # SQLite lets one writer in at a time, and those that wait for its lock poll: within a process they queue here.
        self._waiting: AbstractAsyncContextManager[object] = (
            asyncio.Lock() if self._is_sqlite else asyncio.Semaphore(_POOL_OF_WAITING)
        )
        # By default each statement would see what was committed until then; on SQLite a transaction sees one moment.
        self._one_moment = None if self._is_sqlite else "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"
        self._given_up: set[asyncio.Task[None]] = set()

    async def transact(
        self,
        work: Callable[[Connection], T],
        *,
        read_only: bool = False,
        waits: bool = True,
        timeout_s: float = PATIENCE_S,
    ) -> T:
        """See `Database.transact`."""
        queues = not read_only and (waits or self._is_sqlite)
        transaction = asyncio.create_task(
            self._transact(work, read_only=read_only, queues=queues, limit_s=timeout_s),
        )
        try:
            done, _ = await asyncio.wait({transaction}, timeout=timeout_s)
        finally:
            if not transaction.done():
                self._give_up(transaction)
        if not done:
            raise no_answer(timeout_s)
        return transaction.result()

    async def _transact(self, work: Callable[[Connection], T], *, read_only: bool, queues: bool, limit_s: float) -> T:
        connected = False
        try:
            async with self._waiting if queues else nullcontext(), self._engine.connect() as connection:
                connected = True
                connection.info[READ_ONLY] = read_only
                is_long = limit_s > self._patience_s and not self._is_sqlite
                try:
                    async with connection.begin():
                        if read_only and self._one_moment is not None:
                            # It holds for one transaction: SQLAlchemy's option is taken back when a connection returns
                            # to the pool, and one that is lost by then would never return.
                            await connection.exec_driver_sql(self._one_moment)
                        if is_long:
                            limits = session_limits(self._engine.dialect.name, limit_s, is_local=True)
                            await connection.exec_driver_sql(limits)
                        done = await connection.run_sync(work)
                finally:
                    if is_long and self._engine.dialect.name != "postgresql":
                        # The session's limits are no more those of the others.
                        await connection.invalidate()
                if self._open_file is not None:
                    self._open_file.check(connection.info)
                return done
        except UnwritableError:
            raise
        except Exception as error:
            # Drivers raise this and that while they connect.
            if connected and not (isinstance(error, DBAPIError) and error.connection_invalidated):
                raise
            raise NoConnectionError(error) from error

    def _give_up(self, transaction: asyncio.Task[T]) -> None:
        """End a transaction by and by; its connection is closed, for nobody knows what it is in the middle of."""

        async def end() -> None:
            while not transaction.done():
                # More than once: waits for a queue and drivers have been seen to swallow it.
                transaction.cancel()
                await asyncio.wait({transaction}, timeout=_END_S)
            if not transaction.cancelled():
                transaction.exception()  # looked at, or asyncio would log it

        ending = asyncio.create_task(end())
        self._given_up.add(ending)
        ending.add_done_callback(self._given_up.discard)

    async def close(self) -> None:
        """Close every connection."""
        if self._given_up:
            await asyncio.wait(self._given_up, timeout=_END_S)
        # A network that says nothing must not keep the server from ending.
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await self._engine.dispose()


def limit_sessions(engine: Engine, patience_s: float) -> None:
    """Have each session of these connections begin with limits of so many seconds."""
    sql = session_limits(engine.dialect.name, patience_s)
    execute = "execute" if engine.dialect.name == "postgresql" else "query"

    @event.listens_for(engine, "connect")
    def _limit(connection: Any, _record: Any) -> None:
        # By the driver itself, as the adapter would begin a transaction for it; and not as parameters of the
        # connection, which poolers like PgBouncer refuse.
        connection.run_async(lambda driver: getattr(driver, execute)(sql))


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
        refuse_network(url)
        options: dict[str, Any] = {"pool_size": READERS + 1}
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
            # a traceback in the log where the connection is lost. Nor is a connection pinged when it is taken: if it
            # was lost, its transaction is begun again, and all connections that are as old are made anew.
            pool_reset_on_return=None,
            **options,
        )
    except ModuleNotFoundError as error:
        extra = _EXTRAS[url.get_backend_name()]
        raise ValueError(f"{error.name} is not installed: pip install 'zeus-plugins[{extra}]'") from error
    open_file = None
    if url.drivername == _AIOSQLITE:
        open_file = configure_sqlite(engine.sync_engine)
        event.listen(engine.sync_engine, "begin", begin)
    else:
        limit_sessions(engine.sync_engine, patience_s)
    return AsyncDatabase(engine, open_file, patience_s=patience_s)


def open_sqlite_file(database_url: str, *, echo_sql: bool = False, busy_timeout_s: float) -> SqliteFile | None:
    """The SQLite file that a URL names; None where it names another kind of database. Errors as in `open_database`.

    A statement waits for another connection's lock as many seconds as `busy_timeout_s` says.
    """
    url = _url(database_url)
    if url.get_backend_name() != "sqlite":
        return None
    return SqliteFile(url, echo_sql=echo_sql, busy_timeout_s=busy_timeout_s)


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
