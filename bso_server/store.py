"""The database: transactions, and rows in and core dataclasses out. No decisions here."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, nullcontext
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import (
    ColumnElement,
    RowMapping,
    Select,
    Table,
    bindparam,
    delete,
    event,
    func,
    insert,
    select,
    tuple_,
    update,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from bso_server import migrations
from bso_server.core.history import Arm, Cheapest
from bso_server.core.model import OBSERVED, UNCOUNTED, Job, TrialRecord
from bso_server.core.statistics import Statistics
from bso_server.errors import DatabaseNotReadyError
from bso_server.filesystem import network_filesystem
from bso_server.tables import arms, epochs, jobs, trials
from zeus_plugins.protocol import EndReason, JobRegistration, Origin, TrialState

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
        cheapest: The cheapest trial that reached the target, or None.
        bandit_entered_at: Event at which the bandit stage began, or None.
        folded_event: Event up to which ends of trials are in the arms.
        rng_state: State of the job's generator as JSON, or None.
        survivors: Batch sizes with which the bandit stage was entered, ascending, or None.
    """

    registration: JobRegistration
    job: Job
    created_at: datetime
    event_count: int
    trial_count: int
    cheapest: Cheapest | None
    bandit_entered_at: int | None
    folded_event: int
    rng_state: str | None
    survivors: tuple[int, ...] | None


TrialKey = tuple[str, int]
"""A trial's job_id and number."""


@dataclass(frozen=True, slots=True)
class StoredTrial:
    """A row of `trials`: the record that decisions need, and what only people and leases need.

    Attributes:
        job_id: Its job.
        record: The record.
        reason: Why its batch size was chosen.
        energy_source: How its energy was measured, or None.
        started_at: When it was dispatched (UTC).
        reported_at: When its last report was taken (UTC), or None.
        ended_at: When it ended (UTC), or None.
        lease_expires_at: When it is abandoned if nothing more is heard of it (UTC); None for one that has ended.
    """

    job_id: str
    record: TrialRecord
    reason: str
    started_at: datetime
    lease_expires_at: datetime | None
    energy_source: str | None = None
    reported_at: datetime | None = None
    ended_at: datetime | None = None

    @property
    def key(self) -> TrialKey:
        """Its job_id and number."""
        return self.job_id, self.record.trial_number


