"""Imports: nothing left after a failure, and their limits."""

from __future__ import annotations

import io
import socket
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select, update

from bso_server.errors import InvalidImportError, JobConflictError
from bso_server.service import imports
from bso_server.service.exports import JobExport, TrialExport, export, split_exports
from bso_server.storage.tables import arms, epochs, jobs, trials
from bso_server.storage.transaction import Transaction
from tests.support.exports import Lines, decoded, encoded, exported, import_beside, import_lines, renamed
from tests.support.jobs import job
from tests.support.servers import ServerProcess
from tests.support.service import JobService, job_service
from zeus_plugins.protocol import CreatedJob

PATIENCE_S = 60.0
START = datetime(2026, 1, 1, tzinfo=UTC)


def export_of(job_id: str, trials: int, reports: int = 3) -> Lines:
    """Return the export of a job with trials that all reached the target."""

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
        first = {
            "first_epoch": 1,
            "first_time_s": 5,
            "first_energy_j": 500,
            "report_count": reports,
            "longest_gap_s": 5,
            "epochs": kept,
        }
        ends = {"ended_at": at(begun + 60), "reported_at": at(begun + 60), "ended_event": 2 * number}
        state = {"state": "completed", "end_reason": "target_reached", "message": "target reached"}
        origin = {"origin": "exploration", "reason": "tried", "started_at": at(begun), "started_event": 2 * number - 1}
        other = {"energy_source": "nvml", "lease_expires_at": None, "heartbeats": True}
        size = {"trial_number": number, "batch_size": (8, 16)[number % 2]}
        return size | state | origin | ends | totals | first | other

    registered = job(job_id=job_id, policy="gp_voi", max_epochs=10)
    head = {"format": "zeus-bso-job", "version": 1, "job": registered, "created_at": at(0), "trials": trials}
    return [{**head, "survivors": None, "rng_state": None}, *(trial(number + 1) for number in range(trials))]


def new_id() -> str:
    return f"big-{uuid.uuid4().hex[:8]}"


def rows_of(transaction: Transaction, job_id: str) -> list[int]:
    return [
        transaction.rows(select(func.count().label("n")).select_from(table).where(table.c.job_id == job_id))[0]["n"]
        for table in (jobs, arms, trials, epochs)
    ]


def told_of(lines: Lines) -> list[JobExport | TrialExport]:
    """Parse an export, so that different spellings of a number or an instant compare equal."""
    job, *trials = lines
    return [JobExport.model_validate(job), *map(TrialExport.model_validate, trials)]


async def test_imported_job_continues(bso: JobService) -> None:
    job_id = new_id()
    lines = export_of(job_id, 400)
    assert (await import_lines(bso.store, lines)).trials == 400
    assert told_of(await exported(bso.store, job_id)) == told_of(lines)
    registration = CreatedJob.model_validate(lines[0]["job"])
    assert await bso.service.register(registration) == (registration, False)
    trial = await bso.service.transact(bso.service.commands.begin_trial, job_id)
    assert trial.trial_number == 401


async def test_job_registered_during_the_import_stays(bso: JobService) -> None:
    lines = export_of(new_id(), 400)
    registration = CreatedJob.model_validate(lines[0]["job"])
    assert (await bso.service.register(registration))[1]
    with pytest.raises(JobConflictError, match="exists"):
        await import_lines(bso.store, lines)
    assert await bso.store.read(rows_of, registration.job_id) == [1, 2, 0, 0]


async def test_failed_import_leaves_nothing(bso: JobService, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = new_id()
    wrong = export_of(job_id, 400)
    wrong[-1]["ended_event"] = 799
    with pytest.raises(InvalidImportError, match="line 401, ended_event: event 799 is taken already"):
        await import_lines(bso.store, wrong)
    assert await bso.store.read(rows_of, job_id) == [0, 0, 0, 0]

    def fail(transaction: Transaction, *_: object) -> None:
        assert rows_of(transaction, job_id) == [1, 2, 400, 800]
        raise OSError("the process has ended")

    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "insert_decisions", fail)
        with pytest.raises(OSError, match="has ended"):
            await import_lines(bso.store, export_of(job_id, 400))
    assert await bso.store.read(rows_of, job_id) == [0, 0, 0, 0]
    assert (await import_lines(bso.store, export_of(job_id, 400))).trials == 400


async def test_larger_job_is_refused_at_once(service: JobService, monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.BytesIO(encoded(export_of("big-1", 400)))
    monkeypatch.setattr(imports, "MOST_TRIALS", 399)
    with pytest.raises(InvalidImportError, match=r"^line 1, trials: an import takes at most 399 trials"):
        await imports.import_job(service.store, text)
    assert text.readline() != b"", "the trials were read"
    monkeypatch.setattr(imports, "MOST_TRIALS", 400)
    monkeypatch.setattr(imports, "MOST_REPORTS", 799)
    with pytest.raises(InvalidImportError, match=r"^line 401, epochs: an import takes at most 799 reports: remove"):
        await import_lines(service.store, export_of("big-1", 400))
    monkeypatch.setattr(imports, "MOST_REPORTS", 800)
    assert (await import_lines(service.store, export_of("big-1", 400))).trials == 400


async def test_export_omits_trials_begun_during_the_export_and_can_be_imported(bso: JobService) -> None:
    job_id = new_id()
    await import_lines(bso.store, export_of(job_id, 250))
    pieces = export(bso.store, job_id)
    text = await anext(pieces) + await anext(pieces)
    begun = await bso.service.transact(bso.service.commands.begin_trial, job_id)
    assert begun.trial_number == 251
    text += b"".join([piece async for piece in pieces])
    job, *trials = decoded(text)
    assert [trial["trial_number"] for trial in trials] == list(range(1, 251))
    assert (await import_lines(bso.store, renamed([job, *trials], new_id()))).trials == 250


@pytest.mark.slow
def test_export_of_a_job_deleted_during_the_export_is_cut_off(server: ServerProcess) -> None:
    # More data than the system buffers for a slow reader, so that the export is still running when the job is deleted,
    # however busy the machine is.
    export = export_of("big-1", 3000, reports=15)
    takes_little = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)])
    with (
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S, transport=takes_little) as slow,
    ):
        import_beside(http, export)
        with slow.stream("GET", "/api/jobs/big-1/export") as answer:
            pieces = answer.iter_raw(100)
            next(pieces)
            assert http.delete("/jobs", params={"job_id": "big-1"}).status_code == 200
            with pytest.raises(httpx.RemoteProtocolError):
                list(pieces)


