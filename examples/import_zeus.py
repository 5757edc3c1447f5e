"""Read the jobs of a Zeus 0.16 batch size optimization server, and write the file that `bso-server jobs import` reads.

Usage: ``python examples/import_zeus.py DATABASE_URL --timezone ZONE [--job JOB [--job-id NEW]] > jobs.jsonl``

The script only reads the database, which may be SQLite, PostgreSQL, MySQL or MariaDB. Zeus stores the end and the
totals of a trial, but neither its epochs nor its metric: those stay unknown. `docs/move-from-zeus.md` describes the
whole move. The script needs the extra ``server``, and ``postgres`` or ``mysql`` for these databases.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import sqlalchemy as sa
from pydantic import ValidationError
from sqlalchemy.ext.asyncio import create_async_engine

from zeus_plugins.protocol import CreatedJob, faults_in_words

# The driver of this package for each kind of database; Zeus's server may use another driver.
DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}

# Columns of each table in Zeus 0.16. The first line of "Job" specifies the job, with the names that clients use.
SPECIFIED = """job_id job_id_prefix default_batch_size higher_is_better_metric eta_knob beta_knob target_metric
    max_epochs num_pruning_rounds window_size max_power number_of_gpus gpu_model mab_prior_mean mab_prior_precision
    mab_num_explorations mab_seed"""
TABLES = {
    "Job": f"{SPECIFIED} mab_random_generator_state min_cost",
    "BatchSize": "job_id batch_size",
    "GaussianTsArmState": "job_id batch_size",
    "Trial": "job_id batch_size trial_number start_timestamp type status end_timestamp time energy converged",
}
ORIGINS = {"Exploration": "exploration", "Concurrent": "concurrent", "MAB": "bandit"}

# The new server abandons a trial without an end if its training has not reported there after this time.
LEASE = timedelta(hours=1)

Row = Mapping[str, Any]
Tables = dict[str, Sequence[Row]]


async def read_tables(database_url: str) -> Tables:
    """Return the rows of Zeus's tables, read in one transaction."""
    url = sa.make_url(database_url)
    url = url.set(drivername=DRIVERS.get(url.get_backend_name(), "mysql+asyncmy"))
    if url.get_backend_name() == "sqlite":
        url = url.set(database=f"file:{url.database}").update_query_dict({"mode": "ro", "uri": "true"})
    async with create_async_engine(url, poolclass=sa.NullPool).connect() as connection:
        return await connection.run_sync(rows_of_tables)


def rows_of_tables(connection: sa.Connection) -> Tables:
    """Return the rows of each table; raise `ValueError` if the tables are not those of Zeus 0.16."""
    found: Tables = {}
    for name, columns in TABLES.items():
        if not sa.inspect(connection).has_table(name):
            raise ValueError(f"the database has no table {name!r}: use the database of Zeus's server")
        table = sa.Table(name, sa.MetaData(), autoload_with=connection, resolve_fks=False)
        if missing := sorted(set(columns.split()) - set(table.c.keys())):
            raise ValueError(f"the tables are of another version of Zeus than 0.16: {name} has no {missing}")
        found[name] = connection.execute(sa.select(table).order_by(*table.primary_key)).mappings().all()
    return found


