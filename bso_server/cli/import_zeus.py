"""``bso-server jobs import-zeus``: import jobs of a Zeus 0.16 server with their trials."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, tzinfo
from functools import partial
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from bso_server.cli.common import CommandError, Commands, add_command, settings_of, table_of
from bso_server.cli.jobs import import_job, read_jobs
from bso_server.core.job import Moment
from bso_server.errors import BsoError, DatabaseUnavailableError
from bso_server.service.exports import line_of
from bso_server.service.zeus_import import ZeusImport, imported
from bso_server.storage.zeus_database import ZeusJob
from bso_server.storage.zeus_database import read_jobs as read_zeus_jobs
from zeus_plugins.protocol import TrialState, printable

_COLUMNS = (
    TrialState.COMPLETED,
    TrialState.EARLY_STOPPED,
    TrialState.EXHAUSTED,
    TrialState.FAILED,
    TrialState.RUNNING,
    TrialState.ABANDONED,
)


def add_import_zeus_command(jobs: Commands) -> None:
    """Add ``import-zeus`` to ``jobs``."""
    summary = "take over jobs of a Zeus 0.16 server from its database, which is only read"
    command = add_command(jobs, "import-zeus", summary, _import_zeus, or_server=True)
    command.add_argument(
        "--zeus-database-url",
        metavar="URL",
        required=True,
        help="SQLAlchemy URL of Zeus's database, as its server has it in ZEUS_BSO_DATABASE_URL",
    )
    which = command.add_mutually_exclusive_group()
    which.add_argument("--job", metavar="JOB", help="job to import (default: the only job)")
    which.add_argument("--all", action="store_true", help="import all jobs")
    command.add_argument("--job-id", metavar="NEW", help="give the job this id here")
    command.add_argument(
        "--timezone",
        metavar="ZONE",
        type=_zone,
        help="time zone of the clock of Zeus's server, such as UTC or Europe/Berlin (default: this machine's)",
    )
    command.add_argument(
        "--live-as",
        choices=[TrialState.RUNNING.value, TrialState.ABANDONED.value],
        default=TrialState.RUNNING.value,
        help="state of trials without an end: running (default) if their trainings may report here, else abandoned",
    )
    command.add_argument("--dry-run", action="store_true", help="show the jobs and trials, without importing them")


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise argparse.ArgumentTypeError(
            f"{name!r} is no time zone: write UTC, or one such as Europe/Berlin"
        ) from error


def _import_zeus(options: argparse.Namespace) -> None:
    if options.job_id is not None and options.all:
        raise CommandError("--job-id names one job: use it with --job")
    moment = Moment(datetime.now(UTC), settings_of(options).leases)
    chosen = _chosen(options, asyncio.run(read_zeus_jobs(options.zeus_database_url)))
    there = {job.job_id for job in read_jobs(options, "prepared").jobs}
    print(f"times are read as {_name_of(options.timezone, moment)}")
    refused: dict[str, str] = {}
    found: dict[str, ZeusImport] = {}
    for source in chosen:
        try:
            job = imported(
                source, moment, zone=options.timezone, live_as=TrialState(options.live_as), job_id=options.job_id
            )
            job_id = job.job.job.job_id
            if job_id in there:
                raise CommandError(
                    f"job {job_id!r} is here already, and stays as it is: --job {source.job_id} --job-id NEW takes the "
                    "other one over beside it"
                )
            if not options.dry_run:
                import_job(options, (line_of(each) for each in (job.job, *job.trials)))
            found[job_id] = job
        except DatabaseUnavailableError:
            raise
        except (BsoError, CommandError) as error:
            refused[source.job_id] = str(error)
    if found:
        print(_table(found))
    for job_id, job in found.items():
        for note in job.notes:
            print(printable(f"job {job_id}: {note}"))
    for job_id, why in refused.items():
        print(printable(f"job {job_id} cannot be taken over: {why}"))
    print(f"{len(found)} of {len(chosen)} jobs {'would be' if options.dry_run else 'are'} taken over")
    if refused:
        raise CommandError(f"{len(refused)} of {len(chosen)} jobs cannot be taken over")


def _chosen(options: argparse.Namespace, jobs: list[ZeusJob]) -> list[ZeusJob]:
    names = ", ".join([*(repr(job.job_id) for job in jobs[:20]), *(["…"] if len(jobs) > 20 else [])])
    if options.job is not None:
        jobs = [job for job in jobs if job.job_id == options.job]
        if not jobs:
            raise CommandError(f"Zeus's database has no job {options.job!r}; it has {names or 'none at all'}")
    elif not options.all and len(jobs) > 1:
        raise CommandError(f"Zeus's database has {len(jobs)} jobs, {names}: choose one by --job, or --all")
    return jobs


def _name_of(zone: tzinfo | None, moment: Moment) -> str:
    if zone is not None:
        return str(zone)
    here = moment.now.astimezone().tzname()
    return f"{here}, this machine's time zone; state the time zone of Zeus's server with --timezone"


def _table(found: dict[str, ZeusImport]) -> str:
    columns: dict[str, Callable[[ZeusImport], object]] = {
        "JOB": lambda job: job.job.job.job_id,
        "STAGE": lambda job: f"bandit, {len(job.job.survivors)} sizes" if job.job.survivors else "pruning",
        "TRIALS": lambda job: len(job.trials),
        **{state.replace("_", " ").upper(): partial(_number_in, state) for state in _COLUMNS},
        "LOWEST COST J": lambda job: job.min_cost_j,
    }
    return table_of(columns, list(found.values()))


def _number_in(state: TrialState, job: ZeusImport) -> int:
    return job.states[state]
