"""The schema's numbered steps, and the ways to take them. The scripts in `versions` are Alembic's."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, text

from bso_server.errors import DatabaseNotReadyError
from bso_server.storage.deadlines import MIGRATION_PATIENCE_S

if TYPE_CHECKING:
    from alembic.config import Config

REVISIONS = ("0001",)
"""The revisions in `versions`, oldest first. Alembic itself is loaded only when there is something to migrate."""

HEAD = REVISIONS[-1]
"""The revision that this version needs."""

logger = logging.getLogger("bso_server")

_LOCK_NAME = "zeus_bso_migration"
_LOCK_KEY = 0x7A657573  # "zeus": PostgreSQL's advisory locks have numbers for names
_LOCK_TIMEOUT_S = round(MIGRATION_PATIENCE_S)


def upgrade(connection: Connection) -> None:
    """Bring the database to this version's schema; nothing happens if it is there already.

    Several processes may call this at the same time: one does the work, the others wait for it.
    """
    with _only_one(connection):
        before = current(connection)
        if before == HEAD:
            return
        from alembic import command

        logger.info("upgrading the database's schema from %s to %s", before or "nothing", HEAD)
        config = _config()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def upgrade_sql(dialect: str) -> str:
    """The SQL that makes an empty database of this dialect, for those who run it by hand."""
    from alembic import command

    output = io.StringIO()
    config = _config(output)
    config.attributes["dialect"] = dialect
    command.upgrade(config, "head", sql=True)
    return output.getvalue()


def current(connection: Connection) -> str | None:
    """The revision that the database is at, or None for an empty one."""
    if not connection.dialect.has_table(connection, "alembic_version"):
        return None
    revision: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return revision


def refuse_newer(found: str | None, description: str) -> None:
    """Raise `DatabaseNotReadyError` for a database, described so, that a newer version has made."""
    if found is not None and found not in REVISIONS:
        raise DatabaseNotReadyError(
            f"the database {description} is at schema {found}, which this version does not know: it was made by a "
            f"newer version of zeus-plugins. Install that one, or restore the backup (this one needs schema {HEAD})"
        )


def _config(output: io.StringIO | None = None) -> Config:
    from alembic.config import Config

    config = Config(output_buffer=output)
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return config


@contextmanager
def _only_one(connection: Connection) -> Iterator[None]:
    """Hold a lock on the whole schema. SQLite needs none: its transaction has the database to itself."""
    match connection.dialect.name:
        case "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK_KEY})
            yield
        case "mysql" | "mariadb":
            # A lock of the connection, not of the transaction, which MySQL ends at every change of the schema.
            name = {"name": _LOCK_NAME, "timeout": _LOCK_TIMEOUT_S}
            if connection.scalar(text("SELECT GET_LOCK(:name, :timeout)"), name) != 1:
                raise TimeoutError(f"another process has been upgrading the database for {_LOCK_TIMEOUT_S} s")
            end = "ROLLBACK"
            try:
                yield
                end = "COMMIT"
            finally:
                # Whoever has the lock next must find the revision, which is a row like any other.
                connection.exec_driver_sql(end)
                connection.execute(text("SELECT RELEASE_LOCK(:name)"), {"name": _LOCK_NAME})
        case _:
            yield
