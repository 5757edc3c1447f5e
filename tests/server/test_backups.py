"""Backups by `bso-server db backup`, restoring them, and `bso-server db verify` on damaged databases."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import stat
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Event

import httpx
import pytest
from sqlalchemy.engine import make_url

from bso_server.storage.database import open_database
from bso_server.storage.store import Store
from tests.support.databases import POSTGRES_URL, fresh_database
from tests.support.disks import damage_page
from tests.support.jobs import job
from tests.support.servers import ServerProcess, bso_server
from tests.support.service import job_service, run_apart
from tests.support.wire import OURS, begin, report

TIMED = re.compile(r"copy\.[0-9]{8}T[0-9]{6}Z")


def filled(database_url: str) -> str:
    """Make a job with a completed and a running trial in a database, and return its URL."""

    async def fill() -> None:
        async with job_service(database_url) as job:
            await job.reach(await job.suggest(), 500.0)
            await job.report(await job.suggest(), cost_j=100.0)

    run_apart(fill)
    return database_url


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A SQLite file with a job, which no process has open."""
    file = tmp_path / "bso.sqlite3"
    filled(f"sqlite:///{file}")
    return file


def backup(file: Path, copy: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return bso_server("db", "backup", str(copy), *options, "--database-url", f"sqlite:///{file}")


def verify(database_url: str, *options: str) -> subprocess.CompletedProcess[str]:
    return bso_server("db", "verify", *options, "--database-url", database_url)


def test_copies_of_a_live_server_under_load_hold_all_earlier_reports(server: ServerProcess, tmp_path: Path) -> None:
    """Back up five times during reports, restore each copy into a new file, and verify it."""
    file = Path(make_url(server.database_url).database or "")
    acknowledged: dict[int, int] = {}
    stop = Event()

    def train() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            trial = begin(http, "load-1")
            for epoch in range(1, 100_000):
                report(
                    http, trial, time=epoch, energy=epoch, metric=0.5, current_epoch=epoch, **OURS
                ).raise_for_status()
                acknowledged[trial["trial_number"]] = epoch
                if stop.is_set():
                    return

    with httpx.Client(base_url=server.url) as http, ThreadPoolExecutor(4) as pool:
        http.post("/jobs", json=job(job_id="load-1", max_epochs=100_000)).raise_for_status()
        trainings = [pool.submit(train) for _ in range(4)]
        try:
            expected = []
            for number in range(5):
                while len(acknowledged) < 4 or sum(acknowledged.values()) < 40 * (number + 1):
                    assert not any(training.done() for training in trainings)
                    time.sleep(0.01)
                before = dict(acknowledged)
                assert backup(file, tmp_path / f"copy-{number}").returncode == 0
                expected.append(before)
        finally:
            stop.set()
        for training in trainings:
            training.result()
    server.stop()

    for number, before in enumerate(expected):
        restored = tmp_path / f"restored-{number}.sqlite3"
        shutil.copy(tmp_path / f"copy-{number}", restored)
        verified = verify(f"sqlite:///{restored}")
        assert (verified.returncode, verified.stderr) == (0, "")
        with closing(sqlite3.connect(restored)) as connection:
            found = dict(connection.execute("SELECT trial_number, max(epoch) FROM epochs GROUP BY trial_number"))
        assert all(found[trial] >= epoch for trial, epoch in before.items())


def test_copy_is_private_and_leaves_nothing_else(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copies"
    folder.mkdir()
    done = backup(file, folder / "copy")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"is copied to {folder / 'copy'}" in done.stdout
    assert [path.name for path in folder.iterdir()] == ["copy"]
    assert stat.S_IMODE((folder / "copy").stat().st_mode) == 0o600


def test_existing_file_is_not_replaced(file: Path, tmp_path: Path) -> None:
    (tmp_path / "copy").write_text("a letter")
    for copy in (tmp_path / "copy", file):
        refused = backup(file, copy)
        assert refused.returncode == 1
        assert f"{copy} exists" in refused.stderr
    assert (tmp_path / "copy").read_text() == "a letter"
    assert verify(f"sqlite:///{file}").returncode == 0


def test_newest_copies_are_kept_and_unrelated_files_stay(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copies"
    folder.mkdir()
    old = [f"copy.202501{day:02}T000000Z" for day in range(1, 6)]
    others = ["copy", "copy.old", "copy.20250101T000000Z.gz", "another.20250101T000000Z"]
    for name in [*old, *others, "copy.20250102T000000Z.abcdefgh.partial"]:
        (folder / name).touch()
    assert backup(file, folder / "copy", "--keep", "3").returncode == 0
    left = {path.name for path in folder.iterdir()}
    (made,) = [name for name in left if TIMED.fullmatch(name) and name not in old]
    assert left == {made, *old[-2:], *others}
    assert verify(f"sqlite:///{folder / made}").returncode == 0


@pytest.mark.parametrize("number", ["0", "-1"])
def test_keep_below_1_is_refused(number: str, file: Path, tmp_path: Path) -> None:
    refused = backup(file, tmp_path / "copy", f"--keep={number}")
    assert refused.returncode != 0
    assert "--keep" in refused.stderr


@pytest.mark.parametrize("harm", ["a table", "no database", "no folder"])
def test_failed_backup_leaves_earlier_copies(harm: str, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copies"
    folder.mkdir()
    for day in (1, 2):
        (folder / f"copy.2025010{day}T000000Z").touch()
    before = sorted(folder.iterdir())
    copy = folder / "copy"
    match harm:
        case "a table":
            damage_page(file, "epochs")
        case "no database":
            file = tmp_path / "misspelt.sqlite3"
        case _:
            copy = tmp_path / "nowhere" / "copy"
    failed = backup(file, copy, "--keep", "1")
    assert failed.returncode == 1
    assert failed.stderr.startswith("bso-server: ")
    assert "Traceback" not in failed.stderr
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("kind", ["postgresql", "mysql"])
async def test_backup_of_a_database_server_names_its_tool(kind: str, tmp_path: Path) -> None:
    store = Store(open_database(f"{kind}://me:quiet@db.example:1234/bso"))
    with pytest.raises(ValueError, match=r"nothing is copied, .* pg_dump or mariadb-dump, see docs/operations\.md"):
        await store.back_up(tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []


class TestVerify:
    @pytest.mark.parametrize("part", ["epochs", "sqlite_autoindex_trials_1"])
    def test_damaged_page_of_sqlite_is_found(self, part: str, file: Path) -> None:
        damage_page(file, part)
        found = verify(f"sqlite:///{file}")
        assert found.returncode == 1
        assert "the database is damaged" in found.stderr
        assert "not detected: " in found.stdout
        found = verify(f"sqlite:///{file}", "--json")
        assert found.returncode == 1
        said = json.loads(found.stdout)
        assert (said["jobs"], len(said["damage"]) > 0) == (0, True)

    def test_index_missing_a_row_is_found(self, file: Path) -> None:
        with closing(sqlite3.connect(file)) as connection:
            connection.executescript(
                "PRAGMA writable_schema = ON; CREATE INDEX some ON epochs (epoch) WHERE epoch < 0;"
                "UPDATE sqlite_master SET sql = 'CREATE INDEX some ON epochs (epoch)' WHERE name = 'some'"
            )
        found = verify(f"sqlite:///{file}")
        assert found.returncode == 1
        assert "missing from index some" in found.stdout

    @pytest.mark.postgresql
    @pytest.mark.slow
    def test_verify_of_postgresql_names_the_tool_for_its_pages(self) -> None:
        with fresh_database(POSTGRES_URL) as url:
            filled(url)
            assert "let pg_amcheck or mariadb-check look for it" in output_of_sound(url)


def output_of_sound(database_url: str) -> str:
    """Return the output of `verify` for a database in which it finds no damage."""
    found = verify(database_url)
    assert found.returncode == 0
    assert "not detected: " in found.stdout
    return found.stdout
