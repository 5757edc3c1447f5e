"""The database of a Zeus 0.16 batch size optimization server, which is read and never written.

Its tables stand here as that server makes them, with the names of its columns. All jobs are read in one read-only
transaction, so that a server that goes on meanwhile changes nothing in the middle of it.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    DateTime,
    Double,
    Float,
    Integer,
    MetaData,
    RowMapping,
    String,
    Table,
    cast,
    create_engine,
    inspect,
    select,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.pool import NullPool

from bso_server.errors import ZeusDatabaseError
from bso_server.storage.async_database import NoConnectionError
from bso_server.storage.database import described, open_database
from bso_server.storage.deadlines import LONG_PATIENCE_S

# Seconds that a read waits for Zeus's server to end a transaction of its own, on SQLite.
_SQLITE_BUSY_TIMEOUT_S = 5.0

T = TypeVar("T")

_metadata = MetaData()

_jobs = Table(
    "Job",
    _metadata,
    Column("job_id", String(400), primary_key=True),
    Column("job_id_prefix", String(300)),
    Column("default_batch_size", Integer),
    Column("higher_is_better_metric", Boolean),
    Column("eta_knob", Float),
    Column("beta_knob", Float),
    Column("target_metric", Float),
    Column("max_epochs", Integer),
    Column("num_pruning_rounds", Integer),
    Column("window_size", Integer),
    Column("max_power", Float),
    Column("number_of_gpus", Integer),
    Column("gpu_model", String(30)),
    Column("mab_prior_mean", Float),
    Column("mab_prior_precision", Float),
    Column("mab_num_explorations", Integer),
    Column("mab_seed", Integer),
    Column("mab_random_generator_state", String(10000)),
    Column("exp_default_batch_size", Integer),
    Column("stage", String(7)),
    Column("min_cost", Float),
    Column("min_cost_batch_size", Integer),
)
_sizes = Table(
    "BatchSize",
    _metadata,
    Column("job_id", String(400), primary_key=True),
    Column("batch_size", Integer, primary_key=True),
)
_arms = Table(
    "GaussianTsArmState",
    _metadata,
    Column("job_id", String(300), primary_key=True),
    Column("batch_size", Integer, primary_key=True),
    Column("param_mean", Float),
    Column("param_precision", Float),
    Column("reward_precision", Float),
    Column("num_observations", Integer),
)
_trials = Table(
    "Trial",
    _metadata,
    Column("job_id", String(300), primary_key=True),
    Column("batch_size", Integer),
    Column("trial_number", Integer, primary_key=True),
    Column("start_timestamp", DateTime),
    Column("type", String(11)),
    Column("status", String(10)),
    Column("end_timestamp", DateTime),
    Column("time", Float),
    Column("energy", Float),
    Column("converged", Boolean),
)

# The columns of a job that are its specification, by the names that they have in `JobRegistration`, too.
_SPECIFICATION = (
    *("job_id", "job_id_prefix", "default_batch_size", "higher_is_better_metric", "eta_knob", "beta_knob"),
    *("target_metric", "max_epochs", "num_pruning_rounds", "window_size", "max_power", "number_of_gpus", "gpu_model"),
    *("mab_prior_mean", "mab_prior_precision", "mab_num_explorations", "mab_seed"),
)


@dataclass(frozen=True, slots=True)
class ZeusTrial:
    """A row of `Trial`: instants without a zone, as the clock of Zeus's server showed them; seconds and joules.

    Time, energy and whether it converged are None unless a training has reported the trial's end.
    """

    trial_number: int
    batch_size: int
    type: str
    status: str
    started: datetime
    ended: datetime | None
    time_s: float | None
    energy_j: float | None
    converged: bool | None


@dataclass(frozen=True, slots=True)
class ZeusArm:
    """A row of `GaussianTsArmState`, the belief about one batch size: the mean is of rewards, −cost in joules."""

    batch_size: int
    param_mean: float
    num_observations: int


@dataclass(frozen=True, slots=True)
class ZeusJob:
    """A job with all that its server keeps of it.

    Attributes:
        specification: The fields of a registration.
        rng_state: State of its random generator as JSON, or None.
        min_cost_j: The lowest cost of a trial, joules, or None.
        arms: Those of the bandit stage, ascending; none before it.
        trials: In order of dispatch.
        digits: The significant digits to which Zeus itself knows its measurements.
    """

    specification: dict[str, Any]
    rng_state: str | None
    min_cost_j: float | None
    arms: tuple[ZeusArm, ...]
    trials: tuple[ZeusTrial, ...]
    digits: int

    @property
    def job_id(self) -> str:
        """Its id, up to 400 characters of any kind."""
        return str(self.specification["job_id"])


async def read_jobs(database_url: str) -> list[ZeusJob]:
    """All jobs of a Zeus server, ordered by id.

    Args:
        database_url: SQLAlchemy URL of its database, as that server was given it: SQLite, PostgreSQL, MySQL or MariaDB.

    Raises:
        ZeusDatabaseError: It cannot be opened or read, or holds other tables than Zeus 0.16 makes.
        ValueError: It is of another kind, or its driver is not installed.
    """
    try:
        url = make_url(database_url)
    except ArgumentError:
        # Not repeated: it may hold a password.
        raise ZeusDatabaseError(
            "the URL of Zeus's database cannot be read; it is what its server has as ZEUS_BSO_DATABASE_URL, such as "
            "sqlite+aiosqlite:////var/lib/zeus.sqlite3 or postgresql+asyncpg://user:password@host/database"
        ) from None
    try:
        if url.get_backend_name() == "sqlite":
            return await asyncio.to_thread(_on_sqlite, url, _read)
        return await _on_server(url, _read)
    except (NoConnectionError, DBAPIError, sqlite3.Error) as error:
        cause = error if isinstance(error, NoConnectionError) else NoConnectionError(error)
        raise ZeusDatabaseError(f"Zeus's database {described(url)} cannot be read: {cause}") from error


def _on_sqlite(url: URL, work: Callable[[Connection], T]) -> T:
    path = Path(url.database or "")
    if not path.is_file():
        raise ZeusDatabaseError(f"there is no SQLite file {str(path)!r}: name the one that Zeus's server works on")

    def connect() -> sqlite3.Connection:
        uri = f"{path.resolve().as_uri()}?mode=ro"
        return sqlite3.connect(uri, uri=True, timeout=_SQLITE_BUSY_TIMEOUT_S, isolation_level=None)

    engine = create_engine("sqlite://", creator=connect, poolclass=NullPool)
    with engine.connect() as connection:
        connection.exec_driver_sql("BEGIN")
        return work(connection)


async def _on_server(url: URL, work: Callable[[Connection], T]) -> T:
    def only_reading(connection: Connection) -> T:
        connection.exec_driver_sql("SET TRANSACTION READ ONLY")
        return work(connection)

    # Zeus's server may use another driver.
    own_url = url.set(drivername=url.get_backend_name()).render_as_string(hide_password=False)
    database = open_database(own_url, patience_s=LONG_PATIENCE_S)
    try:
        return await database.run(only_reading, read_only=True, timeout_s=LONG_PATIENCE_S)
    finally:
        await database.close()


def _read(connection: Connection) -> list[ZeusJob]:
    _refuse_other_tables(connection)
    # In MySQL these columns are of single precision. Zeus reads six digits of them, as that database prints them, while
    # a cast shows what is there. The specification is wanted as it was said: 0.9, and not 0.8999999761581421.
    digits = 6 if connection.dialect.name in ("mysql", "mariadb") else 15
    jobs = _rows(connection, _jobs, _jobs.c.job_id)
    sizes = _by_job(_rows(connection, _sizes, _sizes.c.batch_size))
    arms = _by_job(_rows(connection, _arms, _arms.c.batch_size))
    trials = _by_job(_rows(connection, _trials, _trials.c.trial_number))
    return [
        ZeusJob(
            {
                **{name: job[name] for name in _SPECIFICATION},
                "batch_sizes": [row["batch_size"] for row in sizes.get(job["job_id"], ())],
            },
            job["mab_random_generator_state"],
            job["min_cost"],
            tuple(
                ZeusArm(row["batch_size"], row["param_mean"], row["num_observations"])
                for row in arms.get(job["job_id"], ())
            ),
            tuple(
                ZeusTrial(
                    trial_number=row["trial_number"],
                    batch_size=row["batch_size"],
                    type=row["type"],
                    status=row["status"],
                    started=row["start_timestamp"],
                    ended=row["end_timestamp"],
                    time_s=row["time"],
                    energy_j=row["energy"],
                    converged=row["converged"],
                )
                for row in trials.get(job["job_id"], ())
            ),
            digits,
        )
        for job in jobs
    ]


# What Zeus has measured or computed.
_MEASURED = frozenset({"min_cost", "param_mean", "time", "energy"})


def _rows(connection: Connection, table: Table, order: Column[Any]) -> list[RowMapping]:
    columns = [
        cast(column, Double).label(column.name) if column.name in _MEASURED else column for column in table.columns
    ]
    return list(connection.execute(select(*columns).order_by(order)).mappings())


def _by_job(rows: list[RowMapping]) -> dict[str, list[RowMapping]]:
    found: dict[str, list[RowMapping]] = {}
    for row in rows:
        found.setdefault(row["job_id"], []).append(row)
    return found


def _refuse_other_tables(connection: Connection) -> None:
    inspector = inspect(connection)
    missing = [table.name for table in _metadata.sorted_tables if not inspector.has_table(table.name)]
    if len(missing) == len(_metadata.tables):
        hint = ""
        if inspector.has_table("jobs") and inspector.has_table("policy_memories"):
            hint = ": it is one of this project's; bso-server jobs export and jobs import move its jobs"
        raise ZeusDatabaseError(f"the database has no table of Zeus's batch size optimization server{hint}")
    for table in _metadata.sorted_tables:
        there = set() if table.name in missing else {column["name"] for column in inspector.get_columns(table.name)}
        wanted = {column.name for column in table.columns}
        if there != wanted:
            differs = [
                *(f"no {table.name}.{name}" for name in sorted(wanted - there)),
                *(f"{table.name}.{name} beside" for name in sorted(there - wanted)),
            ]
            raise ZeusDatabaseError(
                f"the tables are of another version of Zeus than 0.16, the one that can be read: {', '.join(differs)}"
            )
