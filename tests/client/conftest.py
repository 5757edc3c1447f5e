"""Fixtures of the client's tests: client of a real server, the user's outbox, and a file for the embedded server."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.embedded import is_open
from tests.support.servers import ServerProcess
from zeus_plugins.client.http import BsoClient
from zeus_plugins.client.outbox import Outbox
from zeus_plugins.client.port import NO_RETRIES


@pytest.fixture
def outbox(state_directory: Path) -> Outbox:
    return Outbox(state_directory / "outbox")


@pytest.fixture
def client(server: ServerProcess) -> Iterator[BsoClient]:
    with BsoClient(server.url, retries=NO_RETRIES) as client:
        yield client


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Default SQLite file, also in child processes; it does not exist yet."""
    file = tmp_path / "data" / "bso.sqlite3"
    monkeypatch.setenv("ZEUS_BSO_DATABASE_URL", f"sqlite:///{file}")
    for name in ("ZEUS_SERVER_URL", "ZEUS_BSO_TOKEN", "ZEUS_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    yield file
    # Collect objects that an exception from a signal handler has left half opened.
    gc.collect()
    assert not is_open(file)
