"""Jobs imported from the tables of a Zeus server; test_zeus_move.py uses a real server."""

from __future__ import annotations

import json
import shutil
import sqlite3
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy.engine import make_url

from tests.support.databases import MYSQL, POSTGRES_URL, POSTGRESQL, administer, empty_database, fresh_database
from tests.support.exports import decoded, export_over, import_over, renamed
from tests.support.servers import ServerProcess, bso_server, free_port
from tests.support.zeus_jobs import Player
from tests.support.zeus_tables import DRAWING, EXPLORING, fill, import_zeus


@pytest.fixture(scope="module", params=["sqlite", POSTGRESQL, MYSQL])
def zeus_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Database of a Zeus server with both jobs, on each kind in turn."""
    with empty_database(request.param, tmp_path_factory.mktemp("zeus")) as url:
        fill(url, EXPLORING, DRAWING)
        yield url


@pytest.fixture(scope="module")
def _new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("ours") / "ours.sqlite3"
    assert bso_server("db", "upgrade", "--database-url", f"sqlite:///{file}").returncode == 0
    return file


@pytest.fixture
def database_url(_new: Path, tmp_path: Path) -> str:
    """An empty database of this project."""
    return f"sqlite:///{shutil.copy(_new, tmp_path)}"


def test_new_sqlite_file_needs_no_upgrade_before_the_import(zeus_url: str, tmp_path: Path) -> None:
    assert "2 of 2 jobs are taken over" in taken_over(zeus_url, f"sqlite:///{tmp_path / 'new.sqlite3'}", "--all")


def taken_over(source: str, destination: str, *arguments: str) -> str:
    done = import_zeus(source, destination, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refused(source: str, destination: str, *arguments: str) -> str:
    """Return the reason for a refused import."""
    done = import_zeus(source, destination, *arguments)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done
    assert json.loads(bso_server("jobs", "list", "--json", "--database-url", destination).stdout)["jobs"] == []
    return done.stdout + done.stderr


def zeus_file(tmp_path: Path, *jobs: dict[str, Any], then: str | None = None) -> str:
    url = f"sqlite+aiosqlite:///{tmp_path / 'zeus.sqlite3'}"
    fill(url, *jobs, then=then)
    return url


def shown(job_id: str, database_url: str) -> dict[str, Any]:
    done = bso_server("jobs", "show", job_id, "--json", "--database-url", database_url)
    assert done.returncode == 0, done.stderr
    job: dict[str, Any] = json.loads(done.stdout)
    return job


@pytest.mark.parametrize("source", [EXPLORING, DRAWING], ids=lambda job: job["id"])
def test_imported_job_continues_as_on_zeus(zeus_url: str, shared_server: ServerProcess, source: dict[str, Any]) -> None:
    """The running trial ends here because its training has switched the URL; then the sizes of Zeus follow."""
    job_id = f"{source['id']}-{uuid.uuid4().hex[:8]}"
    said = taken_over(zeus_url, shared_server.database_url, "--job", source["id"], "--job-id", job_id)
    assert "Zeus keeps" not in said

    number, size, *_ = source["trials"][-1]
    with httpx.Client(base_url=shared_server.url) as http:
        here = Player(http, job_id, running=[{"job_id": job_id, "batch_size": size, "trial_number": number}])
        here.end()
        assert here.recur(20) == source["next"]
    assert shown(job_id, shared_server.database_url)["trial_count"] == len(source["trials"]) + 20


def test_imported_fields_are_kept_or_marked_as_unknown(tmp_path: Path, database_url: str) -> None:
    taken_over(zeus_file(tmp_path, EXPLORING), database_url, "--timezone", "Europe/Berlin")
    job = shown("exploring", database_url)

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


def test_order_of_beginnings_and_ends_is_kept(tmp_path: Path, database_url: str) -> None:
    """Times come from the clock of Zeus's server; in MySQL's whole seconds, an end precedes the next beginning."""
    rounded = [
        (*trial[:2], trial[2][:19], *trial[3:5], trial[5] and trial[5][:19], *trial[6:])
        for trial in EXPLORING["trials"]
    ]
    source = zeus_file(tmp_path, EXPLORING, {**EXPLORING, "id": "rounded", "trials": rounded})
    taken_over(source, database_url, "--all")
    found = {}
    for job_id in ("exploring", "rounded"):
        _, *trials = decoded(bso_server("jobs", "export", job_id, "--database-url", database_url).stdout)
        found[job_id] = [(trial["started_event"], trial["ended_event"]) for trial in trials]
    # The third trial ran within the second, and the sixth within the fifth.
    assert found["exploring"] == [(1, 2), (3, 6), (4, 5), (7, 8), (9, 12), (10, 11), (13, None)]
    assert found["rounded"] == [(1, 2), (3, 4), (5, 6), (7, 8), (9, 10), (11, 12), (13, None)]


def test_unknown_fields_stay_unknown_in_exports_and_on_pages(tmp_path: Path, shared_server: ServerProcess) -> None:
    source, job_id = zeus_file(tmp_path, EXPLORING), f"exploring-{uuid.uuid4().hex[:8]}"
    taken_over(source, shared_server.url, "--job", "exploring", "--job-id", job_id)
    with httpx.Client(base_url=shared_server.url) as http:
        export = export_over(http, job_id)
        unknown = ("epoch", "metric", "first_epoch", "first_energy_j")
        assert [export[5][name] for name in unknown] == [None] * 4
        import_over(http, renamed(export, f"{job_id}-again")).raise_for_status()
        assert export_over(http, f"{job_id}-again")[1:] == export[1:]

        assert http.get(f"/api/jobs/{job_id}/trials/1/epochs").json() == {"epochs": []}
        page = http.get(f"/ui/jobs/{job_id}/trials/1").raise_for_status().text
        assert "32 reached the target, 0.9, with " in page
        assert http.get(f"/ui/jobs/{job_id}").status_code == 200
        http.post(f"/api/jobs/{job_id}/trials/5/discard").raise_for_status()
        set_aside = http.get(f"/api/jobs/{job_id}").json()["trials"][4]
        assert (set_aside["state"], set_aside["epochs"]) == ("withdrawn", None)
    simulated = bso_server("simulate", "--job", job_id, "--database-url", shared_server.database_url)
    assert "no trial has reached the target yet, of those whose epochs" in simulated.stderr


def test_running_trials_of_dead_trainings_can_be_imported_as_abandoned(tmp_path: Path, database_url: str) -> None:
    said = taken_over(zeus_file(tmp_path, EXPLORING), database_url, "--live-as", "abandoned")
    assert "without an end: 7; taken as abandoned" in said
    last = shown("exploring", database_url)["trials"][-1]
    assert (last["state"], last["end_reason"]) == ("abandoned", "lease_expired")
    explained = bso_server("jobs", "explain", "exploring", "--json", "--database-url", database_url)
    assert json.loads(explained.stdout)["batch_size"] == 64  # the exploration of 64 is repeated


def test_all_jobs_are_imported_except_incompatible_jobs(tmp_path: Path, database_url: str) -> None:
    odd = {**EXPLORING, "id": "a job/ü", "prefix": "a job"}
    source = zeus_file(tmp_path, EXPLORING, DRAWING, odd)
    assert "choose one by --job, or --all" in refused(source, database_url)
    assert "has no job 'nobody'; it has 'a job/ü', 'drawing', 'exploring'" in refused(
        source, database_url, "--job", "nobody"
    )
    done = import_zeus(source, database_url, "--all")
    assert (done.returncode, done.stderr) == (1, "bso-server: 1 of 3 jobs cannot be taken over\n")
    assert "job a job/ü cannot be taken over: job_id_prefix" in done.stdout
    assert "2 of 3 jobs are taken over" in done.stdout

    taken_over(source, database_url, "--job", "a job/ü", "--job-id", "a-job-1")
    assert shown("a-job-1", database_url)["job"]["job_id_prefix"] == "a-job-1"

    again = import_zeus(source, database_url, "--job", "drawing")
    assert again.returncode == 1
    assert "job 'drawing' is here already, and stays as it is" in again.stdout


def test_dry_run_shows_the_planned_import(tmp_path: Path, database_url: str) -> None:
    source = zeus_file(tmp_path, EXPLORING, DRAWING)
    said = taken_over(source, database_url, "--all", "--dry-run", "--timezone", "UTC")
    zone, header, *rows, _, _, end = said.splitlines()
    assert (zone, end) == ("times are read as UTC", "2 of 2 jobs would be taken over")
    names = ["JOB", "STAGE", "TRIALS", "COMPLETED", "EARLY STOPPED", "EXHAUSTED", "FAILED", "RUNNING", "ABANDONED"]
    assert header.split("  ")[0] == "JOB"
    assert [name for name in names if name not in header] == []
    assert [row.split() for row in rows] == [
        ["drawing", "bandit,", "3", "sizes", "17", "12", "2", "0", "2", "1", "0", "414.4"],
        ["exploring", "pruning", "7", "4", "1", "0", "1", "1", "0", "464.5"],
    ]
    assert bso_server("jobs", "list", "--database-url", database_url).stdout == "no jobs\n"


DIFFERENCES = {
    "the lowest cost": (
        {**DRAWING, "min_cost": 400.0},
        "lowest cost: Zeus keeps 400 J, and its trials say 414.44956 J",
    ),
    "a run that missed the target": (
        {
            **EXPLORING,
            "min_cost": 300.0,
            "trials": [(*trial[:6], 0.5, 300.0, False) if trial[0] == 5 else trial for trial in EXPLORING["trials"]],
        },
        "lowest cost: 300 J in Zeus, of a run that missed the target, and 464.50616 J here",
    ),
    "an arm": (
        {**DRAWING, "arms": [(16, -500.0, 1.0, 1.0, 2), *DRAWING["arms"][1:]]},
        "batch size 16: Zeus keeps a mean cost of 500 J over 2 runs, and its trials say 552.3533 J over 2",
    ),
    "a window": (
        {**EXPLORING, "specification": {"window_size": 1}},
        "window_size is 2 and not 1, which could never hold mab_num_explorations (2)",
    ),
}


@pytest.mark.parametrize(("job", "said"), DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_differences_to_zeus_are_reported(tmp_path: Path, database_url: str, job: dict[str, Any], said: str) -> None:
    assert said in taken_over(zeus_file(tmp_path, job), database_url)


TRIAL = 'UPDATE "Trial" SET {} WHERE trial_number = 2'
WRONG = {
    "a column less": ('ALTER TABLE "Trial" DROP COLUMN converged', "another version of Zeus; only 0.16 can be read"),
    "a column more": ('ALTER TABLE "Job" ADD COLUMN owner TEXT', "Job.owner beside"),
    "a table less": ('DROP TABLE "GaussianTsArmState"', "no GaussianTsArmState.batch_size"),
    "another type": (TRIAL.format("type = 'Replay'"), "trial 2, type: Input should be 'Exploration'"),
    "an end of none": (TRIAL.format("status = 'Dispatched'"), "trial 2: it is Dispatched and has an end"),
    "no end": (TRIAL.format("end_timestamp = NULL"), "trial 2: it is Succeeded and has no end"),
    "no energy": (TRIAL.format("energy = NULL"), "trial 2: it has ended as Succeeded without time and energy"),
    "negative energy": (TRIAL.format("energy = -1"), "trial 2, energy_j: "),
    "a gap": ('DELETE FROM "Trial" WHERE trial_number = 2', "number 2 is missing"),
    "no size": ('DELETE FROM "BatchSize"', "batch_sizes"),
    "a broken generator": (
        "UPDATE \"Job\" SET mab_random_generator_state = '{}'",
        "not the state of a random generator",
    ),
}


@pytest.mark.parametrize(("statement", "said"), WRONG.values(), ids=WRONG.keys())
def test_tables_with_a_foreign_schema_are_refused(tmp_path: Path, database_url: str, statement: str, said: str) -> None:
    assert said in refused(zeus_file(tmp_path, EXPLORING, then=statement), database_url)


def test_databases_without_zeus_tables_are_refused(tmp_path: Path, database_url: str) -> None:
    text, empty = tmp_path / "text", tmp_path / "empty"
    text.write_text("not a database, but long enough to be taken for one " * 100)
    sqlite3.connect(empty).close()
    empty.touch()
    assert "file is not a database" in refused(f"sqlite:///{text}", database_url)
    assert "no table of Zeus's batch size optimization server" in refused(f"sqlite:///{empty}", database_url)
    assert "it is one of this project's; bso-server jobs export" in refused(database_url, database_url)
    assert "there is no SQLite file" in refused(f"sqlite:///{tmp_path / 'nothing'}", database_url)
    assert not (tmp_path / "nothing").exists()
    assert "the URL of Zeus's database cannot be read" in refused("zeus", database_url)
    assert "oracle databases are not supported" in refused("oracle://host/zeus", database_url)
    for login, query in (("zeus:secret@", ""), ("zeus@", "?password=secret")):
        said = refused(f"postgresql+psycopg://{login}127.0.0.1:{free_port()}/zeus{query}", database_url)
        assert "cannot be read" in said
        assert "secret" not in said


def test_wrong_arguments_are_refused(tmp_path: Path, database_url: str) -> None:
    source = zeus_file(tmp_path, EXPLORING)
    done = import_zeus(source, database_url, "--timezone", "Mars/Olympus")
    assert (done.returncode, "'Mars/Olympus' is no time zone" in done.stderr) == (2, True)
    assert "--job-id names one job" in refused(source, database_url, "--all", "--job-id", "other")


def test_source_database_is_only_read(tmp_path: Path, database_url: str) -> None:
    source = zeus_file(tmp_path, EXPLORING, DRAWING)
    file = tmp_path / "zeus.sqlite3"
    before, files = file.read_bytes(), sorted(path.name for path in tmp_path.iterdir())
    taken_over(source, database_url, "--all")
    assert file.read_bytes() == before
    assert [name for name in sorted(path.name for path in tmp_path.iterdir()) if "zeus" in name] == [
        name for name in files if "zeus" in name
    ]


@pytest.mark.postgresql
def test_standby_can_be_the_source_but_not_the_destination(database_url: str) -> None:
    """A standby can be read but cannot store a job."""
    with fresh_database(POSTGRES_URL) as standby, fresh_database(POSTGRES_URL) as ours:
        fill(standby, EXPLORING)
        assert bso_server("db", "upgrade", "--database-url", ours).returncode == 0
        for url in (standby, ours):
            name = make_url(url).database
            administer(POSTGRES_URL, f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        taken_over(standby, database_url)
        done = import_zeus(standby, ours)
        assert done.returncode == 1
        assert "takes no writes" in done.stderr
        assert "Traceback" not in done.stderr
