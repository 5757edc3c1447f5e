"""The tables. `jobs` and `trials` hold facts; columns marked as caches follow from them and save reading history."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    Column,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
)
from sqlalchemy.dialects import mysql
from sqlalchemy.types import TypeEngine

metadata = MetaData()

# Ids differ by case and accent; MySQL's default collation would take "Job" and "job" for the same key.
_MYSQL: dict[str, Any] = {"mysql_charset": "utf8mb4", "mysql_collate": "utf8mb4_bin", "mysql_engine": "InnoDB"}


class UtcDateTime(TypeDecorator[datetime]):
    """An instant. Aware and in UTC on the Python side, whatever the database can keep."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Microseconds everywhere: MySQL's DATETIME drops them unless told otherwise."""
        if dialect.name in {"mysql", "mariadb"}:
            return dialect.type_descriptor(mysql.DATETIME(fsp=6))
        return dialect.type_descriptor(DateTime(timezone=dialect.name == "postgresql"))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert to UTC; drop the zone where the database has no type for it."""
        if value is None:
            return None
        in_utc = value.astimezone(UTC)
        return in_utc if dialect.name == "postgresql" else in_utc.replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002 - the signature is SQLAlchemy's
        """Put the zone back."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


jobs = Table(
    "jobs",
    metadata,
    Column("job_id", String(255), primary_key=True),
    Column("job_id_prefix", String(255), nullable=False, index=True),
    Column("policy", String(32), nullable=False),
    # The registration as JSON: immutable, read as a whole, compared as a whole.
    Column("spec", Text, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    # Logical clock of the job: one tick per dispatch and per ending.
    Column("event_count", Integer, nullable=False),
    # State of the job's random generator as JSON; null before its first draw and for jobs without a seed.
    Column("rng_state", Text),
    # Caches.
    Column("trial_count", Integer, nullable=False),
    Column("min_cost_j", Double),
    Column("min_cost_batch_size", Integer),
    **_MYSQL,
)

trials = Table(
    "trials",
    metadata,
    Column("job_id", String(255), ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True),
    Column("trial_number", Integer, primary_key=True, autoincrement=False),
    Column("batch_size", Integer, nullable=False),
    Column("state", String(16), nullable=False),
    Column("origin", String(16), nullable=False),
    Column("reason", Text, nullable=False),
    Column("message", Text),
    Column("started_at", UtcDateTime, nullable=False),
    Column("started_event", Integer, nullable=False),
    Column("reported_at", UtcDateTime),
    Column("ended_at", UtcDateTime),
    Column("ended_event", Integer),
    # The last report: totals since the trial began. Null before the first.
    Column("time_s", Double),
    Column("energy_j", Double),
    Column("energy_source", String(255)),
    Column("epoch", Double),
    Column("metric", Double),
    **_MYSQL,
)
