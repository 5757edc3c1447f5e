"""The database: transactions, and rows in and core dataclasses out. No decisions here."""

from __future__ import annotations

import asyncio
import logging
import random
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, nullcontext
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import RowMapping, delete, event, insert, select, update
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from bso_server import migrations
from bso_server.core.model import Job, TrialRecord
from bso_server.errors import DatabaseNotReadyError
from bso_server.filesystem import network_filesystem
from bso_server.tables import jobs, trials
from zeus_plugins.protocol import JobRegistration, Origin, TrialState

# Seconds that a SQLite connection waits for another one's transaction before it gives up.
_SQLITE_BUSY_TIMEOUT_S = 30

# Connections that one server process holds open at most; a request that finds none free waits for one.
_POOL_SIZE = 10

_READ_ONLY = "bso_read_only"

# How often a transaction is tried that the database keeps breaking off, and the longest wait after the first time.
_ATTEMPTS = 8
_BACKOFF_S = 0.05

T = TypeVar("T")

logger = logging.getLogger("bso_server")


class JobExistsError(Exception):
    """Another transaction inserted the same job_id first."""


@dataclass(frozen=True, slots=True)
class StoredJob:
    """A row of `jobs`.

    Attributes:
        registration: The job as registered.
        job: The part of it that decisions need.
        created_at: When it was registered (UTC).
        event_count: The job's logical clock.
        trial_count: Trials dispatched so far.
        min_cost_j: Lowest cost of a trial that reached the target, joules, or None.
        min_cost_batch_size: Its batch size.
        rng_state: State of the job's generator as JSON, or None.
    """

    registration: JobRegistration
    job: Job
    created_at: datetime
    event_count: int
    trial_count: int
    min_cost_j: float | None
    min_cost_batch_size: int | None
    rng_state: str | None


@dataclass(frozen=True, slots=True)
class StoredTrial:
    """A row of `trials`: the record that decisions need, and what only people read.

    Attributes:
        record: The record.
        reason: Why its batch size was chosen.
        energy_source: How its energy was measured, or None.
        started_at: When it was dispatched (UTC).
        ended_at: When it ended (UTC), or None.
    """

    record: TrialRecord
    reason: str
    energy_source: str | None
    started_at: datetime
    ended_at: datetime | None


class Transaction:
    """One transaction. Made by `Store.write` and `Store.read` alone; dead once their block is left.

    Methods named ``locked_…`` make other writers of the same job wait until the transaction ends (on SQLite the whole
    transaction does).
    """

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def job(self, job_id: str) -> StoredJob | None:
        """The job, or None."""
        return await self._one_job(job_id, lock=False)

    async def locked_job(self, job_id: str) -> StoredJob | None:
        """The job, or None; other writers wait."""
        return await self._one_job(job_id, lock=True)

    async def locked_trial(self, job_id: str, trial_number: int) -> tuple[StoredJob, StoredTrial] | None:
        """The job and one of its trials in one statement, or None; other writers of both wait."""
        statement = (
            select(*jobs.c, *(column.label(f"trial_{column.name}") for column in trials.c))
            .join_from(jobs, trials)
            .where(trials.c.job_id == job_id, trials.c.trial_number == trial_number)
            .with_for_update()
        )
        row = (await self._connection.execute(statement)).mappings().one_or_none()
        return None if row is None else (_job_from(row), _trial_from(row, prefix="trial_"))

    async def all_jobs(self) -> list[StoredJob]:
        """Every job, ordered by id."""
        rows = await self._connection.execute(select(jobs).order_by(jobs.c.job_id))
        return [_job_from(row) for row in rows.mappings()]

    async def all_trials(self, job_id: str) -> list[StoredTrial]:
        """Every trial of the job, in order of dispatch."""
        statement = select(trials).where(trials.c.job_id == job_id).order_by(trials.c.trial_number)
        return [_trial_from(row) for row in (await self._connection.execute(statement)).mappings()]

    async def insert_job(self, registration: JobRegistration, created_at: datetime) -> None:
        """Add a job.

        Raises:
            JobExistsError: Another one has its id; the transaction is of no more use.
        """
        row = {
            "job_id": registration.job_id,
            "job_id_prefix": registration.job_id_prefix,
            "policy": registration.policy.value,
            "spec": registration.model_dump_json(),
            "created_at": created_at,
            "event_count": 0,
            "trial_count": 0,
        }
        try:
            await self._connection.execute(insert(jobs).values(row))
        except IntegrityError as error:
            raise JobExistsError(registration.job_id) from error

    async def update_job(self, job_id: str, **columns: Any) -> None:
        """Change columns of a job whose row this transaction has locked."""
        await self._connection.execute(update(jobs).where(jobs.c.job_id == job_id).values(columns))

    async def delete_job(self, job_id: str) -> bool:
        """Remove a job with all its trials; False if there was none."""
        result = await self._connection.execute(delete(jobs).where(jobs.c.job_id == job_id))
        return bool(result.rowcount)

    async def insert_trial(self, job_id: str, record: TrialRecord, *, reason: str, started_at: datetime) -> None:
        """Add a trial that was just dispatched."""
        row = {
            "job_id": job_id,
            "trial_number": record.trial_number,
            "batch_size": record.batch_size,
            "state": record.state.value,
            "origin": record.origin.value,
            "reason": reason,
            "started_at": started_at,
            "started_event": record.started_event,
        }
        await self._connection.execute(insert(trials).values(row))

    async def update_trial(self, job_id: str, trial_number: int, **columns: Any) -> None:
        """Change columns of a trial whose row this transaction has locked."""
        statement = update(trials).where(trials.c.job_id == job_id, trials.c.trial_number == trial_number)
        await self._connection.execute(statement.values(columns))

    async def _one_job(self, job_id: str, *, lock: bool) -> StoredJob | None:
        statement = select(jobs).where(jobs.c.job_id == job_id)
        if lock:
            statement = statement.with_for_update()
        row = (await self._connection.execute(statement)).mappings().one_or_none()
        return None if row is None else _job_from(row)


