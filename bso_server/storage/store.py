"""The store: transactions that are run, repeated and committed in one place."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from bso_server.errors import DatabaseNotReadyError, DatabaseUnavailableError
from bso_server.storage import migrations
from bso_server.storage.database import Database, NoConnectionError, back_up, is_passing
from bso_server.storage.transaction import JobExistsError, Transaction

# How often a transaction is tried that the database keeps breaking off, and the longest wait after the first time.
_ATTEMPTS = 8
_BACKOFF_S = 0.05

# The same where connections are lost: a database that starts anew needs seconds. Many clients wait for five at most.
_LOST_BACKOFF_S = 0.2
_PATIENCE_S = 3.0

T = TypeVar("T")

logger = logging.getLogger("bso_server")


class _Attempts:
    """The attempts at one transaction: which failure is followed by another one, and after how long."""

    def __init__(self) -> None:
        self._end = time.monotonic() + _PATIENCE_S
        self._made = 0
        self._lost = False
        self._collided = False

    def wait_s(self, error: Exception) -> float:
        """Seconds to wait before the next attempt; random.

        Raises:
            Exception: This error, after which there is none.
        """
        self._made += 1
        if isinstance(error, JobExistsError):
            # What the other transaction did is there to be found by now.
            if self._collided:
                raise error
            self._collided = True
            return 0.0
        if isinstance(error, DatabaseUnavailableError):
            if self._made == _ATTEMPTS or time.monotonic() > self._end:
                logger.warning("gave up after %d attempts: %s", self._made, error.detail)
                raise error
            self._lost, backoff_s = True, _LOST_BACKOFF_S
        else:
            if not (isinstance(error, DBAPIError) and is_passing(error)) or self._made == _ATTEMPTS:
                raise error
            logger.info("transaction broken off by the database, attempt %d: %s", self._made, error.orig)
            backoff_s = _BACKOFF_S
        # Not all at once again; randomness is what parts them.
        return backoff_s * self._made * random.random()  # noqa: S311 - no secret

    def succeeded(self) -> None:
        """Note that the last attempt has done it."""
        if self._lost:
            logger.info("lost the connection to the database, and found it again at attempt %d", self._made + 1)


class Store:
    """The project's data in a database. Commit happens in one place: when the work given to `write` has returned."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @property
    def is_sqlite(self) -> bool:
        """Whether the database is a SQLite file."""
        return self._dialect == "sqlite"

    @property
    def file(self) -> Path | None:
        """The SQLite file, or None for a database of another kind."""
        return Path(self._database.url.database or "") if self.is_sqlite else None

    @property
    def description(self) -> str:
        """The database's URL as a user would write it, without its password."""
        url = self._database.url
        # Drivers take it there, too.
        query = {name: "***" if "pass" in name.lower() else value for name, value in url.query.items()}
        return url.set(drivername=self._dialect, query=query).render_as_string(hide_password=True)

    @property
    def _dialect(self) -> str:
        return self._database.url.get_backend_name()

    async def write(self, work: Callable[[Transaction], T]) -> T:
        """Do `work` in a transaction, and again from the start when the database broke it off or went away.

        Databases end one of two transactions that wait for each other; the other one's rows are then free. Work that
        inserts a job at the same time as another transaction is done again, too, and then finds the job.

        Args:
            work: Does nothing but read and write through the transaction, so that it can be repeated. When the
                connection was lost at the commit, it is repeated though it may be in force already.

        Raises:
            DatabaseUnavailableError: The database stays away. `work` may be in force.
        """
        return await self._repeated(work, read_only=False)

    async def read(self, work: Callable[[Transaction], T]) -> T:
        """Do `work`, which only reads, in a transaction that makes nobody wait; again as in `write`.

        Raises:
            DatabaseUnavailableError: The database stays away.
        """
        return await self._repeated(work, read_only=True)

    async def _repeated(self, work: Callable[[Transaction], T], *, read_only: bool) -> T:
        def begin(connection: Connection) -> tuple[T, Transaction]:
            transaction = Transaction(connection)
            return work(transaction), transaction

        attempts = _Attempts()
        while True:
            try:
                done, transaction = await self._run(begin, read_only=read_only)
            except (DBAPIError, DatabaseUnavailableError, JobExistsError) as error:
                await asyncio.sleep(attempts.wait_s(error))
            else:
                attempts.succeeded()
                transaction.write_log()
                return done

    async def _run(self, work: Callable[[Connection], T], *, read_only: bool = False) -> T:
        try:
            return await self._database.run(work, read_only=read_only)
        except NoConnectionError as error:
            raise DatabaseUnavailableError(f"no connection to the database {self.description}: {error}") from error

    async def migrate(self) -> None:
        """Bring the database to this version's schema. A SQLite file is copied first, if there is anything to lose.

        Raises:
            DatabaseNotReadyError: It was made by a newer version.
            DatabaseUnavailableError: It cannot be reached.
        """
        found = await self.current_revision()
        self._refuse_newer(found)
        if self.file is not None and found not in (None, migrations.head()):
            copy = await asyncio.to_thread(back_up, self.file)
            logger.info("the database was copied to %s before its schema is upgraded", copy)
        await self._run(migrations.upgrade)

    def migration_sql(self) -> str:
        """The SQL that makes this version's schema in an empty database of this kind."""
        return migrations.upgrade_sql(self._dialect)

    @property
    def needed_revision(self) -> str:
        """The revision of the schema that this version needs."""
        return migrations.head()

    async def current_revision(self) -> str | None:
        """The revision of the database's schema, or None for an empty database.

        Raises:
            DatabaseUnavailableError: It cannot be reached.
        """
        return await self._run(migrations.current, read_only=True)

    async def check_schema(self) -> None:
        """Make sure that the database has this version's schema.

        Raises:
            DatabaseNotReadyError: It has another one, or none.
            DatabaseUnavailableError: It cannot be reached.
        """
        found = await self.current_revision()
        self._refuse_newer(found)
        if found != migrations.head():
            raise DatabaseNotReadyError(
                f"the database {self.description} is at schema {found or 'none'}, this version needs "
                f"{migrations.head()}; run: bso-server db upgrade --database-url '{self.description}'"
            )

    def _refuse_newer(self, found: str | None) -> None:
        if found is not None and not migrations.is_known(found):
            raise DatabaseNotReadyError(
                f"the database {self.description} is at schema {found}, which this version does not know: it was made "
                f"by a newer version of zeus-plugins. Install that one, or restore the backup (this one needs schema "
                f"{migrations.head()})"
            )

    async def close(self) -> None:
        """Close every connection."""
        await self._database.close()
