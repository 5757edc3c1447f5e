"""Databases of all kinds: URLs, connections, and transactions on each kind.

The work of a transaction is a plain function that takes a synchronous SQLAlchemy connection. Such a function can wait
only for the database, so that no transaction stays open because of another slow operation.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from bso_server.storage.deadlines import PATIENCE_S
from bso_server.storage.faults import NoConnectionError, no_answer
from bso_server.storage.sqlite import SqliteDatabase, SqliteFile

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

# Connections of one server process; a request that finds none free waits.
_POOL_SIZE = 10

# For each kind of database: its driver, and the extra of this package that installs the driver.
_DRIVERS = {
    "sqlite": ("sqlite", "server"),
    "postgresql": ("postgresql+asyncpg", "postgres"),
    "mysql": ("mysql+asyncmy", "mysql"),
    "mariadb": ("mariadb+asyncmy", "mysql"),
}
# SQLite runs on Python's own driver, whichever driver the URL names.
_ACCEPTED = {*_DRIVERS, *(driver for driver, _ in _DRIVERS.values()), "sqlite+aiosqlite", "sqlite+pysqlite"}

# Seconds until a host that does not answer counts as unreachable.
_CONNECT_TIMEOUT_S = 5

# Connections for transactions that may wait for locks; the others stay free for work without locks.
_POOL_OF_WAITING = 6

# Seconds between two attempts to cancel a transaction that was given up; also the limit of each wait in `close`.
_END_S = 5.0

# Seconds beyond the patience that a session may be idle in a transaction, as when its client has lost the network.
_IDLE_S = 10.0

T = TypeVar("T")


def session_limits(backend: str, patience_s: float, *, is_local: bool = False) -> str:
    """Return the SQL that limits the transactions of a session on a database server to `patience_s` seconds.

    A session waits for a lock for at most 0.4 `patience_s`, so that the store can retry without the locks that the
    transaction held. PostgreSQL looks for a deadlock only after a transaction has waited 1 s for a lock. With
    `is_local`, PostgreSQL limits only the current transaction; other databases cannot do so.
    """
    lock_s = 0.4 * patience_s
    if backend == "postgresql":
        limits = {
            "statement_timeout": patience_s,
            "lock_timeout": lock_s,
            "idle_in_transaction_session_timeout": patience_s + _IDLE_S,
        }
        # One statement, because the driver prepares it, and cannot prepare several at once.
        return "SELECT " + ", ".join(
            f"set_config('{name}', '{max(1, round(1000 * limit_s))}', {is_local})" for name, limit_s in limits.items()
        )
    # The limits are whole seconds. MySQL executes the first comment, MariaDB the second, because their variables have
    # different names. MySQL cannot limit statements that write, or idle transactions.
    whole_lock_s, statement_s = max(1, round(lock_s)), max(1, round(patience_s))
    idle_s = round(statement_s + _IDLE_S)
    return (
        f"SET innodb_lock_wait_timeout = {whole_lock_s}, lock_wait_timeout = {whole_lock_s}"
        f" /*!50708 , max_execution_time = {1000 * statement_s} */"
        f" /*M!100301 , max_statement_time = {statement_s}, idle_transaction_timeout = {idle_s} */"
    )


class AsyncDatabase:
    """Database of a server: PostgreSQL, MySQL or MariaDB.

    Each transaction is a task of its own, so that a caller can give up without waiting for the task's end: aborting its
    statement and closing its connection may take several seconds.

    Args:
        engine: The connections.
        written: The URL as the user wrote it.
        patience_s: Seconds to which the sessions limit their transactions.
    """

    def __init__(self, engine: AsyncEngine, written: URL, *, patience_s: float) -> None:
        self._engine, self.url, self.written, self._patience_s = engine, engine.url, written, patience_s
        self._waiting = asyncio.Semaphore(_POOL_OF_WAITING)
        self._given_up: set[asyncio.Task[None]] = set()

    async def transact(
        self, work: Callable[[Connection], T], *, read_only: bool, waits: bool = True, timeout_s: float
    ) -> T:
        """Execute `work` in a transaction; commit when it returns, roll back when it raises.

        Args:
            work: The statements.
            read_only: `work` only reads, blocks no writer, and sees one snapshot.
            waits: `work` may wait for locks. Work that waits for no locks does not queue behind it.
            timeout_s: Seconds until the transaction is given up and its connection closed.

        Raises:
            NoConnectionError: The database cannot be reached, the connection was lost, or the time is over.
        """
        queues = waits and not read_only
        transaction = asyncio.create_task(self._transact(work, read_only=read_only, queues=queues, limit_s=timeout_s))
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
                is_long = limit_s > self._patience_s
                try:
                    async with connection.begin():
                        if read_only:
                            # By default, each statement on PostgreSQL would see its own snapshot. Not by SQLAlchemy's
                            # option `isolation_level`, which stays set if the connection is lost.
                            await connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                        if is_long:
                            limits = session_limits(self._engine.dialect.name, limit_s, is_local=True)
                            await connection.exec_driver_sql(limits)
                        return await connection.run_sync(work)
                finally:
                    if is_long and self._engine.dialect.name != "postgresql":
                        # The session would keep the longer limits, and later transactions would inherit them.
                        await connection.invalidate()
        except Exception as error:
            if isinstance(error, TypeError) and "keyword argument" in str(error):
                raise ValueError(
                    f"the database URL has an option that the driver does not take: {error}. docs/server.md#database "
                    "lists the options for TLS"
                ) from error
            # Drivers raise errors of many types while they connect.
            if connected and not (isinstance(error, DBAPIError) and error.connection_invalidated):
                raise
            raise NoConnectionError(error) from error

    def _give_up(self, transaction: asyncio.Task[T]) -> None:
        """Cancel a transaction in the background, which closes its connection."""

        async def end() -> None:
            while not transaction.done():
                # Repeatedly, because queues and drivers sometimes swallow a cancellation.
                transaction.cancel()
                await asyncio.wait({transaction}, timeout=_END_S)
            if not transaction.cancelled():
                transaction.exception()  # retrieved, or asyncio would log it

        ending = asyncio.create_task(end())
        self._given_up.add(ending)
        ending.add_done_callback(self._given_up.discard)

    async def close(self) -> None:
        """Close every connection."""
        if self._given_up:
            await asyncio.wait(self._given_up, timeout=_END_S)
        # A network that does not answer must not prevent the server from ending.
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await self._engine.dispose()


Database: TypeAlias = AsyncDatabase | SqliteDatabase


def _limit_sessions(engine: Engine, patience_s: float) -> None:
    """Set `session_limits`, and the isolation of writers, on each new connection of an engine."""
    statements = [session_limits(engine.dialect.name, patience_s)]
    execute = "execute" if engine.dialect.name == "postgresql" else "query"
    if engine.dialect.name != "postgresql":
        # By default, MySQL shows a writer the moment of its first statement, even after the writer has taken a lock.
        statements.append("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")

    @event.listens_for(engine, "connect")
    def _limit(connection: Any, _record: Any) -> None:
        # By the driver, because SQLAlchemy's adapter would begin a transaction. The limits are not parameters of the
        # connection, because poolers such as PgBouncer refuse these.
        for sql in statements:
            connection.run_async(lambda driver, sql=sql: getattr(driver, execute)(sql))


def open_database(
    database_url: str, *, user: str | None = None, password: str | None = None, patience_s: float = PATIENCE_S
) -> Database:
    """Open a database, and make the directory of a SQLite file, without connecting yet.

    Args:
        database_url: SQLAlchemy URL. ``sqlite://`` runs on Python's own driver in threads; ``postgresql://`` and
            ``mysql://`` select the drivers of this project's extras.
        user: User, if the URL names none.
        password: Password, if the URL has none.
        patience_s: Seconds to which the sessions limit their transactions.

    Raises:
        ValueError: The URL is invalid, its driver is not installed, or its SQLite database is in memory or on a network
            file system.
    """
    url = _url(database_url)
    backend = url.get_backend_name()
    if backend == "sqlite":
        return SqliteDatabase(SqliteFile(url))
    url = url.set(username=url.username or user, password=url.password or password)
    driven, arguments = _for_driver(url)
    # Imported here, because a training on a SQLite file does not need it.
    from sqlalchemy.ext.asyncio import create_async_engine

    try:
        engine = create_async_engine(
            driven.set(drivername=_DRIVERS[backend][0]) if url.drivername in _DRIVERS else driven,
            connect_args=arguments,
            pool_size=_POOL_SIZE,
            max_overflow=0,
            # Transactions have deadlines of their own.
            pool_timeout=None,
            # No rollback when a connection returns to the pool: its transaction has ended. A rollback would be another
            # round trip, and would log a traceback if the connection is lost. The pool does not ping connections
            # either: after a loss, the store retries the transaction, and the pool replaces all older connections.
            pool_reset_on_return=None,
        )
    except ModuleNotFoundError as error:
        extra = _DRIVERS[backend][1]
        raise ValueError(f"{error.name} is not installed: pip install 'zeus-plugins[{extra}]'") from error
    _limit_sessions(engine.sync_engine, patience_s)
    return AsyncDatabase(engine, url, patience_s=patience_s)


def _for_driver(url: URL) -> tuple[URL, dict[str, Any]]:
    """Return a URL without the options that its driver takes in another form, and the arguments that replace them."""
    query: dict[str, Any] = dict(url.query)
    limit_s = float(query.pop("timeout", query.pop("connect_timeout", _CONNECT_TIMEOUT_S)))
    needs_tls = (query.get("ssl") or query.get("ssl-mode", "")).lower() in ("true", "required")
    if needs_tls:
        query = {name: value for name, value in query.items() if name not in ("ssl", "ssl-mode")}
    if url.get_backend_name() != "postgresql":
        return url.set(query=query), {"connect_timeout": limit_s, **({"ssl": True} if needs_tls else {})}
    # As libpq does.
    libpq = {"sslmode": "require"} if needs_tls else {}
    libpq |= {name: query.pop(name) for name in url.query if name == "application_name" or re.match("ssl.+", name)}
    # The driver takes these options only in a URL.
    return url.set(query=query), {"timeout": limit_s, "dsn": URL.create("postgresql", query=libpq).render_as_string()}


def open_sqlite_file(database_url: str, *, busy_timeout_s: float) -> SqliteFile | None:
    """Return the SQLite file of a URL, or None for another kind of database; raise like `open_database`.

    A statement waits up to `busy_timeout_s` seconds for the lock of another connection.
    """
    url = _url(database_url)
    if url.get_backend_name() != "sqlite":
        return None
    return SqliteFile(url, busy_timeout_s=busy_timeout_s)


def _url(database_url: str) -> URL:
    try:
        url = make_url(database_url)
    except ArgumentError:
        # The message omits the URL, which may contain a password.
        raise ValueError(
            "the database URL cannot be read; it looks like sqlite:////var/lib/bso.sqlite3 "
            "or postgresql://user:password@host/database"
        ) from None
    # SQLAlchemy does not accept the name ``postgres`` any more, but Heroku and libpq use it.
    backend = "postgresql" if url.get_backend_name() == "postgres" else url.get_backend_name()
    if backend not in _DRIVERS:
        raise ValueError(f"{backend} databases are not supported: use SQLite, PostgreSQL, MySQL or MariaDB")
    if url.drivername not in _ACCEPTED:
        written = url.set(drivername=backend, query={}).render_as_string(hide_password=True)
        raise ValueError(
            f"the database URL begins with {url.drivername}://, a driver that this server does not use: write "
            f"{written} (with your password), and the server's own driver is used"
        )
    return url
