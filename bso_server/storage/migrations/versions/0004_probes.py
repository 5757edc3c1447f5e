"""The latest probe of each job."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from bso_server.storage.tables import LongText

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add the probe."""
    op.add_column("jobs", sa.Column("probe", LongText))
