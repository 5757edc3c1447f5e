"""Power cuts: a SQLite file keeps every report that was acknowledged before the cut.

A server runs once with its clients, while `power_cut.c` records each write and sync. For a cut at any
moment, the record yields a possible state of the disk. The server's own code opens that state, and
`tests/chaos/evidence.py` compares it with the answers that the clients had received before the cut.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
from sqlalchemy.exc import SQLAlchemyError

from bso_server.errors import BsoError
from bso_server.service.commands import Commands
from bso_server.storage.transaction import Transaction
from tests.chaos.client import BoundedClient, DoneError
from tests.chaos.evidence import Acknowledgement, check_job
from tests.support import ROOT
from tests.support.servers import free_port, wait_until_up
from tests.support.service import in_store

# --- The disk after a power cut ---------------------------------------------------------------------------------------


# `power_cut.c` records writes and syncs. A disk keeps all synced data. Of the unsynced writes it keeps any subset of
# sectors. Of the unsynced changes to the folder (files created, renamed or deleted) it keeps any prefix.
SECTOR = 512


class Entry(NamedTuple):
    """A change to a file, the start (B) or end (E) of a sync, or an acknowledgement (A) that a client has received.

    `number` is an offset, a size, or the number of a sync.
    """

    kind: Literal["C", "W", "T", "U", "R", "B", "E", "A"]
    path: str
    number: int
    data: bytes


def recorder(folder: Path) -> Path:
    """Compile `power_cut.c` into the folder; without a compiler the test is skipped, except in CI, where it fails."""
    library = folder / "power_cut.so"
    compiler = shutil.which("cc")
    if compiler is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("there is no C compiler (cc) to record writes with")
    source = Path(__file__).with_name("power_cut.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


def acknowledge(record: int, answer: dict[str, Any]) -> None:
    """Append an answer, which a client has received, to the open record."""
    data = json.dumps(answer).encode()
    os.write(record, b"A 0 %d -\n%b" % (len(data), data))


def read_record(record: Path) -> Iterator[Entry]:
    """Yield the entries of a record in order."""
    with record.open("rb") as file:
        while head := file.readline():
            kind, number, length, path = head.decode().rstrip("\n").split(" ", 3)
            yield Entry(kind, path, int(number), file.read(int(length)))


@dataclass
class File:
    """Synced content of a file, and its unsynced changes with their positions in the record."""

    synced: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, Entry]] = field(default_factory=list)


class Disk:
    """One folder of a disk, after the entries of a record that were applied so far."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._names: dict[str, File] = {}
        self._kept: dict[str, File] = {}
        self._moves: list[tuple[int, dict[str, File | None]]] = []
        self._begun: dict[tuple[str, int], int] = {}
        self._time = 0

    def apply(self, entry: Entry) -> None:
        """Apply the next entry of the record."""
        self._time += 1
        path = entry.path
        match entry.kind:
            case "C":
                self._move({path: File()})
            case "U":
                self._move({path: None})
            case "R":
                self._move({entry.data.decode(): self._names[path], path: None})
            case "W" | "T":
                self._names[path].pending.append((self._time, entry))
            case "B":
                self._begun[path, entry.number] = self._time
            case "E":
                self._sync(path, self._begun.pop((path, entry.number)))

    def _move(self, move: dict[str, File | None]) -> None:
        self._moves.append((self._time, move))
        _rename(self._names, move)

    def _sync(self, path: str, begun: int) -> None:
        if path == self._folder:
            for time, move in self._moves:
                if time < begun:
                    _rename(self._kept, move)
            self._moves = [each for each in self._moves if each[0] > begun]
        elif (file := self._names.get(path)) is not None:
            for time, entry in file.pending:
                if time < begun:
                    _change(file.synced, entry)
            file.pending = [each for each in file.pending if each[0] > begun]

    def seen(self) -> dict[str, bytes]:
        """Return the files as programs see them, by their names."""
        return {Path(path).name: _content(file) for path, file in self._names.items()}

    def after_cut(self, rng: random.Random) -> dict[str, bytes]:
        """Return files that a cut at this moment may leave, by their names."""
        names = dict(self._kept)
        for _, move in self._moves[: rng.choice([0, len(self._moves), rng.randint(0, len(self._moves))])]:
            _rename(names, move)
        chances = rng.choice([0.0, 0.0, 0.1, 0.5, 0.9, 1.0])
        return {Path(path).name: _content(file, rng, chances) for path, file in names.items()}


def _rename(names: dict[str, File], move: dict[str, File | None]) -> None:
    for path, file in move.items():
        if file is None:
            names.pop(path, None)
        else:
            names[path] = file


def _content(file: File, rng: random.Random | None = None, chances: float = 1.0) -> bytes:
    content = bytearray(file.synced)
    for _, entry in file.pending:
        for part in _sectors(entry):
            if rng is None or rng.random() < chances:
                _change(content, part)
    return bytes(content)


def _sectors(entry: Entry) -> Iterator[Entry]:
    """Split a write at the borders of sectors."""
    if entry.kind != "W":
        yield entry
        return
    begin, end = entry.number, entry.number + len(entry.data)
    while begin < end:
        border = min(end, (begin // SECTOR + 1) * SECTOR)
        yield entry._replace(number=begin, data=entry.data[begin - entry.number : border - entry.number])
        begin = border


def _change(content: bytearray, entry: Entry) -> None:
    size = entry.number if entry.kind == "T" else max(len(content), entry.number + len(entry.data))
    content.extend(bytes(max(0, size - len(content))))
    if entry.kind == "T":
        del content[size:]
    else:
        content[entry.number : entry.number + len(entry.data)] = entry.data


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
    assert losses(folder, cuts=10) == []


@pytest.mark.slow
def test_power_cuts_with_restarts_lose_no_acknowledged_report(folder: Path) -> None:
    record_run(folder, runs=2, answers=100)
    assert losses(folder, cuts=100) == []


@pytest.mark.slow
@pytest.mark.parametrize("level", ["NORMAL", "OFF"])
def test_power_cuts_without_a_sync_per_commit_lose_reports(level: str, folder: Path) -> None:
    record_run(folder, level=level)
    assert len(losses(folder, cuts=20)) > 1
