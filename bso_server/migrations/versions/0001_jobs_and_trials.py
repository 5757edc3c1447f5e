"""Jobs and their trials."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

from bso_server.tables import UtcDateTime

revision = "0001"
down_revision = None

_MYSQL: dict[str, Any] = {"mysql_charset": "utf8mb4", "mysql_collate": "utf8mb4_bin", "mysql_engine": "InnoDB"}


def upgrade() -> None:
    """Create both tables."""
    op.create_table(
        "jobs",
        sa.Column("job_id", sa.String(255), primary_key=True),
        sa.Column("job_id_prefix", sa.String(255), nullable=False, index=True),
        sa.Column("policy", sa.String(32), nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("event_count", sa.Integer, nullable=False),
        sa.Column("rng_state", sa.Text),
        sa.Column("trial_count", sa.Integer, nullable=False),
        sa.Column("min_cost_j", sa.Double),
        sa.Column("min_cost_batch_size", sa.Integer),
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
        **_MYSQL,
    )
