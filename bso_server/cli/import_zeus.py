"""``bso-server jobs import-zeus``: jobs of a Zeus 0.16 server, with all that it knows of them, go on here."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from bso_server.cli.common import CommandError, Commands, add_command, settings_of
from bso_server.cli.jobs import import_job, read_jobs
from bso_server.cli.tables import table
from bso_server.core.job import Moment
from bso_server.errors import BsoError, DatabaseUnavailableError
from bso_server.service.transfer import END, beginning, lines
from bso_server.service.zeus_import import ZeusImport, imported
from bso_server.storage.zeus_database import ZeusJob
from bso_server.storage.zeus_database import read_jobs as read_zeus_jobs
from zeus_plugins.protocol import TrialState

# Trials that are turned into JSON at a time.
_AT_ONCE = 500

_COLUMNS = (
    *(TrialState.COMPLETED, TrialState.EARLY_STOPPED, TrialState.EXHAUSTED, TrialState.FAILED),
    *(TrialState.RUNNING, TrialState.ABANDONED),
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
    which.add_argument("--job", metavar="JOB", help="this job (default: the only one that there is)")
    which.add_argument("--all", action="store_true", help="all jobs")
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
        help="what trials without an end are: their trainings may report here (running, default), or are gone",
    )
    command.add_argument("--dry-run", action="store_true", help="show what would be done, and do nothing")


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
    there = {job.job_id for job in read_jobs(options).jobs}
    print(f"times are read as {_name_of(options.timezone, moment)}")
    refused: dict[str, str] = {}
    found: dict[str, ZeusImport] = {}
    for source in chosen:
        try:
            job = imported(
                source, moment, zone=options.timezone, live_as=TrialState(options.live_as), job_id=options.job_id
            )
            job_id = job.head.job.job_id or ""
            if job_id in there:
                raise CommandError(
                    f"job {job_id!r} is here already, and stays as it is: --job {source.job_id} --job-id NEW takes the "
                    "other one over beside it"
                )
            if not options.dry_run:
                import_job(options, _pieces(job))
            found[job_id] = job
        except DatabaseUnavailableError:
            raise
        except (BsoError, CommandError) as error:
            refused[source.job_id] = str(error)
    if found:
        print(_table(found))
    for job_id, job in found.items():
        for note in job.notes:
            print(f"job {job_id}: {note}")
    for job_id, why in refused.items():
        print(f"job {job_id} cannot be taken over: {why}")
    print(f"{len(found)} of {len(chosen)} jobs {'would be' if options.dry_run else 'are'} taken over")
    if refused:
        raise CommandError(f"{len(refused)} of {len(chosen)} jobs cannot be taken over")


def _chosen(options: argparse.Namespace, jobs: list[ZeusJob]) -> list[ZeusJob]:
    names = ", ".join(repr(job.job_id) for job in jobs[:20]) + ", …" * (len(jobs) > 20)
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
    return f"{moment.now.astimezone().tzname()}, this machine's time zone; --timezone names that of Zeus's server"


def _pieces(job: ZeusImport) -> Iterator[bytes]:
    """The text of its export."""
    yield beginning(job.head).encode()
    for first in range(0, len(job.trials), _AT_ONCE):
        yield lines(job.trials[first : first + _AT_ONCE], is_first=first == 0).encode()
    yield END.encode()


def _table(found: dict[str, ZeusImport]) -> str:
    """A line for each job: its stage, and the number of its trials that become what."""
    header = ["JOB", "STAGE", "TRIALS", *(state.replace("_", " ").upper() for state in _COLUMNS), "LOWEST COST J"]
    rows = []
    for job_id, job in found.items():
        states = job.states
        stage = "pruning" if job.head.survivors is None else f"bandit, {len(job.head.survivors)} sizes"
        cost = "-" if job.min_cost_j is None else f"{job.min_cost_j:.4g}"
        rows.append([job_id, stage, str(len(job.trials)), *(str(states[state]) for state in _COLUMNS), cost])
    return table(header, rows)
