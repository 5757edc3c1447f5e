"""Shared by the ``bso-server`` commands: settings from the command line, and the database that they name."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pydantic import ValidationError

from bso_server.app import store_of
from bso_server.settings import Settings, problems
from bso_server.storage.store import Store

TOKEN_VARIABLE = "ZEUS_BSO_TOKEN"  # noqa: S105 - the variable's name, not a token

T = TypeVar("T")


class CommandError(Exception):
    """The command cannot do its work; the text tells the user why."""


def add_database_url(parser: argparse._ActionsContainer) -> None:
    """Let the command line name the database."""
    parser.add_argument("--database-url", help="SQLAlchemy URL (default: a SQLite file in the user's data directory)")


def given(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that stand on the command line."""
    return {name: value for name in Settings.model_fields if (value := getattr(options, name, None)) is not None}


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings of a command.

    Raises:
        CommandError: One is wrong.
    """
    try:
        return Settings(**given(options))
    except ValidationError as error:
        raise CommandError(f"wrong setting, given as an argument or by {problems(error)}") from error


def with_store(options: argparse.Namespace, use: Callable[[Store], Awaitable[T]]) -> T:
    """Open the database, use it, and close it."""

    async def run() -> T:
        store = store_of(settings_of(options))
        try:
            return await use(store)
        finally:
            await store.close()

    return asyncio.run(run())


def with_ready_store(options: argparse.Namespace, use: Callable[[Store], Awaitable[T]]) -> T:
    """The same with a database that must have this version's schema."""

    async def checked(store: Store) -> T:
        await store.check_schema()
        return await use(store)

    return with_store(options, checked)
