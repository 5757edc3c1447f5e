"""Migrations of the schema: revisions, and how to apply them. The scripts in `versions` belong to Alembic."""

from __future__ import annotations

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

REVISIONS = tuple(sorted(script.name[:4] for script in Path(__file__).parent.glob("versions/[0-9]*.py")))
"""Revisions, oldest first, from the names of their scripts, because Alembic is loaded only for a migration."""

HEAD = REVISIONS[-1]
"""Revision that this version needs."""

logger = logging.getLogger("bso_server")

_LOCK_NAME = "zeus_bso_migration"
_LOCK_KEY = 0x7A657573  # "zeus", because PostgreSQL identifies advisory locks by numbers
_LOCK_TIMEOUT_S = round(MIGRATION_PATIENCE_S)


def upgrade(connection: Connection) -> None:
    """Upgrade the database to this version's schema, if it has an older one.

    Several processes may call this at the same time: one upgrades, the others wait.
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


def current(connection: Connection) -> str | None:
    """Return the revision of the database, or None for an empty one."""
    if not connection.dialect.has_table(connection, "alembic_version"):
        return None
    revision: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return revision


def refuse_newer(found: str | None, description: str) -> None:
    """Raise `DatabaseNotReadyError` if a newer version has written the schema of the database."""
    if found is not None and found not in REVISIONS:
        raise DatabaseNotReadyError(
            f"the database {description} is at schema {found}, which this version does not know: it was made by a "
            f"newer version of zeus-plugins. Install that one, or restore the backup (this one needs schema {HEAD})"
        )


def _config() -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return config


@contextmanager
def _only_one(connection: Connection) -> Iterator[None]:
    """Hold a lock on the whole schema; on SQLite, the transaction locks the file already."""
    match connection.dialect.name:
        case "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK_KEY})
            yield
        case "mysql" | "mariadb":
            # This lock belongs to the connection, because MySQL commits the transaction at each change of the schema.
            name = {"name": _LOCK_NAME, "timeout": _LOCK_TIMEOUT_S}
            if connection.scalar(text("SELECT GET_LOCK(:name, :timeout)"), name) != 1:
                raise TimeoutError(f"another process has been upgrading the database for {_LOCK_TIMEOUT_S} s")
            end = "ROLLBACK"
            try:
                yield
                end = "COMMIT"
            finally:
                # The next holder of the lock must see the new revision, which is a row of a table.
                connection.exec_driver_sql(end)
                connection.execute(text("SELECT RELEASE_LOCK(:name)"), {"name": _LOCK_NAME})
        case _:
            yield
