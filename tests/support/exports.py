"""Exports as tests read, change and import them: decoded lines, with the job first."""

from __future__ import annotations

import io
import json
import uuid
from copy import deepcopy
from typing import Any, TypeAlias

import httpx

from bso_server.service.exports import export
from bso_server.service.imports import import_job
from bso_server.storage.store import Store
from tests.support.servers import DATABASE_OF
from tests.support.service import open_store, run_apart
from zeus_plugins.protocol import JobSummary

Lines: TypeAlias = list[dict[str, Any]]


def decoded(text: str | bytes) -> Lines:
    """Return the lines of an export; only line feeds end a line."""
    *lines, rest = text.encode().split(b"\n") if isinstance(text, str) else text.split(b"\n")
    assert rest == b"", "an export ends with the end of a line"
    return [json.loads(line) for line in lines]


def encoded(lines: Lines) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def import_lines(store: Store, lines: Lines | bytes, *, first_line: int = 1) -> JobSummary:
    """Import a job from the lines or the text of its export."""
    text = lines if isinstance(lines, bytes) else encoded(lines)
    return await import_job(store.patient(), io.BytesIO(text), first_line=first_line)


async def exported(store: Store, job_id: str) -> Lines:
    return decoded(b"".join([piece async for piece in export(store, job_id)]))


def export_over(http: httpx.Client, job_id: str) -> Lines:
    return decoded(http.get(f"/api/jobs/{job_id}/export").raise_for_status().text)


def import_beside(http: httpx.Client, lines: Lines | bytes) -> JobSummary:
    """Import a job into the database of the client's server, while the server runs."""
    database_url = DATABASE_OF[str(http.base_url).rstrip("/")]

    async def run() -> JobSummary:
        async with open_store(database_url) as store:
            return await import_lines(store, lines)

    return run_apart(run)


def renamed(lines: Lines, job_id: str | None = None) -> Lines:
    """Return a copy of an export for a job with another id and the same prefix."""
    copy = deepcopy(lines)
    copy[0]["job"]["job_id"] = job_id or f"{copy[0]['job']['job_id_prefix']}-{uuid.uuid4().hex[:8]}"
    return copy
