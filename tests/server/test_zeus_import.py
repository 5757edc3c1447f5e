"""Jobs from the tables of a Zeus server, read by the example script, continue as on Zeus; some from a real server."""

from __future__ import annotations

import asyncio
import io
import json
import runpy
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import create_async_engine

from tests.support import ROOT
from tests.support.databases import DATABASES, empty_database
from tests.support.exports import Lines, decoded, encoded, export_over, import_beside, renamed
from tests.support.servers import ServerProcess, bso_server, free_port
from tests.support.zeus_jobs import ZEUS_JOB, Player
from tests.zeus_peer.peer import Peer

# --- Tables of a Zeus server, with jobs as it has left them -----------------------------------------------------------


# Recorded from a Zeus 0.16 server, with its next suggestions. The jobs are `ZEUS_JOB` under two names, played by
# `Player`: five recurrences and a running trial during exploration, and sixteen recurrences, in the bandit stage.

SCRIPT = ROOT / "examples" / "import_zeus.py"

# In the order, with the names and types, of a server's `CREATE TABLE`s on PostgreSQL and SQLite.
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


@pytest.fixture(scope="module", params=DATABASES)
def zeus_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Database of a Zeus server with both jobs, on each kind in turn."""
    with empty_database(request.param, tmp_path_factory.mktemp("zeus")) as url:
        fill(url, EXPLORING, DRAWING)
        yield url


def zeus_file(tmp_path: Path, *jobs: dict[str, Any], then: str | None = None) -> str:
    url = f"sqlite+aiosqlite:///{tmp_path / 'zeus.sqlite3'}"
    fill(url, *jobs, then=then)
    return url


def lines_of(source: str, *arguments: str) -> Lines:
    return decoded(read_from_zeus(source, *arguments))


@pytest.mark.parametrize("source", [EXPLORING, DRAWING], ids=lambda job: job["id"])
def test_imported_job_continues_as_on_zeus(
    zeus_url: str, shared_server: ServerProcess, source: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The running trial ends here because its training has switched the URL; then the sizes of Zeus follow."""
    job_id = f"{source['id']}-{uuid.uuid4().hex[:8]}"
    with httpx.Client(base_url=shared_server.url) as http:
        import_beside(http, encoded(lines_of(zeus_url, "--job", source["id"], "--job-id", job_id)))
        assert capsys.readouterr().err == ""
        number, size, *_ = source["trials"][-1]
        here = Player(http, job_id, running=[{"job_id": job_id, "batch_size": size, "trial_number": number}])
        here.end()
        assert here.recur(20) == source["next"]
        job = http.get(f"/api/jobs/{job_id}").json()
    assert job["trial_count"] == len(source["trials"]) + 20


def test_imported_fields_are_kept_or_marked_as_unknown(tmp_path: Path) -> None:
    source, database_url = zeus_file(tmp_path, EXPLORING, DRAWING), f"sqlite:///{tmp_path / 'new.sqlite3'}"
    before = (tmp_path / "zeus.sqlite3").read_bytes()
    done = import_zeus(source, database_url, tmp_path / "jobs.jsonl", "--timezone", "Europe/Berlin")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "zeus.sqlite3").read_bytes() == before
    shown = bso_server("jobs", "show", "exploring", "--json", "--database-url", database_url)
    job = json.loads(shown.stdout)

    assert (job["job"]["policy"], job["job"]["mab_seed"], job["stage"]) == ("zeus", 7, "pruning")
    assert job["min_cost_j"] == pytest.approx(EXPLORING["min_cost"])
    told = [
        (trial["state"], trial["origin"], trial["end_reason"], trial["metric"], trial["epochs"])
        for trial in job["trials"]
    ]
    assert told == [
        ("completed", "exploration", "target_reached", 0.9, None),
        ("completed", "exploration", "target_reached", 0.9, None),
        ("completed", "concurrent", "target_reached", 0.9, None),
        ("failed", "exploration", "crashed", None, None),
        ("early_stopped", "exploration", "cost_bound_crossed", None, None),
        ("completed", "concurrent", "target_reached", 0.9, None),
        ("running", "exploration", None, None, None),
    ]
    assert [trial["energy_j"] for trial in job["trials"]] == [trial[7] for trial in EXPLORING["trials"]]
    first = job["trials"][0]
    assert (first["started_at"], first["ended_at"]) == ("2026-11-22T17:44:08.101186Z", "2026-11-22T17:44:08.120444Z")
    assert bso_server("db", "verify", "--database-url", database_url).returncode == 0


