"""Migrations of databases with data, on each kind of database."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from bso_server.service import reading
from bso_server.service.health import differences
from bso_server.service.loading import known_job
from bso_server.service.verdicts import update_all
from bso_server.storage import migrations
from bso_server.storage.database import open_database
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from tests.support.databases import DATABASES, empty_database
from tests.support.jobs import job
from tests.support.service import JobService
from zeus_plugins.protocol import GP_VOI, ZEUS

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


def moved_to(revision: str, move: Callable[[Config, str], None] = command.upgrade) -> Callable[[sa.Connection], None]:
    """Return a step that upgrades a database to a revision, or downgrades it."""

    def step(connection: sa.Connection) -> None:
        config = migrations._config()
        config.attributes["connection"] = connection
        migrations.current(connection)  # Alembic reads this as an open transaction.
        move(config, revision)

    return step


def with_empty_store(kind: str, folder: Path, use: Callable[[Store], Awaitable[None]]) -> None:
    """Call a function with the store of an empty database, and close the store."""

    async def used(database_url: str) -> None:
        store = Store(open_database(database_url, patience_s=60.0), patience_s=60.0)
        try:
            await use(store)
        finally:
            await store.close()

    with empty_database(kind, folder) as database_url:
        asyncio.run(used(database_url))


async def changed(store: Store, *steps: Callable[[sa.Connection], None]) -> None:
    for step in steps:
        await store._database.transact(step, read_only=False, timeout_s=60.0)


@pytest.mark.parametrize("kind", DATABASES)
def test_migration_from_the_first_schema_keeps_totals_of_first_reports(kind: str, tmp_path: Path) -> None:
    async def migrate(store: Store) -> None:
        await changed(store, moved_to("0001"), add_rows_of_version_1)
        await store.migrate()
        trials = await store.read(Transaction.all_trials, "old")
        first = [(trial.first_epoch, trial.first_time_s, trial.first_energy_j) for trial in trials]
        assert first == [(1.0, 3.0, 100.0), (1.0, 2.0, 90.0), (1.0, 2.0, 90.0)]
        assert [(trial.deviations, trial.other_gpus) for trial in trials] == [(None, False)] * 3
        # The row of the job lacks its cheapest trial.
        assert [each for each in await store.read(differences, "old") if "cheapest" not in each] == []

    with_empty_store(kind, tmp_path, migrate)


PROBE = {"gpus": {"max_power": 100, "number_of_gpus": 1, "gpu_model": "V100"}, "sizes": [], "critical_batch_size": 90}


def add_rows_of_version_5(connection: sa.Connection) -> None:
    """Give every job a probe, and the first job a webhook that has sent a message and a trial's power-limit profile.

    Add a job without its trials.
    """
    connection.execute(sa.table("jobs", sa.column("probe")).update().values(probe=json.dumps(PROBE)))
    insert(
        connection,
        "webhooks",
        webhook_id="0123456789abcdef",
        url="https://example.org",
        format="json",
        events="verdict stuck",
        secret="s",  # noqa: S106 - of a test
        created_at=NOW,
        week=NOW,
    )
    insert(connection, "jobs", **{**JOB, "job_id": "half-imported", "importing_at": NOW, "revised_event": 0})
    of_job = {"event": 2, "word": "saves", "is_stuck": False, "level_event": 1}
    insert(connection, "webhook_jobs", job_id="job-zeus", webhook_id="0123456789abcdef", **of_job)
    of_trial = {"job_id": "job-zeus", "trial_number": 1, "batch_size": 16}
    insert(connection, "power_profiles", **of_trial, samples="[]", stored_at=NOW)


def removed_rows(connection: sa.Connection) -> list[int]:
    """Return the numbers of jobs with a probe, webhooks, states that their receivers know, and power-limit profiles."""
    counts = ("jobs WHERE probe IS NOT NULL", "webhooks", "webhook_jobs", "power_profiles")
    return [connection.scalar(sa.text(f"SELECT count(*) FROM {rows}")) or 0 for rows in counts]  # noqa: S608 - constants


def rows_of(table: str) -> Callable[[sa.Connection], list[dict[str, Any]]]:
    """Return a function that reads a table without the columns that some schemas lack, ordered by its first ones."""

    def read(connection: sa.Connection) -> list[dict[str, Any]]:
        rows = connection.execute(sa.text(f"SELECT * FROM {table} ORDER BY 1, 2")).mappings()  # noqa: S608 - constants
        return [{name: value for name, value in row.items() if name not in LACKING} for row in rows]

    return read


def set_power_limits(connection: sa.Connection) -> None:
    connection.execute(sa.text("UPDATE trials SET power_limit_w = 80, power_limits = 2"))


async def counts(store: Store) -> list[int]:
    return await store._database.transact(removed_rows, read_only=True, timeout_s=60.0)


LACKING = ("probe", "importing_at", "startup_s")

FACTS = ("jobs", "trials", "epochs", "arms", "policy_memories", "decisions")


async def facts(store: Store) -> list[list[dict[str, Any]]]:
    return [await store._database.transact(rows_of(table), read_only=True, timeout_s=60.0) for table in FACTS]


async def decide_and_verify(services: list[JobService]) -> None:
    """Let each job end one more trial; its caches then equal a replay of its trials."""
    for service in services:
        before = (await service.show()).trial_count
        await service.reach(await service.suggest())
        assert (await service.show()).trial_count == before + 1
        assert await service.differences() == []
    listed = await services[0].store.read(reading.list_jobs)
    assert [each.job_id for each in listed.jobs] == [each.job_id for each in services]


@pytest.mark.parametrize("kind", DATABASES)
def test_migration_drops_unused_rows_and_no_job_or_trial(kind: str, tmp_path: Path) -> None:
    async def migrate(store: Store) -> None:
        services = [
            JobService(store, job_id=f"job-{policy}", job_id_prefix="job", policy=policy) for policy in (GP_VOI, ZEUS)
        ]
        await store.migrate()
        for service in services:
            await service.service.register(service.job)
            await service.reach(await service.suggest())
            await service.end(await service.suggest())
            await service.suggest()
        await changed(store, set_power_limits)
        before = await facts(store)
        await changed(store, moved_to("0005", command.downgrade), add_rows_of_version_5)
        assert await counts(store) == [2, 1, 1, 1]
        await store.migrate()
        assert await facts(store) == before
        await decide_and_verify(services)
        later = await facts(store)
        await changed(store, moved_to("0005", command.downgrade))
        assert await counts(store) == [0, 0, 0, 0]
        assert await facts(store) == later
        await store.migrate()
        await decide_and_verify(services)

    with_empty_store(kind, tmp_path, migrate)


@pytest.mark.parametrize("kind", DATABASES)
def test_verdicts_are_computed_after_an_upgrade_and_start_ups_are_unknown(kind: str, tmp_path: Path) -> None:
    async def migrate(store: Store) -> None:
        service = JobService(store, job_id="job", job_id_prefix="job", policy=GP_VOI)
        await store.migrate()
        await service.service.register(service.job)
        await service.reach(await service.suggest(), startup_s=0.5)
        assert [each.startup_s for each in (await service.show()).trials] == [0.5]
        before = await facts(store)
        for _ in range(2):
            await changed(store, moved_to("0007", command.downgrade))
            assert await facts(store) == before
            await store.migrate()
            assert [each.startup_s for each in (await service.show()).trials] == [None]
            assert await update_all(store) == 0
            kept = await store.read(lambda transaction: transaction.verdict(known_job(transaction, service.job_id)))
            assert kept is not None
            assert kept[1].savings == (await service.show()).savings
        await decide_and_verify([service])

    with_empty_store(kind, tmp_path, migrate)