class Transaction:
    """One transaction. Made by `Store` alone; dead once it has ended.

    Methods named ``locked_…`` make other writers of the same rows wait until the transaction ends (on SQLite the whole
    transaction does). Rows are locked job before trial and in the order of their keys.
    """

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def job(self, job_id: str) -> StoredJob | None:
        """The job, or None."""
        return await self._one_job(select(jobs).where(jobs.c.job_id == job_id))

    async def locked_job(self, job_id: str) -> StoredJob | None:
        """The job, or None; other writers wait."""
        return await self._one_job(select(jobs).where(jobs.c.job_id == job_id).with_for_update())

    async def locked_trials(self, keys: Collection[TrialKey]) -> dict[TrialKey, tuple[StoredJob, StoredTrial]]:
        """Those of these trials that exist, each with its job, in one statement; other writers of both wait."""
        rows = await self._connection.execute(_LOCKED_TRIALS, {"keys": sorted(keys)})
        return {
            (row["job_id"], row["trial_trial_number"]): (_job_from(row), _trial_from(row, prefix="trial_"))
            for row in rows.mappings()
        }

    async def all_jobs(self) -> list[StoredJob]:
        """Every job, ordered by id."""
        rows = await self._connection.execute(select(jobs).order_by(jobs.c.job_id))
        return [_job_from(row) for row in rows.mappings()]

    async def all_trials(self, job_id: str) -> list[StoredTrial]:
        """Every trial of the job, in order of dispatch."""
        return await self._trials(trials.c.job_id == job_id)

    async def counted_explorations(self, job_id: str) -> list[TrialRecord]:
        """The job's exploration trials that count, in order of dispatch."""
        found = await self._trials(
            trials.c.job_id == job_id,
            trials.c.origin == Origin.EXPLORATION.value,
            trials.c.state.not_in([state.value for state in UNCOUNTED]),
        )
        return [trial.record for trial in found]

    async def ended_after(self, job_id: str, event: int) -> list[TrialRecord]:
        """Trials that ended after this event of the job, in order of their ends."""
        found = await self._trials(trials.c.job_id == job_id, trials.c.ended_event > event)
        return sorted((trial.record for trial in found), key=lambda record: record.ended_event or 0)

    async def expired_trials(self, job_id: str, now: datetime) -> list[StoredTrial]:
        """The job's trials whose leases have run out, in order of dispatch."""
        return await self._trials(trials.c.job_id == job_id, *_expired(now))

    async def jobs_with_expired_trials(self, now: datetime) -> list[str]:
        """Ids of jobs that have such trials, in order."""
        statement = select(trials.c.job_id).distinct().where(*_expired(now)).order_by(trials.c.job_id)
        return list((await self._connection.execute(statement)).scalars())

    async def trial_with_key(self, job_id: str, idempotency_key: str) -> StoredTrial | None:
        """The trial that a request with this key started, or None."""
        found = await self._trials(trials.c.job_id == job_id, trials.c.idempotency_key == idempotency_key)
        return found[0] if found else None

    async def crashes(self, job_id: str, batch_size: int) -> tuple[int, bool]:
        """How many trials of the size crashed, and whether one was ever measured to its end."""
        statement = (
            select(trials.c.state, func.count())
            .where(trials.c.job_id == job_id, trials.c.batch_size == batch_size)
            .group_by(trials.c.state)
        )
        counts = {TrialState(state): count for state, count in await self._connection.execute(statement)}
        return counts.get(TrialState.FAILED, 0), any(state in OBSERVED for state in counts)

    async def arms(self, job_id: str) -> dict[int, Arm]:
        """What is remembered of each batch size, ascending."""
        statement = select(arms).where(arms.c.job_id == job_id).order_by(arms.c.batch_size)
        rows = await self._connection.execute(statement)
        return {row["batch_size"]: _arm_from(row) for row in rows.mappings()}

    async def insert_job(self, registration: JobRegistration, created_at: datetime) -> None:
        """Add a job with its arms.

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
            "folded_event": 0,
        }
        try:
            await self._connection.execute(insert(jobs).values(row))
        except IntegrityError as error:
            raise JobExistsError(registration.job_id) from error
        rows = [{"job_id": registration.job_id, **_arm_row(Arm(size))} for size in registration.batch_sizes]
        await self._connection.execute(insert(arms), rows)

    async def update_jobs(self, changed: Iterable[StoredJob]) -> None:
        """Save what may change of jobs whose rows this transaction has locked."""
        await self._update_many(jobs, [_job_row(job) for job in changed], key=("job_id",))

    async def update_arms(self, job_id: str, changed: Iterable[Arm]) -> None:
        """Replace what is remembered of these batch sizes of a locked job."""
        rows = [{"job_id": job_id, **_arm_row(arm)} for arm in changed]
        await self._update_many(arms, rows, key=("job_id", "batch_size"))

    async def delete_job(self, job_id: str) -> bool:
        """Remove a job with all its trials; False if there was none."""
        result = await self._connection.execute(delete(jobs).where(jobs.c.job_id == job_id))
        return bool(result.rowcount)

    async def insert_trial(self, trial: StoredTrial, *, idempotency_key: str | None = None) -> None:
        """Add a trial that was just dispatched."""
        record = trial.record
        row = {
            **_trial_row(trial),
            "batch_size": record.batch_size,
            "origin": record.origin.value,
            "reason": trial.reason,
            "started_at": trial.started_at,
            "started_event": record.started_event,
            "idempotency_key": idempotency_key,
        }
        await self._connection.execute(insert(trials).values(row))

    async def update_trials(self, changed: Iterable[StoredTrial]) -> None:
        """Save what may change of trials whose rows this transaction has locked."""
        await self._update_many(trials, [_trial_row(trial) for trial in changed], key=("job_id", "trial_number"))

    async def insert_epochs(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add reports to the epochs of their trials."""
        if rows:
            await self._connection.execute(insert(epochs), rows)

    async def _one_job(self, statement: Select[Any]) -> StoredJob | None:
        row = (await self._connection.execute(statement)).mappings().one_or_none()
        return None if row is None else _job_from(row)

    async def _trials(self, *conditions: ColumnElement[bool]) -> list[StoredTrial]:
        statement = select(trials).where(*conditions).order_by(trials.c.trial_number)
        return [_trial_from(row) for row in (await self._connection.execute(statement)).mappings()]

    async def _update_many(self, table: Table, rows: Sequence[Mapping[str, Any]], key: tuple[str, ...]) -> None:
        if not rows:
            return
        # A bound value may not have the name of a column that is set.
        statement = (
            update(table)
            .where(*(table.c[name] == bindparam(f"key_{name}") for name in key))
            .values({name: bindparam(name) for name in rows[0] if name not in key})
        )
        values = [{f"key_{name}" if name in key else name: value for name, value in row.items()} for row in rows]
        await self._connection.execute(statement, values)


def _expired(now: datetime) -> tuple[ColumnElement[bool], ...]:
    alive = [TrialState.RUNNING.value, TrialState.SUSPENDED.value]
    return trials.c.state.in_(alive), trials.c.lease_expires_at < now


# Built once: putting it together costs more than running it.
_LOCKED_TRIALS = (
    select(*jobs.c, *(column.label(f"trial_{column.name}") for column in trials.c))
    .join_from(jobs, trials)
    .where(tuple_(trials.c.job_id, trials.c.trial_number).in_(bindparam("keys", expanding=True)))
    .order_by(trials.c.job_id, trials.c.trial_number)
    .with_for_update()
)


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


