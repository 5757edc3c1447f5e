"""Webhooks, and the state of each job that their receivers know."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

from bso_server.storage.tables import UtcDateTime

revision = "0005"
down_revision = "0004"

_MYSQL: dict[str, Any] = {"mysql_charset": "utf8mb4", "mysql_collate": "utf8mb4_bin", "mysql_engine": "InnoDB"}


def upgrade() -> None:
    """Add both tables."""
    op.create_table(
        "webhooks",
        sa.Column("webhook_id", sa.String(16), primary_key=True),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("format", sa.String(16), nullable=False),
        sa.Column("events", sa.String(255), nullable=False),
        sa.Column("secret", sa.String(64), nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("week", UtcDateTime, nullable=False),
        sa.Column("next_attempt_at", UtcDateTime),
        sa.Column("failing_since", UtcDateTime),
        sa.Column("last_error", sa.String(255)),
        **_MYSQL,
    )
    op.create_table(
        "webhook_jobs",
        sa.Column("job_id", sa.String(255), sa.ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True),
        sa.Column("webhook_id", sa.String(16), primary_key=True),
        sa.Column("event", sa.Integer, nullable=False),
        sa.Column("word", sa.String(16), nullable=False),
        sa.Column("is_stuck", sa.Boolean, nullable=False),
        sa.Column("level_event", sa.Integer, nullable=False),
        **_MYSQL,
    )
