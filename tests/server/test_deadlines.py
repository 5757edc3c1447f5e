"""Locked rows and files, silent networks, and databases that abort each transaction."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import create_async_engine

from bso_server.core.access import UNRESTRICTED
from bso_server.errors import DatabaseUnavailableError, UnknownJobError
from bso_server.service.reports import Outcome, ReportBatch
from bso_server.storage.database import AsyncDatabase
from bso_server.storage.deadlines import Deadline, begin_request, waiting
from bso_server.storage.faults import Failure, JobExistsError, Retries, failure_of
from bso_server.storage.queries import epochs_between
from bso_server.storage.store import Store
from bso_server.storage.transaction import RowLocked, Transaction
from tests.support.databases import DATABASES, MYSQL, POSTGRESQL, DriverError
from tests.support.relay import relay_to
from tests.support.service import HOUR_S, JobService, beat_of, job_service, open_store, trial_id
from zeus_plugins.protocol import TrainingResult, TrialDispatch, TrialState

# Longer than any unblocked operation takes on a busy machine.
LONG_S = 60.0
# Long enough for a database that answers, and short enough for a test to wait until it expires.
SHORT_S = 2.0
# More requests than the pool has connections.
MANY = 15

T = TypeVar("T")

with_row_locks = pytest.mark.parametrize("database_url", [POSTGRESQL, MYSQL], indirect=True, scope="module")


async def jobs_on(store: Store, number: int) -> list[JobService]:
    """Register `number` jobs on one service."""
    servers = [JobService(store) for _ in range(number)]
    for server in servers:
        server.service = servers[0].service
        await server.service.register(server.job)
    return servers


@asynccontextmanager
async def locked(database_url: str, *where: str) -> AsyncIterator[None]:
    """Lock the rows that these clauses name in an open transaction of another session."""
    engine = create_async_engine(database_url)
    try:
        async with engine.connect() as connection:
            for rows in where:
                assert (await connection.execute(text(f"SELECT * FROM {rows} FOR UPDATE"))).all()  # noqa: S608 - no secret
            yield
            await connection.rollback()
    finally:
        await engine.dispose()


def row_of(server: JobService, trial: TrialDispatch | None = None) -> str:
    """Return the clause for the row of the job, or of one of its trials."""
    if trial is None:
        return f"jobs WHERE job_id = '{server.job_id}'"
    # If a query does not name a whole key, MariaDB also locks the gaps beside its result, and neighbours cannot be
    # inserted.
    return f"trials WHERE job_id = '{trial.job_id}' AND trial_number = {trial.trial_number}"


def sleeps(transaction: Transaction) -> None:
    prefix = "pg_" if transaction.connection.dialect.name == "postgresql" else ""
    transaction.connection.exec_driver_sql(f"SELECT {prefix}sleep(600)").all()


async def wait_until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG_S):
        while not holds():
            await asyncio.sleep(0.01)


async def unavailable(request: Coroutine[Any, Any, Any]) -> None:
    with pytest.raises(DatabaseUnavailableError):
        await request


async def sent_until_taken(request: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Retry the request until it succeeds, because an abandoned transaction may keep its locks briefly."""
    async with asyncio.timeout(LONG_S):
        while True:
            try:
                return await request()
            except DatabaseUnavailableError:
                continue


async def begun(store: Store, trials: int) -> tuple[JobService, list[TrialDispatch]]:
    """Register a job and begin trials on a store whose short time limit a busy machine may exceed."""
    (server,) = await sent_until_taken(lambda: jobs_on(store, 1))
    return server, [await sent_until_taken(server.suggest) for _ in range(trials)]


async def epochs(server: JobService, trial: TrialDispatch) -> list[float]:
    found = await server.store.read(epochs_between, trial.job_id, trial.trial_number, trial.trial_number)
    return [epoch.epoch for epoch in found]


async def beat(server: JobService, trial: TrialDispatch) -> None:
    await server.service.transact(server.service.commands.heartbeat, beat_of(trial))


async def outcomes_without_waiting(server: JobService, *reports: tuple[TrialDispatch, int, float]) -> list[Outcome]:
    """Return the outcomes of a group of reports of (trial, epoch, metric) that must not wait for locks."""
    results = [
        TrainingResult(**trial_id(trial).model_dump(), time=epoch, energy=epoch, metric=metric, current_epoch=epoch)
        for trial, epoch, metric in reports
    ]

    def take(transaction: Transaction) -> list[Outcome]:
        group = [(result, UNRESTRICTED) for result in results]
        return ReportBatch(transaction, group, server.service.commands.moment(), waits=False).take()

    return (await server.store._transact(take, waits=False))[0]


def checked_out(store: Store) -> int:
    """Return the number of connections in use."""
    assert isinstance(store._database, AsyncDatabase)
    pool: Any = store._database._engine.pool
    return int(pool.checkedout())


