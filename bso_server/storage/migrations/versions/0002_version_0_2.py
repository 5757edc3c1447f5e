"""The additions of version 0.2 to the schema of 0.1."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from bso_server.storage.tables import LongText, UtcDateTime

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Jobs get their fingerprint from their next training. Those that are there belong to no token, so to all.

    The windows of old jobs may need more than 64 KiB.
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
    if op.get_context().dialect.name in {"mysql", "mariadb"}:
        op.alter_column("arms", "window", type_=LongText, existing_type=sa.Text, existing_nullable=False)
    op.add_column("jobs", sa.Column("importing_at", UtcDateTime))
    op.create_index("ix_jobs_importing_at", "jobs", ["importing_at"])
