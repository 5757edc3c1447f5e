"""Recorded tables of a Zeus 0.16 server with two jobs, and its next suggestions.

The jobs are `zeus_jobs.ZEUS_JOB` under two names, played by `zeus_jobs.Player`: five recurrences and a running trial
during exploration, and sixteen recurrences, in the bandit stage.
"""

from __future__ import annotations

import asyncio
import io
import runpy
import sqlite3
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import create_async_engine

from tests.support import ROOT
from tests.support.servers import bso_server
from tests.support.zeus_jobs import ZEUS_JOB

SCRIPT = ROOT / "examples" / "import_zeus.py"

# In the order, with the names and types, of a server's `CREATE TABLE`s on PostgreSQL and SQLite; see `_statements`.
_TABLES = (
    """CREATE TABLE "Job" (job_id VARCHAR(400) NOT NULL, job_id_prefix VARCHAR(300) NOT NULL,
    default_batch_size INTEGER NOT NULL, higher_is_better_metric BOOLEAN NOT NULL, eta_knob FLOAT NOT NULL,
    beta_knob FLOAT, target_metric FLOAT NOT NULL, max_epochs INTEGER NOT NULL, num_pruning_rounds INTEGER NOT NULL,
    window_size INTEGER NOT NULL, max_power FLOAT NOT NULL, number_of_gpus INTEGER NOT NULL,
    gpu_model VARCHAR(30) NOT NULL, mab_prior_mean FLOAT NOT NULL, mab_prior_precision FLOAT NOT NULL,
    mab_num_explorations INTEGER NOT NULL, mab_seed INTEGER, mab_random_generator_state VARCHAR(10000),
    exp_default_batch_size INTEGER NOT NULL, stage VARCHAR(7) NOT NULL, min_cost FLOAT,
    min_cost_batch_size INTEGER NOT NULL, PRIMARY KEY (job_id))""",
    """CREATE TABLE "BatchSize" (job_id VARCHAR(400) NOT NULL, batch_size INTEGER NOT NULL,
    PRIMARY KEY (job_id, batch_size), FOREIGN KEY(job_id) REFERENCES "Job" (job_id) ON DELETE CASCADE)""",
    """CREATE TABLE "GaussianTsArmState" (job_id VARCHAR(300) NOT NULL, batch_size INTEGER NOT NULL,
    param_mean FLOAT NOT NULL, param_precision FLOAT NOT NULL, reward_precision FLOAT NOT NULL,
    num_observations INTEGER NOT NULL, PRIMARY KEY (job_id, batch_size),
    FOREIGN KEY(job_id, batch_size) REFERENCES "BatchSize" (job_id, batch_size) ON DELETE CASCADE)""",
    """CREATE TABLE "Trial" (job_id VARCHAR(300) NOT NULL, batch_size INTEGER NOT NULL, trial_number INTEGER NOT NULL,
    start_timestamp TIMESTAMP NOT NULL, type VARCHAR(11) NOT NULL, status VARCHAR(10) NOT NULL,
    end_timestamp TIMESTAMP, time FLOAT, energy FLOAT, converged BOOLEAN, PRIMARY KEY (job_id, trial_number),
    FOREIGN KEY(job_id, batch_size) REFERENCES "BatchSize" (job_id, batch_size) ON DELETE CASCADE)""",
)

_DAY = "2026-11-22"

# The generator of `mab_seed`; draws change the two numbers.
_GENERATOR = (
    '{{"bit_generator": "PCG64", "state": {{"state": {state}, "inc": 261136684632268670825940853076396136793}}, '
    '"has_uint32": 0, "uinteger": {uinteger}}}'
)


def _trials(rows: str) -> list[tuple[Any, ...]]:
    """Trials from lines of number, size, start, kind, status, and, if they have them, end, seconds, joules, outcome."""
    trials = []
    for row in rows.strip().splitlines():
        number, size, start, kind, status, *rest = row.split()
        end = f"{_DAY} {rest[0]}" if rest else None
        measured = [float(rest[1]), float(rest[2]), rest[3] == "reached"] if rest[1:] else [None] * 3
        trials.append((int(number), int(size), f"{_DAY} {start}", kind, status, end, *measured))
    return trials


EXPLORING: dict[str, Any] = {
    "id": "exploring",
    "stage": "Pruning",
    "generator": _GENERATOR.format(state=208745520555909116978795849195383758904, uinteger=0),
    "min_cost": 464.5061642348154,
    "arms": [],
    "trials": _trials("""
1 32 18:44:08.101186 Exploration Succeeded 18:44:08.120444 0.9252377802069485 555.1426681241691 reached
2 16 18:44:08.149790 Exploration Succeeded 18:44:08.243989 0.9622472914152262 577.3483748491358 reached
3 32 18:44:08.187961 Concurrent Succeeded 18:44:08.223097 0.9972646242390575 598.3587745434345 reached
4 8 18:44:08.290699 Exploration Failed 18:44:08.321219
5 8 18:44:08.363241 Exploration Succeeded 18:44:08.464933 1.7235339481438048 1034.120368886283 missed
6 32 18:44:08.400489 Concurrent Succeeded 18:44:08.433110 0.774176940391359 464.5061642348154 reached
7 64 18:44:08.489578 Exploration Dispatched
"""),
    # Zeus's next suggestions to the same trainings.
    "next": [128, 32, 32, 16, 32, 64, 64, 32, 32, 32, 64, 32, 32, 32, 32, 32, 32, 32, 32, 64],
}

