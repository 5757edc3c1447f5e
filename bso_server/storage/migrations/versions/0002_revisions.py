"""Revisions of jobs; the facts of trials no longer depend on their job's terms."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

from bso_server.storage.tables import LongText, UtcDateTime

revision = "0002"
down_revision = "0001"

_MYSQL: dict[str, Any] = {"mysql_charset": "utf8mb4", "mysql_collate": "utf8mb4_bin", "mysql_engine": "InnoDB"}

_FIRST_REPORT = (
    "SELECT epochs.{0} FROM epochs WHERE epochs.job_id = trials.job_id "
    "AND epochs.trial_number = trials.trial_number AND epochs.report_number = 1"
)


def upgrade() -> None:
    """Add the revisions; keep the time and energy of each trial's first report instead of its cost."""
    op.create_table(
        "revisions",
        sa.Column("job_id", sa.String(255), sa.ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True),
        sa.Column("revision", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("event", sa.Integer, nullable=False),
        sa.Column("trials", sa.Integer, nullable=False),
        sa.Column("revised_at", UtcDateTime, nullable=False),
        sa.Column("changes", LongText, nullable=False),
        **_MYSQL,
    )
    op.add_column("jobs", sa.Column("revised_event", sa.Integer, nullable=False, server_default="0"))
    op.add_column("trials", sa.Column("other_gpus", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("trials", sa.Column("deviations", LongText))
    for name in ("time_s", "energy_j"):
        op.add_column("trials", sa.Column(f"first_{name}", sa.Double))
        # The totals of a trial with one report are the report's. Of a pruned first report, only the epochs are known.
        first = f"coalesce(({_FIRST_REPORT.format(name)}), {name} * first_epoch / epoch)"
        update = f"UPDATE trials SET first_{name} = CASE WHEN report_count = 1 THEN {name} ELSE {first} END"  # noqa: S608 - constants
        op.execute(f"{update} WHERE first_epoch > 0")
    # The spreads of times and energies cannot be computed from the spread of costs. The usual spread is assumed.
    op.drop_column("trials", "first_cost_j")
    op.drop_column("trials", "cost_deviations_j2")
