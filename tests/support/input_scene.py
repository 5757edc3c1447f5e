"""A job with trials over real HTTP, and bodies with one wrong field.

The server has a SQLite file: requests are refused before any database is asked.
"""

from __future__ import annotations

import json
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.jobs import JOB, THREE_SIZES, job
from tests.support.power_limit_bench import found_out
from tests.support.servers import ServerProcess

JSON = {"content-type": "application/json"}


# Longest answer to an invalid request of any size.
LONGEST_ANSWER = 16_000


@dataclass(frozen=True)
class Scene:
    """A job with a running and an ended trial, and a second job with trials.

    Attributes:
        http: Client of the server.
        running: The running trial's id.
        reported: Its last report, the second one.
        ended: The id of the trial that has ended.
        final: Its last report.
        verdict: The answer to the last report of the ended trial.
        other_job: The other job's id; its trial 1 has the batch size of the running trial.
        file: A connection to the server's SQLite file.
    """

    http: httpx.Client
    running: dict[str, Any]
    reported: dict[str, Any]
    ended: dict[str, Any]
    final: dict[str, Any]
    verdict: dict[str, Any]
    other_job: str
    file: sqlite3.Connection

    def stored(self) -> list[Any]:
        """Return a number that changes with the SQLite file."""
        return self.file.execute("PRAGMA data_version").fetchall()

    @contextmanager
    def nothing_stored(self) -> Iterator[None]:
        """Assert that the block leaves the database unchanged."""
        before = self.stored()
        yield
        assert self.stored() == before


def register(http: httpx.Client, **fields: Any) -> str:
    job_id = f"job-{uuid.uuid4().hex[:8]}"
    answer = http.post("/jobs", json=job(**{"job_id": job_id, **THREE_SIZES, **fields}))
    assert answer.status_code == 201, answer.text
    return job_id


def good_body(scene: Scene, path: str) -> dict[str, Any]:
    """Return a valid body of the route."""
    match path:
        case "/jobs":
            return job(**THREE_SIZES, job_id="job-refused")
        case _:
            report = {"time": 6.0, "energy": 600.0, "metric": 0.5, "current_epoch": 3}
            return {**scene.running, **report, **found_out(JOB)}


def assert_refused(answer: httpx.Response, status: int, field: str) -> None:
    assert answer.status_code == status, answer.text[:LONGEST_ANSWER]
    assert answer.headers["content-type"] == "application/problem+json"
    assert len(answer.content) < LONGEST_ANSWER
    body = answer.json()
    assert body["message"]
    assert field in {error["field"] for error in body["errors"]}, body


def with_token(body: dict[str, Any], field: str, token: str) -> bytes:
    """Return the body as JSON with a field replaced by the raw text `token`, whether or not valid JSON."""
    rest = json.dumps({name: value for name, value in body.items() if name != field})
    return f'{rest[:-1]}, "{field}": {token}}}'.encode()


def memory_of(server: ServerProcess, line: str) -> int:
    """Return bytes: ``VmRSS`` for the present memory of the server, ``VmHWM`` for its maximum."""
    assert server.process is not None
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    (kilobytes,) = (words[1] for words in map(str.split, status.splitlines()) if words[0] == f"{line}:")
    return int(kilobytes) * 1024


# Spellings of numbers outside JSON by Python's json, by other encoders, and as strings.
NO_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", '"NaN"', '"Infinity"', '"-Infinity"']
# Both parsers of integers refuse this number.
HUGE = "9" * 5000


def no_numbers(*fields: str) -> list[tuple[str, str, str]]:
    return [(field, token, field) for field in fields for token in NO_NUMBERS]
