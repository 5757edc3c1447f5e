"""Parts that ``bso-server`` commands share: options, settings, access to the database, and tables."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar

from pydantic import ValidationError

from bso_server.app import prepare, store_of
from bso_server.service.fleet import length_of
from bso_server.settings import Settings, problems
from bso_server.storage.store import Store
from zeus_plugins.protocol import printable

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

# Environment variables that trainings read, too.
SERVER_URL_VARIABLE = "ZEUS_SERVER_URL"
TOKEN_VARIABLE = "ZEUS_BSO_TOKEN"  # nosec B105  # noqa: S105 - the variable's name, not a token
_EMBEDDED = "embedded:"

# Maximum width of a table's column in characters; longer ids are still printed whole, so that they can be copied.
_WIDEST = 48

T = TypeVar("T")
Item = TypeVar("Item")


class CommandError(Exception):
    """The command cannot do its work; the message says why."""


class RemovedOption(argparse.Action):
    """Option of an earlier version: not in the help, and an error that names what to do `instead`."""

    def __init__(self, option_strings: Sequence[str], dest: str, instead: str) -> None:
        super().__init__(option_strings, dest, nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        self._instead = instead

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002 - the signature is argparse's
        values: Any,  # noqa: ARG002 - the signature is argparse's
        option_string: str | None = None,
    ) -> NoReturn:
        """End the command with the error."""
        parser.error(f"{option_string} was removed: {self._instead}")


def add_command(
    commands: Commands, name: str, summary: str, run: Callable[[argparse.Namespace], None], *, or_server: bool = False
) -> argparse.ArgumentParser:
    """Add a command that opens a database, or with `or_server` can ask a server instead."""
    parser = commands.add_parser(name, help=summary)
    add_source(parser, or_server=or_server)
    parser.set_defaults(run=run)
    return parser


def add_source(parser: argparse.ArgumentParser, *, or_server: bool = True) -> None:
    """Add the option for a database, and with `or_server` the option for a server."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--database-url", help="SQLAlchemy URL (default: a SQLite file in the user's data directory)")
    if or_server:
        source.add_argument(
            "--server-url", help=f"ask this server instead of opening the database (default: {SERVER_URL_VARIABLE})"
        )


def take_server_from_environment(options: argparse.Namespace) -> None:
    """Take the server or database from ``ZEUS_SERVER_URL``, like a training, if the options name none."""
    url = os.environ.get(SERVER_URL_VARIABLE, "").strip()
    if not url or not hasattr(options, "server_url") or (options.server_url or options.database_url) is not None:
        return
    if not url.startswith(_EMBEDDED):
        options.server_url = url
    elif path := url.removeprefix(_EMBEDDED).removeprefix("//"):
        options.database_url = f"sqlite:///{path}"


def given(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that the command line gives."""
    return {name: value for name in Settings.model_fields if (value := getattr(options, name, None)) is not None}


def settings_of(options: argparse.Namespace) -> Settings:
    """Return the settings of a command; raise `CommandError` if one is wrong."""
    try:
        return Settings(**given(options))
    except (ValidationError, UnicodeDecodeError) as error:
        raise CommandError(f"wrong setting, given as an argument or by {problems(error)}") from error


def with_store(
    options: argparse.Namespace,
    use: Callable[[Store], Awaitable[T]],
    *,
    schema: Literal["checked", "prepared", "any"] = "checked",
) -> T:
    """Open the database with long time limits, call `use`, and close the database.

    Unless `schema` is ``any``, raise `DatabaseNotReadyError` if the database has another schema than this version's;
    ``prepared`` first upgrades a SQLite file.
    """

    async def use_store() -> T:
        store = store_of(settings_of(options)).patient()
        try:
            # Report an absent database at once, in one line; every later step would wait for the database.
            found = await store.current_revision()
            if schema == "prepared":
                await prepare(store)
            elif schema == "checked":
                store.refuse_other_schema(found)
            return await use(store)
        finally:
            await store.close()

    return asyncio.run(use_store())


def duration(text: str) -> timedelta:
    """Parse hours, days or weeks, such as 12h."""
    try:
        return length_of("0h" if text == "0" else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def cell(value: object) -> str:
    """Format a value for a table: None as a dash, floats with four digits, instants to the minute."""
    match value:
        case None:
            return "-"
        case float():
            return f"{value:.4g}"
        case datetime():
            return f"{value:%Y-%m-%d %H:%M}"
    return str(value)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows as aligned columns, two spaces apart; a text longer than `_WIDEST` widens only its own row."""
    lines = [list(map(printable, row)) for row in [header, *rows]]
    widths = [min(max(map(len, column)), _WIDEST) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def table_of(columns: Mapping[str, Callable[[Item], object]], items: Sequence[Item]) -> str:
    """Format items as a table; each column has a title and a function that returns the value of an item."""
    return table(list(columns), [[cell(value(item)) for value in columns.values()] for item in items])
