"""No probes of batch sizes, and no webhooks."""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Drop the column of probes and the tables of webhooks, which nothing reads any more."""
    op.drop_column("jobs", "probe")
    op.drop_table("webhook_jobs")
    op.drop_table("webhooks")


def downgrade() -> None:
    """Create the column and the tables again, empty, by the scripts that created them first."""
    environment = op.get_context().environment_context
    for earlier in ("0004", "0005"):
        environment.script.get_revision(earlier).module.upgrade()