class Store:
    """A database. Commit happens in one place: at the end of a `write` block that raised nothing."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        # SQLite lets one writer in at a time, and those that wait for its lock poll. Queueing in front of it is fairer
        # and quicker; what keeps other processes out is SQLite's lock all the same.
        self._turn: AbstractAsyncContextManager[object] = asyncio.Lock() if self.is_sqlite else nullcontext()

    @property
    def is_sqlite(self) -> bool:
        """Whether the database is a SQLite file."""
        return self._engine.dialect.name == "sqlite"

    @property
    def description(self) -> str:
        """The database's URL as a user would write it, without its password."""
        url = self._engine.url
        return url.set(drivername=url.get_backend_name()).render_as_string(hide_password=True)

    async def run(self, work: Callable[[Transaction], Awaitable[T]]) -> T:
        """Do `work` in a `write` transaction, and again from the start when the database broke it off.

        Databases end one of two transactions that wait for each other; the other one's rows are then free.

        Args:
            work: Does nothing but read and write through the transaction, so that it can be repeated.
        """
        for attempt in range(1, _ATTEMPTS):
            try:
                return await self._once(work)
            except DBAPIError as error:
                if not _is_passing(error):
                    raise
                logger.info("transaction broken off by the database, attempt %d: %s", attempt, error.orig)
            # Not all at once again; randomness is what parts them.
            await asyncio.sleep(_BACKOFF_S * attempt * random.random())  # noqa: S311 - no secret
        return await self._once(work)

    async def _once(self, work: Callable[[Transaction], Awaitable[T]]) -> T:
        async with self.write() as transaction:
            return await work(transaction)

    @asynccontextmanager
    async def write(self) -> AsyncIterator[Transaction]:
        """A transaction that is committed when the block ends, and rolled back when it raises."""
        async with self._turn, self._engine.begin() as connection:
            yield Transaction(connection)

    @asynccontextmanager
    async def read(self) -> AsyncIterator[Transaction]:
        """A transaction for reading, which makes nobody wait."""
        async with self._engine.connect() as connection:
            await connection.execution_options(**{_READ_ONLY: True})
            yield Transaction(connection)

    async def migrate(self) -> None:
        """Bring the database to this version's schema. A SQLite file is copied first, if there is anything to lose."""
        if self.is_sqlite and await self.current_revision() not in (None, migrations.head()):
            await asyncio.to_thread(self._back_up)
        async with self._engine.begin() as connection:
            await connection.run_sync(migrations.upgrade)

    def migration_sql(self) -> str:
        """The SQL that makes this version's schema in an empty database of this kind."""
        return migrations.upgrade_sql(self._engine.dialect.name)

    async def current_revision(self) -> str | None:
        """The revision of the database's schema, or None for an empty database."""
        async with self._engine.connect() as connection:
            return await connection.run_sync(migrations.current)

    def _back_up(self) -> None:
        """Copy the SQLite file beside itself, consistently even while others write to it."""
        database = self._engine.url.database or ""
        copy = f"{database}.{datetime.now(UTC):%Y%m%dT%H%M%SZ}.backup"
        with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)
        logger.info("the database was copied to %s before its schema is upgraded", copy)

    async def check_schema(self) -> None:
        """Make sure that the database has this version's schema.

        Raises:
            DatabaseNotReadyError: It has another one, or none.
        """
        found = await self.current_revision()
        if found != migrations.head():
            raise DatabaseNotReadyError(
                f"the database {self.description} is at schema {found or 'none'}, this version needs "
                f"{migrations.head()}; run: bso-server db upgrade --database-url '{self.description}'"
            )

    async def close(self) -> None:
        """Close every connection."""
        await self._engine.dispose()


