"""The ``bso-server`` command."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from bso_server.cli.common import (
    CommandError,
    RemovedOption,
    add_command,
    duration,
    take_server_from_environment,
    with_store,
)
from bso_server.cli.jobs import add_jobs_commands
from bso_server.cli.report import add_report_command
from bso_server.cli.serve import add_serve_command
from bso_server.cli.simulate import add_simulate_command
from bso_server.cli.tokens import add_token_commands
from bso_server.errors import BsoError, DatabaseUnavailableError, PolicyNotInstalledError
from bso_server.service import reading
from bso_server.service.commands import BatchSizeService
from bso_server.service.health import differences
from bso_server.storage.store import Store
from zeus_plugins.protocol import package_version, printable

# Status of a command whose reader has closed the pipe, as in `bso-server jobs list | head`: 128 + SIGPIPE.
_READER_LEFT = 141

# Commands of earlier versions, each with what to do instead.
_REMOVED = {
    "config show": "docs/settings.md lists the settings; the server names its database when it starts",
    "db current": "db check names the schema of the database if it is not this version's",
    "jobs report": "print or save the page /ui/jobs/JOB of bso-server serve; jobs show JOB prints the figures",
    "jobs import-zeus": "examples/import_zeus.py writes a file for jobs import: docs/move-from-zeus.md",
    "jobs share": "make the token that registers the job with token create --share, or move the job: docs/tokens.md",
    "token transfer": "rotate a token that is lost or leaked, or move its jobs: docs/tokens.md",
    "webhook": "Prometheus and Alertmanager send messages about jobs: docs/alerts.md has a configuration",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 1 after one line on standard error, or 141 if the reader of its output has ended."""
    arguments = sys.argv[1:] if arguments is None else arguments
    for removed, instead in _REMOVED.items():
        if list(arguments[: len(removed.split())]) == removed.split():
            print(f"bso-server: the command {removed!r} was removed: {instead}", file=sys.stderr)
            return 1
    options = _parser().parse_args(arguments)
    take_server_from_environment(options)
    # Commands that configure no log of their own log in the format of their other messages.
    logging.basicConfig(format="%(message)s")
    try:
        options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes standard output at its end, and would print an error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_LEFT
    except DatabaseUnavailableError as error:
        advice = (
            ". Check that it runs and can be reached from here, and its URL, user and "
            "password (--database-url or ZEUS_BSO_DATABASE_URL, ZEUS_BSO_DB_USER, ZEUS_BSO_DB_PASSWORD)"
        )
        problem = error.detail + ("" if error.fault else advice)
    except (CommandError, BsoError, ValueError, OSError) as error:
        problem = str(error)
    else:
        return 0
    print(printable(f"bso-server: {problem}"), file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bso-server", description="The batch size optimization server.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {package_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    add_serve_command(commands)
    database = commands.add_parser("db", help="maintain the database").add_subparsers(required=True, metavar="WHAT")
    upgrade = add_command(database, "upgrade", "bring the database to this version's schema", _db_upgrade)
    upgrade.add_argument(
        "--sql",
        action=RemovedOption,
        instead="give the command a user with the rights to create, change and drop tables",
    )
    check_help = "fail unless the database has this version's schema"
    add_command(database, "check", check_help, partial(with_store, use=_say_ready))
    prune_help = "delete old reports; trials stay, each with its last report"
    prune = add_command(database, "prune", prune_help, _db_prune)
    prune.add_argument(
        "--older-than",
        type=duration,
        required=True,
        metavar="AGE",
        help="age in hours, days or weeks, such as 12h, 30d or 8w",
    )

    verify_help = "check the database's pages, and each job's derived data against a replay of its trials"
    verify = add_command(database, "verify", verify_help, _db_verify)
    verify.add_argument("--json", action="store_true", help="print JSON")
    backup_help = "copy a SQLite database, also while it is in use, and check the copy"
    backup = add_command(database, "backup", backup_help, _db_backup)
    backup.add_argument("file", type=Path, metavar="FILE", help="file for the copy, which must not exist yet")
    keep_help = "add the time to the name FILE, and keep the N newest of these copies"
    backup.add_argument("--keep", type=int, metavar="N", help=keep_help)

    add_token_commands(commands)
    add_jobs_commands(commands)
    add_report_command(commands)
    add_simulate_command(commands)
    return parser


def _db_upgrade(options: argparse.Namespace) -> None:
    async def upgrade(store: Store) -> None:
        await store.migrate()
        await _say_ready(store)

    with_store(options, upgrade, schema="any")


async def _say_ready(store: Store) -> None:
    print(f"{store.description} is at this version's schema")


def _db_prune(options: argparse.Namespace) -> None:
    async def prune(store: Store) -> None:
        print(f"{await BatchSizeService(store).prune(options.older_than)} reports are forgotten")

    with_store(options, prune)


def _db_backup(options: argparse.Namespace) -> None:
    file, keep = options.file, options.keep
    copy = file if keep is None else Path(f"{file}.{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
    if copy.exists():
        raise CommandError(f"{copy} exists: name another file, or add --keep 14")
    if keep is not None and keep < 1:
        raise CommandError("--keep takes the number of copies, 1 or more")

    async def back_up(store: Store) -> None:
        if await store.current_revision() is None:
            raise CommandError(f"{store.description} is empty: check its name")
        await store.back_up(copy)
        print(f"{store.description} is copied to {copy}")

    with_store(options, back_up, schema="any")
    if keep is not None:
        # Partial files of killed commands sort first, so that they are deleted first.
        pattern = re.compile(re.escape(file.name) + r"\.[0-9]{8}T[0-9]{6}Z(\..+\.partial)?")
        found = [(match[1] is None, path) for path in file.parent.iterdir() if (match := pattern.fullmatch(path.name))]
        for _, old in sorted(found)[:-keep]:
            old.unlink()


def _db_verify(options: argparse.Namespace) -> None:
    differing: dict[str, list[str]] = {}
    unchecked: dict[str, str] = {}

    async def verify(store: Store) -> tuple[int, list[str], str]:
        damage, undetected = await store.check_integrity()
        jobs = () if damage else (await store.read(reading.list_jobs, limit=None)).jobs
        # One transaction for each job, because one for all jobs of a large database would take too long.
        for job in jobs:
            try:
                if said := await store.read(differences, job.job_id):
                    differing[job.job_id] = said
            except PolicyNotInstalledError as error:
                unchecked[job.job_id] = error.message
        return len(jobs), damage, undetected

    number, damage, undetected = with_store(options, verify)
    if options.json:
        found = {"jobs": number, "damage": damage, "undetected": undetected}
        print(json.dumps({**found, "differences": differing, "unchecked": unchecked}, indent=2))
    else:
        print("\n".join([*map(printable, damage), f"not detected: {undetected}"]))
        for job_id, said in differing.items():
            print("\n  ".join([f"job {job_id}:", *map(printable, said)]))
        for job_id, why in unchecked.items():
            print(printable(f"job {job_id} cannot be checked: {why}"))
    if damage:
        raise CommandError("the database is damaged, and no job was compared: restore a backup (docs/operations.md)")
    if differing:
        raise CommandError(
            f"the caches of {len(differing)} of {number} jobs differ from a replay of their trials: export, delete and "
            "import such a job to rebuild them"
        )
    if not options.json:
        print(f"{number - len(unchecked)} jobs have the same caches as a replay of their trials")