def test_order_of_beginnings_and_ends_is_kept(tmp_path: Path) -> None:
    """Times come from the clock of Zeus's server; in MySQL's whole seconds, an end precedes the next beginning."""
    rounded = [
        (*trial[:2], trial[2][:19], *trial[3:5], trial[5] and trial[5][:19], *trial[6:])
        for trial in EXPLORING["trials"]
    ]
    source = zeus_file(tmp_path, EXPLORING, {**EXPLORING, "id": "rounded", "trials": rounded})
    found = {}
    for job_id in ("exploring", "rounded"):
        _, *trials = lines_of(source, "--job", job_id)
        found[job_id] = [(trial["started_event"], trial["ended_event"]) for trial in trials]
    # The third trial ran within the second, and the sixth within the fifth.
    assert found["exploring"] == [(1, 2), (3, 6), (4, 5), (7, 8), (9, 12), (10, 11), (13, None)]
    assert found["rounded"] == [(1, 2), (3, 4), (5, 6), (7, 8), (9, 10), (11, 12), (13, None)]


def test_unknown_fields_stay_unknown_in_exports_and_on_pages(tmp_path: Path, shared_server: ServerProcess) -> None:
    job_id = f"exploring-{uuid.uuid4().hex[:8]}"
    lines = lines_of(zeus_file(tmp_path, EXPLORING), "--job-id", job_id)
    with httpx.Client(base_url=shared_server.url) as http:
        import_beside(http, encoded(lines))
        export = export_over(http, job_id)
        unknown = ("epoch", "metric", "first_epoch", "first_energy_j")
        assert [export[5][name] for name in unknown] == [None] * 4
        import_beside(http, renamed(export, f"{job_id}-again"))
        assert export_over(http, f"{job_id}-again")[1:] == export[1:]

        assert http.get(f"/ui/jobs/{job_id}/trials/1.json").json()["epochs"] == []
        page = http.get(f"/ui/jobs/{job_id}/trials/1").raise_for_status().text
        assert "32 reached the target, 0.9, with " in page
        assert http.get(f"/ui/jobs/{job_id}").status_code == 200
        http.post(f"/api/jobs/{job_id}/trials/5/discard").raise_for_status()
        set_aside = http.get(f"/api/jobs/{job_id}").json()["trials"][4]
        assert (set_aside["state"], set_aside["epochs"]) == ("withdrawn", None)
    simulated = bso_server("simulate", "--job", job_id, "--database-url", shared_server.database_url)
    assert "no trial has reached the target yet, of those whose epochs" in simulated.stderr


