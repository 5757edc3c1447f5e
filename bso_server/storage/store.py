"""The store: transactions that are run, repeated and committed in one place."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from bso_server.core.watch import Listener, Outcome, TransactionDone, nobody
from bso_server.errors import BsoError, DatabaseNotReadyError, DatabaseUnavailableError
from bso_server.storage import migrations
from bso_server.storage.async_database import NoConnectionError
from bso_server.storage.database import Database, SqliteFile, back_up, described, is_passing
from bso_server.storage.deadlines import LONG_PATIENCE_S, MIGRATION_PATIENCE_S, PATIENCE_S, Deadline, waiting
from bso_server.storage.transaction import JobExistsError, Transaction
from bso_server.storage.unwritable import UnwritableError, as_unwritable

# The longest wait after the first time that the database breaks a transaction off; it grows with each time, so often.
_BACKOFF_S = 0.05
_GROWS = 8

# The same where connections are lost: a database that starts anew needs seconds, and one that is away for good must not
# keep a patient caller waiting.
_LOST_BACKOFF_S = 0.2
_LOST_ATTEMPTS = 8

# A database that can keep nothing is spoken of when that begins and ends, and each time that so many seconds are over.
_SAY_AGAIN_S = 60.0

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger("bso_server")


class _Attempts:
    """The attempts at one transaction: which failure is followed by another one, and after how long.

    That the database has broken one off is logged at this level.
    """

    def __init__(self, deadline: Deadline, level: int = logging.INFO) -> None:
        self._level = level
        self._deadline = deadline
        self._lost_deadline = Deadline(PATIENCE_S)
        self._begun = time.monotonic()
        self._made = 0
        self._lost = False
        self._collided = False
        self.repeats = 0

    def wait_s(self, error: Exception) -> float | None:
        """Seconds to wait before the next attempt, random; None if there is no time for one.

        Raises the error if another attempt would fare no better.
        """
        self._made += 1
        took_s = time.monotonic() - self._begun
        if isinstance(error, JobExistsError):
            # What the other transaction did is there to be found by now.
            if self._collided:
                raise error
            self._collided = True
            wait_s = 0.0
        elif isinstance(error, DatabaseUnavailableError):
            if error.fault is not None:
                raise error  # Waiting mends nothing.
            if self._made == _LOST_ATTEMPTS or not self._lost_deadline.left_s:
                return None
            self._lost = True
            wait_s = self._random_s(_LOST_BACKOFF_S)
        else:
            if not (isinstance(error, DBAPIError) and is_passing(error)):
                raise error
            logger.log(self._level, "transaction broken off by the database, attempt %d: %s", self._made, error.orig)
            wait_s = self._random_s(_BACKOFF_S)
        # What has waited for a lock in vain would need as long again, and leave its connection in the middle of it.
        if wait_s + took_s >= self._deadline.left_s:
            return None
        self._begun = time.monotonic() + wait_s
        self.repeats += 1
        return wait_s

    def _random_s(self, most_s: float) -> float:
        # Not all at once again; randomness is what parts them.
        return most_s * min(self._made, _GROWS) * random.random()  # noqa: S311 - no secret

    def given_up(self, error: Exception) -> DatabaseUnavailableError:
        """The error to raise as there is no time for another attempt; it is logged, too."""
        if not isinstance(error, DatabaseUnavailableError):
            error = DatabaseUnavailableError(f"broken off by the database each time: {NoConnectionError(error)}")
        logger.warning("gave up after %d attempts: %s", self._made, error.detail)
        return error

    def succeeded(self) -> None:
        """Note that the last attempt has done it."""
        if self._lost:
            logger.info("lost the connection to the database, and found it again at attempt %d", self._made + 1)


class _Health:
    """The database's ability to keep anything, and what the log has said of it."""

    def __init__(self) -> None:
        self.fault: str | None = None
        self._say_again = -math.inf

    def told(self, error: UnwritableError, database: str) -> DatabaseUnavailableError:
        """The error of a write that failed by this one."""
        detail, now = f"nothing can be kept in the database {database}, for {error}", time.monotonic()
        if error.fault != self.fault or now > self._say_again:
            logger.error("%s; every request gets 503 until that is mended", detail)
            self._say_again = now + _SAY_AGAIN_S
        self.fault = error.fault
        return DatabaseUnavailableError(detail, fault=error.fault)

    def mended(self, database: str) -> None:
        """Note that a write was kept again."""
        logger.warning("the database %s keeps what is written again", database)
        self.fault, self._say_again = None, -math.inf


