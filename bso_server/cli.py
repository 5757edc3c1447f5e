"""The ``bso-server`` command."""

from __future__ import annotations

import argparse
import asyncio
import logging.config
import os
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import uvicorn
from pydantic import BaseModel, ValidationError

from bso_server.app import prepare, store_of
from bso_server.errors import BsoError
from bso_server.format import job_list_text, job_text, token_list_json, token_list_text
from bso_server.security import CACHE_S, Scope, TokenRecord
from bso_server.service import BatchSizeService
from bso_server.settings import Settings, source_of, variable_of
from bso_server.store import Store
from bso_server.tokens import Tokens
from zeus_plugins.protocol import ErrorBody, JobList, JobView, Paths

_TOKEN_VARIABLE = "ZEUS_BSO_TOKEN"  # noqa: S105 - the variable's name, not a token

# User and password in a URL; a token may be the password, and is not to be printed.
_LOGIN = re.compile("//[^/]*@")

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
        print(f"bso-server: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bso-server", description="The batch size optimization server.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="run the server")
    serve.add_argument("--host", dest="server_host", help="address to listen on (default 127.0.0.1)")
    serve.add_argument("--port", dest="server_port", help="port to listen on (default 8000)")
    serve.add_argument("--workers", type=int, default=1, help="number of processes (default 1)")
    serve.add_argument(
        "--migrate",
        action="store_true",
        help="bring the database to this version's schema first (on SQLite that is done in any case)",
    )
    serve.add_argument(
        "--insecure", action="store_const", const=True, help="serve everybody who shows no token, on any machine"
    )
    _add_database_url(serve)
    serve.set_defaults(run=_serve)

    database = commands.add_parser("db", help="look after the database").add_subparsers(required=True, metavar="WHAT")
    upgrade = database.add_parser("upgrade", help="bring the database to this version's schema")
    upgrade.add_argument("--sql", action="store_true", help="print the SQL for an empty database instead of running it")
    _add_database_url(upgrade)
    upgrade.set_defaults(run=_db_upgrade)
    check = database.add_parser("check", help="fail unless the database has this version's schema")
    _add_database_url(check)
    check.set_defaults(run=_db_check)
    current = database.add_parser("current", help="print the revision of the database's schema")
    _add_database_url(current)
    current.set_defaults(run=_db_current)

    token = commands.add_parser("token", help="say who may use it").add_subparsers(required=True, metavar="WHAT")
    create = token.add_parser("create", help="make a token and print it, this once")
    create.add_argument("--name", required=True, help="what or whom it is for")
    create.add_argument(
        "--scope",
        dest="scopes",
        action="extend",
        nargs="+",
        choices=list(Scope),
        type=Scope,
        help="what it allows: read; report, which includes read (default); admin, which includes all",
    )
    _add_database_url(create)
    create.set_defaults(run=_token_create)
    token_list = token.add_parser("list", help="all tokens, without their secrets")
    token_list.add_argument("--json", action="store_true", help="print JSON")
    _add_database_url(token_list)
    token_list.set_defaults(run=_token_list)
    revoke = token.add_parser("revoke", help="make a token worthless for good")
    revoke.add_argument("token_id", metavar="ID")
    _add_database_url(revoke)
    revoke.set_defaults(run=_token_revoke)

    config = commands.add_parser("config", help="look at the settings").add_subparsers(required=True, metavar="WHAT")
    show = config.add_parser("show", help="every setting with its source")
    _add_database_url(show)
    show.set_defaults(run=_config_show)

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


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that stand on the command line."""
    return {name: value for name in Settings.model_fields if (value := getattr(options, name, None)) is not None}


def _settings(options: argparse.Namespace) -> Settings:
    try:
        return Settings(**_given(options))
    except ValidationError as error:
        problems = [f"{variable_of(str(line['loc'][0]))}: {line['msg']}" for line in error.errors()]
        raise CommandError(f"wrong setting, given as an argument or by {'; '.join(problems)}") from error


def _serve(options: argparse.Namespace) -> None:
    settings = _settings(options)
    log_config = _log_config(settings.log_level)
    logging.config.dictConfig(log_config)
    _with_store(options, lambda store: prepare(store, migrate=options.migrate))
    # Each worker process builds its own application, and reads the settings from the environment that it inherits.
    os.environ.update({variable_of(name): str(value) for name, value in _given(options).items()})
    uvicorn.run(
        "bso_server.app:create_app",
        factory=True,
        host=settings.server_host,
        port=settings.server_port,
        workers=options.workers,
        log_config=log_config,
        # One line per request would drown the others.
        access_log=False,
    )


def _log_config(level: str) -> dict[str, Any]:
    """Logging for this process and for each worker, as `logging.config.dictConfig` takes it."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "root": {"level": level, "handlers": ["stderr"]},
        # It tells which implementation it picked at every look at the schema.
        "loggers": {"alembic": {"level": "WARNING"}},
    }


def _db_upgrade(options: argparse.Namespace) -> None:
    async def upgrade(store: Store) -> None:
        if options.sql:
            print(store.migration_sql())
            return
        await store.migrate()
        print(f"{store.description} is at this version's schema")

    _with_store(options, upgrade)


def _db_check(options: argparse.Namespace) -> None:
    async def check(store: Store) -> None:
        await store.check_schema()
        print(f"{store.description} is at this version's schema")

    _with_store(options, check)


def _db_current(options: argparse.Namespace) -> None:
    async def current(store: Store) -> None:
        print(await store.current_revision() or "none")

    _with_store(options, current)


def _token_create(options: argparse.Namespace) -> None:
    async def create(store: Store) -> None:
        await prepare(store)
        token, record = await Tokens(store).create(options.name, options.scopes or [Scope.REPORT])
        print(token)
        print(
            f"token {record.token_id} ({record.name}): {', '.join(sorted(record.scopes))}. It is shown this once; "
            f"trainings take it from {_TOKEN_VARIABLE}. A server of this database asks every client for a token now.",
            file=sys.stderr,
        )

    _with_store(options, create)


def _token_list(options: argparse.Namespace) -> None:
    async def read(store: Store) -> list[TokenRecord]:
        await store.check_schema()
        return await Tokens(store).all()

    tokens = _with_store(options, read)
    print(token_list_json(tokens) if options.json else token_list_text(tokens))


def _token_revoke(options: argparse.Namespace) -> None:
    async def revoke(store: Store) -> None:
        await store.check_schema()
        await Tokens(store).revoke(options.token_id)
        print(f"token {options.token_id} is revoked; running servers refuse it within {CACHE_S:g} s")

    _with_store(options, revoke)


def _config_show(options: argparse.Namespace) -> None:
    settings, given = _settings(options), _given(options)
    for name in Settings.model_fields:
        value = getattr(settings, name)
        if name == "database_url":
            value = store_of(settings).description
        print(f"{variable_of(name)}={'' if value is None else value}  ({source_of(name, given)})")


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
        store = store_of(_settings(options))
        try:
            return await use(store)
        finally:
            await store.close()

    return asyncio.run(run())


def _get(url: str) -> bytes:
    token = os.environ.get(_TOKEN_VARIABLE, "").strip()
    shown = _LOGIN.sub("//", url)
    try:
        response = httpx.get(url, headers={"Authorization": f"Bearer {token}"} if token else None)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CommandError(f"no answer from {shown}: {error}") from error
    if response.is_error:
        raise CommandError(f"{shown} answered {response.status_code}: {_message_in(response)}")
    return response.content


def _message_in(response: httpx.Response) -> str:
    try:
        return ErrorBody.model_validate_json(response.content).message
    except ValidationError:
        return response.text[:200]
