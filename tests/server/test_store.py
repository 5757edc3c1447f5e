"""Storage on each kind of database, below HTTP."""

from __future__ import annotations

import asyncio
import math
import os
import re
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, Engine, event

from bso_server.core.model import TrialRecord, changed
from bso_server.service.commands import BatchSizeService
from bso_server.storage.database import open_database
from bso_server.storage.queries import jobs_page
from bso_server.storage.rows import TRIAL_AT_REPORT
from bso_server.storage.sqlite import SqliteDatabase
from bso_server.storage.store import Store
from bso_server.storage.tables import metadata
from bso_server.storage.transaction import Transaction
from tests.support.databases import MYSQL, POSTGRESQL
from tests.support.jobs import job
from tests.support.service import in_store, open_store, trial_id
from zeus_plugins.protocol import OWN_POLICIES, ZEUS, CreatedJob, Origin, TrainingResult, TrialId, TrialState

pytestmark = pytest.mark.storage

NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=timezone(timedelta(hours=9)))


def registration(job_id: str, policy: str = ZEUS) -> CreatedJob:
    return CreatedJob(**job(policy=policy, job_id=job_id, job_id_prefix=job_id[:1]))


def begun(job_id: str, trial_number: int, started_at: datetime) -> TrialRecord:
    return TrialRecord(
        job_id=job_id,
        trial_number=trial_number,
        batch_size=8,
        state=TrialState.RUNNING,
        origin=Origin.BANDIT,
        started_at=started_at,
    )


def result_of(trial: TrialId, metric: float, **fields: Any) -> TrainingResult:
    return TrainingResult(**trial_id(trial).model_dump(), time=1, energy=1, metric=metric, current_epoch=1, **fields)


async def test_migrations_create_the_tables_expected_by_the_code(store: Store) -> None:
    def differences(connection: Connection) -> list[Any]:
        return list(compare_metadata(MigrationContext.configure(connection), metadata))

    await store.migrate()  # a repetition changes nothing
    await store.check_schema()
    assert await store._database.transact(differences, read_only=True, timeout_s=60.0) == []


def test_changed_copy_of_a_record_differs_only_in_the_given_fields() -> None:
    trial = begun("copied", 1, NOW)
    assert changed(trial, metric=0.5, report_count=1) == replace(trial, metric=0.5, report_count=1)
    assert trial.metric is None
    with pytest.raises(TypeError, match="TrialRecord has no field mertic"):
        changed(trial, mertic=0.5)


async def test_rows_are_ordered(store: Store) -> None:
    def write(transaction: Transaction) -> None:
        for job_id in ("order-b", "order-a", "order-c"):
            transaction.insert_job(registration(job_id), NOW)
        for number in (2, 1, 3):
            transaction.insert_trials([begun("order-a", number, NOW)])

    await store.write(write)
    page = await store.read(partial(jobs_page, prefix=None, stage=None, after=None, limit=100))
    jobs = [stored.job_id for stored in page]
    trials = await store.read(Transaction.all_trials, "order-a")
    assert [job for job in jobs if job.startswith("order")] == ["order-a", "order-b", "order-c"]
    assert [trial.trial_number for trial in trials] == [1, 2, 3]


async def test_work_aborted_by_a_deadlock_is_repeated(store: Store, database_url: str) -> None:
    """Two transactions lock two jobs in opposite orders; on SQLite, one simply waits for the other."""
    both_hold_one = threading.Barrier(2)
    tries = Counter[str]()

    def lock(first: str, second: str) -> Callable[[Transaction], None]:
        def work(transaction: Transaction) -> None:
            tries[first] += 1
            transaction.locked_job(first)
            if tries.total() <= 2 and not database_url.startswith("sqlite"):
                both_hold_one.wait(60)
            transaction.locked_job(second)

        return work

    def in_thread(first: str, second: str) -> None:
        in_store(database_url, lambda store: store.write(lock(first, second)))

    for job_id in ("dead-a", "dead-b"):
        await store.write(Transaction.insert_job, registration(job_id), NOW)
    with ThreadPoolExecutor(2) as pool:
        for outcome in [pool.submit(in_thread, "dead-a", "dead-b"), pool.submit(in_thread, "dead-b", "dead-a")]:
            outcome.result()
    assert tries.total() == (2 if database_url.startswith("sqlite") else 3)