@with_row_locks
class TestRowsThatStayLocked:
    async def test_locked_rows_of_a_job_do_not_block_the_next_job(self, database_url: str) -> None:
        async with open_store(database_url, patience_s=LONG_S) as store:
            blocked, other = await jobs_on(store, 2)
            trials = [await blocked.suggest() for _ in range(MANY)]
            trial = await other.suggest()
            async with locked(database_url, row_of(blocked), *(row_of(blocked, each) for each in trials)):
                requests = [
                    asyncio.create_task(request)
                    for each in trials
                    for request in (blocked.report(each, cost_j=100), beat(blocked, each), blocked.suggest())
                ]
                # At this point, some of them are waiting.
                await wait_until(lambda: checked_out(store) > 1)
                for epoch in (1, 2):
                    await other.report(trial, cost_j=100 * epoch, epoch=epoch)
                await beat(other, trial)
                await other.reach(trial)
                await other.suggest()
                assert not any(request.done() for request in requests)
            await asyncio.gather(*requests)
            assert [await epochs(blocked, each) for each in trials] == [[1]] * MANY

    async def test_locked_rows_of_many_jobs_do_not_block_reports_of_an_unlocked_job(self, database_url: str) -> None:
        async with open_store(database_url, patience_s=LONG_S) as store:
            *blocked, other = await jobs_on(store, MANY + 1)
            trial = await other.suggest()
            async with locked(database_url, *map(row_of, blocked)):
                requests = [asyncio.create_task(each.suggest()) for each in blocked]
                await wait_until(lambda: checked_out(store) > 1)
                await other.report(trial, cost_j=100)
                await other.show()
                assert not any(request.done() for request in requests)
            await asyncio.gather(*requests)

    async def test_locked_row_of_a_trial_does_not_block_a_sibling_trial(self, database_url: str) -> None:
        async with job_service(database_url) as server:
            first, second = await server.suggest(), await server.suggest()
            async with locked(database_url, row_of(server, first)):
                waiting_report = asyncio.create_task(server.report(first, cost_j=100))
                await server.report(second, cost_j=100)
                await server.reach(second)
                assert not waiting_report.done()
            await waiting_report

    async def test_locked_row_keeps_the_order_of_a_trials_reports(self, database_url: str) -> None:
        async with open_store(database_url, patience_s=LONG_S) as store:
            server, other = await jobs_on(store, 2)
            trial, another = await server.suggest(), await other.suggest()
            async with locked(database_url, row_of(server), row_of(server, trial)):
                reports = []
                for epoch in range(1, 6):
                    reports.append(asyncio.create_task(server.report(trial, cost_j=100 * epoch, epoch=epoch)))
                    # Each report is in its own group.
                    await other.report(another, cost_j=100 * epoch, epoch=epoch)
                assert not any(report.done() for report in reports)
            await asyncio.gather(*reports)
            assert await epochs(server, trial) == [1, 2, 3, 4, 5]

    async def test_locked_job_lets_no_trial_of_a_group_end_or_be_overtaken(self, database_url: str) -> None:
        """Writing a job without its lock would lose concurrent changes, such as the numbers of trials."""
        async with job_service(database_url) as server:
            first, second = await server.suggest(), await server.suggest()
            async with locked(database_url, row_of(server)):
                # The first report would end its trial; the report after it must not overtake it.
                reports = (first, 1, 0.95), (first, 2, 0.5), (second, 1, 0.95)
                outcomes = await outcomes_without_waiting(server, *reports)
                assert outcomes == [RowLocked.ROW_LOCKED] * 3
            assert await server.states() == [TrialState.RUNNING] * 2
            assert await epochs(server, first) == []

    async def test_trial_ends_once_the_job_is_unlocked(self, database_url: str) -> None:
        """PostgreSQL locks the trial first and then the job; other databases lock both at once."""
        async with job_service(database_url) as server:
            first, second = await server.suggest(), await server.suggest()
            async with locked(database_url, row_of(server)):
                end = asyncio.create_task(server.reach(first))
                progress = asyncio.create_task(server.report(second, cost_j=100))
                if database_url.startswith("postgresql"):
                    await progress
                    assert not end.done()
            await asyncio.gather(end, progress)
            assert await server.states() == [TrialState.COMPLETED, TrialState.RUNNING]

    async def test_locks_held_too_long_are_reported(self, database_url: str) -> None:
        async with open_store(database_url, patience_s=SHORT_S) as store:
            server, (trial, other) = await begun(store, 2)
            async with locked(database_url, row_of(server), row_of(server, trial)):
                await asyncio.gather(
                    *(
                        unavailable(request)
                        for _ in range(MANY)
                        for request in (
                            server.report(trial, cost_j=100),
                            server.report(trial, cost_j=500, metric=0.95, epoch=5),
                            beat(server, trial),
                            server.suggest(),
                            server.end(trial),
                            server.offline(8, "key"),
                        )
                    )
                )
            await wait_until(lambda: checked_out(store) == 0)
            # The abandoned request may have been committed.
            await sent_until_taken(lambda: server.report(other, cost_j=100))
            await sent_until_taken(lambda: server.reach(other))
            states = await sent_until_taken(server.states)
            assert states[other.trial_number - 1] is TrialState.COMPLETED

    async def test_search_for_abandoned_trials_skips_locked_rows(self, database_url: str) -> None:
        async with open_store(database_url, patience_s=LONG_S) as store:
            servers = await jobs_on(store, 3)
            trials = [[await server.suggest(), await server.suggest()] for server in servers]
            reaper = servers[0]
            reaper.wait(2 * HOUR_S)
            async with locked(database_url, row_of(servers[0]), row_of(servers[1], trials[1][0])):
                await reaper.service.reap()
                # Views show an expired trial as abandoned before the reaper has stored its end.
                rows = [await store.read(Transaction.all_trials, server.job_id) for server in servers]
                states = [[trial.state for trial in found] for found in rows]
                running, abandoned = TrialState.RUNNING, TrialState.ABANDONED
                assert states == [[running] * 2, [running, abandoned], [abandoned] * 2]
            await reaper.service.reap()
            assert [await server.states() for server in servers] == [[abandoned] * 2] * 3