@lru_cache(maxsize=4096)
def _specification(spec: str) -> tuple[JobRegistration, Job]:
    """A job's immutable part. Parsing it for each report would cost more than the report."""
    registration = JobRegistration.model_validate_json(spec)
    return registration, Job(**{name: getattr(registration, name) for name in _JOB_FIELDS})


def _job_from(row: RowMapping) -> StoredJob:
    registration, job = _specification(row["spec"])
    cheapest = None
    if row["min_cost_j"] is not None:
        cheapest = Cheapest(row["min_cost_trial_number"], row["min_cost_batch_size"], row["min_cost_j"])
    return StoredJob(
        registration=registration,
        job=job,
        created_at=row["created_at"],
        event_count=row["event_count"],
        trial_count=row["trial_count"],
        cheapest=cheapest,
        bandit_entered_at=row["bandit_entered_event"],
        folded_event=row["folded_event"],
        rng_state=row["rng_state"],
        survivors=None if row["survivors"] is None else tuple(json.loads(row["survivors"])),
    )


def _job_row(stored: StoredJob) -> dict[str, Any]:
    """The columns that may change, with the key."""
    cheapest = stored.cheapest
    return {
        "job_id": stored.job.job_id,
        "event_count": stored.event_count,
        "trial_count": stored.trial_count,
        "min_cost_j": None if cheapest is None else cheapest.cost_j,
        "min_cost_batch_size": None if cheapest is None else cheapest.batch_size,
        "min_cost_trial_number": None if cheapest is None else cheapest.trial_number,
        "bandit_entered_event": stored.bandit_entered_at,
        "folded_event": stored.folded_event,
        "rng_state": stored.rng_state,
        "survivors": None if stored.survivors is None else json.dumps(stored.survivors),
    }


def _trial_row(trial: StoredTrial) -> dict[str, Any]:
    """The columns that may change, with the key. A trial without reports has no totals, rather than zeros."""
    record = trial.record
    reported = record.metric is not None
    return {
        "job_id": trial.job_id,
        "trial_number": record.trial_number,
        "state": record.state.value,
        "message": record.message,
        "end_reason": None if record.end_reason is None else record.end_reason.value,
        "reported_at": trial.reported_at,
        "ended_at": trial.ended_at,
        "ended_event": record.ended_event,
        "time_s": record.time_s if reported else None,
        "energy_j": record.energy_j if reported else None,
        "energy_source": trial.energy_source,
        "epoch": record.epoch if reported else None,
        "metric": record.metric,
        "report_count": record.reports,
        "longest_gap_s": record.longest_gap_s,
        "lease_expires_at": trial.lease_expires_at,
        "heartbeats": record.heartbeats,
    }


def _trial_from(row: RowMapping, *, prefix: str = "") -> StoredTrial:
    def column(name: str) -> Any:
        return row[prefix + name]

    end_reason = column("end_reason")
    return StoredTrial(
        job_id=column("job_id"),
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
            end_reason=None if end_reason is None else EndReason(end_reason),
            reports=column("report_count"),
            longest_gap_s=column("longest_gap_s"),
            heartbeats=column("heartbeats"),
        ),
        reason=column("reason"),
        energy_source=column("energy_source"),
        started_at=column("started_at"),
        reported_at=column("reported_at"),
        ended_at=column("ended_at"),
        lease_expires_at=column("lease_expires_at"),
    )


_STATISTICS = ("explored", "observed", "completed")
_STATISTICS_FIELDS = [field.name for field in fields(Statistics)]


def _arm_from(row: RowMapping) -> Arm:
    infeasible, latest = row["infeasible"], json.loads(row["latest"])
    return Arm(
        batch_size=row["batch_size"],
        trials=row["trials"],
        infeasible=None if infeasible is None else EndReason(infeasible),
        refitted=row["refitted"],
        window=tuple((trial_number, cost_j) for trial_number, cost_j in json.loads(row["window"])),
        latest=None if latest is None else (latest[0], latest[1]),
        **{name: Statistics(*(row[f"{name}_{field}"] for field in _STATISTICS_FIELDS)) for name in _STATISTICS},
    )


def _arm_row(arm: Arm) -> dict[str, Any]:
    row = {
        "batch_size": arm.batch_size,
        "trials": arm.trials,
        "infeasible": None if arm.infeasible is None else arm.infeasible.value,
        "refitted": arm.refitted,
        "window": json.dumps(arm.window),
        "latest": json.dumps(arm.latest),
    }
    for name in _STATISTICS:
        statistics = getattr(arm, name)
        row |= {f"{name}_{field}": getattr(statistics, field) for field in _STATISTICS_FIELDS}
    return row
