"""Clients of servers in this process, as tests of the pages use them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from litestar import Litestar

from bso_server.app import create_app
from bso_server.settings import Settings
from tests.support.dashboard_pages import client_of, in_app


@pytest.fixture(scope="module")
async def full_app(dashboard_database: str) -> AsyncIterator[Litestar]:
    """A server that has all kinds of jobs, for tests that change nothing."""
    app = create_app(Settings(database_url=dashboard_database))
    async with app.lifespan():
        yield app


@pytest.fixture
async def http(full_app: Litestar) -> AsyncIterator[httpx.AsyncClient]:
    """A client, without cookies of other tests, of a server that has all kinds of jobs."""
    async with client_of(full_app) as client:
        yield client


@pytest.fixture
async def new_http(new_database: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server without jobs."""
    async with in_app(Settings(database_url=new_database)) as client:
        yield client
