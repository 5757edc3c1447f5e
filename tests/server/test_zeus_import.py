"""Jobs from the tables of a Zeus server, read by the example script, continue as on Zeus; some from a real server."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.databases import EACH_ONCE, empty_database
from tests.support.exports import Lines, decoded, encoded, export_over, import_over, renamed
from tests.support.servers import ServerProcess, bso_server, free_port, serving
from tests.support.zeus_jobs import ZEUS_JOB, Player
from tests.support.zeus_tables import DRAWING, EXPLORING, SCRIPT, fill, import_zeus, read_from_zeus
from tests.zeus_peer.peer import Peer


@pytest.fixture(scope="module", params=EACH_ONCE)
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
        import_over(http, encoded(lines_of(zeus_url, "--job", source["id"], "--job-id", job_id))).raise_for_status()
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
        import_over(http, encoded(lines)).raise_for_status()
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


# Each kind of database is source once and destination once.
WAYS = [
    pytest.param("sqlite+aiosqlite", "postgresql", marks=pytest.mark.postgresql),
    pytest.param("postgresql", "mysql", marks=[pytest.mark.postgresql, pytest.mark.mysql]),
    pytest.param("mysql", "sqlite", marks=pytest.mark.mysql),
]


@pytest.mark.slow
@pytest.mark.zeus_peer
@pytest.mark.parametrize(("source", "destination"), WAYS)
def test_moved_job_continues_with_the_sizes_of_zeus(peer: Peer, source: str, destination: str, tmp_path: Path) -> None:
    """The next 20 sizes equal Zeus's: during exploration, with a running trial, and in the bandit stage."""
    with (
        empty_database(source, tmp_path) as zeus_database,
        empty_database(destination, tmp_path) as database,
        peer.server(tmp_path, zeus_database) as zeus_url,
        serving(database, tmp_path, "--migrate") as ours,
        httpx.Client(base_url=zeus_url, timeout=60) as zeus,
        httpx.Client(base_url=ours.url, timeout=60) as http,
    ):
        for job_id, recurrences, stage in (("moved-a", 5, "pruning"), ("moved-b", 16, "bandit")):
            zeus.post("/jobs", json={**ZEUS_JOB, "job_id": job_id}).raise_for_status()
            on_zeus = Player(zeus, job_id)
            on_zeus.recur(recurrences)
            on_zeus.begin()
            done = import_zeus(zeus_database, database, tmp_path / "jobs.jsonl", "--job", job_id)
            assert done.returncode == 0, done.stderr
            here = Player(http, job_id, running=list(on_zeus.running))
            job = http.get(f"/api/jobs/{job_id}").json()
            assert job["stage"] == stage
            assert job["trials"][-1]["state"] == "running"
            here.end()
            on_zeus.end()
            assert here.recur(20) == on_zeus.recur(20)


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
