"""Sessions of pages that their readers have ended."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

from bso_server.storage.tables import UtcDateTime

revision = "0003"
down_revision = "0002"

_MYSQL: dict[str, Any] = {"mysql_charset": "utf8mb4", "mysql_collate": "utf8mb4_bin", "mysql_engine": "InnoDB"}


def upgrade() -> None:
    """Add the table of ended sessions."""
    op.create_table(
        "ended_sessions",
        sa.Column("session_id", sa.String(32), primary_key=True),
        sa.Column("ends_at", UtcDateTime, nullable=False),
        **_MYSQL,
    )
