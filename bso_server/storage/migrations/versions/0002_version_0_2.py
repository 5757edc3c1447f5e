"""What version 0.2 adds to the schema of 0.1."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Jobs get their fingerprint from their next training."""
    op.add_column("jobs", sa.Column("fingerprint", sa.Text))
    op.create_table(
        "write_probes",
        sa.Column("probe_id", sa.String(32), primary_key=True),
        sa.Column("ballast", sa.Text, nullable=False),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
    )
