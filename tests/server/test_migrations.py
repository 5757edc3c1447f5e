"""Migrations of databases with data, on each kind of database."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command

from bso_server.service.health import differences
from bso_server.storage import migrations
from bso_server.storage.database import open_database
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from tests.support.databases import DATABASES, empty_database
from tests.support.jobs import job

pytestmark = pytest.mark.storage

NOW = datetime(2026, 1, 1)

JOB: dict[str, Any] = {
    "job_id": "old",
    "job_id_prefix": "old",
    "policy": "gp_voi",
    "spec": json.dumps(job(job_id="old", policy="gp_voi", max_epochs=9)),
    "created_at": NOW,
    "shared": False,
    "event_count": 6,
    "trial_count": 3,
    "folded_event": 0,
    "bandit_entered_event": 0,
}
TRIAL: dict[str, Any] = {
    "job_id": "old",
    "batch_size": 16,
    "state": "completed",
    "origin": "exploration",
    "reason": "tried",
    "end_reason": "target_reached",
    "started_at": NOW,
    "reported_at": NOW,
    "ended_at": NOW,
    "metric": 0.95,
    "longest_gap_s": 2.0,
    "heartbeats": False,
    "lease_epoch": 1,
    "confirmed": 1,
    "first_epoch": 1.0,
    "first_cost_j": 100.0,
    "cost_deviations_j2": 3.0,
}


def insert(connection: sa.Connection, table: str, **row: Any) -> None:
    connection.execute(sa.table(table, *map(sa.column, row)).insert().values(row))


def add_rows_of_version_1(connection: sa.Connection) -> None:
    """Insert a job of the first schema: trials with all reports, with a single report, and with pruned reports."""
    insert(connection, "jobs", **JOB)
    for size in (8, 16):
        insert(connection, "arms", job_id="old", batch_size=size, arm=json.dumps({"batch_size": size, "trials": 0}))
    connection.execute(sa.text("""UPDATE arms SET arm = '{"batch_size": 16, "trials": 3}' WHERE batch_size = 16"""))
    for number, reports in ((1, 3), (2, 1), (3, 3)):
        events = {"started_event": 2 * number - 1, "ended_event": 2 * number}
        totals = {"report_count": reports, "epoch": reports, "time_s": 2.0 * reports, "energy_j": 90.0 * reports}
        insert(connection, "trials", trial_number=number, **TRIAL, **events, **totals)
    for report in (1, 2):
        key = {"job_id": "old", "trial_number": 1, "report_number": report, "reported_at": NOW}
        insert(connection, "epochs", **key, epoch=report, time_s=3.0 * report, energy_j=100.0 * report, metric=0.5)


def upgrade_to_version_1(connection: sa.Connection) -> None:
    config = migrations._config()
    config.attributes["connection"] = connection
    assert migrations.current(connection) is None  # Alembic reads this as an open transaction.
    command.upgrade(config, "0001")


@pytest.mark.parametrize("kind", DATABASES)
def test_migration_from_the_first_schema_keeps_totals_of_first_reports(kind: str, tmp_path: Path) -> None:
    async def migrate(database_url: str) -> None:
        store = Store(open_database(database_url))
        try:
            for step in (upgrade_to_version_1, add_rows_of_version_1):
                await store._database.transact(step, read_only=False, timeout_s=60.0)
            await store.migrate()
            trials = await store.read(Transaction.all_trials, "old")
            first = [(trial.first_epoch, trial.first_time_s, trial.first_energy_j) for trial in trials]
            assert first == [(1.0, 3.0, 100.0), (1.0, 2.0, 90.0), (1.0, 2.0, 90.0)]
            assert [(trial.deviations, trial.other_gpus) for trial in trials] == [(None, False)] * 3
            # The row of the job lacks its cheapest trial.
            assert [each for each in await store.read(differences, "old") if "cheapest" not in each] == []
        finally:
            await store.close()

    with empty_database(kind, tmp_path) as database_url:
        asyncio.run(migrate(database_url))