DRAWING: dict[str, Any] = {
    "id": "drawing",
    "stage": "MAB",
    "generator": _GENERATOR.format(state=119725963502042274673997512416535327174, uinteger=22614310),
    "min_cost": 414.4495629249179,
    "arms": [
        (16, -552.3533037007458, 0.0032012621592596435, 0.0016006310796298218, 2),
        (32, -515.6950988948489, 0.0021754847902879654, 0.00027193559878599567, 8),
        (64, -527.656225320821, 0.00031991391813439464, 0.00015995695906719732, 2),
    ],
    "trials": _trials("""
1 32 18:44:08.524420 Exploration Succeeded 18:44:08.541468 0.9252377802069485 555.1426681241691 reached
2 16 18:44:08.587288 Exploration Succeeded 18:44:08.676280 0.9622472914152262 577.3483748491358 reached
3 32 18:44:08.621231 Concurrent Succeeded 18:44:08.645471 0.9972646242390575 598.3587745434345 reached
4 8 18:44:08.710299 Exploration Failed 18:44:08.734043
5 8 18:44:08.801218 Exploration Succeeded 18:44:08.907283 1.7235339481438048 1034.120368886283 missed
6 32 18:44:08.835190 Concurrent Succeeded 18:44:08.867243 0.774176940391359 464.5061642348154 reached
7 64 18:44:08.939399 Exploration Succeeded 18:44:08.977227 1.011206337266547 606.7238023599282 reached
8 128 18:44:09.009723 Exploration Succeeded 18:44:09.145383 2.2593510893128017 1355.610653587681 missed
9 32 18:44:09.064595 Concurrent Succeeded 18:44:09.122448 0.6907492715415299 414.4495629249179 reached
10 32 18:44:09.153271 Exploration Succeeded 18:44:09.188488 0.7619740953192582 457.1844571915549 reached
11 16 18:44:09.195115 Exploration Succeeded 18:44:09.236749 0.8789303875872597 527.3582325523558 reached
12 32 18:44:09.201951 Concurrent Succeeded 18:44:09.208223 0.9439427389369933 566.365643362196 reached
13 64 18:44:09.287536 Exploration Failed 18:44:09.319216
14 64 18:44:09.357442 Exploration Succeeded 18:44:09.427147 0.7476477471361895 448.5886482817137 reached
15 32 18:44:09.376980 Concurrent Succeeded 18:44:09.411827 0.9360027856273606 561.6016713764163 reached
16 32 18:44:09.458780 MAB Succeeded 18:44:09.487687 0.8465864156688128 507.9518494012877 reached
17 32 18:44:09.516242 MAB Dispatched
"""),
    # Zeus's next suggestions to the same trainings.
    "next": [32, 32, 32, 32, 32, 32, 32, 32, 64, 64, 32, 32, 64, 64, 32, 64, 64, 32, 64, 32],
}


def fill(database_url: str, *jobs: dict[str, Any], then: str | None = None) -> None:
    """Create the tables in an empty database with these jobs, and execute the statement `then`."""
    url = make_url(database_url)
    statements = [*_TABLES, *(statement for job in jobs for statement in _rows(job)), *([then] if then else [])]
    if url.get_backend_name() == "sqlite":
        connection = sqlite3.connect(url.database or "")
        connection.executescript(";\n".join(statements))
        connection.close()
    else:
        asyncio.run(_fill_server(database_url, statements))


def read_from_zeus(database_url: str, *arguments: str) -> str:
    """Return the output of the example script, whose `sys.exit` raises an exception, for times in UTC."""
    output = io.StringIO()
    given = [str(SCRIPT), database_url, "--timezone", "UTC", *arguments]
    with patch.object(sys, "argv", given), redirect_stdout(output):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return output.getvalue()


def import_zeus(source: str, destination: str, file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Import jobs of Zeus's database into a database or server of this project, by a file."""
    file.write_text(read_from_zeus(source, *arguments))
    named = "--server-url" if destination.startswith("http") else "--database-url"
    return bso_server("jobs", "import", str(file), named, destination)


async def _fill_server(database_url: str, statements: list[str]) -> None:
    engine = create_async_engine(database_url)
    async with engine.begin() as connection:
        if engine.dialect.name != "postgresql":
            await connection.exec_driver_sql("SET SESSION sql_mode = 'ANSI_QUOTES'")
            statements = [each.replace("TIMESTAMP", "DATETIME") for each in statements]
        for statement in statements:
            await connection.exec_driver_sql(statement)
    await engine.dispose()


def _rows(job: dict[str, Any]) -> list[str]:
    of_job = {**ZEUS_JOB, **job.get("specification", {})}
    own = [job["id"], job.get("prefix", job["id"])]
    kept = (
        *("default_batch_size", "higher_is_better_metric", "eta_knob", "beta_knob", "target_metric", "max_epochs"),
        *("num_pruning_rounds", "window_size", "max_power", "number_of_gpus", "gpu_model", "mab_prior_mean"),
        *("mab_prior_precision", "mab_num_explorations", "mab_seed"),
    )
    return [
        _insert("Job", *own, *(of_job[name] for name in kept), job["generator"], 32, job["stage"], job["min_cost"], 32),
        *(_insert("BatchSize", job["id"], size) for size in of_job["batch_sizes"]),
        *(_insert("GaussianTsArmState", job["id"], *arm) for arm in job["arms"]),
        *(_insert("Trial", job["id"], size, number, *rest) for number, size, *rest in job["trials"]),
    ]


def _insert(table: str, *values: object) -> str:
    return f'INSERT INTO "{table}" VALUES ({", ".join(map(_literal, values))})'  # noqa: S608 - values of this file


def _literal(value: object) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return "NULL" if value is None else str(value).upper()
