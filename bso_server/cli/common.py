"""Shared by the ``bso-server`` commands: settings from the command line, and the database that they name."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
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
Item = TypeVar("Item")


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

    async def use_store() -> T:
        store = store_of(settings_of(options)).patient()
        try:
            return await use(store)
        finally:
            await store.close()

    return asyncio.run(use_store())


def with_ready_store(options: argparse.Namespace, use: Callable[[Store], Awaitable[T]]) -> T:
    """Open the database like `with_store`, and fail unless it has this version's schema."""

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


def cell(value: object) -> str:
    """Return the text of a value in a table: a dash for None, four digits of a number, the minute of an instant."""
    match value:
        case None:
            return "-"
        case float():
            return f"{value:.4g}"
        case datetime():
            return f"{value:%Y-%m-%d %H:%M}"
    return str(value)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return columns as wide as what is in them, two blanks apart."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    )


def table_of(columns: Mapping[str, Callable[[Item], object]], items: Sequence[Item]) -> str:
    """Return a table with a line for each item; each column is a title and the value that it shows of an item."""
    return table(list(columns), [[cell(value(item)) for value in columns.values()] for item in items])