def refused(*arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        read_from_zeus(*arguments)
    return str(ended.value.code)


def test_job_can_get_another_id(tmp_path: Path) -> None:
    odd = {**EXPLORING, "id": "a job/ü", "prefix": "a job"}
    source = zeus_file(tmp_path, DRAWING, odd)
    assert "job 'a job/ü' cannot be imported (--job JOB --job-id NEW gives it another id): job_id_prefix" in refused(
        source
    )
    assert "choose one by --job: 'a job/ü', 'drawing'" in refused(source, "--job", "nobody")
    assert "choose one by --job: 'a job/ü', 'drawing'" in refused(source, "--job-id", "new")
    head, *_ = lines_of(source, "--job", "a job/ü", "--job-id", "a-job-1")
    assert (head["job"]["job_id"], head["job"]["job_id_prefix"]) == ("a-job-1", "a-job-1")


def test_difference_of_the_lowest_cost_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Zeus also counts a run that missed the target."""
    trials = [(*trial[:6], 0.5, 300.0, False) if trial[0] == 5 else trial for trial in EXPLORING["trials"]]
    read_from_zeus(zeus_file(tmp_path, {**EXPLORING, "min_cost": 300.0, "trials": trials}))
    assert "job exploring: lowest cost 300.0 J in Zeus, 464.5061642" in capsys.readouterr().err


def test_window_that_could_not_hold_the_explorations_is_enlarged(tmp_path: Path) -> None:
    head, *_ = lines_of(zeus_file(tmp_path, {**EXPLORING, "specification": {"window_size": 1}}))
    assert head["job"]["window_size"] == 2


WRONG = {
    "a column less": ('ALTER TABLE "Trial" DROP COLUMN converged', "another version of Zeus than 0.16: Trial has no"),
    "a table less": ('DROP TABLE "GaussianTsArmState"', "the database has no table 'GaussianTsArmState'"),
    "no energy": ('UPDATE "Trial" SET energy = NULL WHERE trial_number = 2', "trial 2 has succeeded without time"),
    "no size": ('DELETE FROM "BatchSize"', "job 'exploring' cannot be imported (--job JOB --job-id NEW"),
}


@pytest.mark.parametrize(("statement", "said"), WRONG.values(), ids=WRONG.keys())
def test_tables_of_another_version_are_refused(tmp_path: Path, statement: str, said: str) -> None:
    assert said in refused(zeus_file(tmp_path, EXPLORING, then=statement))


@pytest.mark.parametrize(
    ("url", "zone", "said"),
    [
        ("sqlite:///{}", "UTC", "unable to open database file"),
        ("zeus:secret", "UTC", "nothing can be read: "),
        ("sqlite:///{}", "Mars/Olympus", "No time zone found with key Mars/Olympus"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, url: str, zone: str, said: str) -> None:
    command = [sys.executable, str(SCRIPT), url.format(tmp_path / "nothing"), "--timezone", zone]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, said in done.stderr, "secret" in done.stderr) == (1, True, False)
    assert not (tmp_path / "nothing").exists()


def test_former_command_names_the_script() -> None:
    done = bso_server("jobs", "import-zeus", "--all")
    assert (done.returncode, "examples/import_zeus.py writes a file for jobs import" in done.stderr) == (1, True)


# --- With a real Zeus 0.16 server -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.zeus_peer
def test_zeus_client_continues_on_our_server_during_a_training(peer: Peer, tmp_path: Path) -> None:
    """Our server replaces Zeus's server at the same address after the training's first epoch."""
    port, pause = free_port(), tmp_path / "pause"
    zeus_database = f"sqlite+aiosqlite:///{tmp_path / 'zeus.sqlite3'}"
    database = f"sqlite:///{tmp_path / 'bso.sqlite3'}"
    job = {name: value for name, value in ZEUS_JOB.items() if name not in ("max_power", "number_of_gpus", "gpu_model")}
    epochs = dict.fromkeys(ZEUS_JOB["batch_sizes"], 3)
    ours = ServerProcess(database, tmp_path / "server.log", port)
    with ThreadPoolExecutor(1) as thread:
        try:
            with peer.server(tmp_path, zeus_database, port) as url:
                launch = thread.submit(peer.train, url, job, epochs, "--pause", str(pause))
                while not (pause.exists() or launch.done()):
                    time.sleep(0.02)
            done = import_zeus(zeus_database, database, tmp_path / "jobs.jsonl")
            assert done.returncode == 0, done.stderr
            ours.start()
            pause.unlink()
            assert launch.result().ended == "finished", launch.result()
            (trial,) = httpx.get(f"{url}/api/jobs/moved").json()["trials"]
            assert (trial["state"], trial["epochs"], trial["metric"]) == ("completed", 3, 0.95)
        finally:
            pause.unlink(missing_ok=True)
            ours.kill()