def test_file_is_split_into_exports_even_if_some_are_not_read() -> None:
    odd = {"reason": "format", "message": '"format": "zeus-bso-job"', "epochs": []}
    texts = [b"\n", *encoded([{"format": 1}, odd]).splitlines(keepends=True), b" \n", b'{"version": 1, "format" : 2}']
    assert [(first, list(lines)) for first, lines in split_exports(texts)] == [
        (1, texts[:1]),
        (2, texts[1:4]),
        (5, texts[4:]),
    ]
    assert [first for first, _ in split_exports(texts)] == [1, 2, 5]


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[JobService]:
    async with job_service(f"sqlite:///{tmp_path / 'bso.sqlite3'}") as job:
        yield job


FIRST, SECOND = encoded(export_of("odd-1", 2)).splitlines()[:2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "line 1: there is no export, the text is empty"),
        (b" \n\n", "line 1: there is no export, the text is empty"),
        (b"\n[]", "line 2: Input should be an object"),
        (b"{}", "line 1, job: Field required; and"),
        (FIRST[:-5], "line 1: Invalid JSON: EOF while parsing a value at column"),
        (FIRST + b"\n{'a': 1}", "line 2: Invalid JSON: "),
        (FIRST + b"\n" + SECOND + b"\n\xff", "line 3: Invalid JSON: "),
        (FIRST + b"\n\n" + SECOND + b"{}", "line 3: Invalid JSON: trailing characters"),
        (FIRST + b"\n" + b"[" * 10_000, "line 2: Invalid JSON: recursion limit exceeded"),
        (FIRST + b"\n" + FIRST, "line 2, trial_number: Field required; and"),
        (FIRST + b"\n" + SECOND, "line 1, trials: 2 trials should follow, and there are 1"),
        (FIRST.replace(b'"trials": 2', b'"trials": 0') + b"\n" + SECOND, "line 1, trials: 0 trials should follow, and"),
        (FIRST + b"\n" + SECOND.replace(b"0.95", b"NaN"), "line 2, metric: Input should be a finite number"),
        (FIRST + b"\n" + SECOND.replace(b'"epoch": 1', b'"epoch": "x"'), "line 2, epochs.0.epoch: Input should be a"),
    ],
)
async def test_invalid_line_is_reported_with_line_and_field(service: JobService, text: bytes, said: str) -> None:
    with pytest.raises(InvalidImportError) as caught:
        await import_lines(service.store, text)
    assert str(caught.value).startswith(said)
    assert caught.value.field == said.partition(":")[0]
    with pytest.raises(InvalidImportError, match=f"^line {int(said.split()[1].strip(',:')) + 40}"):
        await import_lines(service.store, text, first_line=41)
    assert await service.store.read(rows_of, "odd-1") == [0, 0, 0, 0]


async def test_longer_line_is_refused(service: JobService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "LONGEST_LINE_BYTES", len(FIRST) + 1)
    with pytest.raises(InvalidImportError, match=f"line 2: it is longer than {len(FIRST) + 1} bytes"):
        await import_lines(service.store, FIRST + b"\n" + b"x" * (len(FIRST) + 2))


async def test_infinite_number_is_exported_as_null(service: JobService) -> None:
    """No code writes such numbers, but SQLite keeps infinities that other programs write."""
    await import_lines(service.store, export_of("odd-1", 2))
    infinite, negative = float("inf"), float("-inf")

    def spoil(transaction: Transaction) -> None:
        transaction.connection.execute(update(trials).where(trials.c.trial_number == 2).values(metric=infinite))
        transaction.connection.execute(update(epochs).where(epochs.c.report_number == 2).values(energy_j=negative))

    await service.store.write(spoil)
    job, first, second = await exported(service.store, "odd-1")
    assert first["epochs"][1]["energy_j"] is second["epochs"][1]["energy_j"] is second["metric"] is None
    refused = r"^line 2, epochs\.1\.energy_j: "
    with pytest.raises(InvalidImportError, match=refused):
        await import_lines(service.store, renamed([job, first, second]))
    first["epochs"][1]["energy_j"], second["epochs"][1]["energy_j"] = 700, 700
    with pytest.raises(InvalidImportError, match=r"^line 3, metric: goes with having reported"):
        await import_lines(service.store, renamed([job, first, second]))
    second["metric"] = 0.9
    assert (await import_lines(service.store, renamed([job, first, second]))).trials == 2
