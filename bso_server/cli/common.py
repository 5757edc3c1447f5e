"""Shared by the ``bso-server`` commands: settings from the command line, and the database that they name."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

from pydantic import ValidationError

from bso_server.app import store_of
from bso_server.settings import Settings, problems
from bso_server.storage.store import Store

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

# As trainings read them.
SERVER_URL_VARIABLE = "ZEUS_SERVER_URL"
TOKEN_VARIABLE = "ZEUS_BSO_TOKEN"  # noqa: S105 - the variable's name, not a token
_EMBEDDED = "embedded:"

T = TypeVar("T")


class CommandError(Exception):
    """The command cannot do its work; the text tells the user why."""


def add_command(
    commands: Commands,
    name: str,
    summary: str,
    run: Callable[[argparse.Namespace], None],
    *,
    or_server: bool = False,
) -> argparse.ArgumentParser:
    """Add a command that works on a database, or perhaps asks a server, to which the command line gives the URL."""
    parser = commands.add_parser(name, help=summary)
    add_source(parser, or_server=or_server)
    parser.set_defaults(run=run)
    return parser


def add_source(parser: argparse.ArgumentParser, *, or_server: bool = True) -> None:
    """Let the command line name a database, or perhaps a server."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--database-url", help="SQLAlchemy URL (default: a SQLite file in the user's data directory)")
    if or_server:
        source.add_argument(
            "--server-url", help=f"ask this server instead of opening the database (default: {SERVER_URL_VARIABLE})"
        )


def take_server_from_environment(options: argparse.Namespace) -> None:
    """Have a command that may ask a server look where a training of the same environment would keep its jobs."""
    url = os.environ.get(SERVER_URL_VARIABLE, "").strip()
    if not url or not hasattr(options, "server_url") or (options.server_url or options.database_url) is not None:
        return
    if not url.startswith(_EMBEDDED):
        options.server_url = url
    elif path := url.removeprefix(_EMBEDDED).removeprefix("//"):
        options.database_url = f"sqlite:///{path}"


def given(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that stand on the command line."""
    return {name: value for name in Settings.model_fields if (value := getattr(options, name, None)) is not None}


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings of a command, or `CommandError` if one is wrong."""
    try:
        return Settings(**given(options))
    except ValidationError as error:
        raise CommandError(f"wrong setting, given as an argument or by {problems(error)}") from error


def with_store(options: argparse.Namespace, use: Callable[[Store], Awaitable[T]]) -> T:
    """Open the database, use it, and close it. A command keeps nobody waiting, and may itself take its time."""

    async def run() -> T:
        store = store_of(settings_of(options)).patient()
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


def duration(text: str) -> timedelta:
    """The time that an argument says, in hours, days or weeks."""
    match = re.fullmatch(r"([0-9]{1,4})([hdw])", text)
    if match is None and text != "0":
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write hours, days or weeks as 12h, 30d or 8w")
    number, unit = (0, "h") if match is None else (int(match[1]), match[2])
    return number * {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}[unit]
