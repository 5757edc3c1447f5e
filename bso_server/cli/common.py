"""Shared by the ``bso-server`` commands: settings from the command line, and the database that they name."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from bso_server.app import store_of
from bso_server.settings import Settings, problems
from bso_server.storage.store import Store

if TYPE_CHECKING:
    # argparse keeps the name to itself.
    from argparse import _SubParsersAction

TOKEN_VARIABLE = "ZEUS_BSO_TOKEN"  # noqa: S105 - the variable's name, not a token

T = TypeVar("T")


class CommandError(Exception):
    """The command cannot do its work; the text tells the user why."""


def add_command(
    commands: _SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    run: Callable[[argparse.Namespace], None],
    *,
    or_server: bool = False,
) -> argparse.ArgumentParser:
    """Add a command that works on a database, to which the command line gives the URL.

    Args:
        commands: Where to add it.
        name: The command.
        summary: Its line in the help.
        run: Does it.
        or_server: Whether the command line may name a running server instead.
    """
    parser = commands.add_parser(name, help=summary)
    add_source(parser, or_server=or_server)
    parser.set_defaults(run=run)
    return parser


def add_source(parser: argparse.ArgumentParser, *, or_server: bool = True) -> None:
    """Let the command line name a database, or perhaps a server."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--database-url", help="SQLAlchemy URL (default: a SQLite file in the user's data directory)")
    if or_server:
        source.add_argument("--server-url", help="ask this server instead of opening the database")


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
