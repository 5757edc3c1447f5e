"""What version 0.2 adds to the schema of 0.1."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Jobs get their fingerprint from their next training."""
    op.add_column("jobs", sa.Column("fingerprint", sa.Text))
