"""Fixtures that several test files share: clients and services."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from bso_server.storage.store import Store
from tests.support.servers import ServerProcess
from tests.support.service import JobService, new_job, open_store


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
