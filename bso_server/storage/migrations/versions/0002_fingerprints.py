"""The making of a job's trainings: model, framework, optimizer."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the column; jobs get theirs from their next training."""
    op.add_column("jobs", sa.Column("fingerprint", sa.Text))
