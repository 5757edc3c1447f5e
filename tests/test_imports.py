"""Imports and exports piece by piece: unseen until whole, nothing left when broken off, nobody waits for them."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import func, select

from bso_server.cli import main
from bso_server.errors import InvalidImportError, JobConflictError, UnknownJobError
from bso_server.service import queries
from bso_server.service.imports import SILENCE
from bso_server.service.json_stream import Element, Field, ListBegin, MalformedJsonError, NotAnObjectError, ObjectReader
from bso_server.service.messages import JobExport
from bso_server.service.queries import JobReader
from bso_server.storage.tables import arms, epochs, jobs, trials
from bso_server.storage.transaction import Transaction
from tests.support.jobs import job
from tests.support.servers import Server as ServerProcess
from tests.support.service import Server, exported, serve
from tests.support.wire import OURS, begin

PATIENCE_S = 60.0
START = datetime(2026, 1, 1, tzinfo=UTC)


def export_of(job_id: str, trials: int, reports: int = 3) -> dict[str, Any]:
    """A job whose trials have all reached the target."""

    def at(seconds: float) -> str:
        return (START + timedelta(seconds=seconds)).isoformat()

    def trial(number: int) -> dict[str, Any]:
        begun, cost = number * 600, 1 + number % 7 / 10
        kept = [
            {"report_number": each, "epoch": each, "time_s": 5 * each, "energy_j": 500 * each, "metric": 0.5}
            | {"reported_at": at(begun + 5 * each)}
            for each in range(1, reports)
        ]
        totals = {"time_s": 50 * cost, "energy_j": 5000 * cost, "epoch": reports, "metric": 0.95}
        first = {"first_epoch": 1, "first_cost_j": 500, "report_count": reports, "longest_gap_s": 5, "epochs": kept}
        ends = {"ended_at": at(begun + 60), "reported_at": at(begun + 60), "ended_event": 2 * number}
        state = {"state": "completed", "end_reason": "target_reached", "message": "target reached"}
        origin = {"origin": "exploration", "reason": "tried", "started_at": at(begun), "started_event": 2 * number - 1}
        other = {"energy_source": "nvml", "lease_expires_at": None, "heartbeats": True}
        size = {"trial_number": number, "batch_size": (8, 16)[number % 2]}
        return size | state | origin | ends | totals | first | other

    registered = job(job_id=job_id, policy="gp_voi", max_epochs=10)
    head = {"format": "zeus-bso-job", "version": 1, "job": registered, "created_at": at(0)}
    return {**head, "survivors": None, "rng_state": None, "trials": [trial(number + 1) for number in range(trials)]}


def new_id() -> str:
    return f"big-{uuid.uuid4().hex[:8]}"


def rows_of(transaction: Transaction, job_id: str) -> list[int]:
    return [
        transaction.rows(select(func.count().label("n")).select_from(table).where(table.c.job_id == job_id))[0]["n"]
        for table in (jobs, arms, trials, epochs)
    ]


class Sender:
    """Sends an export in two halves, the second when it is told to."""

    def __init__(self, export: dict[str, Any]) -> None:
        self.text = json.dumps(export).encode()
        self.is_half = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.error: Exception | None = None
        self.sent = 0

    async def pieces(self) -> AsyncIterator[bytes]:
        half = len(self.text) // 2
        for first in range(0, half, 4096):
            yield self.text[first : min(first + 4096, half)]
            self.sent = first
        self.is_half.set()
        await self.goes_on.wait()
        if self.error is not None:
            raise self.error
        yield self.text[half:]

    async def half_way(self, server: Server) -> asyncio.Task[Any]:
        """The import, which waits for the second half."""
        task = asyncio.create_task(server.service.import_job(self.pieces()))
        await asyncio.wait({task, asyncio.create_task(self.is_half.wait())}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return task


def test_nobody_sees_a_job_before_all_of_it_is_there(database_url: str) -> None:
    async def use(server: Server) -> None:
        job_id = new_id()
        sender = Sender(export_of(job_id, 400))
        task = await sender.half_way(server)
        assert (await server.store.read(rows_of, job_id))[2] > 100, "some of it is written"

        reader = JobReader(server.store)
        listed = await reader.read(queries.list_jobs, limit=None)
        assert job_id not in {each.job_id for each in listed.jobs}
        with pytest.raises(UnknownJobError):
            await reader.read(queries.show_job, job_id)
        with pytest.raises(UnknownJobError):
            await server.service.run(server.service.commands.suggest, job_id)
        with pytest.raises(UnknownJobError):
            await server.service.delete_job(job_id)
        registration = JobExport.model_validate_json(sender.text).job
        with pytest.raises(JobConflictError, match="is being imported"):
            await server.service.register(registration)
        with pytest.raises(JobConflictError, match="is being imported"):
            await server.service.import_job(Sender(export_of(job_id, 1)).pieces())
        await server.service.reap()

        sender.goes_on.set()
        assert (await task).trials == 400
        assert await exported(server.store, job_id) == JobExport.model_validate_json(sender.text)
        assert await server.service.register(registration) == (registration, False)
        trial = await server.service.run(server.service.commands.suggest, job_id)
        assert trial.trial_number == 401

    serve(database_url, use)


def test_an_import_that_fails_leaves_nothing(database_url: str) -> None:
    async def use(server: Server) -> None:
        job_id = new_id()
        wrong = export_of(job_id, 400)
        wrong["trials"][-1]["ended_event"] = 3
        with pytest.raises(InvalidImportError, match="event 3"):
            await server.service.import_job(whole(wrong))
        assert await server.store.read(rows_of, job_id) == [0, 0, 0, 0]

        sender = Sender(export_of(job_id, 400))
        task = await sender.half_way(server)
        sender.error = OSError("the client has left")
        sender.goes_on.set()
        with pytest.raises(OSError, match="has left"):
            await task
        assert await server.store.read(rows_of, job_id) == [0, 0, 0, 0]
        assert (await server.service.import_job(whole(export_of(job_id, 400)))).trials == 400

    serve(database_url, use)


async def whole(export: dict[str, Any]) -> AsyncIterator[bytes]:
    yield json.dumps(export).encode()


async def crashed(server: Server, job_id: str) -> Sender:
    """An import whose process is no more."""
    sender = Sender(export_of(job_id, 400))
    task = await sender.half_way(server)
    task.cancel()
    await asyncio.wait({task})
    assert (await server.store.read(rows_of, job_id))[0] == 1
    return sender


async def by_reaping(server: Server, _job_id: str) -> None:
    await server.service.reap()


async def by_importing(server: Server, job_id: str) -> None:
    assert (await server.service.import_job(whole(export_of(job_id, 2)))).trials == 2
    await server.service.delete_job(job_id)


@pytest.mark.parametrize("tidy_up", [by_reaping, by_importing])
def test_what_a_crash_leaves_is_removed(
    database_url: str, tidy_up: Callable[[Server, str], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    async def use(server: Server) -> None:
        job_id = new_id()
        await crashed(server, job_id)
        await server.service.reap()
        assert (await server.store.read(rows_of, job_id))[0] == 1, "it may still go on"
        server.wait(SILENCE.total_seconds() + 1)
        await tidy_up(server, job_id)
        assert await server.store.read(rows_of, job_id) == [0, 0, 0, 0]
        assert "broken off" in caplog.text

    serve(database_url, use)


def test_an_import_that_was_given_up_cannot_go_on(database_url: str) -> None:
    async def use(server: Server) -> None:
        job_id = new_id()
        first, second = Sender(export_of(job_id, 400)), Sender(export_of(job_id, 300))
        given_up = await first.half_way(server)
        server.wait(SILENCE.total_seconds() + 1)
        await server.service.reap()
        assert await server.store.read(rows_of, job_id) == [0, 0, 0, 0]
        other = await second.half_way(server)
        first.goes_on.set()
        with pytest.raises(JobConflictError, match="given up"):
            await given_up
        second.goes_on.set()
        assert (await other).trials == 300
        assert await exported(server.store, job_id) == JobExport.model_validate_json(second.text)

    serve(database_url, use)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda export: export["job"].update(job_id="there-1", job_id_prefix="there"),
        lambda export: export.update(version=2),
        lambda export: export["job"].update(max_power=0),
        lambda export: export.update(survivors=[3]),
    ],
)
def test_what_must_be_refused_is_refused_before_the_trials_are_read(
    spoil: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    async def use(server: Server) -> None:
        export = export_of(new_id(), 1000)
        spoil(export)
        sender = Sender(export)
        with pytest.raises((JobConflictError, InvalidImportError)):
            await server.service.import_job(sender.pieces())
        assert sender.sent < 2 * 65536

    serve(f"sqlite:///{tmp_path / 'bso.sqlite3'}", use, job_id="there-1", job_id_prefix="there")


def test_an_export_leaves_out_what_begins_meanwhile_and_can_be_imported(database_url: str) -> None:
    async def use(server: Server) -> None:
        job_id = new_id()
        await server.service.import_job(whole(export_of(job_id, 250)))
        pieces = JobReader(server.store).export(job_id)
        text = await anext(pieces) + await anext(pieces)
        begun = await server.service.run(server.service.commands.suggest, job_id)
        assert begun.trial_number == 251
        text += b"".join([piece async for piece in pieces])
        export = JobExport.model_validate_json(text)
        assert [trial.trial_number for trial in export.trials] == list(range(1, 251))
        other = export.renamed(new_id())
        assert (await server.service.import_job(whole(json.loads(other.model_dump_json())))).trials == 250

    serve(database_url, use)


@pytest.mark.slow
def test_a_job_that_is_deleted_while_it_is_exported_is_no_export(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # More than the system keeps on the way, to a client that takes little at a time: the server is not through when the
    # job is deleted, whatever else the machine does meanwhile.
    export = export_of("big-1", 3000, reports=15)
    takes_little = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)])
    with (
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S, transport=takes_little) as slow,
    ):
        http.post("/api/import", json=export).raise_for_status()
        with slow.stream("GET", "/api/jobs/big-1/export") as answer:
            pieces = answer.iter_raw(100)
            next(pieces)
            assert http.delete("/jobs", params={"job_id": "big-1"}).status_code == 200
            with pytest.raises(httpx.RemoteProtocolError):
                list(pieces)
        file = tmp_path / "job.json"
        file.write_text("an older one")
        assert main(["jobs", "export", "big-1", "--output", str(file), "--server-url", server.url]) == 1
        assert "unknown job" in capsys.readouterr().err
        assert file.read_text() == "an older one"
        assert list(tmp_path.glob("*.part")) == []


@pytest.mark.slow
def test_a_large_import_needs_little_memory_and_keeps_nobody_waiting(any_server: ServerProcess) -> None:
    job_id = new_id()
    text = json.dumps(export_of(job_id, 6000, reports=10)).encode()
    assert len(text) > 10_000_000
    with httpx.Client(base_url=any_server.url, timeout=PATIENCE_S * 5) as http:
        trial = begin(http, http.post("/jobs", json=job(max_epochs=100_000)).raise_for_status().json()["job_id"])
        before = peak_kb(any_server)
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(http.post("/api/import", content=text)))
        thread.start()
        reported = 0
        while thread.is_alive():
            reported += 1
            result = {"time": reported, "energy": 100 * reported, "metric": 0.5, "current_epoch": reported / 100}
            http.post("/report", json={**trial, **result, **OURS}).raise_for_status()
            time.sleep(0.02)
        thread.join()
        assert answers[0].status_code == 201, answers[0].text
        # More than the one that waits for the import where a server reads it at once.
        assert reported > 5
        with http.stream("GET", f"/api/jobs/{job_id}/export") as answer:
            assert sum(map(len, answer.iter_raw())) > 9_000_000
        # Read at once, it took ten times as much as its text.
        assert peak_kb(any_server) - before < 60_000
        http.delete("/jobs", params={"job_id": job_id}).raise_for_status()


def peak_kb(server: ServerProcess) -> int:
    assert server.process is not None
    status = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmHWM")).split()[1])


def test_a_client_that_leaves_in_the_middle_leaves_nothing(server: ServerProcess) -> None:
    text = json.dumps(export_of("big-1", 400)).encode()
    head = (
        f"POST /api/import HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + text[:-100])
        # Most often some of it is written by then; where not, the client has left all the same.
        time.sleep(0.2)
    deadline = time.monotonic() + PATIENCE_S
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http:
        while (answer := http.post("/api/import", content=text)).status_code == 409:
            assert time.monotonic() < deadline, answer.text
            time.sleep(0.1)
        assert answer.status_code == 201
    assert "Traceback" not in server.log.read_text()


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))
OBJECTS = st.dictionaries(st.text(), VALUES, max_size=4)


def read(text: bytes, cuts: list[int]) -> tuple[dict[str, Any], list[Any] | None]:
    """The parts read of a text that comes in pieces: its fields, and the list if there is one."""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    reader = ObjectReader("trials")
    fields: dict[str, Any] = {}
    elements: list[Any] | None = None
    for first, last in [*pairwise(places), (0, 0)]:
        for part in reader.feed(text[first:last]):
            match part:
                case Field(name, value):
                    fields[name] = value
                case ListBegin():
                    elements = []
                case Element(value):
                    assert elements is not None
                    elements.append(value)
    return fields, elements


def test_a_number_that_is_cut_in_two_is_one() -> None:
    numbers = [-1.5, 2.448362400181261e16, 1e-7, -3, 1e300, 17, 0.25]
    text = json.dumps({"first": numbers[0], "trials": numbers, "last": numbers[1]}).encode()
    for cut in range(len(text)):
        assert read(text, [cut, cut + 1]) == ({"first": -1.5, "last": 2.448362400181261e16}, numbers)


@given(
    fields=OBJECTS,
    elements=st.lists(VALUES, max_size=4),
    indent=st.sampled_from([None, 1]),
    cuts=st.lists(st.integers(0)),
)
def test_an_object_is_read_alike_however_it_is_cut(
    fields: dict[str, Any], elements: list[Any], indent: int | None, cuts: list[int]
) -> None:
    fields.pop("trials", None)
    text = json.dumps({**fields, "trials": elements}, indent=indent, ensure_ascii=False).encode(errors="replace")
    whole = json.loads(text)
    assert read(text, cuts) == ({name: value for name, value in whole.items() if name != "trials"}, whole["trials"])
    for end in range(len(text)):
        with pytest.raises((MalformedJsonError, NotAnObjectError)):
            read(text[:end], cuts)
    with pytest.raises(MalformedJsonError):
        read(text + b" {}", cuts)


@pytest.mark.parametrize(
    "text", [b'{"a" 1}', b'{"a": 1,}', b'{"trials": [1 2]}', b'{"a": nothing}', b"\xff", b"{'a': 1}"]
)
def test_what_is_no_json_is_refused_at_once(text: bytes) -> None:
    reader = ObjectReader("trials")
    with pytest.raises(MalformedJsonError):
        reader.feed(text + b" " * 100)


@pytest.mark.parametrize("text", [b"", b"[1]", b"3", b"null"])
def test_what_is_no_object_is_refused(text: bytes) -> None:
    with pytest.raises(NotAnObjectError):
        read(text, [])


def test_a_value_without_an_end_is_refused_before_it_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bso_server.service.json_stream._LONGEST_VALUE", 100_000)
    reader = ObjectReader("trials")
    assert reader.feed(b'{"trials": ["') == [ListBegin()]

    for _ in range(9):
        assert reader.feed(b"x" * 10_000) == []
    with pytest.raises(MalformedJsonError, match="longer than 100000"):
        reader.feed(b"x" * 20_000)
