"""A database over an asynchronous driver, and the error of one that does not answer."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import DBAPIError, InvalidatePoolError

from bso_server.storage.deadlines import PATIENCE_S, SessionLimits
from bso_server.storage.unwritable import OpenFile, UnwritableError

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

READ_ONLY = "bso_read_only"
"""The key of a flag, that the transaction only reads, in the `info` of its connection."""

# Transactions that may wait for other clients' locks, of which so many run at once. The other connections are for those
# that wait for no lock, which would else wait with them.
_POOL_OF_WAITING = 6

# Seconds after which a transaction that was given up is told once more to end, and for which its end is waited for when
# the database is closed.
_END_S = 5.0

# Seconds for which a connection that was used is taken to be there; the time of its last use is in its `info`.
_FRESH_S = 1.0
_USED = "bso_used"

T = TypeVar("T")


class NoConnectionError(Exception):
    """There is no connection to the database, or it was lost in the middle of a transaction.

    Whether that transaction is in force is not known: the connection may have been lost after the commit. The text is
    one line that says what happened, without a password.
    """

    def __init__(self, cause: Exception) -> None:
        said = cause.orig if isinstance(cause, DBAPIError) and cause.orig is not None else cause
        super().__init__(" ".join(str(said).split()) or type(said).__name__)


def no_answer(timeout_s: float) -> NoConnectionError:
    """The error of a transaction that has taken too long."""
    return NoConnectionError(TimeoutError(f"no answer within {timeout_s:.1f} s"))


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
        self._is_sqlite = self.queues_writers = engine.dialect.name == "sqlite"
        # SQLite lets one writer in at a time, and those that wait for its lock poll: within a process they queue here.
        self._waiting: AbstractAsyncContextManager[object] = (
            asyncio.Lock() if self._is_sqlite else asyncio.Semaphore(_POOL_OF_WAITING)
        )
        # By default each statement would see what was committed until then; on SQLite a transaction sees one moment.
        self._one_moment = None if self._is_sqlite else "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"
        self._given_up: set[asyncio.Task[None]] = set()

    async def run(
        self,
        work: Callable[[Connection], T],
        *,
        read_only: bool = False,
        waits: bool = True,
        alone: bool = False,  # noqa: ARG002 - every transaction has a connection of its own
        timeout_s: float = PATIENCE_S,
    ) -> T:
        """See `Database.run`."""
        queues = not read_only and (waits or self._is_sqlite)
        transaction = asyncio.create_task(
            self._run(work, read_only=read_only, queues=queues, limit_s=timeout_s),
        )
        try:
            done, _ = await asyncio.wait({transaction}, timeout=timeout_s)
        finally:
            if not transaction.done():
                self._give_up(transaction)
        if not done:
            raise no_answer(timeout_s)
        return transaction.result()

    async def _run(self, work: Callable[[Connection], T], *, read_only: bool, queues: bool, limit_s: float) -> T:
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
                            limits = SessionLimits(limit_s).sql(self._engine.dialect.name, is_local=True)
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


def limit_sessions(engine: Engine, limits: SessionLimits) -> None:
    """Have each session of these connections begin with these limits."""
    sql = limits.sql(engine.dialect.name)
    execute = "execute" if engine.dialect.name == "postgresql" else "query"

    @event.listens_for(engine, "connect")
    def _limit(connection: Any, _record: Any) -> None:
        # By the driver itself, as the adapter would begin a transaction for it; and not as parameters of the
        # connection, which poolers like PgBouncer refuse.
        connection.run_async(lambda driver: getattr(driver, execute)(sql))


def ping_after_idle(engine: Engine) -> None:
    """Have a connection that died while it was idle noticed before it is used.

    The pool's own ping does so each time that a connection is taken, which with asyncpg is three round trips more, as
    many as a report's statements. One that was used just now is taken as it is, unless another one was lost since: if
    it was, too, the transaction is begun again like any whose connection is lost.
    """
    dialect, lost_at = engine.dialect, -math.inf

    @event.listens_for(engine, "invalidate")
    def _lost(_connection: Any, _record: Any, _error: Any) -> None:
        nonlocal lost_at
        lost_at = time.monotonic()

    @event.listens_for(engine, "checkin")
    def _used(_connection: Any, record: Any) -> None:
        record.info[_USED] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def _check(connection: Any, record: Any, _proxy: Any) -> None:
        # A new one has not been used.
        used_at = record.info.get(_USED, math.inf)
        if used_at > max(lost_at, time.monotonic() - _FRESH_S):
            return
        try:
            dialect.do_ping(connection)
        except dialect.loaded_dbapi.Error as error:
            if dialect.is_disconnect(error, connection, None):
                raise InvalidatePoolError from error
            raise
