"""The verdict on each job and the start-up of each trial; no measurements of power limits."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import op
from alembic.script import ScriptDirectory

from bso_server.storage.tables import LongText

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Add an empty table of verdicts and unknown start-ups; drop the measurements, but not the limits of trials."""
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
    op.add_column("trials", sa.Column("startup_s", sa.Double))
    op.drop_table("power_profiles")


def downgrade() -> None:
    """Drop verdicts and start-ups, and create the table of measurements again, empty."""
    ScriptDirectory(str(Path(__file__).parent.parent)).get_revision("0001").module.create_power_profiles()
    op.drop_column("trials", "startup_s")
    op.drop_table("verdicts")
