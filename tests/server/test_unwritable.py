"""Databases that answer but cannot store: full, read-only, or without their file. They acknowledge nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

from bso_server.errors import DatabaseNotReadyError, DatabaseUnavailableError
from bso_server.service.reading import JobReader
from bso_server.storage.faults import as_unwritable
from bso_server.storage.transaction import Transaction
from tests.support.databases import (
    MYSQL,
    POSTGRES_URL,
    POSTGRESQL,
    DriverError,
    administer,
    end_sessions,
)
from tests.support.disks import damage_page
from tests.support.jobs import job
from tests.support.servers import ServerProcess, bso_server, serving
from tests.support.service import JobService, job_service, open_store, trial_id
from tests.support.wire import OURS, assert_refused, begin, report
from zeus_plugins.client.local import LocalServer
from zeus_plugins.errors import ZeusBSOServerUnreachableError
from zeus_plugins.protocol import CreatedJob, TrainingResult, TrialDispatch

PATIENCE_S = 60.0


def assert_retried(answer: httpx.Response, words: str) -> None:
    assert_refused(answer, 503, None, words)
    assert int(answer.headers["retry-after"]) > 0


def on_sqlite(statement: str) -> Callable[[Transaction], Any]:
    return lambda transaction: transaction.connection.exec_driver_sql(statement).scalar()


async def refused(server: JobService, trial: TrialDispatch, epoch: float) -> str:
    """Return the fault stated by the server for a report that it cannot store."""
    with pytest.raises(DatabaseUnavailableError) as caught:
        await server.report(trial, cost_j=100.0 * epoch, epoch=epoch)
    assert caught.value.fault is not None
    assert caught.value.fault in caught.value.message
    assert "bso.sqlite3" not in caught.value.message
    with pytest.raises(DatabaseNotReadyError, match=caught.value.fault):
        await JobReader(server.store).check_ready()
    return caught.value.fault


async def epoch_without_room(server: JobService, trial: TrialDispatch) -> float:
    """Return the first epoch of which the report does not fit any more."""
    for number in range(1, 1000):
        try:
            await server.report(trial, cost_j=float(number), epoch=number / 100)
        except DatabaseUnavailableError:
            return number / 100
    raise AssertionError("it is never full")


async def test_full_database_is_reported_and_continues_after_space_is_freed(
    new_database: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with job_service(new_database) as server:
        trial = await server.suggest()
        await JobReader(server.store).check_ready()
        pages = await server.store.read(on_sqlite("PRAGMA page_count"))
        await server.store.write(on_sqlite(f"PRAGMA max_page_count = {pages}"))
        epoch = await epoch_without_room(server, trial)
        assert "disk of its database is full" in await refused(server, trial, epoch)
        assert await server.states() == ["running"]
        said = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert len(said) == 1, "one line, and not one for each request"
        assert str(tmp_path) in said[0].getMessage()

        await server.store.write(on_sqlite("PRAGMA max_page_count = 1000000"))
        await server.report(trial, cost_j=100.0 * epoch, epoch=epoch)
        await JobReader(server.store).check_ready()
        assert "accepts writes again" in caplog.text


TAKEN_AWAY: dict[str, Callable[[Path], object]] = {
    "deleted": lambda file: file.unlink(),
    "moved": lambda file: file.rename(file.with_name("moved")),
    "replaced": lambda file: Path(shutil.copy(file, file.with_name("copy"))).replace(file),
    "log deleted": lambda file: Path(f"{file}-wal").unlink(),
    "index deleted": lambda file: Path(f"{file}-shm").unlink(),
    "all deleted": lambda file: [Path(f"{file}{end}").unlink() for end in ("", "-wal", "-shm")],
}


@pytest.mark.parametrize("taken_away", TAKEN_AWAY.values(), ids=TAKEN_AWAY.keys())
async def test_no_report_is_acknowledged_after_the_file_was_removed(
    new_database: str, taken_away: Callable[[Path], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "bso.sqlite3"
    async with job_service(new_database) as server:
        trial = await server.suggest()
        await server.report(trial, cost_j=100.0, epoch=1)
        taken_away(file)
        there = file.exists()
        for epoch in (2, 3):
            assert "deleted, moved or replaced" in await refused(server, trial, epoch)
        # Connections opened after this neither answer from another file nor create a file.
        for outcome in await asyncio.gather(*(server.show() for _ in range(8)), return_exceptions=True):
            assert isinstance(outcome, DatabaseUnavailableError)
        assert file.exists() == there
        (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert str(file) in line


async def test_restored_file_is_used_again(new_database: str, tmp_path: Path) -> None:
    file = tmp_path / "bso.sqlite3"
    async with job_service(new_database) as server:
        trial = await server.suggest()
        TAKEN_AWAY["moved"](file)
        await refused(server, trial, 1)
        (tmp_path / "moved").rename(file)
        await server.report(trial, cost_j=100.0, epoch=1)
        await JobReader(server.store).check_ready()


async def test_server_with_damaged_page_stays_unready_after_successful_writes(
    new_database: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with job_service(new_database) as server:
        await server.suggest()
    damage_page(tmp_path / "bso.sqlite3", "epochs")
    async with open_store(new_database) as store:
        reader = JobReader(store)
        await reader.check_ready()  # the page has not been read yet
        for _ in range(2):
            with pytest.raises(DatabaseUnavailableError) as caught:
                await store.read(on_sqlite("SELECT count(energy_j) FROM epochs"))
            assert caught.value.fault == "its database is damaged"
            await store.write(Transaction.write_probe, "another page")
            with pytest.raises(DatabaseNotReadyError, match="its database is damaged"):
                await reader.check_ready()
        # A temporary second fault does not end the damage.
        pages = await store.read(on_sqlite("PRAGMA page_count"))
        await store.write(on_sqlite(f"PRAGMA max_page_count = {pages}"))
        with pytest.raises(DatabaseUnavailableError, match="disk of its database is full"):
            await store.write(on_sqlite("CREATE TABLE ballast AS SELECT zeroblob(1000000)"))
        await store.write(on_sqlite("PRAGMA max_page_count = 1000000"))
        with pytest.raises(DatabaseNotReadyError, match="its database is damaged"):
            await reader.check_ready()
    damaged = [each.getMessage() for each in caplog.records if "is damaged" in each.getMessage()]
    errors = [line for line in damaged if not line.startswith("not ready")]
    assert len(errors) == 1
    assert "bso-server db verify" in errors[0]


@pytest.mark.parametrize("database_url", [POSTGRESQL, MYSQL], indirect=True)
async def test_damage_reported_by_the_database_makes_the_server_unready(database_url: str) -> None:
    backend = make_url(database_url).get_backend_name()

    def damaged(transaction: Transaction) -> None:
        transaction.connection.exec_driver_sql(
            "DO $$ BEGIN RAISE EXCEPTION 'invalid page in block 0' USING ERRCODE = 'XX001'; END $$"
            if backend == "postgresql"
            else "SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1712, MESSAGE_TEXT = 'Index is corrupted'"
        )

    async with open_store(database_url) as store:
        with pytest.raises(DatabaseUnavailableError, match="its database is damaged"):
            await store.read(damaged)
        await store.write(Transaction.write_probe, "a row")
        with pytest.raises(DatabaseNotReadyError, match="its database is damaged"):
            await JobReader(store).check_ready()


def test_restarted_server_uses_the_present_file(server: ServerProcess) -> None:
    file = Path(make_url(server.database_url).database or "")
    with httpx.Client(base_url=server.url) as http:
        trial = begin(http, http.post("/jobs", json=job()).raise_for_status().json()["job_id"])
        file.unlink()
        for epoch in range(1, 51):
            assert_retried(_report(http, trial, epoch), "deleted, moved or replaced")
        assert_refused(http.get("/health/ready"), 503, None, "deleted, moved or replaced")
    log = server.log.read_text()
    assert "Traceback" not in log
    assert log.count(" ERROR ") == 1
    server.stop()
    server.start()
    assert httpx.get(f"{server.url}/health/ready").status_code == 200
    assert httpx.get(f"{server.url}/api/jobs").json()["jobs"] == []


JOB = CreatedJob(**job(job_id="local-1"))


def test_embedded_server_creates_no_second_file_beside_the_training(tmp_path: Path) -> None:
    file = tmp_path / "bso.sqlite3"
    with LocalServer(f"embedded://{file}") as server:
        trial = server.request_trial(server.register(JOB).job_id)
        result = TrainingResult(**trial_id(trial).model_dump(), time=1, energy=100, metric=0.5, current_epoch=1)
        file.rename(tmp_path / "moved")
        for _ in range(2):
            with pytest.raises(ZeusBSOServerUnreachableError, match="deleted, moved or replaced"):
                server.send_report(result)
        # The connection is closed before each fork, and opened again after it.
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(ZeusBSOServerUnreachableError, match="deleted, moved or replaced"):
            server.send_report(result)
        assert not file.exists()
        (tmp_path / "moved").rename(file)
        assert not server.send_report(result).stop_train
    # A later training in this process uses the file that then exists.
    (tmp_path / "bso.sqlite3").unlink()
    with LocalServer(f"embedded://{file}") as server:
        assert server.list_jobs().jobs == ()


@pytest.mark.parametrize("database_url", [POSTGRESQL], indirect=True)
def test_postgresql_standby_is_reported_as_read_only(database_url: str, tmp_path: Path) -> None:
    alter = f"ALTER DATABASE {make_url(database_url).database}"
    with (
        serving(database_url, tmp_path, "--migrate") as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http,
    ):
        trial = begin(http, http.post("/jobs", json=job()).json()["job_id"])
        assert http.get("/health/ready").status_code == 200
        # Each change takes effect for new sessions.
        administer(POSTGRES_URL, f"{alter} SET default_transaction_read_only = on")
        end_sessions(database_url)
        assert_retried(_report(http, trial, 1), "takes no writes")
        assert_refused(http.get("/health/ready"), 503, None, "takes no writes")
        administer(POSTGRES_URL, f"{alter} RESET default_transaction_read_only")
        end_sessions(database_url)
        assert _report(http, trial, 1).status_code == 200
        assert http.get("/health/ready").status_code == 200
        assert "Traceback" not in server.log.read_text()


def _report(http: httpx.Client, trial: dict[str, Any], epoch: int) -> httpx.Response:
    return report(http, trial, time=epoch, energy=100 * epoch, metric=0.5, current_epoch=epoch, **OURS)


@pytest.mark.parametrize("database_url", [MYSQL], indirect=True)
def test_mysql_replica_is_reported_as_read_only(database_url: str, tmp_path: Path) -> None:
    assert bso_server("db", "upgrade", "--database-url", database_url).returncode == 0
    replica = make_url(database_url).update_query_dict({"init_command": "SET SESSION TRANSACTION READ ONLY"})
    with serving(replica.render_as_string(hide_password=False), tmp_path) as server:
        assert_refused(httpx.post(f"{server.url}/jobs", json=job()), 503, None, "takes no writes")
        assert_refused(httpx.get(f"{server.url}/health/ready"), 503, None, "takes no writes")


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (DriverError("disk full", sqlstate="53100"), "full"),
        (DriverError(1114, "The table 'epochs' is full"), "full"),
        (DriverError(1021, "Disk full"), "full"),
        (DriverError(1290, "running with the --read-only option"), "no writes"),
        (DriverError(3, "Error writing file (Errcode: 28)"), "disk"),
        (DriverError("invalid page in block 0", sqlstate="XX001"), "damaged"),
        (DriverError("item order invariant violated", sqlstate="XX002"), "damaged"),
        (DriverError(1712, "Index PRIMARY is corrupted"), "damaged"),
        (DriverError("duplicate key", sqlstate="23505"), None),
        (DriverError(1062, "Duplicate entry"), None),
        (DriverError(), None),
        (None, None),
    ],
)
def test_driver_errors_are_classified_by_fault(error: BaseException | None, fault: str | None) -> None:
    found = as_unwritable(DBAPIError("INSERT", None, error))
    assert (found is None) is (fault is None)
    assert fault is None or fault in str(found)


async def test_readiness_probes_do_not_write_to_the_disk_each_time(tmp_path: Path) -> None:
    file = tmp_path / "bso.sqlite3"
    async with job_service(f"sqlite:///{file}") as server:
        reader = JobReader(server.store)
        await reader.check_ready()
        with closing(sqlite3.connect(file)) as connection:
            before = connection.execute("PRAGMA data_version").fetchone()
            for _ in range(20):
                await reader.check_ready()
            assert connection.execute("PRAGMA data_version").fetchone() == before
            await server.store.check_writable()
            assert connection.execute("PRAGMA data_version").fetchone() != before
