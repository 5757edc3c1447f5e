"""Jobs, their trials with measurements and caches, and access tokens."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

from bso_server.storage.tables import LongText, UtcDateTime

revision = "0001"
down_revision = None

_MYSQL: dict[str, Any] = {"mysql_charset": "utf8mb4", "mysql_collate": "utf8mb4_bin", "mysql_engine": "InnoDB"}


def create_power_profiles() -> None:
    """Create the table that revision 0008 drops."""
    op.create_table(
        "power_profiles",
        sa.Column("job_id", sa.String(255), primary_key=True),
        sa.Column("trial_number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("batch_size", sa.Integer, nullable=False),
        sa.Column("samples", LongText, nullable=False),
        sa.Column("stored_at", UtcDateTime, nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id", "trial_number"], ["trials.job_id", "trials.trial_number"], ondelete="CASCADE"
        ),
        **_MYSQL,
    )
    op.create_index("ix_power_profiles_job_id_batch_size", "power_profiles", ["job_id", "batch_size", "trial_number"])


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "jobs",
        sa.Column("job_id", sa.String(255), primary_key=True),
        sa.Column("job_id_prefix", sa.String(255), nullable=False, index=True),
        sa.Column("policy", sa.String(32), nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("registration_id", sa.String(32)),
        sa.Column("fingerprint", sa.Text),
        sa.Column("owner", sa.String(16)),
        sa.Column("shared", sa.Boolean, nullable=False),
        sa.Column("importing_at", UtcDateTime, index=True),
        sa.Column("target_metric", sa.Double),
        sa.Column("target_runs", sa.String(64)),
        sa.Column("event_count", sa.Integer, nullable=False),
        sa.Column("rng_state", sa.Text),
        sa.Column("survivors", sa.Text),
        sa.Column("trial_count", sa.Integer, nullable=False),
        sa.Column("min_cost_j", sa.Double),
        sa.Column("min_cost_batch_size", sa.Integer),
        sa.Column("min_cost_trial_number", sa.Integer),
        sa.Column("bandit_entered_event", sa.Integer),
        sa.Column("folded_event", sa.Integer, nullable=False),
        **_MYSQL,
    )
    op.create_table(
        "trials",
        sa.Column("job_id", sa.String(255), sa.ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True),
        sa.Column("trial_number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("batch_size", sa.Integer, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("origin", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("message", sa.Text),
        sa.Column("end_reason", sa.String(32)),
        sa.Column("started_at", UtcDateTime, nullable=False),
        sa.Column("started_event", sa.Integer, nullable=False),
        sa.Column("reported_at", UtcDateTime),
        sa.Column("ended_at", UtcDateTime),
        sa.Column("ended_event", sa.Integer),
        sa.Column("time_s", sa.Double),
        sa.Column("energy_j", sa.Double),
        sa.Column("energy_source", sa.String(255)),
        sa.Column("epoch", sa.Double),
        sa.Column("metric", sa.Double),
        sa.Column("watched", LongText),
        sa.Column("report_count", sa.Integer, nullable=False),
        sa.Column("longest_gap_s", sa.Double, nullable=False),
        sa.Column("lease_expires_at", UtcDateTime),
        sa.Column("heartbeats", sa.Boolean, nullable=False),
        sa.Column("lease_epoch", sa.Integer, nullable=False),
        sa.Column("first_epoch", sa.Double),
        sa.Column("first_cost_j", sa.Double),
        sa.Column("cost_deviations_j2", sa.Double),
        sa.Column("epoch_bound", sa.Integer),
        sa.Column("epoch_bound_reason", sa.Text),
        sa.Column("idempotency_key", sa.String(255)),
        sa.Column("owner", sa.String(16)),
        sa.Column("power_limit_w", sa.Double),
        sa.Column("power_limits", sa.Integer),
        sa.Column("confirmed", sa.Integer, nullable=False),
        sa.Column("waited_share", sa.Double),
        **_MYSQL,
    )
    op.create_index("ix_trials_job_id_idempotency_key", "trials", ["job_id", "idempotency_key"], unique=True)
    op.create_index("ix_trials_job_id_origin", "trials", ["job_id", "origin"])
    op.create_index("ix_trials_job_id_ended_event", "trials", ["job_id", "ended_event"])
    op.create_index("ix_trials_state_job_id", "trials", ["state", "job_id"])
    op.create_index("ix_trials_owner", "trials", ["owner"])
    op.create_table(
        "epochs",
        sa.Column("job_id", sa.String(255), primary_key=True),
        sa.Column("trial_number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("report_number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("epoch", sa.Double, nullable=False),
        sa.Column("time_s", sa.Double, nullable=False),
        sa.Column("energy_j", sa.Double, nullable=False),
        sa.Column("metric", sa.Double, nullable=False),
        sa.Column("reported_at", UtcDateTime, nullable=False, index=True),
        sa.ForeignKeyConstraint(
            ["job_id", "trial_number"], ["trials.job_id", "trials.trial_number"], ondelete="CASCADE"
        ),
        **_MYSQL,
    )
    create_power_profiles()
    op.create_table(
        "decisions",
        sa.Column("job_id", sa.String(255), primary_key=True),
        sa.Column("trial_number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("decision", sa.Text, nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id", "trial_number"], ["trials.job_id", "trials.trial_number"], ondelete="CASCADE"
        ),
        **_MYSQL,
    )
    op.create_table(
        "arms",
        sa.Column("job_id", sa.String(255), sa.ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True),
        sa.Column("batch_size", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("arm", LongText, nullable=False),
        **_MYSQL,
    )
    op.create_table(
        "policy_memories",
        sa.Column("job_id", sa.String(255), sa.ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True),
        sa.Column("version", sa.String(64), nullable=False),
        sa.Column("folded_event", sa.Integer, nullable=False),
        sa.Column("memory", LongText, nullable=False),
        **_MYSQL,
    )
    op.create_table(
        "write_probes",
        sa.Column("probe_id", sa.String(32), primary_key=True),
        sa.Column("ballast", sa.Text, nullable=False),
        **_MYSQL,
    )
    op.create_table(
        "tokens",
        sa.Column("token_id", sa.String(16), primary_key=True),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("scopes", sa.String(64), nullable=False),
        sa.Column("token_hash", sa.String(64), nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("revoked_at", UtcDateTime),
        sa.Column("shares_jobs", sa.Boolean, nullable=False),
        sa.Column("rotated_at", UtcDateTime),
        sa.Column("previous_hash", sa.String(64)),
        sa.Column("previous_until", UtcDateTime),
        **_MYSQL,
    )
