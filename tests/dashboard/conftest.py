"""Clients of servers in this process, as tests of the pages use them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from bso_server.settings import Settings
from tests.support.dashboard_pages import in_app


@pytest.fixture
async def http(dashboard_database: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server that has all kinds of jobs."""
    async with in_app(Settings(database_url=dashboard_database)) as client:
        yield client


@pytest.fixture
async def new_http(new_database: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server without jobs."""
    async with in_app(Settings(database_url=new_database)) as client:
        yield client
