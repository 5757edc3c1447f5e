"""No measurements of power limits, which stay on the training's machine."""

from __future__ import annotations

from pathlib import Path

from alembic import op
from alembic.script import ScriptDirectory

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Drop the table of measurements; trials keep their power limit."""
    op.drop_table("power_profiles")


def downgrade() -> None:
    """Create the table again, empty."""
    ScriptDirectory(str(Path(__file__).parent.parent)).get_revision("0001").module.create_power_profiles()
