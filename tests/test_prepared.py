"""Statements that are handed to the driver do what they do through SQLAlchemy."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, bindparam, event, func, insert, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import create_async_engine

from bso_server.core.model import TrialRecord, changed
from bso_server.service.batch_size_service import BatchSizeService
from bso_server.storage import async_database, statements
from bso_server.storage.database import open_database
from bso_server.storage.prepared import Prepared
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from tests.support.databases import MYSQL_URL, POSTGRES_URL, administer
from tests.support.jobs import job
from zeus_plugins.protocol import GP_VOI, JobRegistration, Origin, TrainingResult, TrialState

pytestmark = pytest.mark.storage

NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


def in_store(database_url: str, use: Callable[[Store], Awaitable[None]]) -> None:
    async def run() -> None:
        store = Store(open_database(database_url, patience_s=60.0), patience_s=60.0)
        try:
            await store.migrate()
            await use(store)
        finally:
            await store.close()

    asyncio.run(run())


async def with_trials(store: Store) -> str:
    """The id of a job that has an ended trial with a memory of it, and one that has reported once."""
    service, job_id = BatchSizeService(store), f"prepared-{secrets.token_hex(4)}"
    await service.register(JobRegistration(**job(policy=GP_VOI, job_id=job_id)))
    for metric in (0.95, 0.5):
        trial = await service.run(service.commands.suggest, job_id, f"key {metric}")
        key = trial.model_dump(include={"job_id", "batch_size", "trial_number"})
        await service.report(TrainingResult(**key, time=1.5, energy=100.25, metric=metric, current_epoch=1))
    return job_id


QUERIES: dict[str, tuple[Prepared, dict[str, object]]] = {
    "job": (statements.JOB, {"job_id": None}),
    "arms": (statements.ARMS, {"job_id": None}),
    "memory": (statements.MEMORY, {"job_id": None}),
    "open trials": (statements.open_trials(with_explorations=True), {"job_id": None, "event": 0}),
    "trial with a key": (statements.TRIAL_WITH_KEY, {"job_id": None, "idempotency_key": "key 0.5"}),
    "states of a size": (statements.STATES_OF_SIZE, {"job_id": None, "batch_size": job()["default_batch_size"]}),
    "two trials": (
        statements.locked_trials_of(2, skip=False),
        {"job_id_0": None, "trial_number_0": 1, "job_id_1": None, "trial_number_1": 2},
    ),
}


def test_rows_are_the_same_as_through_sqlalchemy(database_url: str) -> None:
    def compare(transaction: Transaction, job_id: str) -> None:
        connection = transaction._connection
        for name, (query, values) in QUERIES.items():
            parameters = {key: job_id if value is None else value for key, value in values.items()}
            directly = [tuple(row) for row in query.rows(connection, parameters)]
            assert directly, name
            statement: Any = query._statement
            expected = [tuple(row) for row in connection.execute(statement, parameters)]
            assert sorted(map(repr, directly)) == sorted(map(repr, expected)), name

    async def use(store: Store) -> None:
        await store.write(compare, await with_trials(store))

    in_store(database_url, use)


def test_statements_that_somebody_listens_to_go_through_sqlalchemy(database_url: str) -> None:
    heard: list[object] = []

    def listened_to(transaction: Transaction, job_id: str) -> None:
        @event.listens_for(transaction._connection, "before_cursor_execute")
        def hear(*arguments: object) -> None:
            heard.append(arguments[4])  # the context, which only SQLAlchemy makes

        assert transaction.job(job_id) is not None
        assert len(transaction.open_trials(job_id, 0, with_explorations=False)) == 2

    async def use(store: Store) -> None:
        await store.read(listened_to, await with_trials(store))

    in_store(database_url, use)
    assert len(heard) == 2
    assert None not in heard


def test_several_trials_are_saved_with_their_own_values(database_url: str) -> None:
    def save(transaction: Transaction, job_id: str) -> list[TrialRecord]:
        before = transaction.all_trials(job_id)
        transaction.update_trials([replace(trial, message=f"new {trial.trial_number}") for trial in before])
        return before

    async def use(store: Store) -> None:
        job_id = await with_trials(store)
        before = await store.write(save, job_id)
        after = await store.read(lambda transaction: transaction.all_trials(job_id))
        assert after == [replace(trial, message=f"new {trial.trial_number}") for trial in before]

    in_store(database_url, use)


def test_errors_are_sqlalchemy_s(database_url: str) -> None:
    absent = Table("absent", MetaData(), Column("number", Integer))
    look = Prepared(select(absent).where(absent.c.number == bindparam("number")))
    add = Prepared(insert(absent))

    def twice(transaction: Transaction, job_id: str) -> None:
        row = statements.ARMS.mappings(transaction._connection, {"job_id": job_id})[0]
        statements.INSERT_ARMS.run(transaction._connection, [row])

    def look_for(transaction: Transaction) -> None:
        look.rows(transaction._connection, {"number": 1})

    def add_two(transaction: Transaction) -> None:
        add.run(transaction._connection, [{"number": 1}, {"number": 2}])

    async def use(store: Store) -> None:
        with pytest.raises(IntegrityError):
            await store.write(twice, await with_trials(store))
        for work in (look_for, add_two):
            with pytest.raises(DBAPIError, match="absent") as raised:
                await store.write(work)
            assert not raised.value.connection_invalidated

    in_store(database_url, use)


async def until_none_is_left(url: str, sessions: set[int]) -> None:
    """Sessions that are ended are given the time that they need for it."""
    table = "pg_stat_activity WHERE pid" if url.startswith("postgresql") else "information_schema.processlist WHERE id"
    left = text(f"SELECT count(*) FROM {table} IN ({', '.join(map(str, sessions))})")  # noqa: S608 - numbers
    engine = create_async_engine(url, isolation_level="AUTOCOMMIT")
    try:
        async with asyncio.timeout(60), engine.connect() as connection:
            while await connection.scalar(left):
                await asyncio.sleep(0.01)
    finally:
        await engine.dispose()


@pytest.mark.parametrize("is_fresh", [True, False])
def test_connections_that_were_ended_while_idle_cost_no_request(
    database_url: str, is_fresh: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if database_url.startswith("sqlite"):
        pytest.skip("a file has no sessions")
    monkeypatch.setattr(async_database, "_FRESH_S", 600.0 if is_fresh else 0.0)
    is_postgres = database_url.startswith("postgresql")
    own = func.pg_backend_pid() if is_postgres else func.connection_id()

    def session(transaction: Transaction) -> int:
        (row,) = transaction.rows(select(own.label("session")))
        number: int = row["session"]
        return number

    async def use(store: Store) -> None:
        ended = set(await asyncio.gather(store.read(session), store.read(session)))
        assert len(ended) == 2
        url, end = (POSTGRES_URL, "SELECT pg_terminate_backend({})") if is_postgres else (MYSQL_URL, "KILL {}")
        await asyncio.gather(*(asyncio.to_thread(administer, url, end.format(number)) for number in ended))
        await until_none_is_left(url, ended)
        caplog.clear()
        await store.write(lambda transaction: transaction.job("none"))

    caplog.set_level(logging.INFO, "bso_server")
    in_store(database_url, use)
    # One that was used just now is found to be lost when it is used, and the others are then looked at before.
    assert ("found it again at attempt 2" if is_fresh else "") in caplog.text
    assert ("lost the connection" in caplog.text) is is_fresh


def test_a_copy_of_a_record_differs_in_what_was_changed_alone() -> None:
    trial = TrialRecord(trial_number=1, batch_size=8, state=TrialState.RUNNING, origin=Origin.BANDIT, started_at=NOW)
    assert changed(trial, metric=0.5, report_count=1) == replace(trial, metric=0.5, report_count=1)
    assert trial.metric is None
    with pytest.raises(TypeError, match="TrialRecord has no field mertic"):
        changed(trial, mertic=0.5)
