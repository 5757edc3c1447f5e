"""No probes of batch sizes, and no webhooks."""

from __future__ import annotations

from pathlib import Path

from alembic import op
from alembic.script import ScriptDirectory

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Drop the column of probes and the tables of webhooks, which nothing reads any more."""
    op.drop_column("jobs", "probe")
    op.drop_table("webhook_jobs")
    op.drop_table("webhooks")


def downgrade() -> None:
    """Create the column and the tables again, empty, by the scripts that created them first."""
    scripts = ScriptDirectory(str(Path(__file__).parent.parent))
    for earlier in ("0004", "0005"):
        scripts.get_revision(earlier).module.upgrade()
