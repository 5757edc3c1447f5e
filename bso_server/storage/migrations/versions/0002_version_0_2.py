"""The additions of version 0.2 to the schema of 0.1."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from bso_server.storage.tables import LongText, UtcDateTime

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Jobs get their fingerprint from their next training. Those that are there belong to no token, so to all.

    The windows of old jobs may need more than 64 KiB. What policies remember is made anew by the next decision.
    """
    op.add_column("jobs", sa.Column("fingerprint", sa.Text))
    op.create_table(
        "write_probes",
        sa.Column("probe_id", sa.String(32), primary_key=True),
        sa.Column("ballast", sa.Text, nullable=False),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
    )
    op.add_column("jobs", sa.Column("owner", sa.String(16)))
    op.add_column("jobs", sa.Column("shared", sa.Boolean, nullable=False, server_default=sa.false()))
    op.create_index("ix_trials_owner", "trials", ["owner"])
    op.add_column("tokens", sa.Column("shares_jobs", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("tokens", sa.Column("rotated_at", UtcDateTime))
    op.add_column("tokens", sa.Column("previous_hash", sa.String(64)))
    op.add_column("tokens", sa.Column("previous_until", UtcDateTime))
    op.add_column("jobs", sa.Column("registration_id", sa.String(32)))
    op.add_column("trials", sa.Column("lease_epoch", sa.Integer, nullable=False, server_default="1"))
    op.add_column("trials", sa.Column("cost_deviations_j2", sa.Double))
    if op.get_context().dialect.name in {"mysql", "mariadb"}:
        op.alter_column("arms", "window", type_=LongText, existing_type=sa.Text, existing_nullable=False)
    op.add_column("jobs", sa.Column("importing_at", UtcDateTime))
    op.create_index("ix_jobs_importing_at", "jobs", ["importing_at"])
    op.create_table(
        "policy_memories",
        sa.Column("job_id", sa.String(255), sa.ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True),
        sa.Column("version", sa.String(64), nullable=False),
        sa.Column("folded_event", sa.Integer, nullable=False),
        sa.Column("memory", LongText, nullable=False),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
    )
    op.drop_column("arms", "belief")
    op.create_table(
        "decisions",
        sa.Column("job_id", sa.String(255), primary_key=True),
        sa.Column("trial_number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("decision", sa.Text, nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id", "trial_number"], ["trials.job_id", "trials.trial_number"], ondelete="CASCADE"
        ),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
    )
