"""Reads the database of a Zeus 0.16 batch size optimization server, without writing to it.

One read-only transaction reads all jobs, so that they are consistent even if Zeus's server is running.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Double, MetaData, RowMapping, Table, cast, create_engine, inspect, select
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.pool import NullPool

from bso_server.errors import ZeusDatabaseError
from bso_server.storage.database import open_database
from bso_server.storage.deadlines import LONG_PATIENCE_S
from bso_server.storage.faults import NoConnectionError, described

# Seconds that a read waits for a transaction of Zeus's server, on SQLite.
_SQLITE_BUSY_TIMEOUT_S = 5.0

# Columns of each table in Zeus 0.16. The columns that specify a job have the same names in `JobSpecFromClient`.
_SPECIFIED = """job_id job_id_prefix default_batch_size higher_is_better_metric eta_knob beta_knob target_metric
    max_epochs num_pruning_rounds window_size max_power number_of_gpus gpu_model mab_prior_mean mab_prior_precision
    mab_num_explorations mab_seed"""
_JOB, _SIZE, _ARM, _TRIAL = "Job", "BatchSize", "GaussianTsArmState", "Trial"
_TABLES = {
    _JOB: f"{_SPECIFIED} mab_random_generator_state exp_default_batch_size stage min_cost min_cost_batch_size",
    _SIZE: "job_id batch_size",
    _ARM: "job_id batch_size param_mean param_precision reward_precision num_observations",
    _TRIAL: "job_id batch_size trial_number start_timestamp type status end_timestamp time energy converged",
}

# Columns that Zeus has measured or computed.
_MEASURED = frozenset({"min_cost", "param_mean", "time", "energy"})


@dataclass(frozen=True, slots=True)
class ZeusJob:
    """Job with all its data.

    Attributes:
        specification: Fields of its registration.
        rng_state: State of its random generator as JSON, or None.
        min_cost_j: Lowest cost of a trial, joules, or None.
        arms: Rows of `GaussianTsArmState`, ascending by batch size; none before the bandit stage. Rewards are −cost
            in joules.
        trials: Rows of `Trial`, in order of dispatch, in seconds and joules; times without a zone, by the clock of
            Zeus's server.
        digits: Significant digits with which Zeus reads its own measurements.
    """

    specification: dict[str, Any]
    rng_state: str | None
    min_cost_j: float | None
    arms: Sequence[RowMapping]
    trials: Sequence[RowMapping]
    digits: int

    @property
    def job_id(self) -> str:
        """Id of the job, up to 400 arbitrary characters."""
        return str(self.specification["job_id"])


async def read_jobs(database_url: str) -> list[ZeusJob]:
    """Return all jobs of a Zeus server, ordered by id; `database_url` is the URL in its settings.

    Raises:
        ZeusDatabaseError: The database cannot be read, or it lacks the tables of Zeus 0.16.
        ValueError: The database is of an unsupported kind, or its driver is not installed.
    """
    try:
        url = make_url(database_url)
    except ArgumentError:
        # The message omits the URL, which may contain a password.
        raise ZeusDatabaseError(
            "the URL of Zeus's database cannot be read; it is what its server has as ZEUS_BSO_DATABASE_URL, such as "
            "sqlite+aiosqlite:////var/lib/zeus.sqlite3 or postgresql+asyncpg://user:password@host/database"
        ) from None
    try:
        if url.get_backend_name() == "sqlite":
            return await asyncio.to_thread(_read_file, url)
        return await _read_server(url)
    except (NoConnectionError, DBAPIError, sqlite3.Error) as error:
        cause = error if isinstance(error, NoConnectionError) else NoConnectionError(error)
        raise ZeusDatabaseError(f"Zeus's database {described(url)} cannot be read: {cause}") from error


def _read_file(url: URL) -> list[ZeusJob]:
    path = Path(url.database or "")
    if not path.is_file():
        raise ZeusDatabaseError(f"there is no SQLite file {str(path)!r}: name the database of Zeus's server")

    def connect() -> sqlite3.Connection:
        uri = f"{path.resolve().as_uri()}?mode=ro"
        return sqlite3.connect(uri, uri=True, timeout=_SQLITE_BUSY_TIMEOUT_S, isolation_level=None)

    engine = create_engine("sqlite://", creator=connect, poolclass=NullPool)
    with engine.connect() as connection:
        connection.exec_driver_sql("BEGIN")
        return _read(connection)


async def _read_server(url: URL) -> list[ZeusJob]:
    def read(connection: Connection) -> list[ZeusJob]:
        connection.exec_driver_sql("SET TRANSACTION READ ONLY")
        return _read(connection)

    # Without the driver, because Zeus's server may use another driver.
    own_url = url.set(drivername=url.get_backend_name()).render_as_string(hide_password=False)
    database = open_database(own_url, patience_s=LONG_PATIENCE_S)
    try:
        return await database.transact(read, read_only=True, timeout_s=LONG_PATIENCE_S)
    finally:
        await database.close()


def _read(connection: Connection) -> list[ZeusJob]:
    tables = _tables(connection)
    # MySQL stores Zeus's numbers in single precision and prints six digits, and Zeus reads these digits. A cast returns
    # the stored value. Only measured columns are cast: a specification of 0.9 must not become 0.8999999761581421.
    digits = 6 if connection.dialect.name in ("mysql", "mariadb") else 15
    sizes = _by_job(_rows(connection, tables[_SIZE], "batch_size"))
    arms = _by_job(_rows(connection, tables[_ARM], "batch_size"))
    trials = _by_job(_rows(connection, tables[_TRIAL], "trial_number"))
    return [
        ZeusJob(
            {
                **{name: job[name] for name in _SPECIFIED.split()},
                "batch_sizes": [row["batch_size"] for row in sizes.get(job["job_id"], ())],
            },
            job["mab_random_generator_state"],
            job["min_cost"],
            arms.get(job["job_id"], []),
            trials.get(job["job_id"], []),
            digits,
        )
        for job in _rows(connection, tables[_JOB], "job_id")
    ]


def _rows(connection: Connection, table: Table, order: str) -> list[RowMapping]:
    columns = [cast(column, Double).label(column.name) if column.name in _MEASURED else column for column in table.c]
    return list(connection.execute(select(*columns).order_by(table.c[order])).mappings())


def _by_job(rows: list[RowMapping]) -> dict[str, list[RowMapping]]:
    found: dict[str, list[RowMapping]] = {}
    for row in rows:
        found.setdefault(row["job_id"], []).append(row)
    return found


def _tables(connection: Connection) -> dict[str, Table]:
    """Return Zeus's tables; raise `ZeusDatabaseError` if tables or columns are missing, or there are other columns."""
    inspector = inspect(connection)
    there = [name for name in _TABLES if inspector.has_table(name)]
    if not there:
        hint = ""
        if inspector.has_table("jobs") and inspector.has_table("policy_memories"):
            hint = ": it is one of this project's; bso-server jobs export and jobs import move its jobs"
        raise ZeusDatabaseError(f"the database has no table of Zeus's batch size optimization server{hint}")
    metadata = MetaData()
    metadata.reflect(connection, only=there)
    for name, names in _TABLES.items():
        wanted, found = set(names.split()), set(metadata.tables[name].c.keys() if name in there else ())
        if found != wanted:
            differs = [
                *(f"no {name}.{column}" for column in sorted(wanted - found)),
                *(f"{name}.{column} beside" for column in sorted(found - wanted)),
            ]
            raise ZeusDatabaseError(
                f"the tables are of another version of Zeus; only 0.16 can be read: {', '.join(differs)}"
            )
    return {name: metadata.tables[name] for name in _TABLES}
