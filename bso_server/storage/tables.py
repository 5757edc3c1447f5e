"""Tables: `jobs`, `trials`, `epochs`, `power_profiles`, `decisions` and `tokens` hold facts.

`arms`, `policy_memories` and the columns marked as caches follow from the facts and save reading history.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import (
    Boolean,
    Column,
    DateTime,
    Dialect,
    Double,
    Enum,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
)
from sqlalchemy.dialects import mysql
from sqlalchemy.types import TypeEngine

from bso_server.core.model import Arm
from zeus_plugins.protocol import EndReason, Origin, PowerLimitSample, TrialState

metadata = MetaData()

# MySQL limits TEXT to 64 KiB; the other databases have no limit.
LongText = Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")

# Ids are case-sensitive, but MySQL's default collation treats "Job" and "job" as the same key.
_MYSQL: dict[str, Any] = {"mysql_charset": "utf8mb4", "mysql_collate": "utf8mb4_bin", "mysql_engine": "InnoDB"}


def _to_sqlite(value: datetime | None) -> str | None:
    return None if value is None else value.astimezone(UTC).replace(tzinfo=None).isoformat(" ", "microseconds")


def _from_sqlite(value: str | None) -> datetime | None:
    return None if value is None else datetime.fromisoformat(value).replace(tzinfo=UTC)


class UtcDateTime(TypeDecorator[datetime]):
    """Instant, aware and in UTC in Python; stored without a zone where the database has no type for zones."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Return a type with microseconds, which MySQL's DATETIME has only on request."""
        if dialect.name in {"mysql", "mariadb"}:
            return dialect.type_descriptor(mysql.DATETIME(fsp=6))
        return dialect.type_descriptor(DateTime(timezone=dialect.name == "postgresql"))

    def bind_processor(self, dialect: Dialect) -> Callable[[datetime | None], Any] | None:
        """Return SQLAlchemy's processor; on SQLite, a faster one with the same result."""
        return _to_sqlite if dialect.name == "sqlite" else super().bind_processor(dialect)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], datetime | None] | None:
        """Return SQLAlchemy's processor; on SQLite, a faster one with the same result."""
        return _from_sqlite if dialect.name == "sqlite" else super().result_processor(dialect, coltype)

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert to UTC; drop the zone where the database has no type for it."""
        if value is None:
            return None
        in_utc = value.astimezone(UTC)
        return in_utc if dialect.name == "postgresql" else in_utc.replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002 - the signature is SQLAlchemy's
        """Restore the zone."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Json(TypeDecorator[Any]):
    """Value of a type that pydantic validates, stored as JSON text."""

    impl = LongText
    cache_ok = True

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind
        self._adapter: TypeAdapter[Any] = TypeAdapter(kind)

    def process_bind_param(self, value: Any, dialect: Dialect) -> str:  # noqa: ARG002 - the signature is SQLAlchemy's
        """Return the value as JSON."""
        return self._adapter.dump_json(value).decode()

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:  # noqa: ARG002 - the signature is SQLAlchemy's
        """Return the value of this JSON."""
        return self._adapter.validate_json(value)


def _member_of(members: type[StrEnum], length: int) -> Enum:
    """Return the type of a column that stores members of an enumeration as text."""
    return Enum(members, native_enum=False, length=length, values_callable=lambda kind: [each.value for each in kind])


# When a column of a trial is updated: with each report, with each change of state (which writes the columns of reports
# too), or when the training sends its power limit. Columns without such a mark are never updated.
REPORT = {"written": "report"}
STATE = {"written": "state"}
POWER_LIMIT = {"written": "power limit"}

