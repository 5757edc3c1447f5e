"""Real databases for the tests: each test run creates its databases on running servers."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import create_async_engine

# Servers on which the test run creates its databases; environment variables override them.
POSTGRES_URL = os.environ.get("ZEUS_TEST_POSTGRES_URL", "postgresql+asyncpg://postgres@127.0.0.1:5432/postgres")
MYSQL_URL = os.environ.get("ZEUS_TEST_MYSQL_URL", "mysql+asyncmy://root@127.0.0.1:3306/")

POSTGRESQL = pytest.param("postgresql", marks=pytest.mark.postgresql)
MYSQL = pytest.param("mysql", marks=pytest.mark.mysql)
MYSQL_SNAPSHOTS = pytest.param("mysql-snapshots", marks=pytest.mark.mysql)
"""MariaDB with `innodb_snapshot_isolation`, its default from version 11.6.2 on."""
DATABASES = ("sqlite", POSTGRESQL, MYSQL)
"""The kinds of databases, as parameters of the fixture `database_url`."""


class DriverError(Exception):
    """An error of a database driver, by its code or state."""

    def __init__(self, *args: object, sqlstate: str | None = None) -> None:
        super().__init__(*args)
        self.sqlstate = sqlstate


def administer(admin_url: str, statement: str) -> None:
    async def run() -> None:
        engine = create_async_engine(admin_url, isolation_level="AUTOCOMMIT")
        try:
            async with engine.connect() as connection:
                await connection.execute(text(statement))
        finally:
            await engine.dispose()

    asyncio.run(run())


# Statements that find the sessions of a database's other users, and end a session.
_SESSIONS = {
    "postgresql": "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()",
    "mysql": "SELECT id FROM information_schema.processlist WHERE db = database() AND id <> connection_id()",
}
END_SESSION = {"postgresql": "SELECT pg_terminate_backend({})", "mysql": "KILL {}"}


def end_sessions(database_url: str, choose: Callable[[Sequence[int]], Sequence[int]] = lambda found: found) -> int:
    """End sessions of the database's other users from the database's side; return the number that had to be ended."""
    backend, ended = make_url(database_url).get_backend_name(), 0

    async def run() -> None:
        nonlocal ended
        engine = create_async_engine(database_url, isolation_level="AUTOCOMMIT")
        try:
            async with engine.connect() as connection:
                for session in choose((await connection.execute(text(_SESSIONS[backend]))).scalars().all()):
                    with suppress(DBAPIError):
                        await connection.execute(text(END_SESSION[backend].format(session)))
                        ended += 1
        finally:
            await engine.dispose()

    asyncio.run(run())
    return ended


@contextmanager
def fresh_database(admin_url: str) -> Iterator[str]:
    """Create a database on a running server; without a server, skip the test, or fail in CI."""
    name = f"zeus_test_{uuid.uuid4().hex[:12]}"
    try:
        administer(admin_url, f"CREATE DATABASE {name}")
    except (OSError, SQLAlchemyError) as error:
        reason = f"no database at {make_url(admin_url).render_as_string()}: {error}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    try:
        yield make_url(admin_url).set(database=name).render_as_string(hide_password=False)
    finally:
        force = " WITH (FORCE)" if admin_url.startswith("postgresql") else ""
        administer(admin_url, f"DROP DATABASE {name}{force}")


@contextmanager
def empty_database(kind: str, folder: Path) -> Iterator[str]:
    """Yield the URL of a database of this kind, one of `DATABASES`; a file is created in the folder."""
    if kind.startswith("sqlite"):
        yield f"{kind}:///{folder / 'bso.sqlite3'}"
    else:
        with fresh_database(POSTGRES_URL if kind == "postgresql" else MYSQL_URL) as url:
            options = {"init_command": "SET innodb_snapshot_isolation = ON"} if kind == "mysql-snapshots" else {}
            yield make_url(url).update_query_dict(options).render_as_string(hide_password=False)