def open_store(
    database_url: str, *, user: str | None = None, password: str | None = None, echo_sql: bool = False
) -> Store:
    """Open a database, and make the directory of a SQLite file if need be; nothing is connected yet.

    Args:
        database_url: An SQLAlchemy URL. ``sqlite://``, ``postgresql://`` and ``mysql://`` without a driver get the one
            of this project's extras.
        user: User, where the URL names none.
        password: Password, where the URL holds none.
        echo_sql: Log every statement.

    Raises:
        ValueError: The URL cannot be read, its driver is not installed, or it is a SQLite file that several hosts
            could open.
    """
    url = _async_url(database_url)
    if url.get_backend_name() == "sqlite":
        _refuse_network(url)
        engine = create_async_engine(url, echo=echo_sql)
        _prepare_sqlite(engine)
        return Store(engine)
    url = url.set(username=url.username or user, password=url.password or password)
    try:
        # A connection that died while idle is noticed before it is used.
        engine = create_async_engine(url, echo=echo_sql, pool_pre_ping=True, pool_size=_POOL_SIZE, max_overflow=0)
    except ModuleNotFoundError as error:
        extra = {"postgresql": "postgres", "mysql": "mysql"}.get(url.get_backend_name(), "server")
        raise ValueError(f"{error.name} is not installed: pip install 'zeus-plugins[{extra}]'") from error
    return Store(engine)


def _async_url(database_url: str) -> URL:
    try:
        url = make_url(database_url)
    except ArgumentError:
        # The URL is not repeated: it may hold a password.
        raise ValueError(
            "the database URL cannot be read; it looks like sqlite:////var/lib/bso.sqlite3 "
            "or postgresql://user:password@host/database"
        ) from None
    driver = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "mysql": "mysql+asyncmy"}
    return url.set(drivername=driver.get(url.drivername, url.drivername))


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


# Codes by which databases say that a transaction lost against another one and may simply be tried again.
_POSTGRES_PASSING = {"40001", "40P01"}  # serialization failure, deadlock
_MYSQL_PASSING = {1205, 1213}  # lock wait timeout, deadlock


def _is_passing(error: DBAPIError) -> bool:
    cause = error.orig
    if getattr(cause, "sqlstate", None) in _POSTGRES_PASSING:
        return True
    code = cause.args[0] if cause is not None and cause.args else None
    return code in _MYSQL_PASSING or (isinstance(code, str) and "database is locked" in code)


def _prepare_sqlite(engine: AsyncEngine) -> None:
    @event.listens_for(engine.sync_engine, "connect")
    def _configure(connection: Any, _record: Any) -> None:
        # The driver's own transactions begin at the first write, after the reads that a decision rests on. None turns
        # them off, so that `_begin` below says when a transaction starts.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {_SQLITE_BUSY_TIMEOUT_S * 1000}")
        cursor.execute("PRAGMA journal_mode = WAL")
        # FULL: a committed report survives a power cut.
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def _begin(connection: Any) -> None:
        read_only = connection.get_execution_options().get(_READ_ONLY, False)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")


_JOB_FIELDS = [field.name for field in fields(Job)]


def _job_from(row: RowMapping) -> StoredJob:
    registration = JobRegistration.model_validate_json(row["spec"])
    return StoredJob(
        registration=registration,
        job=Job(**{name: getattr(registration, name) for name in _JOB_FIELDS}),
        created_at=row["created_at"],
        event_count=row["event_count"],
        trial_count=row["trial_count"],
        min_cost_j=row["min_cost_j"],
        min_cost_batch_size=row["min_cost_batch_size"],
        rng_state=row["rng_state"],
    )


def _trial_from(row: RowMapping, *, prefix: str = "") -> StoredTrial:
    def column(name: str) -> Any:
        return row[prefix + name]

    return StoredTrial(
        record=TrialRecord(
            trial_number=column("trial_number"),
            batch_size=column("batch_size"),
            state=TrialState(column("state")),
            origin=Origin(column("origin")),
            started_event=column("started_event"),
            ended_event=column("ended_event"),
            time_s=column("time_s") or 0.0,
            energy_j=column("energy_j") or 0.0,
            epoch=column("epoch") or 0.0,
            metric=column("metric"),
            message=column("message"),
        ),
        reason=column("reason"),
        energy_source=column("energy_source"),
        started_at=column("started_at"),
        ended_at=column("ended_at"),
    )
