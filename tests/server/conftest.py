"""Fixtures that several test files share: clients, services, and a scene for the tests of inputs."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from sqlalchemy.engine import make_url

from bso_server.storage.store import Store
from tests.support.databases import SQLITE_DRIVERS
from tests.support.input_scene import Scene, register
from tests.support.servers import ServerProcess
from tests.support.service import JobService, new_job, open_store
from tests.support.wire import begin


@pytest.fixture(params=SQLITE_DRIVERS)
def sqlite_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a SQLite file that does not exist yet, once per SQLite driver."""
    return f"{request.param}:///{tmp_path / 'bso.sqlite3'}"


@pytest.fixture(scope="module")
def http(any_server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=any_server.url) as client:
        yield client


@pytest.fixture(scope="module")
def http_on_sqlite(shared_server: ServerProcess) -> Iterator[httpx.Client]:
    """A client of the server on a SQLite file, for requests that are refused before any database is asked."""
    with httpx.Client(base_url=shared_server.url) as client:
        yield client


@pytest.fixture(scope="module")
def scene(shared_server: ServerProcess) -> Iterator[Scene]:
    path = make_url(shared_server.database_url).database
    with (
        httpx.Client(base_url=shared_server.url, timeout=60) as http,
        closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as file,
    ):
        job_id, other_job = register(http), register(http)
        ended, running = begin(http, job_id), begin(http, job_id)
        final = {"time": 5.0, "energy": 500.0, "metric": 0.95, "current_epoch": 2}
        verdict = http.post("/report", json={**ended, **final}).raise_for_status().json()
        for epoch in (1, 2):
            reported = {"time": epoch * 2.0, "energy": epoch * 200.0, "metric": 0.5, "current_epoch": epoch}
            http.post("/report", json={**running, **reported}).raise_for_status()
        begin(http, other_job)
        yield Scene(http, running, reported, ended, final, verdict, other_job, file)


@pytest.fixture(scope="module")
async def store(database_url: str) -> AsyncIterator[Store]:
    """A migrated store on each kind of database in turn, shared by the tests of a module, which use separate jobs."""
    async with open_store(database_url) as store:
        yield store


@pytest.fixture
async def bso(store: Store) -> JobService:
    """The service with one job, on each kind of database."""
    return await new_job(store)


@pytest.fixture
def quiet_logs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Hundreds of lines per example would only slow the examples down."""
    with caplog.at_level("WARNING", logger="bso_server"):
        yield
