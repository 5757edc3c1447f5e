"""Tables of facts, and of caches.

`arms`, `policy_memories`, `verdicts` and the columns marked as caches can be computed from the facts. They save reading
all trials of a job.
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import sqlalchemy as sa
from pydantic import TypeAdapter
from sqlalchemy.dialects import mysql
from sqlalchemy.types import TypeEngine

from bso_server.core.model import Arm, Deviations
from bso_server.core.savings import JobVerdict
from zeus_plugins.protocol import Change, EndReason, Origin, TrialState

metadata = sa.MetaData()

# MySQL limits TEXT to 64 KiB; the other databases have no limit.
LongText = sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")

# Ids are case-sensitive, but MySQL's default collation treats "Job" and "job" as the same key.
_MYSQL: dict[str, Any] = {"mysql_charset": "utf8mb4", "mysql_collate": "utf8mb4_bin", "mysql_engine": "InnoDB"}


class UtcDateTime(sa.TypeDecorator[datetime]):
    """Instant: in Python, aware and in UTC; in databases without a type for time zones, stored without a zone."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: sa.Dialect) -> TypeEngine[Any]:
        """Return a type with microseconds, which MySQL's DATETIME has only on request."""
        if dialect.name in {"mysql", "mariadb"}:
            return dialect.type_descriptor(mysql.DATETIME(fsp=6))
        return dialect.type_descriptor(sa.DateTime(timezone=dialect.name == "postgresql"))

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        """Convert to UTC; drop the zone where the database has no type for it."""
        if value is None:
            return None
        in_utc = value.astimezone(UTC)
        return in_utc if dialect.name == "postgresql" else in_utc.replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:  # noqa: ARG002 - the signature is SQLAlchemy's
        """Restore the zone."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Json(sa.TypeDecorator[Any]):
    """Value of a type that pydantic validates, stored as JSON text; None is null."""

    impl = LongText
    cache_ok = True

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind
        self._adapter: TypeAdapter[Any] = TypeAdapter(kind)

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> str | None:  # noqa: ARG002 - the signature is SQLAlchemy's
        """Return the value as JSON."""
        return None if value is None else self._adapter.dump_json(value).decode()

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> Any:  # noqa: ARG002 - the signature is SQLAlchemy's
        """Return the value of this JSON."""
        return None if value is None else self._adapter.validate_json(value)


def _member_of(members: type[StrEnum], length: int) -> sa.Enum:
    """Return the type of a column that stores members of an enumeration as text."""
    return sa.Enum(
        members, native_enum=False, length=length, values_callable=lambda kind: [each.value for each in kind]
    )


# When a message updates a column of a trial: with each report, or with each change of state (which writes the columns
# of reports too). Messages of a trial never update other columns.
REPORT = {"written": "report"}
STATE = {"written": "state"}

jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("job_id", sa.String(255), primary_key=True),
    sa.Column("job_id_prefix", sa.String(255), nullable=False, index=True),
    sa.Column("policy", sa.String(32), nullable=False),
    # The job's present terms as JSON, which only revisions change.
    sa.Column("spec", sa.Text, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    # Random id that distinguishes a job from a deleted one with the same job_id; null for imported jobs.
    sa.Column("registration_id", sa.String(32)),
    # `protocol.Fingerprint` as JSON; null until a training has sent it.
    sa.Column("fingerprint", sa.Text),
    # Id of the token that owns the job; null if the job was registered without a token.
    sa.Column("owner", sa.String(16)),
    # True if other tokens may use the job too.
    sa.Column("shared", sa.Boolean, nullable=False),
    # For jobs that were registered without a target: the target, null until it is set, and as JSON the numbers of the
    # trials from which the target was learned. Both are null for other jobs.
    sa.Column("target_metric", sa.Double),
    sa.Column("target_runs", sa.String(64)),
    # Logical clock of the job: one tick for each dispatch, end and discard of a trial, and for each revision.
    sa.Column("event_count", sa.Integer, nullable=False),
    # State of the random generator as JSON; null before the first draw and for jobs without a seed.
    sa.Column("rng_state", sa.Text),
    # Batch sizes with which the bandit stage began, as JSON; null before this stage.
    sa.Column("survivors", sa.Text),
    # Caches.
    sa.Column("trial_count", sa.Integer, nullable=False),
    sa.Column("min_cost_j", sa.Double),
    sa.Column("min_cost_batch_size", sa.Integer),
    sa.Column("min_cost_trial_number", sa.Integer),
    sa.Column("bandit_entered_event", sa.Integer),
    # The arms include the trials that ended up to this event; the next suggestion adds the later trials.
    sa.Column("folded_event", sa.Integer, nullable=False),
    # Event of the latest revision, or 0. Trials that began before this revision end under the earlier terms.
    sa.Column("revised_event", sa.Integer, nullable=False),
    **_MYSQL,
)

# Each column is a field of `protocol.Revision` with the same name.
revisions = sa.Table(
    "revisions",
    metadata,
    sa.Column("job_id", sa.String(255), sa.ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True),
    sa.Column("revision", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("event", sa.Integer, nullable=False),
    sa.Column("trials", sa.Integer, nullable=False),
    sa.Column("revised_at", UtcDateTime, nullable=False),
    sa.Column("changes", Json(dict[str, Change]), nullable=False),
    **_MYSQL,
)

# Each column is a field of `core.model.TrialRecord` with the same name.
trials = sa.Table(
    "trials",
    metadata,
    sa.Column("job_id", sa.String(255), sa.ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True),
    sa.Column("trial_number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("batch_size", sa.Integer, nullable=False),
    sa.Column("state", _member_of(TrialState, 16), nullable=False, info=STATE),
    sa.Column("origin", _member_of(Origin, 16), nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("message", sa.Text, info=REPORT),
    sa.Column("end_reason", _member_of(EndReason, 32), info=STATE),
    sa.Column("started_at", UtcDateTime, nullable=False),
    sa.Column("started_event", sa.Integer, nullable=False),
    sa.Column("reported_at", UtcDateTime, info=REPORT),
    sa.Column("ended_at", UtcDateTime, info=STATE),
    sa.Column("ended_event", sa.Integer, info=STATE),
    # Totals from the start of the trial to its last report; null before the first report.
    sa.Column("time_s", sa.Double, info=REPORT),
    sa.Column("energy_j", sa.Double, info=REPORT),
    sa.Column("energy_source", sa.String(255), info=REPORT),
    sa.Column("epoch", sa.Double, info=REPORT),
    sa.Column("metric", sa.Double, info=REPORT),
    # Finite values of watched metrics, by name.
    sa.Column("watched", Json(dict[str, float]), info=REPORT),
    sa.Column("report_count", sa.Integer, nullable=False, info=REPORT),
    sa.Column("longest_gap_s", sa.Double, nullable=False, info=REPORT),
    sa.Column("lease_expires_at", UtcDateTime, info=REPORT),
    sa.Column("heartbeats", sa.Boolean, nullable=False, info=STATE),
    sa.Column("lease_epoch", sa.Integer, nullable=False, info=STATE),
    sa.Column("first_epoch", sa.Double, info=REPORT),
    sa.Column("first_time_s", sa.Double, info=REPORT),
    sa.Column("first_energy_j", sa.Double, info=REPORT),
    sa.Column("deviations", Json(Deviations), info=REPORT),
    sa.Column("epoch_bound", sa.Integer, info=STATE),
    sa.Column("epoch_bound_reason", sa.Text, info=STATE),
    sa.Column("idempotency_key", sa.String(255)),
    sa.Column("owner", sa.String(16)),
    sa.Column("power_limit_w", sa.Double, info=REPORT),
    sa.Column("power_limits", sa.Integer, info=REPORT),
    sa.Column("confirmed", sa.Integer, nullable=False, info=REPORT),
    sa.Column("waited_share", sa.Double, info=REPORT),
    sa.Column("startup_s", sa.Double, info=REPORT),
    # True if a revision has given the job other GPUs since the trial began; only revisions update this column.
    sa.Column("other_gpus", sa.Boolean, nullable=False),
    sa.Index("ix_trials_job_id_idempotency_key", "job_id", "idempotency_key", unique=True),
    sa.Index("ix_trials_job_id_origin", "job_id", "origin"),
    sa.Index("ix_trials_job_id_ended_event", "job_id", "ended_event"),
    sa.Index("ix_trials_state_job_id", "state", "job_id"),
    sa.Index("ix_trials_owner", "owner"),
    **_MYSQL,
)

epochs = sa.Table(
    "epochs",
    metadata,
    sa.Column("job_id", sa.String(255), primary_key=True),
    sa.Column("trial_number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("report_number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("epoch", sa.Double, nullable=False),
    sa.Column("time_s", sa.Double, nullable=False),
    sa.Column("energy_j", sa.Double, nullable=False),
    sa.Column("metric", sa.Double, nullable=False),
    sa.Column("reported_at", UtcDateTime, nullable=False, index=True),
    sa.ForeignKeyConstraint(["job_id", "trial_number"], ["trials.job_id", "trials.trial_number"], ondelete="CASCADE"),
    **_MYSQL,
)

# Numbers behind the choice of a trial's batch size. Pages show them, but later decisions do not use them.
decisions = sa.Table(
    "decisions",
    metadata,
    sa.Column("job_id", sa.String(255), primary_key=True),
    sa.Column("trial_number", sa.Integer, primary_key=True, autoincrement=False),
    # `protocol.Decision` as JSON, with its records as lists without field names, so that it takes at most 4 KiB.
    sa.Column("decision", sa.Text, nullable=False),
    sa.ForeignKeyConstraint(["job_id", "trial_number"], ["trials.job_id", "trials.trial_number"], ondelete="CASCADE"),
    **_MYSQL,
)

# Cache with one row for each batch size of a job.
arms = sa.Table(
    "arms",
    metadata,
    sa.Column("job_id", sa.String(255), sa.ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True),
    sa.Column("batch_size", sa.Integer, primary_key=True, autoincrement=False),
    # `refusals.refuse_long_window` limits the length of the arm's window.
    sa.Column("arm", Json(Arm), nullable=False),
    **_MYSQL,
)

# Cache of `core.policy.Memory`. If the policy of a job has a memory, a row exists once it has learned from a trial.
policy_memories = sa.Table(
    "policy_memories",
    metadata,
    sa.Column("job_id", sa.String(255), sa.ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True),
    # Version of the policy that computed the memory; other versions compute their own.
    sa.Column("version", sa.String(64), nullable=False),
    # The memory includes the trials that ended up to this event.
    sa.Column("folded_event", sa.Integer, nullable=False),
    sa.Column("memory", LongText, nullable=False),
    **_MYSQL,
)

# Cache of `service.verdicts`.
verdicts = sa.Table(
    "verdicts",
    metadata,
    sa.Column("job_id", sa.String(255), sa.ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True),
    # Other versions compute their own verdict (`core.savings.verdict_version`).
    sa.Column("version", sa.String(80), nullable=False),
    # The verdict includes the trials that ended up to this event.
    sa.Column("event", sa.Integer, nullable=False),
    # A copy of the verdict's field, by which jobs are ordered.
    sa.Column("trouble", sa.Integer, nullable=False),
    sa.Column("verdict", Json(JobVerdict), nullable=False),
    **_MYSQL,
)

# Always empty: one transaction inserts and deletes a row, to check that the database accepts writes.
write_probes = sa.Table(
    "write_probes",
    metadata,
    sa.Column("probe_id", sa.String(32), primary_key=True),
    sa.Column("ballast", sa.Text, nullable=False),
    **_MYSQL,
)

tokens = sa.Table(
    "tokens",
    metadata,
    sa.Column("token_id", sa.String(16), primary_key=True),
    sa.Column("name", sa.String(255), nullable=False),
    # Separated by blanks.
    sa.Column("scopes", sa.String(64), nullable=False),
    # SHA-256 in hex digits.
    sa.Column("token_hash", sa.String(64), nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("revoked_at", UtcDateTime),
    # True if other tokens may use the jobs that this token registers.
    sa.Column("shares_jobs", sa.Boolean, nullable=False),
    # Time of the last rotation; the secret from before the rotation is valid until `previous_until`.
    sa.Column("rotated_at", UtcDateTime),
    sa.Column("previous_hash", sa.String(64)),
    sa.Column("previous_until", UtcDateTime),
    **_MYSQL,
)
