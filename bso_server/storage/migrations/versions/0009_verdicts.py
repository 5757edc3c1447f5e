"""The verdict on each job, which the server computes from its trials."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from bso_server.storage.tables import LongText

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Add the table, empty."""
    op.create_table(
        "verdicts",
        sa.Column("job_id", sa.String(255), sa.ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True),
        sa.Column("version", sa.String(80), nullable=False),
        sa.Column("event", sa.Integer, nullable=False),
        sa.Column("trouble", sa.Integer, nullable=False),
        sa.Column("verdict", LongText, nullable=False),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
    )


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("verdicts")
