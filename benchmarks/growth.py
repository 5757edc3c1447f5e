"""How long requests take as jobs, and the runs of a job, grow in number; all are copies of a job trained over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import Request, urlopen

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks.driver import BATCH_SIZES, TARGET_METRIC, Exchange, begun_trial, report
from benchmarks.processes import Target, bso_server, serving_bso
from benchmarks.tables import markdown_table
from bso_server.storage import tables
from zeus_plugins.protocol import GP_VOI, ZEUS

JOB, RUNS, REPEATS = "job-0", 20, 5
EXPORT = "api/jobs/job-0/export"
PAGES = {"list": "ui/", "search": "ui/?q=b-0", "page of a job": "ui/jobs/job-0", "report": "ui/report"}
READS = {**PAGES, "export": EXPORT}

Times = tuple[float, float]
"""Milliseconds until an answer, and of the server's CPU time."""


def main() -> None:
    """Print a table for each policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 1000, 20_000], help="numbers of jobs, and of runs")
    parser.add_argument("--database-url", help="an empty database (default: a SQLite file); its jobs are deleted")
    options = parser.parse_args()
    sizes = [*((size, RUNS) for size in options.sizes), *((1, max(size, RUNS)) for size in options.sizes)]
    for policy in (ZEUS, GP_VOI):
        columns = {}
        for jobs, runs in sizes:
            with tempfile.TemporaryDirectory() as folder:
                url = options.database_url or f"sqlite+aiosqlite:///{folder}/bso.sqlite3"
                columns[f"{jobs:,} × {runs:,}"] = measured(url, Path(folder), policy, jobs, runs)
        names = next(iter(columns.values()))
        rows = [[name, *("{} ({})".format(*map(_short, each[name])) for each in columns.values())] for name in names]
        print(f"{markdown_table([[f'`{policy}`', *columns], *rows])}\n", flush=True)


def _short(value_ms: float) -> str:
    return f"{value_ms:,.0f}" if value_ms >= 100 else f"{value_ms:.3g}"


def measured(url: str, folder: Path, policy: str, jobs: int, runs: int) -> dict[str, Times]:
    """Return the median times of each request, with `jobs` jobs of `runs` runs each."""
    bso_server(url, folder, "db", "upgrade")
    asyncio.run(change(url, sa.delete(tables.jobs)))
    terms = {"max_power": 300.0, "number_of_gpus": 1, "gpu_model": "benchmark", "batch_sizes": BATCH_SIZES}
    terms |= {"default_batch_size": BATCH_SIZES[2], "target_metric": TARGET_METRIC, "max_epochs": 9, "mab_seed": 1}
    terms |= {"job_id": JOB, "job_id_prefix": "job", "policy": policy}
    with serving_bso(url, folder) as server:
        ask(server, "jobs", json.dumps(terms).encode())
        for _ in range(RUNS):
            run(server)
        lines = [*map(json.loads, ask(server, EXPORT)[0].splitlines())]
    (folder / "job.jsonl").write_text("\n".join(map(json.dumps, longer(lines, runs))) + "\n")
    bso_server(url, folder, "jobs", "delete", JOB, "--yes")
    bso_server(url, folder, "jobs", "import", "job.jsonl")
    bso_server(url, folder, "report")  # which stores the verdict
    asyncio.run(change(url, *copies(jobs)))
    with serving_bso(url, folder) as server:
        times = {name: [ask(server, path)[1] for _ in range(REPEATS)] for name, path in READS.items()}
        ends = [(*run(server), ask(server, "ui/")[1]) for _ in range(REPEATS)]
        kinds = "batch size", "last report of a run", "list after it"
        for name, each in zip(kinds, zip(*ends, strict=True), strict=True):
            times[name] = [*each]
        times["metrics"] = [ask(server, "metrics", until=b"zeus_bso_jobs{")[1]]
    return {name: tuple(map(median, zip(*each, strict=True))) for name, each in times.items()}


def longer(lines: list[dict[str, Any]], runs: int) -> Iterator[dict[str, Any]]:
    """Yield the lines of an export with copies of its runs behind the last one, `runs` altogether."""
    job, *trials = lines
    yield {**job, "trials": runs}
    for number in range(runs):
        events = 2 * len(trials) * (number // len(trials))
        trial = trials[number % len(trials)]
        moved = {name: trial[name] + events for name in ("started_event", "ended_event")}
        yield {**trial, **moved, "trial_number": number + 1}


def copies(jobs: int) -> Iterator[sa.Insert]:
    """Yield statements that copy the job under other ids until there are this number of jobs."""
    numbers = sa.select(sa.literal(1).label("n")).cte(recursive=True)
    numbers = numbers.union_all(sa.select(numbers.c.n + 1).where(numbers.c.n < jobs - 1))
    copy = sa.literal("job-") + sa.cast(numbers.c.n, sa.String)
    copied = tables.jobs, tables.trials, tables.arms, tables.policy_memories, tables.decisions, tables.verdicts
    for table in copied if jobs > 1 else ():
        values = {column.name: column for column in table.c} | {"job_id": copy}
        if table is tables.jobs:
            values["spec"] = sa.func.replace(table.c.spec, f'"{JOB}"', sa.literal('"') + copy + '"')
        chosen = sa.select(*values.values()).join_from(table, numbers, table.c.job_id == JOB)
        yield sa.insert(table).from_select(list(values), chosen)


async def change(url: str, *statements: sa.Delete | sa.Insert) -> None:
    """Execute statements in one transaction."""
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        for statement in statements:
            await connection.execute(statement)
    await engine.dispose()


def ask(server: Target, path: str, body: bytes | None = None, until: bytes = b"") -> tuple[bytes, Times]:
    """Return the body of the answer to GET, or with a body to POST; repeat the request until the answer has a text."""
    request = Request(f"http://{server.host}:{server.port}/{path}", body, {"Content-Type": "application/json"})
    begun, cpu_s, found = time.perf_counter(), server.meter.cpu_s() or 0.0, b""
    while not found or until not in found:
        with urlopen(request) as answer:  # noqa: S310 - the server under test
            found = answer.read()
    return found, (1e3 * (time.perf_counter() - begun), 1e3 * ((server.meter.cpu_s() or 0.0) - cpu_s))


def run(server: Target) -> tuple[Times, Times]:
    """Run a trial to its target; return the times of the choice of its batch size, and of its last report."""
    body, choice = ask(server, f"jobs/batch_size?job_id={JOB}")
    last_report = report(begun_trial(Exchange(200, body)), epoch=4, epochs=4)
    return choice, ask(server, "report", last_report.partition(b"\r\n\r\n")[2])[1]


if __name__ == "__main__":
    main()
