"""The tables. `jobs`, `trials`, `epochs`, `power_profiles`, `decisions` and `tokens` hold facts.

`arms`, `policy_memories` and the columns marked as caches follow from them and save reading history.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

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

from zeus_plugins.protocol import EndReason, Origin, TrialState

metadata = MetaData()

# MySQL's TEXT ends at 64 KiB; the others have no limit.
LongText = Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")

# Ids differ by case and accent; MySQL's default collation would take "Job" and "job" for the same key.
_MYSQL: dict[str, Any] = {"mysql_charset": "utf8mb4", "mysql_collate": "utf8mb4_bin", "mysql_engine": "InnoDB"}


def _to_sqlite(value: datetime | None) -> str | None:
    return None if value is None else value.astimezone(UTC).replace(tzinfo=None).isoformat(" ", "microseconds")


def _from_sqlite(value: str | None) -> datetime | None:
    return None if value is None else datetime.fromisoformat(value).replace(tzinfo=UTC)


class UtcDateTime(TypeDecorator[datetime]):
    """An instant. Aware and in UTC on the Python side, whatever the database can keep."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Microseconds everywhere: MySQL's DATETIME drops them unless told otherwise."""
        if dialect.name in {"mysql", "mariadb"}:
            return dialect.type_descriptor(mysql.DATETIME(fsp=6))
        return dialect.type_descriptor(DateTime(timezone=dialect.name == "postgresql"))

    def bind_processor(self, dialect: Dialect) -> Callable[[datetime | None], Any] | None:
        """As SQLAlchemy does it, and on SQLite the same text by a shorter way."""
        return _to_sqlite if dialect.name == "sqlite" else super().bind_processor(dialect)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], datetime | None] | None:
        """Likewise."""
        return _from_sqlite if dialect.name == "sqlite" else super().result_processor(dialect, coltype)

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


def _member_of(members: type[StrEnum], length: int) -> Enum:
    """A member of an enumeration, kept as its text."""
    return Enum(members, native_enum=False, length=length, values_callable=lambda kind: [each.value for each in kind])


# A trial's column and when it is written anew, beside its insertion: with each report, with each change of its state
# (and then with what reports write, too), when its power limit is told; never where nothing is said.
REPORT = {"written": "report"}
STATE = {"written": "state"}
POWER_LIMIT = {"written": "power limit"}

jobs = Table(
    "jobs",
    metadata,
    Column("job_id", String(255), primary_key=True),
    Column("job_id_prefix", String(255), nullable=False, index=True),
    Column("policy", String(32), nullable=False),
    # The registration as JSON: immutable, read as a whole, compared as a whole.
    Column("spec", Text, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    # Random, so that a job that is deleted and registered anew is told apart; null for imported ones.
    Column("registration_id", String(32)),
    # `protocol.Fingerprint` as JSON; null while no training has told.
    Column("fingerprint", Text),
    # Id of the token that it belongs to; null where it was registered without one.
    # Shared: other tokens may use it, too.
    Column("owner", String(16)),
    Column("shared", Boolean, nullable=False),
    # While the job is imported: when its import last added something. It is no job until that is over and this null.
    Column("importing_at", UtcDateTime, index=True),
    # Logical clock of the job: one tick per dispatch and per ending.
    Column("event_count", Integer, nullable=False),
    # State of the job's random generator as JSON; null before its first draw and for jobs without a seed.
    Column("rng_state", Text),
    # Batch sizes with which the bandit stage was entered, as JSON; null before that.
    Column("survivors", Text),
    # Caches.
    Column("trial_count", Integer, nullable=False),
    Column("min_cost_j", Double),
    Column("min_cost_batch_size", Integer),
    Column("min_cost_trial_number", Integer),
    Column("bandit_entered_event", Integer),
    # The arms hold the ends of trials up to this event; later ones are added by the next suggestion.
    Column("folded_event", Integer, nullable=False),
    **_MYSQL,
)

# Each column is a field of `core.model.TrialRecord`, by its name.
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
    # Totals since the trial began, as of the last report. Null before the first.
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

# What steps cost under each power limit, kept with the trial that measured something new at its batch size.
power_profiles = Table(
    "power_profiles",
    metadata,
    Column("job_id", String(255), primary_key=True),
    Column("trial_number", Integer, primary_key=True, autoincrement=False),
    # The trial's, so that the newest profile of a size is found by one index.
    Column("batch_size", Integer, nullable=False),
    # `PowerLimitSample`s as JSON, ascending by limit; the GPUs are the job's.
    Column("samples", LongText, nullable=False),
    Column("stored_at", UtcDateTime, nullable=False),
    ForeignKeyConstraint(["job_id", "trial_number"], ["trials.job_id", "trials.trial_number"], ondelete="CASCADE"),
    Index("ix_power_profiles_job_id_batch_size", "job_id", "batch_size", "trial_number"),
    **_MYSQL,
)

# The numbers behind the choice of a trial's batch size: facts, for people.
decisions = Table(
    "decisions",
    metadata,
    Column("job_id", String(255), primary_key=True),
    Column("trial_number", Integer, primary_key=True, autoincrement=False),
    # `protocol.Decision` as JSON without the names of its fields, at most 4 KiB.
    Column("decision", Text, nullable=False),
    ForeignKeyConstraint(["job_id", "trial_number"], ["trials.job_id", "trials.trial_number"], ondelete="CASCADE"),
    **_MYSQL,
)

# A cache as a whole: one row per batch size of a job.
arms = Table(
    "arms",
    metadata,
    Column("job_id", String(255), ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True),
    Column("batch_size", Integer, primary_key=True, autoincrement=False),
    # `core.model.Arm` as JSON; `refusals.refuse_long_window` bounds its window.
    Column("arm", LongText, nullable=False),
    **_MYSQL,
)

# A cache as a whole: what a job's policy remembers itself, `core.policy.Memory`. Only with policies that do, and not
# before a decision that had an end of a trial to learn from.
policy_memories = Table(
    "policy_memories",
    metadata,
    Column("job_id", String(255), ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True),
    # The policy's version that has made it: another one makes it anew.
    Column("version", String(64), nullable=False),
    # It holds the ends of trials up to this event.
    Column("folded_event", Integer, nullable=False),
    # The policy's own JSON.
    Column("memory", LongText, nullable=False),
    **_MYSQL,
)

# Empty: a row is added and removed in one transaction, to see whether the database keeps anything.
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
    # Whether the jobs that it registers are shared.
    Column("shares_jobs", Boolean, nullable=False),
    # The secret before the last rotation, which is good until then.
    Column("rotated_at", UtcDateTime),
    Column("previous_hash", String(64)),
    Column("previous_until", UtcDateTime),
    **_MYSQL,
)
