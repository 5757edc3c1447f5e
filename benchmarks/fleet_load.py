"""``python -m benchmarks.fleet_load``: what a fleet of trainings asks of a server, of its processors and its disk."""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from sqlalchemy import func, select, text
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks.errors import BenchmarkError
from benchmarks.pace import Fleet, FleetFigures, run_fleet
from benchmarks.processes import bso_server, serving
from bso_server.storage.tables import metadata

SIZES = {
    "sqlite": "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()",
    "postgresql": "SELECT pg_database_size(current_database())",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the fleet; the exit status is 0 whatever the figures say, or 1 when they could not be had."""
    options = _parser().parse_args(arguments)
    fleet = Fleet(options.trainings, options.per_job, options.epochs, options.epoch_s, options.heartbeat_s)
    # A connection for each request that waits for its answer, here and, as it is inherited, in the server.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        with tempfile.TemporaryDirectory() as directory:
            figures, rows = _measured(options, fleet, Path(directory))
    except BenchmarkError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    print("\n".join(_lines(figures, rows)))
    if options.json is not None:
        document = {"fleet": asdict(fleet), "figures": asdict(figures), "database": rows}
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fleet_load",
        description="Start `bso-server serve` and let a fleet of simulated trainings run against it at their natural "
        "pace: docs/scale.md.",
    )
    parser.add_argument(
        "--trainings", type=int, default=10_000, help="trainings at the same time (default %(default)s)"
    )
    parser.add_argument("--per-job", type=int, default=10, help="how many of them are of one job (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=20, help="epochs of each training (default %(default)s)")
    parser.add_argument("--epoch-s", type=float, default=300, help="seconds of an epoch (default %(default)s)")
    parser.add_argument(
        "--heartbeat-s", type=float, default=30, help="seconds between heartbeats (default %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=60, help="seconds to measure (default %(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="processes of the server (default %(default)s)")
    parser.add_argument("--database-url", help="SQLAlchemy URL of an empty database (default: a temporary SQLite file)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    return parser


def _measured(
    options: argparse.Namespace, fleet: Fleet, directory: Path
) -> tuple[FleetFigures, dict[str, float | None]]:
    url = options.database_url or f"sqlite:///{directory / 'bso.sqlite3'}"
    bso_server(url, directory, "db", "upgrade")
    empty = asyncio.run(_rows(url))
    command = ["serve", "--workers", str(options.workers)]
    with serving("bso-server", "bso_server", command, database_url=url, directory=directory) as target:
        figures = asyncio.run(run_fleet(target, fleet, window_s=options.seconds, say=partial(print, flush=True)))
    after = asyncio.run(_rows(url))
    grown = None if (size := after["bytes"]) is None or empty["bytes"] is None else size - empty["bytes"]
    return figures, {**after, "bytes": grown}


async def _rows(url: str) -> dict[str, float | None]:
    """The number of rows of each table, and the bytes that the database takes."""
    parsed = make_url(url)
    asynchronous = parsed.set(drivername="sqlite+aiosqlite") if parsed.drivername == "sqlite" else parsed
    engine = create_async_engine(asynchronous)
    try:
        async with engine.connect() as connection:
            counts: dict[str, float | None] = {}
            for table in metadata.sorted_tables:
                counts[table.name] = await connection.scalar(select(func.count()).select_from(table))
            query = SIZES.get(parsed.get_backend_name())
            return {**counts, "bytes": None if query is None else await connection.scalar(text(query))}
    finally:
        await engine.dispose()


def _lines(figures: FleetFigures, rows: dict[str, float | None]) -> list[str]:
    cores = "unknown" if figures.server_cores is None else f"{figures.server_cores:.2f} cores"
    memory = "unknown" if figures.rss_mib is None else f"{figures.rss_mib:.0f} MiB"
    kinds = [
        f"  {kind.request:26} {kind.due:7}  p50 {kind.p50_ms:7.1f} ms  p99 {kind.p99_ms:7.1f} ms  {kind.answers}"
        for kind in figures.kinds
    ]
    size = rows["bytes"]
    per_trial = "" if size is None else f", {size / (rows['trials'] or 1):.0f} bytes for each trial with its reports"
    return [
        f"{figures.requests_per_s:.0f} requests/s for {figures.window_s:.0f} s, {figures.failures} without success",
        f"server {cores}, {memory}; load generator {figures.generator_cores:.2f} cores",
        *kinds,
        f"rows: {', '.join(f'{name} {number}' for name, number in rows.items() if name != 'bytes')}{per_trial}",
    ]


if __name__ == "__main__":
    sys.exit(main())