@with_row_locks
class TestASilentNetwork:
    async def test_silent_network_is_reported_and_survived(self, database_url: str) -> None:
        with relay_to(database_url) as relay:
            async with open_store(relay.url_of(database_url), patience_s=SHORT_S) as store:
                server, (trial,) = await begun(store, 1)
                read_all = partial(store.read, Transaction.all_tokens)
                # Open all connections of the pool.
                await asyncio.gather(*(sent_until_taken(read_all) for _ in range(MANY)))
                relay.fall_silent(True)
                for _ in range(2):
                    await asyncio.gather(
                        *(
                            unavailable(request)
                            for _ in range(MANY)
                            for request in (
                                server.report(trial, cost_j=100),
                                beat(server, trial),
                                server.suggest(),
                                store.read(Transaction.all_tokens),
                            )
                        )
                    )
                relay.fall_silent(False)
                await wait_until(lambda: checked_out(store) == 0)
                await asyncio.gather(*(sent_until_taken(read_all) for _ in range(MANY)))
                await sent_until_taken(lambda: server.report(trial, cost_j=100))
                assert await epochs(server, trial) == [1]


@with_row_locks
class TestSessions:
    async def test_timeouts_are_raised_for_long_operations(self, database_url: str) -> None:
        names = {
            "postgresql": ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"),
            "mysql": ("@@max_statement_time", "@@innodb_lock_wait_timeout", "@@idle_transaction_timeout"),
        }[make_url(database_url).get_backend_name()]

        def limits(transaction: Transaction) -> list[str]:
            ask = "SELECT " + ", ".join(f"current_setting('{each}')" if "@" not in each else each for each in names)
            return list(map(str, transaction.connection.exec_driver_sql(ask).one()))

        def fails(transaction: Transaction) -> None:
            limits(transaction)
            raise ZeroDivisionError

        async with open_store(database_url, patience_s=30.0) as store:
            usual = ["30s", "12s", "40s"] if database_url.startswith("postgresql") else ["30.0", "12", "40"]
            assert await store.read(limits) == usual
            for _ in range(3):
                raised = await store.patient().write(limits)
                assert not set(raised) & set(usual)
                assert await store.read(limits) == await store.write(limits) == usual
                with pytest.raises(ZeroDivisionError):
                    await store.patient().write(fails)
                assert await store.read(limits) == await store.write(limits) == usual

    async def test_statement_beyond_the_time_limit_is_ended(self, database_url: str) -> None:
        async with open_store(database_url, patience_s=SHORT_S) as store:
            await asyncio.gather(*(unavailable(store.write(sleeps)) for _ in range(MANY)))
            await wait_until(lambda: checked_out(store) == 0)
            await sent_until_taken(lambda: store.write(Transaction.all_tokens))

    async def test_connections_of_cancelled_requests_are_returned(self, database_url: str) -> None:
        async with open_store(database_url, patience_s=LONG_S) as store:
            requests = [asyncio.create_task(store.write(sleeps)) for _ in range(MANY)]
            await wait_until(lambda: checked_out(store) > 1)
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
            await wait_until(lambda: checked_out(store) == 0)
            await asyncio.gather(*(store.write(Transaction.all_tokens) for _ in range(MANY)))


