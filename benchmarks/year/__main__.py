"""``python -m benchmarks.year``: total energy of a fleet's year, by policy, and what its server did for it."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.documents import mark_of, replace_tables
from benchmarks.errors import BenchmarkError
from benchmarks.player import Player
from benchmarks.processes import Target, bso_server, serving
from benchmarks.year.jobs import FleetJob, Odds, draw_jobs, read_pool
from benchmarks.year.life import Life, Spent, by_default
from benchmarks.year.tables import tables
from bso_server.simulate.savings import Consumption, Savings
from zeus_plugins.protocol import OWN_POLICIES, TrialState

_LEASE_S = 1.0
_GIVE_UP_S = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, print the tables, and write what is asked for; the exit status is 0, or 1 with a line of reason."""
    options = _parser().parse_args(arguments)
    try:
        source: Path | None = options.source
        results = _measured(options) if source is None else json.loads(source.read_text("utf-8"))
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
        made = tables(results)
        for file in options.write:
            shown = file.read_text("utf-8")
            replace_tables({name: table for name, table in made.items() if mark_of(name) in shown}, file)
    except (BenchmarkError, ValueError, OSError) as error:
        print(f"benchmarks.year: {error}", file=sys.stderr)
        return 1
    print("\n\n".join(made.values()))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.year",
        description="A year of recurring jobs through `bso-server serve`, in accelerated time. See docs/proof.md.",
    )
    parser.add_argument(
        "--mlperf", type=Path, metavar="FILE", help="mlperf_convergence.json, as benchmarks.policies has it"
    )
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder of Zeus's traces")
    parser.add_argument("--jobs", type=int, default=1000, metavar="N", help="number of jobs (default 1000)")
    parser.add_argument("--recurrences", type=float, default=24.0, metavar="N", help="of a job, the mean (default 24)")
    parser.add_argument("--evaluations", type=int, default=8, metavar="N", help="of a run at the default (default 8)")
    parser.add_argument(
        "--in-flight", type=int, default=4, metavar="N", help="recurrences of a job at once (default 4)"
    )
    parser.add_argument(
        "--clients", type=int, default=16, metavar="N", help="jobs that are played at once (default 16)"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, metavar="M", help="begin no job later; count those done"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all draws (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="take the figures of an earlier JSON")
    parser.add_argument("--write", type=Path, nargs="+", default=[], metavar="FILE", help="documents with marks")
    return parser


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    pool = read_pool(options.mlperf, options.traces)
    jobs = draw_jobs(
        pool,
        options.jobs,
        mean_recurrences=options.recurrences,
        evaluations=options.evaluations,
        odds=Odds(),
        seed=options.seed,
    )
    with tempfile.TemporaryDirectory(prefix="fleet-") as temporary:
        directory = Path(temporary)
        file = directory / "bso.sqlite3"
        url = f"sqlite:///{file}"
        bso_server(url, directory, "db", "upgrade")
        leases = {"ZEUS_BSO_HEARTBEAT_INTERVAL_S": str(_LEASE_S / 2), "ZEUS_BSO_HEARTBEAT_LEASE_S": str(_LEASE_S)}
        settings = leases | {"ZEUS_BSO_REAP_INTERVAL_S": str(_LEASE_S), "ZEUS_BSO_LOG_LEVEL": "WARNING"}
        empty_bytes = _bytes(file)
        with serving(
            "bso-server", "bso_server", ("serve",), database_url=url, directory=directory, settings=settings
        ) as target:
            spent, wall_s, cpu_s = asyncio.run(_play(jobs, target, options))
            stuck = _stuck(file)
        grown_bytes = _bytes(file) - empty_bytes
    done = [job for job in jobs if all(job.number in of_policy for of_policy in spent.values())]
    if not done:
        raise BenchmarkError("no job has been played with both policies: give it more --minutes")
    extent = {"jobs": len(done), "workloads": len(pool), "recurrences": sum(job.recurrences for job in done)}
    extent |= {"drifting": sum(job.conditions.drift_at is not None for job in done), "in_flight": options.in_flight}
    server = _of_server([each for of_policy in spent.values() for each in of_policy.values()], wall_s, cpu_s)
    growth = {"database_bytes": grown_bytes, "bytes_per_trial": grown_bytes / server.pop("runs")}
    default = sum((by_default(job, number) for job in done for number in range(job.recurrences)), Consumption())
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        **extent,
        "default": default.as_json(None),
        "policies": {
            policy: _of_policy([of_policy[job.number] for job in done], default) for policy, of_policy in spent.items()
        },
        "server": {**server, "stuck_jobs": stuck, **growth},
    }