jobs = Table(
    "jobs",
    metadata,
    Column("job_id", String(255), primary_key=True),
    Column("job_id_prefix", String(255), nullable=False, index=True),
    Column("policy", String(32), nullable=False),
    # Registration as JSON, which never changes.
    Column("spec", Text, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    # Random id that distinguishes a job from a deleted one with the same job_id; null for imported jobs.
    Column("registration_id", String(32)),
    # `protocol.Fingerprint` as JSON; null until a training has sent it.
    Column("fingerprint", Text),
    # Id of the token that owns the job; null if the job was registered without a token.
    Column("owner", String(16)),
    # True if other tokens may use the job too.
    Column("shared", Boolean, nullable=False),
    # During an import, the time of its last insertion. Queries ignore the job until the import sets this to null.
    Column("importing_at", UtcDateTime, index=True),
    # Logical clock of the job: one tick for each dispatch and for each end of a trial.
    Column("event_count", Integer, nullable=False),
    # State of the random generator as JSON; null before the first draw and for jobs without a seed.
    Column("rng_state", Text),
    # Batch sizes at the start of the bandit stage, as JSON; null before that.
    Column("survivors", Text),
    # Caches.
    Column("trial_count", Integer, nullable=False),
    Column("min_cost_j", Double),
    Column("min_cost_batch_size", Integer),
    Column("min_cost_trial_number", Integer),
    Column("bandit_entered_event", Integer),
    # The arms include the ends of trials up to this event; the next suggestion adds later ones.
    Column("folded_event", Integer, nullable=False),
    **_MYSQL,
)

# Each column is a field of `core.model.TrialRecord` with the same name.
trials = Table(
    "trials",
    metadata,
    Column("job_id", String(255), ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True),
    Column("trial_number", Integer, primary_key=True, autoincrement=False),
    Column("batch_size", Integer, nullable=False),
    Column("state", _member_of(TrialState, 16), nullable=False, info=STATE),
    Column("origin", _member_of(Origin, 16), nullable=False),
    Column("reason", Text, nullable=False),
    Column("message", Text, info=REPORT),
    Column("end_reason", _member_of(EndReason, 32), info=STATE),
    Column("started_at", UtcDateTime, nullable=False),
    Column("started_event", Integer, nullable=False),
    Column("reported_at", UtcDateTime, info=REPORT),
    Column("ended_at", UtcDateTime, info=STATE),
    Column("ended_event", Integer, info=STATE),
    # Totals from the start of the trial to its last report; null before the first report.
    Column("time_s", Double, info=REPORT),
    Column("energy_j", Double, info=REPORT),
    Column("energy_source", String(255), info=REPORT),
    Column("epoch", Double, info=REPORT),
    Column("metric", Double, info=REPORT),
    Column("report_count", Integer, nullable=False, info=REPORT),
    Column("longest_gap_s", Double, nullable=False, info=REPORT),
    Column("lease_expires_at", UtcDateTime, info=REPORT),
    Column("heartbeats", Boolean, nullable=False, info=STATE),
    Column("lease_epoch", Integer, nullable=False, info=STATE),
    Column("first_epoch", Double, info=REPORT),
    Column("first_cost_j", Double, info=REPORT),
    Column("cost_deviations_j2", Double, info=REPORT),
    Column("epoch_bound", Integer, info=STATE),
    Column("epoch_bound_reason", Text, info=STATE),
    Column("idempotency_key", String(255)),
    Column("owner", String(16)),
    Column("power_limit_w", Double, info=POWER_LIMIT),
    Column("power_limits", Integer, info=POWER_LIMIT),
    Index("ix_trials_job_id_idempotency_key", "job_id", "idempotency_key", unique=True),
    Index("ix_trials_job_id_origin", "job_id", "origin"),
    Index("ix_trials_job_id_ended_event", "job_id", "ended_event"),
    Index("ix_trials_state_job_id", "state", "job_id"),
    Index("ix_trials_owner", "owner"),
    **_MYSQL,
)

epochs = Table(
    "epochs",
    metadata,
    Column("job_id", String(255), primary_key=True),
    Column("trial_number", Integer, primary_key=True, autoincrement=False),
    Column("report_number", Integer, primary_key=True, autoincrement=False),
    Column("epoch", Double, nullable=False),
    Column("time_s", Double, nullable=False),
    Column("energy_j", Double, nullable=False),
    Column("metric", Double, nullable=False),
    Column("reported_at", UtcDateTime, nullable=False, index=True),
    ForeignKeyConstraint(["job_id", "trial_number"], ["trials.job_id", "trials.trial_number"], ondelete="CASCADE"),
    **_MYSQL,
)

# Costs of steps under each power limit, stored with the trial that measured them.
power_profiles = Table(
    "power_profiles",
    metadata,
    Column("job_id", String(255), primary_key=True),
    Column("trial_number", Integer, primary_key=True, autoincrement=False),
    # Copied from the trial, so that one index finds the newest profile of a batch size.
    Column("batch_size", Integer, nullable=False),
    # Ascending by limit.
    Column("samples", Json(tuple[PowerLimitSample, ...]), nullable=False),
    Column("stored_at", UtcDateTime, nullable=False),
    ForeignKeyConstraint(["job_id", "trial_number"], ["trials.job_id", "trials.trial_number"], ondelete="CASCADE"),
    Index("ix_power_profiles_job_id_batch_size", "job_id", "batch_size", "trial_number"),
    **_MYSQL,
)

# Numbers behind the choice of a trial's batch size, which pages show and no decision uses.
decisions = Table(
    "decisions",
    metadata,
    Column("job_id", String(255), primary_key=True),
    Column("trial_number", Integer, primary_key=True, autoincrement=False),
    # `protocol.Decision` as JSON; lists of records without field names, so that it takes at most 4 KiB.
    Column("decision", Text, nullable=False),
    ForeignKeyConstraint(["job_id", "trial_number"], ["trials.job_id", "trials.trial_number"], ondelete="CASCADE"),
    **_MYSQL,
)

# Cache with one row for each batch size of a job.
arms = Table(
    "arms",
    metadata,
    Column("job_id", String(255), ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True),
    Column("batch_size", Integer, primary_key=True, autoincrement=False),
    # `refusals.refuse_long_window` limits the size of its window.
    Column("arm", Json(Arm), nullable=False),
    **_MYSQL,
)

# Cache of `core.policy.Memory`: a job has a row once its policy, if that has a memory, has learned from a trial.
policy_memories = Table(
    "policy_memories",
    metadata,
    Column("job_id", String(255), ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True),
    # Version of the policy that computed the memory; other versions compute their own.
    Column("version", String(64), nullable=False),
    # The memory includes the ends of trials up to this event.
    Column("folded_event", Integer, nullable=False),
    Column("memory", LongText, nullable=False),
    **_MYSQL,
)

# Always empty: one transaction inserts and deletes a row, to check that the database accepts writes.
write_probes = Table(
    "write_probes",
    metadata,
    Column("probe_id", String(32), primary_key=True),
    Column("ballast", Text, nullable=False),
    **_MYSQL,
)

tokens = Table(
    "tokens",
    metadata,
    Column("token_id", String(16), primary_key=True),
    Column("name", String(255), nullable=False),
    # Separated by blanks.
    Column("scopes", String(64), nullable=False),
    # SHA-256 in hex digits.
    Column("token_hash", String(64), nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("revoked_at", UtcDateTime),
    # True if other tokens may use the jobs that this token registers.
    Column("shares_jobs", Boolean, nullable=False),
    # Time of the last rotation; the secret before it is valid until `previous_until`.
    Column("rotated_at", UtcDateTime),
    Column("previous_hash", String(64)),
    Column("previous_until", UtcDateTime),
    **_MYSQL,
)
