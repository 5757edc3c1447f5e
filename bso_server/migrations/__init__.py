"""The schema's numbered steps, and the way to take them. The scripts in `versions` are Alembic's."""

from __future__ import annotations

import logging
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

logger = logging.getLogger("bso_server")


def upgrade(connection: Connection) -> None:
    """Bring the database to this version's schema; nothing happens if it is there already."""
    before = current(connection)
    if before == head():
        return
    logger.info("upgrading the database's schema from %s to %s", before or "nothing", head())
    config = _config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def current(connection: Connection) -> str | None:
    """The revision that the database is at, or None for an empty one."""
    return MigrationContext.configure(connection).get_current_revision()


def head() -> str:
    """The revision that this version needs."""
    revision = ScriptDirectory.from_config(_config()).get_current_head()
    if revision is None:
        raise RuntimeError("the installation lacks the migration scripts; install zeus-plugins anew")
    return revision


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return config
