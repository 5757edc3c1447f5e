"""Jobs of a real Zeus 0.16 server, imported from its database, continue as on Zeus."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.databases import empty_database
from tests.support.servers import ServerProcess, free_port, serving
from tests.support.zeus_jobs import ZEUS_JOB, Player
from tests.support.zeus_tables import import_zeus
from tests.zeus_peer.peer import Peer

pytestmark = [pytest.mark.slow, pytest.mark.zeus_peer]

# Each kind of database is source once and destination once.
WAYS = [
    pytest.param("sqlite+aiosqlite", "postgresql", marks=pytest.mark.postgresql),
    pytest.param("postgresql", "mysql", marks=[pytest.mark.postgresql, pytest.mark.mysql]),
    pytest.param("mysql", "sqlite", marks=pytest.mark.mysql),
]


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
