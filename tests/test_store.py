"""The database on each kind of engine, below HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TypeVar

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, event

from bso_server.core.model import TrialRecord
from bso_server.errors import DatabaseNotReadyError
from bso_server.service import BatchSizeService
from bso_server.store import JobExistsError, Store, StoredTrial, open_store
from bso_server.tables import metadata
from zeus_plugins.protocol import JobRegistration, Origin, TrainingResult, TrialState

T = TypeVar("T")
NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=timezone(timedelta(hours=9)))


def registration(job_id: str) -> JobRegistration:
    return JobRegistration(
        job_id=job_id,
        job_id_prefix=job_id[:1],
        batch_sizes=(8, 16),
        default_batch_size=16,
        target_metric=0.9,
        max_power=100,
        number_of_gpus=1,
        gpu_model="V100",
    )


def in_store(database_url: str, use: Callable[[Store], Awaitable[T]]) -> T:
    async def run() -> T:
        store = open_store(database_url)
        try:
            await store.migrate()
            return await use(store)
        finally:
            await store.close()

    return asyncio.run(run())


def test_migrating_again_changes_nothing(database_url: str) -> None:
    async def use(store: Store) -> None:
        await store.migrate()
        await store.check_schema()

    in_store(database_url, use)


def test_the_migrations_make_the_tables_that_the_code_expects(database_url: str) -> None:
    def differences(connection: Connection) -> list[Any]:
        return list(compare_metadata(MigrationContext.configure(connection), metadata))

    async def use(store: Store) -> list[Any]:
        async with store._engine.connect() as connection:
            return await connection.run_sync(differences)

    assert in_store(database_url, use) == []


def test_an_empty_database_is_not_ready(tmp_path: Path) -> None:
    async def check() -> None:
        store = open_store(f"sqlite:///{tmp_path / 'empty.sqlite3'}")
        try:
            await store.check_schema()
        finally:
            await store.close()

    with pytest.raises(DatabaseNotReadyError, match="bso-server db upgrade"):
        asyncio.run(check())


def test_what_goes_in_comes_out(database_url: str) -> None:
    record = TrialRecord(
        trial_number=1, batch_size=16, state=TrialState.RUNNING, origin=Origin.EXPLORATION, started_event=1
    )

    async def use(store: Store) -> None:
        async with store.write() as transaction:
            await transaction.insert_job(registration("round-trip"), NOW)
            trial = StoredTrial("round-trip", record, "first é ✓", started_at=NOW, lease_expires_at=NOW)
            await transaction.insert_trial(trial)
            measured = replace(record, time_s=123456.789012345, energy_j=0.1 + 0.2, metric=0.0)
            await transaction.update_trials([replace(trial, record=measured)])
        async with store.read() as transaction:
            found = await transaction.job("round-trip")
            (trial,) = await transaction.all_trials("round-trip")
        assert found is not None
        assert found.registration == registration("round-trip")
        assert found.job.target_metric == 0.9
        assert found.created_at == trial.started_at == NOW
        assert found.created_at.tzinfo is UTC
        assert trial.reason == "first é ✓"
        assert (trial.record.time_s, trial.record.energy_j) == (123456.789012345, 0.1 + 0.2)
        assert trial.record.metric == 0.0

    in_store(database_url, use)


def test_a_block_that_raises_leaves_nothing(database_url: str) -> None:
    async def crash(store: Store) -> None:
        async with store.write() as transaction:
            await transaction.insert_job(registration("undone"), NOW)
            raise RuntimeError("crash")

    async def use(store: Store) -> None:
        with pytest.raises(RuntimeError, match="crash"):
            await crash(store)
        async with store.read() as transaction:
            assert await transaction.job("undone") is None

    in_store(database_url, use)


def test_a_job_id_is_taken_once(database_url: str) -> None:
    async def use(store: Store) -> None:
        async with store.write() as transaction:
            await transaction.insert_job(registration("taken"), NOW)
        with pytest.raises(JobExistsError):
            async with store.write() as transaction:
                await transaction.insert_job(registration("taken"), NOW)

    in_store(database_url, use)


def test_rows_come_in_order(database_url: str) -> None:
    async def use(store: Store) -> None:
        async with store.write() as transaction:
            for job_id in ("order-b", "order-a", "order-c"):
                await transaction.insert_job(registration(job_id), NOW)
            for number in (2, 1, 3):
                record = TrialRecord(trial_number=number, batch_size=8, state=TrialState.RUNNING, origin=Origin.BANDIT)
                await transaction.insert_trial(StoredTrial("order-a", record, "", NOW, lease_expires_at=None))
        async with store.read() as transaction:
            jobs = [stored.job.job_id for stored in await transaction.all_jobs()]
            numbers = [trial.record.trial_number for trial in await transaction.all_trials("order-a")]
        assert [job for job in jobs if job.startswith("order")] == ["order-a", "order-b", "order-c"]
        assert numbers == [1, 2, 3]

    in_store(database_url, use)


def test_a_report_takes_at_most_three_statements(database_url: str) -> None:
    statements: list[str] = []

    async def use(store: Store) -> None:
        service = BatchSizeService(store)
        await service.register(registration("counted"))
        trial = await service.suggest("counted")

        @event.listens_for(store._engine.sync_engine, "before_cursor_execute")
        def count(_conn: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
            statements.append(statement.split()[0])

        for metric, expected in ((0.5, ["SELECT", "UPDATE", "INSERT"]), (0.95, ["SELECT", "UPDATE", "UPDATE"])):
            statements.clear()
            await service.report(
                TrainingResult(
                    **trial.model_dump(include={"job_id", "batch_size", "trial_number"}),
                    time=1,
                    energy=1,
                    metric=metric,
                    current_epoch=1,
                )
            )
            assert [word for word in statements if word != "BEGIN"] == expected

    in_store(database_url, use)


@pytest.mark.parametrize(
    ("url", "words"),
    [("nonsense", "cannot be read"), ("oracle://host/db", "oracle")],
)
def test_a_url_that_cannot_be_used_says_so(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        open_store(url)