def test_report_in_progress_saves_the_trial_from_the_reaper(database_url: str) -> None:
    """The reaper looks during a report on an expired trial, and waits for the new lease."""
    now = datetime.now(UTC)
    job_id = "saved"
    is_locked = threading.Event()

    def renew(transaction: Transaction) -> None:
        _, trial = transaction.locked_trials([(job_id, 1)])[job_id, 1]
        is_locked.set()
        # Long enough for the reaper to look; the outcome does not depend on this wait.
        time.sleep(0.5)
        transaction.update_trials([replace(trial, lease_expires_at=now + timedelta(hours=1))], TRIAL_AT_REPORT)

    async def begin(store: Store) -> None:
        await store.write(Transaction.insert_job, registration(job_id), now)
        trial = replace(begun(job_id, 1, now), lease_expires_at=now - timedelta(hours=1))
        await store.write(Transaction.insert_trials, [trial])

    async def reap(store: Store) -> list[TrialRecord]:
        assert is_locked.wait(60)
        await BatchSizeService(store).reap()
        return await store.read(Transaction.all_trials, job_id)

    in_store(database_url, begin)
    with ThreadPoolExecutor(2) as pool:
        report = pool.submit(in_store, database_url, lambda store: store.write(renew))
        reaper = pool.submit(in_store, database_url, reap)
        report.result()
        assert [trial.state for trial in reaper.result()] == [TrialState.RUNNING]


