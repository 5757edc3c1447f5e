"""No sessions of pages, and no jobs that version 0.1 has not imported completely."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import op
from alembic.script import ScriptDirectory

from bso_server.storage.tables import UtcDateTime

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Delete the jobs that no query shows, with their mark, and the table of sessions."""
    op.execute("DELETE FROM jobs WHERE importing_at IS NOT NULL")
    op.drop_index("ix_jobs_importing_at", "jobs")
    op.drop_column("jobs", "importing_at")
    op.drop_table("ended_sessions")


def downgrade() -> None:
    """Create both again, empty."""
    op.add_column("jobs", sa.Column("importing_at", UtcDateTime))
    op.create_index("ix_jobs_importing_at", "jobs", ["importing_at"])
    ScriptDirectory(str(Path(__file__).parent.parent)).get_revision("0003").module.upgrade()