def lines_of(job: Row, tables: Tables, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the lines of a job: the job, then each trial in order of dispatch; raise `ValueError` if it is invalid."""
    own = {name: [row for row in rows if row["job_id"] == job["job_id"]] for name, rows in tables.items()}
    registration = registration_of(job, [row["batch_size"] for row in own["BatchSize"]], options.job_id)
    has_bandit = any(row["type"] == "MAB" for row in own["Trial"])
    trials = trial_lines(registration, own["Trial"], options)
    reached = [each for each in trials if each["state"] == "completed"]
    costs_j = [registration.cost_j(time_s=each["time_s"], energy_j=each["energy_j"]) for each in reached]
    if not math.isclose(job["min_cost"] or 0.0, min(costs_j, default=0.0), rel_tol=1e-5):
        note = f"lowest cost {job['min_cost']} J in Zeus, {min(costs_j, default=None)} J here (docs/move-from-zeus.md)"
        print(f"job {registration.job_id}: {note}", file=sys.stderr)
    head = {
        "format": "zeus-bso-job",
        "version": 1,
        "job": registration.model_dump(mode="json"),
        "created_at": trials[0]["started_at"] if trials else options.now,
        "survivors": [row["batch_size"] for row in own["GaussianTsArmState"]] if has_bandit else None,
        "rng_state": job["mab_random_generator_state"],
        "trials": len(trials),
    }
    return [head, *trials]


def registration_of(job: Row, sizes: Sequence[int], job_id: str | None) -> CreatedJob:
    """Return the job as it is registered here; raise `ValueError` if it is not valid here."""
    fields = {name: job[name] for name in SPECIFIED.split()} | {"batch_sizes": sizes, "policy": "zeus"}
    if job_id is not None:
        prefix = fields["job_id_prefix"]
        fields |= {"job_id": job_id, "job_id_prefix": prefix if job_id.startswith(prefix) else job_id}
    # A smaller window could never hold all explorations, and the job would explore for ever.
    if 0 < fields["window_size"] < fields["mab_num_explorations"]:
        fields["window_size"] = fields["mab_num_explorations"]
    return CreatedJob.model_validate(fields)


def trial_lines(job: CreatedJob, trials: Sequence[Row], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the lines of a job's trials; their events are the begins and ends of all trials, numbered from 1."""
    lines: dict[int, dict[str, Any]] = {}
    bound_j = math.inf
    for event, (row, is_end) in enumerate(moments_of(trials), 1):
        number = row["trial_number"]
        if not is_end:
            lines[number] = {
                "trial_number": number,
                "batch_size": row["batch_size"],
                "origin": ORIGINS.get(row["type"], row["type"]),
                "reason": f"chosen by Zeus's server ({row['type']})",
                "started_at": row["start_timestamp"].replace(tzinfo=options.timezone),
                "started_event": event,
                "state": "running",
                "message": "imported from Zeus, which keeps neither epochs nor metric",
                "lease_expires_at": options.now + LEASE,
                **dict.fromkeys(("end_reason", "ended_at", "ended_event")),
                **dict.fromkeys(("time_s", "energy_j", "energy_source", "metric", "epoch", "reported_at")),
                "report_count": 0,
                "longest_gap_s": 0.0,
                "heartbeats": False,
            }
            continue
        ended_at = row["end_timestamp"].replace(tzinfo=options.timezone)
        lines[number] |= {"ended_at": ended_at, "ended_event": event, "lease_expires_at": None}
        if row["status"] == "Failed":
            lines[number] |= {"state": "failed", "end_reason": "crashed"}
            continue
        if row["time"] is None or row["energy"] is None:
            raise ValueError(f"trial {number} has succeeded without time and energy")
        cost_j = job.cost_j(time_s=row["time"], energy_j=row["energy"])
        if row["converged"]:
            state, reason = "completed", "target_reached"
        elif cost_j > bound_j:
            state, reason = "early_stopped", "cost_bound_crossed"
        else:
            state, reason = "exhausted", "max_epochs_reached"
        # In Zeus, runs that missed the target lower the bound, too.
        bound_j = min(bound_j, (job.beta_knob or math.inf) * cost_j)
        lines[number] |= {"state": state, "end_reason": reason, "energy_source": "imported from Zeus"}
        lines[number] |= {"time_s": row["time"], "energy_j": row["energy"], "reported_at": ended_at, "report_count": 1}
        # Of the metric, Zeus keeps only that it reached the target.
        lines[number]["metric"] = job.target_metric if row["converged"] else None
    return list(lines.values())


def moments_of(trials: Sequence[Row]) -> list[tuple[Row, bool]]:
    """Return each trial where it begins, with False, and where it ends, with True, in order of time.

    Trials began in the order of their numbers. An end precedes the begin of another trial at the same instant, because
    MySQL keeps whole seconds.
    """
    moments: list[tuple[Row, bool]] = []
    ended = [row for row in trials if row["end_timestamp"] is not None]
    ends = deque(sorted(ended, key=lambda row: (row["end_timestamp"], row["trial_number"])))
    for row in trials:
        begun = row["trial_number"]
        while ends and ends[0]["trial_number"] < begun and ends[0]["end_timestamp"] <= row["start_timestamp"]:
            moments.append((ends.popleft(), True))
        moments.append((row, False))
    return [*moments, *((row, True) for row in ends)]


def main() -> None:
    """Write the lines of the chosen jobs to standard output; end with status 1 if a job cannot be imported."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("database_url", help="ZEUS_BSO_DATABASE_URL of Zeus's server")
    parser.add_argument("--timezone", required=True, help="zone of the server's clock, such as UTC")
    parser.add_argument("--job", help="only this job")
    parser.add_argument("--job-id", metavar="NEW", help="id of the job here")
    options = parser.parse_args(namespace=argparse.Namespace(now=datetime.now(UTC)))
    try:
        options.timezone = ZoneInfo(options.timezone)
        tables = asyncio.run(read_tables(options.database_url))
    except (KeyError, OSError, ValueError, sa.exc.SQLAlchemyError) as error:
        sys.exit(f"nothing can be read: {error}")
    jobs = [job for job in tables["Job"] if options.job in (None, job["job_id"])]
    if not jobs or (options.job_id is not None and len(jobs) > 1):
        sys.exit(f"choose one by --job: {', '.join(repr(job['job_id']) for job in tables['Job']) or 'there is none'}")
    for job in jobs:
        try:
            lines = lines_of(job, tables, options)
        except ValueError as error:
            said = faults_in_words(error) if isinstance(error, ValidationError) else error
            sys.exit(f"job {job['job_id']!r} cannot be imported (--job JOB --job-id NEW gives it another id): {said}")
        for line in lines:
            print(json.dumps(line, default=datetime.isoformat))


if __name__ == "__main__":
    main()
