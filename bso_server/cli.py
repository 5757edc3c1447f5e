"""The ``bso-server`` command."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import uvicorn
from pydantic import BaseModel, ValidationError

from bso_server.app import create_app
from bso_server.errors import BsoError
from bso_server.format import job_list_text, job_text
from bso_server.service import BatchSizeService
from bso_server.settings import Settings
from bso_server.store import Store, open_store
from zeus_plugins.protocol import ErrorBody, JobList, JobView, Paths

Message = TypeVar("Message", bound=BaseModel)
T = TypeVar("T")


class CommandError(Exception):
    """The command cannot do its work; the text tells the user why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0, or 1 with one line on standard error."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (CommandError, BsoError, ValueError, OSError) as error:
        print(f"bso-server: {_in_words(error)}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bso-server", description="The batch size optimization server.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="run the server")
    serve.add_argument("--host", dest="server_host", help="address to listen on (default 127.0.0.1)")
    serve.add_argument("--port", dest="server_port", help="port to listen on (default 8000)")
    _add_database_url(serve)
    serve.set_defaults(run=_serve)

    database = commands.add_parser("db", help="look after the database").add_subparsers(required=True, metavar="WHAT")
    upgrade = database.add_parser("upgrade", help="bring the database to this version's schema")
    _add_database_url(upgrade)
    upgrade.set_defaults(run=_db_upgrade)

    jobs = commands.add_parser("jobs", help="look at jobs").add_subparsers(required=True, metavar="WHAT")
    jobs_list = jobs.add_parser("list", help="all jobs")
    _add_source(jobs_list)
    jobs_list.set_defaults(run=_jobs_list)
    jobs_show = jobs.add_parser("show", help="one job with its arms and trials")
    jobs_show.add_argument("job_id", metavar="JOB")
    _add_source(jobs_show)
    jobs_show.set_defaults(run=_jobs_show)
    return parser


def _add_database_url(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--database-url", help="SQLAlchemy URL (default: a SQLite file in the user's data directory)")


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    source = parser.add_mutually_exclusive_group()
    _add_database_url(source)
    source.add_argument("--server-url", help="ask this server instead of reading the database")


def _settings(options: argparse.Namespace) -> Settings:
    """The settings, with what was given on the command line on top."""
    given = {name: value for name in Settings.model_fields if (value := getattr(options, name, None)) is not None}
    return Settings(**given)


def _serve(options: argparse.Namespace) -> None:
    settings = _settings(options)
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # It tells which implementation it picked at every look at the schema.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    uvicorn.run(
        create_app(settings),
        host=settings.server_host,
        port=settings.server_port,
        # Uvicorn's lines go through the root logger set up above; one per request would drown them.
        log_config=None,
        access_log=False,
    )


def _db_upgrade(options: argparse.Namespace) -> None:
    async def upgrade(store: Store) -> None:
        await store.migrate()
        print(f"{store.description} is at this version's schema")

    _with_store(options, upgrade)


def _jobs_list(options: argparse.Namespace) -> None:
    jobs = _read(options, JobList, Paths.API_JOBS, lambda service: service.list_jobs())
    print(jobs.model_dump_json(indent=2) if options.json else job_list_text(jobs))


def _jobs_show(options: argparse.Namespace) -> None:
    path = f"{Paths.API_JOBS}/{quote(options.job_id, safe='')}"
    job = _read(options, JobView, path, lambda service: service.show_job(options.job_id))
    print(job.model_dump_json(indent=2) if options.json else job_text(job))


def _read(
    options: argparse.Namespace,
    message: type[Message],
    path: str,
    from_database: Callable[[BatchSizeService], Awaitable[Message]],
) -> Message:
    """Ask the server if one is named, else read the database."""
    if options.server_url is not None:
        return message.model_validate_json(_get(options.server_url.rstrip("/") + path))

    async def read(store: Store) -> Message:
        await store.check_schema()
        return await from_database(BatchSizeService(store))

    return _with_store(options, read)


def _with_store(options: argparse.Namespace, use: Callable[[Store], Awaitable[T]]) -> T:
    async def run() -> T:
        store = open_store(_settings(options).database_url)
        try:
            return await use(store)
        finally:
            await store.close()

    return asyncio.run(run())


def _get(url: str) -> bytes:
    try:
        response = httpx.get(url)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CommandError(f"no answer from {url}: {error}") from error
    if response.is_error:
        raise CommandError(f"{url} answered {response.status_code}: {_message_in(response)}")
    return response.content


def _message_in(response: httpx.Response) -> str:
    try:
        return ErrorBody.model_validate_json(response.content).message
    except ValidationError:
        return response.text[:200]


def _in_words(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    lines: list[Any] = [f"{'.'.join(map(str, line['loc']))}: {line['msg']}" for line in error.errors()]
    return f"{error.title}: {'; '.join(lines)}"
