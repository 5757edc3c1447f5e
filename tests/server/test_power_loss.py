"""Power cuts: a SQLite file keeps every report that was acknowledged before the cut.

A server runs once with its clients, while `tests/support/power_cut.c` records each write and sync. For a cut at any
moment, the record yields a possible state of the disk. The server's own code opens that state, and
`tests/chaos/evidence.py` compares it with the answers that the clients had received before the cut.
"""

from __future__ import annotations

import json
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy.exc import SQLAlchemyError

from bso_server.errors import BsoError
from bso_server.service.commands import Commands
from bso_server.storage.transaction import Transaction
from tests.chaos.client import BoundedClient, DoneError
from tests.chaos.evidence import Acknowledgement, check_job
from tests.support import ROOT
from tests.support.power_cut import Disk, acknowledge, read_record, recorder
from tests.support.servers import free_port, wait_until_up
from tests.support.service import in_store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="writes are recorded by LD_PRELOAD")

PATIENCE_S = 120.0
CLIENTS = 3
# In memory, where a sync is quick: the record, not the file system, decides which data survive.
MEMORY = Path("/dev/shm")  # noqa: S108 - a private folder is created there
# Runs `bso-server` with a different PRAGMA synchronous.
WITH_LEVEL = """
import sys
from sqlalchemy import event
from sqlalchemy.pool import Pool
level = sys.argv.pop(1)
event.listen(Pool, "checkout", lambda driver, *_: driver.execute(f"PRAGMA synchronous = {level}").close())
from bso_server.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        yield Path(folder)


def record_run(folder: Path, level: str = "FULL", *, runs: int = 1, answers: int = 40) -> None:
    """Serve clients until each has received `answers`, then stop the server; repeat this for each of `runs`."""
    disk, record = folder / "disk", folder / "record"
    disk.mkdir()
    environ = {
        **os.environ,
        "LD_PRELOAD": str(recorder(folder)),
        "POWER_CUT_FOLDER": str(disk),
        "POWER_CUT_RECORD": str(record),
        "ZEUS_BSO_DATABASE_TIMEOUT_S": "60",
    }
    port, log = free_port(), folder / "server.log"
    url = f"http://127.0.0.1:{port}"
    program = ["-m", "bso_server"] if level == "FULL" else ["-c", WITH_LEVEL, level]
    serve = [*program, "serve", "--port", str(port), "--database-url", f"sqlite:///{disk / 'bso.sqlite3'}"]
    for run in range(runs):
        with log.open("a") as output, record.open("ab", buffering=0) as file, ThreadPoolExecutor(CLIENTS) as pool:
            server = subprocess.Popen([sys.executable, *serve], env=environ, cwd=ROOT, stdout=output, stderr=output)
            try:
                wait_until_up(server, url, log)
                seeds = range(run * CLIENTS, (run + 1) * CLIENTS)
                clients = [BoundedClient(url, seed, answers, partial(acknowledge, file.fileno())) for seed in seeds]
                for client in [pool.submit(client.run) for client in clients]:
                    assert isinstance(client.exception(), DoneError), log.read_text()
                server.terminate()
                server.wait(PATIENCE_S)
            finally:
                server.kill()
                server.wait()


def losses(folder: Path, cuts: int) -> list[str]:
    """Cut the power at `cuts` random moments; return an error for each cut that lost or damaged data."""
    entries = list(read_record(folder / "record"))
    rng = random.Random(1)  # noqa: S311 - no secret
    moments = set(rng.sample(range(len(entries)), cuts))
    disk, acknowledged, harm = Disk(folder / "disk"), [], []
    for moment, entry in enumerate(entries):
        disk.apply(entry)
        if entry.kind == "A":
            acknowledged.append(json.loads(entry.data))
        if moment in moments:
            after = folder / f"cut-{moment}"
            after.mkdir()
            for name, content in disk.after_cut(rng).items():
                (after / name).write_bytes(content)
            try:
                check(after, acknowledged)
            except (AssertionError, KeyError, BsoError, SQLAlchemyError, sqlite3.Error) as error:
                harm.append(f"cut {moment}: {error!r}")
    seen = {file.name: file.read_bytes() for file in (folder / "disk").iterdir()}
    assert disk.seen() == seen, "the record is not complete"
    return harm


def check(after: Path, acknowledged: list[Acknowledgement]) -> None:
    """Assert that the file is sound, holds everything acknowledged, and accepts new trials."""
    registered = {line["job_id"] for line in acknowledged if line["kind"] == "registered"}

    def work(transaction: Transaction) -> None:
        assert transaction.connection.exec_driver_sql("PRAGMA integrity_check").scalars().all() == ["ok"]
        for job_id in sorted(registered):
            check_job(transaction, job_id, acknowledged)
            Commands().begin_trial(transaction, job_id)

    in_store(f"sqlite:///{after / 'bso.sqlite3'}", lambda store: store.write(work))


def test_power_cuts_lose_no_acknowledged_report(folder: Path) -> None:
    record_run(folder)
    assert losses(folder, cuts=20) == []


@pytest.mark.slow
def test_power_cuts_with_restarts_lose_no_acknowledged_report(folder: Path) -> None:
    record_run(folder, runs=2, answers=100)
    assert losses(folder, cuts=100) == []


@pytest.mark.slow
@pytest.mark.parametrize("level", ["NORMAL", "OFF"])
def test_power_cuts_without_a_sync_per_commit_lose_reports(level: str, folder: Path) -> None:
    record_run(folder, level=level)
    assert len(losses(folder, cuts=20)) > 1