async def _play(
    jobs: Sequence[FleetJob], target: Target, options: argparse.Namespace
) -> tuple[dict[str, dict[int, Spent]], float, float | None]:
    """The costs of each job with each policy, by its number, and the wall time and the server's CPU time, seconds."""
    waiting = [(policy, job) for job in jobs for policy in OWN_POLICIES]
    total = len(waiting)
    waiting.reverse()
    spent: dict[str, dict[int, Spent]] = {policy: {} for policy in OWN_POLICIES}

    async def client() -> None:
        player = await Player.connect(target.host, target.port)
        try:
            while waiting and time.monotonic() < begun_s + 60 * options.minutes:
                policy, job = waiting.pop()
                spent[policy][job.number] = await Life(job, policy, player, options.in_flight).play()
                done = sum(map(len, spent.values()))
                if done % max(1, total // 20) == 0:
                    _say(f"{done} of {total} jobs, {time.monotonic() - begun_s:.0f} s")
        finally:
            player.close()

    begun_s, before_s = time.monotonic(), target.meter.cpu_s()
    await asyncio.gather(*(client() for _ in range(options.clients)))
    after_s = target.meter.cpu_s()
    used_s = None if before_s is None or after_s is None else after_s - before_s
    return spent, time.monotonic() - begun_s, used_s


def _stuck(database: Path) -> int:
    """Jobs with a trial that is neither over nor given up, once the leases of runs that have vanished are over."""
    deadline_s = time.monotonic() + _GIVE_UP_S
    alive = "SELECT COUNT(DISTINCT job_id) FROM trials WHERE state IN (?, ?)"
    while True:
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            (jobs,) = connection.execute(alive, (TrialState.RUNNING.value, TrialState.SUSPENDED.value)).fetchone()
        if not jobs or time.monotonic() > deadline_s:
            return int(jobs)
        time.sleep(_LEASE_S)


def _of_server(spent: Sequence[Spent], wall_s: float, cpu_s: float | None) -> dict[str, Any]:
    """The work of the server, for all jobs that were played."""
    requests: Counter[str] = Counter()
    for each in spent:
        requests.update(each.requests)
    decisions = sum(count for route, count in requests.items() if route.startswith("GET"))
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "requests": dict(requests),
        "runs": sum(each.runs for each in spent),
        "decisions_per_s": decisions / wall_s,
        "requests_per_s": sum(requests.values()) / wall_s,
        "cpu_ms_per_request": None if cpu_s is None else 1e3 * cpu_s / sum(requests.values()),
    }


def _of_policy(spent: Sequence[Spent], default: Consumption) -> dict[str, Any]:
    consumed = sum((each.consumed for each in spent), Consumption())
    ends: Counter[str] = Counter()
    for each in spent:
        ends.update(each.ends)
    return {
        **Savings(sum(each.reached + each.given_up for each in spent), consumed, default).as_json(None),
        "given_up": sum(each.given_up for each in spent),
        "runs": sum(each.runs for each in spent),
        "ends": dict(ends),
    }


def _bytes(file: Path) -> int:
    """Size of a SQLite file with its journal."""
    return sum(part.stat().st_size for part in file.parent.glob(f"{file.name}*"))


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