class Store:
    """The project's data in a database. Commit happens in one place: when the work given to `write` has returned.

    Args:
        database: The database.
        patience_s: Seconds after which `write` and `read` give up, with all their attempts.
        listener: Told of each transaction, and of what has happened in those that are in force.
    """

    def __init__(self, database: Database, *, patience_s: float = PATIENCE_S, listener: Listener = nobody) -> None:
        self._database = database
        self.patience_s = patience_s
        self.listener = listener
        self._is_patient = False
        self._health = _Health()

    def patient(self) -> Store:
        """The same data, for what reads or writes a job as a whole, and for callers that keep nobody waiting."""
        store = Store(self._database, patience_s=max(self.patience_s, LONG_PATIENCE_S), listener=self.listener)
        store._health, store._is_patient = self._health, True
        return store

    @property
    def fault(self) -> str | None:
        """The fault by which the database keeps nothing, as the last write has found it, or None."""
        return self._health.fault

    @property
    def is_sqlite(self) -> bool:
        """True if the database is a SQLite file."""
        return self._database.url.get_backend_name() == "sqlite"

    @property
    def queues_writers(self) -> bool:
        """True if writers wait for one another in this process, without a connection each."""
        return self._database.queues_writers

    @property
    def kind(self) -> str:
        """The kind of the database and its driver, such as ``postgresql+asyncpg``."""
        return self._database.url.drivername

    @property
    def description(self) -> str:
        """The database's URL as a user would write it, without its password."""
        return described(self._database.url)

    async def write(self, work: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do `work` in a transaction, and again from the start when the database broke it off or went away.

        Databases end one of two transactions that wait for each other; the other one's rows are then free. Work that
        inserts a job at the same time as another transaction is done again, too, and then finds the job. It does
        nothing but read and write through the transaction, which comes before its other arguments, so that it can be
        repeated. When the connection was lost at the commit, it is repeated though it may be in force already.

        Raises:
            DatabaseUnavailableError: The database stays away, breaks the transaction off again and again, does not
                answer in time, or can keep nothing. `work` may be in force.
        """
        return await self._done(lambda transaction: work(transaction, *args, **kwargs))

    async def write_at_once(
        self, work: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Do `work`, which waits for no lock of others; it does not wait behind those who do. Errors as in `write`."""
        return await self._done(lambda transaction: work(transaction, *args, **kwargs), waits=False)

    async def read(self, work: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do `work`, which only reads, in a transaction that makes nobody wait; again, and errors, as in `write`."""
        return await self._done(lambda transaction: work(transaction, *args, **kwargs), read_only=True)

    async def _done(self, work: Callable[[Transaction], T], *, read_only: bool = False, waits: bool = True) -> T:
        done, transaction = await self._repeated(
            partial(_done_in_transaction, work), read_only=read_only, waits=waits, patience_s=self.patience_s
        )
        if self.fault is not None and not read_only:
            self._health.mended(self.description)
        transaction.write_log()
        transaction.tell_all(self.listener)
        return done

    async def _repeated(
        self, work: Callable[[Connection], T], *, patience_s: float, read_only: bool = False, waits: bool = True
    ) -> T:
        alone = self._is_patient or patience_s != self.patience_s
        with waiting(patience_s, alone=alone) as deadline:
            attempts, begun, outcome = _Attempts(deadline), time.monotonic(), Outcome.FAILED
            try:
                while True:
                    try:
                        left_s = deadline.left_s
                        done = await self._run(work, read_only=read_only, waits=waits, alone=alone, timeout_s=left_s)
                    except (DBAPIError, DatabaseUnavailableError, JobExistsError) as error:
                        wait_s = attempts.wait_s(error)
                        if wait_s is None:
                            raise attempts.given_up(error) from error
                        await asyncio.sleep(wait_s)
                    else:
                        attempts.succeeded()
                        outcome = Outcome.COMMITTED
                        return done
            except BsoError as error:
                outcome = Outcome.UNAVAILABLE if isinstance(error, DatabaseUnavailableError) else Outcome.REFUSED
                raise
            finally:
                self.listener(TransactionDone(not read_only, outcome, time.monotonic() - begun, attempts.repeats))

    async def _run(
        self,
        work: Callable[[Connection], T],
        *,
        read_only: bool = False,
        waits: bool = True,
        alone: bool = False,
        timeout_s: float = PATIENCE_S,
    ) -> T:
        try:
            return await self._database.run(work, read_only=read_only, waits=waits, alone=alone, timeout_s=timeout_s)
        except NoConnectionError as error:
            raise DatabaseUnavailableError(f"no connection to the database {self.description}: {error}") from error
        except (DBAPIError, UnwritableError) as error:
            unwritable = error if isinstance(error, UnwritableError) else as_unwritable(error)
            if unwritable is None:
                raise
            raise self._health.told(unwritable, self.description) from error

    async def check_writable(self) -> None:
        """Write something and take it away again, so that a full disk and a standby show.

        Raises:
            DatabaseUnavailableError: As in `write`.
        """
        await self.write(Transaction.write_probe, secrets.token_hex(16))

    async def migrate(self) -> None:
        """Bring the database to this version's schema. A SQLite file is copied first, if there is anything to lose.

        Raises:
            DatabaseNotReadyError: It was made by a newer version.
        """
        found = await self.current_revision()
        _refuse_newer(found, self.description)
        if self.is_sqlite and found not in (None, migrations.HEAD):
            await asyncio.to_thread(back_up, Path(self._database.url.database or ""))
        await self._repeated(migrations.upgrade, patience_s=MIGRATION_PATIENCE_S)

    def migration_sql(self) -> str:
        """The SQL that makes this version's schema in an empty database of this kind."""
        return migrations.upgrade_sql(self._database.url.get_backend_name())

    async def current_revision(self) -> str | None:
        """The revision of the database's schema, or None for an empty database; errors as in `read`."""
        return await self._run(migrations.current, read_only=True, timeout_s=self.patience_s)

    async def check_schema(self) -> None:
        """Make sure that the database has this version's schema.

        Raises:
            DatabaseNotReadyError: It has another one, or none.
        """
        found = await self.current_revision()
        _refuse_newer(found, self.description)
        if found != migrations.HEAD:
            raise DatabaseNotReadyError(
                f"the database {self.description} is at schema {found or 'none'}, this version needs "
                f"{migrations.HEAD}; run: bso-server db upgrade --database-url '{self.description}'"
            )

    async def close(self) -> None:
        """Close every connection."""
        await self._database.close()


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
        return self._repeated(work, read_only=False, timeout_s=timeout_s)

    def read(self, work: Callable[[Transaction], T], *, timeout_s: float) -> T:
        """Do `work`, which only reads, in a transaction that makes nobody wait; arguments and errors as in `write`."""
        return self._repeated(work, read_only=True, timeout_s=timeout_s)

    def close(self, *, keeps_file: bool = False) -> None:
        """Close the connection, if one is open; the next transaction opens another, perhaps to the same file alone."""
        with self._lock:
            connection, self._connection = self._connection, None
            _close(connection)
            if not keeps_file:
                self._file.forget()

    def _repeated(self, work: Callable[[Transaction], T], *, read_only: bool, timeout_s: float) -> T:
        attempts = _Attempts(Deadline(timeout_s), level=logging.DEBUG)
        while True:
            try:
                return self._run(partial(_done_in_transaction, work), read_only=read_only)
            except _BrokenInError:
                continue
            except UnwritableError as error:
                raise DatabaseUnavailableError(str(error), fault=error.fault) from error
            except (DBAPIError, JobExistsError) as error:
                try:
                    wait_s = attempts.wait_s(error)
                except DBAPIError:
                    raise DatabaseUnavailableError(str(NoConnectionError(error))) from error
                if wait_s is None:
                    raise DatabaseUnavailableError(
                        f"timed out after {timeout_s:g} s, as another process has it locked"
                    ) from error
                time.sleep(wait_s)

    def _run(self, work: Callable[[Connection], tuple[T, Transaction]], *, read_only: bool) -> T:
        with self._lock:
            depth = self._depth
            if depth:
                # Under the feet of the other transaction, whose next step fails.
                self._drop()
            self._depth, self._is_broken_in = depth + 1, False
            connection: Connection | None = None
            try:
                connection = self._connection or self._open()
                done, transaction = self._file.run(connection, work, read_only=read_only)
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
                    transaction.write_log()
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
            found = self._file.run(connection, migrations.current, read_only=True)
            if found != migrations.HEAD:
                _refuse_newer(found, described(self._file.url))
                if found is not None:
                    back_up(self._file.path)
                with _unlogged():
                    self._file.run(connection, migrations.upgrade)
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


def _done_in_transaction(work: Callable[[Transaction], T], connection: Connection) -> tuple[T, Transaction]:
    transaction = Transaction(connection)
    return work(transaction), transaction


def _refuse_newer(found: str | None, description: str) -> None:
    if found is not None and found not in migrations.REVISIONS:
        raise DatabaseNotReadyError(
            f"the database {description} is at schema {found}, which this version does not know: it was made by a "
            f"newer version of zeus-plugins. Install that one, or restore the backup (this one needs schema "
            f"{migrations.HEAD})"
        )