async def test_permanently_locked_sqlite_file_is_reported(new_database: str, tmp_path: Path) -> None:
    async with open_store(new_database, patience_s=SHORT_S) as store:
        server, (trial,) = await begun(store, 1)
        with closing(sqlite3.connect(tmp_path / "bso.sqlite3", isolation_level=None)) as shell:
            shell.execute("BEGIN IMMEDIATE")
            # No request waits longer because of requests before it.
            await asyncio.gather(
                *(
                    unavailable(request)
                    for _ in range(5)
                    for request in (server.report(trial, cost_j=100), beat(server, trial), server.suggest())
                )
            )
            assert await sent_until_taken(server.states) == [TrialState.RUNNING]
            shell.execute("ROLLBACK")
        await sent_until_taken(lambda: server.report(trial, cost_j=100))
        assert await epochs(server, trial) == [1]


@pytest.mark.parametrize("database_url", DATABASES, indirect=True, scope="module")
async def test_work_beyond_the_time_limit_is_abandoned(database_url: str) -> None:
    async with open_store(database_url, patience_s=LONG_S) as store:
        with pytest.raises(DatabaseUnavailableError) as caught:
            await store._attempt(lambda _: None, read_only=False, timeout_s=0.0)
        assert "no answer within" in caught.value.detail
        await store.write(Transaction.all_tokens)


async def test_deadline_spans_all_transactions_of_a_request() -> None:
    def wait(patience_s: float) -> Deadline:
        with waiting(patience_s) as deadline:
            while deadline.left_s > 0:
                pass
        return deadline

    begin_request()
    wait(0.5)
    with waiting(0.5) as deadline:
        assert deadline.left_s == 0
    with waiting(LONG_S) as deadline:
        assert 0 < deadline.left_s < LONG_S - 0.5
    begin_request()
    with waiting(0.5) as deadline:
        assert deadline.left_s > 0


# --- Retries after failed transactions --------------------------------------------------------------------------------


def broken_off(*args: object, sqlstate: str | None = None) -> OperationalError:
    return OperationalError("INSERT", None, DriverError(*args, sqlstate=sqlstate))


@pytest.fixture
def longest_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every random wait as long as possible."""
    monkeypatch.setattr("random.random", lambda: 1.0)


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (JobExistsError("job"), Failure.COLLIDED),
        (DatabaseUnavailableError("the connection was lost"), Failure.LOST),
        (DatabaseUnavailableError("nothing can be kept", fault="the disk of its database is full"), None),
        (broken_off(sqlstate="40P01"), Failure.BROKEN_OFF),
        (broken_off(1205, "Lock wait timeout exceeded"), Failure.BROKEN_OFF),
        (broken_off(1020, "Record has changed since last read"), Failure.BROKEN_OFF),
        (broken_off("database is locked"), Failure.BROKEN_OFF),
        (broken_off("no such column"), None),
        (UnknownJobError("job"), None),
        (RuntimeError(), None),
    ],
)
def test_errors_are_classified_as_documented(error: Exception, failure: Failure | None) -> None:
    assert failure_of(error) is failure


@pytest.mark.usefixtures("longest_waits")
@pytest.mark.parametrize(
    ("failure", "waits_s"),
    [
        (Failure.COLLIDED, [0.0, None]),
        (Failure.LOST, [0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, None]),
        (Failure.BROKEN_OFF, [0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.4, 0.4]),
    ],
)
def test_waits_between_attempts_are_literal(failure: Failure, waits_s: list[float | None]) -> None:
    retries = Retries(Deadline(LONG_S))
    assert [retries.wait_s(failure, JobExistsError("job")) for _ in waits_s] == pytest.approx(waits_s)
    assert retries.attempts == len(waits_s)


@pytest.mark.usefixtures("longest_waits")
def test_attempt_ending_after_the_deadline_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    clock: Any = lambda: now  # noqa: E731 - a clock set by the test
    monkeypatch.setattr("time.monotonic", clock)
    retries = Retries(Deadline(3.0))
    now += 1.2  # a wait for a lock in vain, as long as the next attempt might wait
    assert retries.wait_s(Failure.BROKEN_OFF, broken_off("database is locked")) == 0.05
    now += 1.25
    assert retries.wait_s(Failure.BROKEN_OFF, broken_off("database is locked")) is None


def test_exhausted_retries_report_an_unavailable_database(caplog: pytest.LogCaptureFixture) -> None:
    retries, collision = Retries(Deadline(LONG_S)), JobExistsError("job")
    assert retries.given_up(collision) is collision
    assert caplog.text == ""
    away = retries.given_up(broken_off("database is locked"))
    assert isinstance(away, DatabaseUnavailableError)
    assert away.detail == "aborted by the database each time: database is locked"
    assert "gave up after 0 attempts: aborted" in caplog.text
