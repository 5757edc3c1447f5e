"""The start-up that each training reports."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Add the start-up of trials; it is unknown for earlier trials."""
    op.add_column("trials", sa.Column("startup_s", sa.Double))


def downgrade() -> None:
    """Drop the start-up of trials."""
    op.drop_column("trials", "startup_s")