async def test_report_takes_the_documented_number_of_statements(
    store: Store, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bso_server.storage.store._SCHEMA_CHECKED_S", math.inf)
    statements: list[str] = []
    # PostgreSQL locks the job separately, once the end of the trial is known.
    locks_apart = ["SELECT"] if database_url.startswith("postgresql") else []
    service = BatchSizeService(store)
    await service.register(registration("counted"))
    trial = await service.transact(service.commands.begin_trial, "counted")

    database: Any = store._database
    engine = database.file.engine if isinstance(database, SqliteDatabase) else database._engine.sync_engine

    @event.listens_for(engine, "before_cursor_execute")
    def count(_conn: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        statements.append(statement.split()[0])

    for metric, expected in (
        (0.5, ["SELECT", "UPDATE", "INSERT"]),
        (0.95, ["SELECT", *locks_apart, "UPDATE", "UPDATE"]),
    ):
        statements.clear()
        await service.reports.record_report(result_of(trial, metric, energy_source="replay"))
        assert [word for word in statements if word != "BEGIN"] == expected


@pytest.mark.parametrize("policy", OWN_POLICIES)
async def test_decision_reads_neither_a_whole_table_nor_all_trials_of_a_job(tmp_path: Path, policy: str) -> None:
    """Check SQLite's plans, which depend only on the statements because SQLite keeps no statistics here."""
    queries: dict[str, Any] = {}
    async with open_store(f"sqlite:///{tmp_path / 'bso.sqlite3'}") as store:
        service = BatchSizeService(store)
        database: Any = store._database
        event.listen(
            database.file.engine,
            "before_cursor_execute",
            lambda _conn, _cursor, statement, parameters, _context, many: queries.update(
                {statement: parameters[0] if many else parameters}
            ),
        )
        await service.register(registration("planned", policy))
        trials = [await service.transact(service.commands.begin_trial, "planned") for _ in range(3)]
        results = map(result_of, trials, (0.5, 0.5, 0.95))
        await asyncio.gather(*map(service.reports.record_report, results))
        await service.transact(service.commands.begin_trial, "planned")
        await service.reap()
    with closing(sqlite3.connect(tmp_path / "bso.sqlite3")) as connection:
        for query, parameters in queries.items():
            # The table of the revision has a single row.
            if query.startswith(("SELECT", "UPDATE")) and "alembic_version" not in query:
                plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {query}", parameters)]
                assert not [step for step in plan if step.startswith("SCAN")], query
                assert "SEARCH trials USING INDEX sqlite_autoindex_trials_1 (job_id=?)" not in plan, query
    assert any(query.startswith("SELECT trials.job_id") and " OR " in query for query in queries)


async def test_sqlite_uses_durable_settings(new_database: str) -> None:
    def settings(connection: Connection) -> dict[str, Any]:
        names = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        return {name: connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in names}

    async with open_store(new_database) as store:
        for read_only in (False, True):
            found = await store._database.transact(settings, read_only=read_only, timeout_s=60.0)
            assert found == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 1_000}


async def test_sqlite_file_is_private_to_the_owner(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        async with open_store(f"sqlite:///{tmp_path / 'bso.sqlite3'}"):
            modes = {file.name: oct(file.stat().st_mode & 0o777) for file in tmp_path.glob("bso.sqlite3*")}
            assert modes == dict.fromkeys(("bso.sqlite3", "bso.sqlite3-shm", "bso.sqlite3-wal"), "0o600")
    finally:
        os.umask(before)


async def test_sqlite_writer_locks_before_reading_and_reader_takes_no_lock(new_database: str, tmp_path: Path) -> None:
    def other_can_write() -> bool:
        with closing(sqlite3.connect(tmp_path / "bso.sqlite3", timeout=0, isolation_level=None)) as other:
            try:
                other.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                return False
            other.execute("ROLLBACK")
            return True

    async with open_store(new_database) as store:
        assert not await store.write(lambda _: other_can_write())
        assert await store.read(lambda transaction: (transaction.job("nobody"), other_can_write())) == (None, True)
        # Repeat on pooled connections, with writers after readers.
        assert not await store.write(lambda _: other_can_write())


async def test_locked_sqlite_file_is_retried(
    new_database: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "bso_server"):
        async with open_store(new_database) as store:
            await store._database.transact(
                lambda connection: connection.exec_driver_sql("PRAGMA busy_timeout = 0").close(),
                read_only=False,
                timeout_s=60.0,
            )
            with closing(sqlite3.connect(tmp_path / "bso.sqlite3", isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                writing = asyncio.create_task(store.write(Transaction.insert_job, registration("waits"), NOW))
                while "the database aborted a transaction" not in caplog.text:
                    await asyncio.sleep(0.01)
                other.execute("ROLLBACK")
                await writing
            assert await store.read(Transaction.job, "waits") is not None


async def test_writers_of_a_process_share_a_single_sqlite_connection(new_database: str) -> None:
    """Separate connections would poll for SQLite's lock, some of them for a long time."""
    opened: list[Any] = []

    def note(connection: Any, _record: Any) -> None:
        opened.append(connection)

    async with open_store(new_database) as store:
        event.listen(Engine, "connect", note)
        try:
            jobs = [registration(f"many-{number}") for number in range(30)]
            await asyncio.gather(*(store.write(Transaction.insert_job, job, NOW) for job in jobs))
        finally:
            event.remove(Engine, "connect", note)
    assert opened == []


async def test_cancelled_request_leaves_no_lock(new_database: str) -> None:
    """A client that disconnects during its request cancels the task; the next writer finds the file unlocked."""
    async with open_store(new_database) as store:
        begun = threading.Event()

        def insert(transaction: Transaction) -> None:
            begun.set()
            for number in range(50):
                transaction.insert_job(registration(f"given-up-{number}"), NOW)

        writing = asyncio.create_task(store.write(insert))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        await store.write(Transaction.insert_job, registration("next"), NOW)
        jobs = await store.read(partial(jobs_page, prefix="given-up", stage=None, after=None, limit=100))
        assert len(jobs) in {0, 50}


@pytest.mark.parametrize(
    "url",
    ["postgresql://bso:s3cret@db/bso", "postgresql://bso@db/bso?password=s3cret", "mysql://bso@db/b?passwd=s3cret"],
)
def test_description_contains_no_password(url: str) -> None:
    description = Store(open_database(url)).description
    assert "s3cret" not in description
    assert description.startswith(url.split("//")[0])


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nonsense", "cannot be read"),
        ("oracle://host/db", "oracle databases are not supported"),
        ("postgres://me:s3cret@db:1/bso", "write postgresql://me:***@db:1/bso "),
        ("postgres+asyncpg://db/bso", "write postgresql://db/bso "),
        ("postgresql+psycopg://me:s3cret@db/bso?sslmode=require", "write postgresql://me:***@db/bso "),
        ("postgresql+psycopg2://db/bso", "write postgresql://db/bso "),
        ("mysql+pymysql://me:s3cret@db/bso", "write mysql://me:***@db/bso "),
        ("mariadb+mariadbconnector://db/bso", "write mariadb://db/bso "),
        ("sqlite+pysqlcipher:////srv/bso.sqlite3", "write sqlite:////srv/bso.sqlite3 "),
    ],
)
def test_unusable_url_is_refused_with_a_correction(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        open_database(url)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("database_url", [POSTGRESQL, MYSQL], indirect=True, scope="module")
async def test_writer_sees_what_was_committed_before_it_took_the_lock(store: Store, database_url: str) -> None:
    """A writer may first look for a job without a lock; MySQL's default isolation would freeze that moment."""

    def add_trial() -> None:
        async def write() -> None:
            async with open_store(database_url) as store:
                await store.write(Transaction.insert_trials, [begun("seen", 1, NOW)])

        asyncio.run(write())

    def work(transaction: Transaction) -> list[TrialRecord]:
        assert transaction.job("seen") is not None
        with ThreadPoolExecutor(1) as other:
            other.submit(add_trial).result()
        assert transaction.locked_job("seen") is not None
        return transaction.all_trials("seen")

    await store.write(Transaction.insert_job, registration("seen"), NOW)
    (found,) = await store.write(work)
    assert found.trial_number == 1
