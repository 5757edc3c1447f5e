"""Promotion of a PostgreSQL standby after the loss of its primary; the server's URL names both hosts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from tests.chaos.client import BoundedClient, DoneError
from tests.chaos.evidence import check_job, check_numbers
from tests.chaos.jobs import jobs
from tests.support.jobs import job
from tests.support.outage_training import EPOCHS, job_of, plain
from tests.support.replicas import Cluster, primary_and_standby
from tests.support.servers import ServerProcess
from tests.support.service import in_store
from tests.support.wire import OURS, begin, report
from zeus_plugins.cli import main
from zeus_plugins.client.http import BsoClient
from zeus_plugins.client.outbox import Outbox
from zeus_plugins.protocol import TrialState

pytestmark = pytest.mark.slow

PATIENCE_S = 120.0
CLIENTS = 3


@contextmanager
def serving(primary: Cluster, standby: Cluster, folder: Path) -> Iterator[ServerProcess]:
    """Run a server that connects to the cluster that accepts writes."""
    hosts = "&".join(f"host=127.0.0.1:{each.port}" for each in (primary, standby))
    url = f"postgresql+asyncpg://postgres@/postgres?{hosts}&target_session_attrs=read-write"
    server = ServerProcess(url, folder / "server.log", database_timeout_s=3.0)
    try:
        server.start("--migrate")
        yield server
    finally:
        server.kill()


def test_promoted_synchronous_standby_has_everything_acknowledged(tmp_path: Path) -> None:
    answers: list[dict[str, Any]] = []
    with (
        primary_and_standby(synchronous=True) as (primary, standby),
        serving(primary, standby, tmp_path) as server,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
        clients = [pool.submit(BoundedClient(server.url, seed, 200, answers.append).run) for seed in range(CLIENTS)]
        deadline = time.monotonic() + PATIENCE_S
        while len(answers) < 200:
            assert time.monotonic() < deadline, server.log.read_text()
            assert not any(each.done() for each in clients), server.log.read_text()
            time.sleep(0.01)
        primary.kill()
        before = len(answers)
        standby.control("promote")
        for client in clients:
            assert isinstance(client.exception(PATIENCE_S), DoneError), client.exception()
        assert len(answers) == CLIENTS * 200 > before + CLIENTS, "the clients went on after the promotion"
        check_numbers(answers)

        def check(transaction: Any) -> None:
            for each in jobs(0):
                check_job(transaction, each.job_id, answers)

        in_store(standby.url, lambda store: store.read(check))
        assert "Traceback" not in server.log.read_text()


def test_absent_synchronous_standby_prevents_acknowledgements(tmp_path: Path) -> None:
    with (
        primary_and_standby(synchronous=True) as (primary, standby),
        serving(primary, standby, tmp_path) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http,
    ):
        trial = begin(http, http.post("/jobs", json=job()).raise_for_status().json()["job_id"])
        totals = {"time": 1, "energy": 100, "metric": 0.5, "current_epoch": 1}
        standby.control("stop")
        # At the second request, the primary has committed the first attempt locally.
        assert [report(http, trial, **totals, **OURS).status_code for _ in range(2)] == [503, 503]
        assert http.get("/health/ready").status_code == 503
        standby.control("start")
        assert report(http, trial, **totals, **OURS).status_code == 200


def test_promoted_asynchronous_standby_lacks_unreceived_transactions(
    state_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEUS_BSO_TIMEOUT_S", "4")
    outbox = Outbox(state_directory / "outbox")
    with primary_and_standby(synchronous=False) as (primary, standby), serving(primary, standby, tmp_path) as server:

        def older(point: str) -> None:
            if point == "epoch 3":
                wait_until_received(primary)
                standby.control("stop")
            elif point == "epoch 4":
                assert plain(server.url, job_of("newer"), newer)["epochs"] == EPOCHS

        def newer(point: str) -> None:
            if point == "epoch 2":
                primary.kill()

        assert plain(server.url, job_of("older"), older)["epochs"] == EPOCHS
        assert len(outbox.waiting()) == 2

        standby.control("start")
        standby.control("promote")
        with BsoClient(server.url) as client:
            (known,) = client.list_jobs().jobs
            assert known.job_id == "older"
            main(["sync"])
            (trial,) = client.show_job("older").trials
            assert (trial.state, trial.epochs, trial.energy_j) == (TrialState.COMPLETED, EPOCHS, 10 * EPOCHS)
        assert outbox.waiting() == []
        kept = httpx.get(f"{server.url}/api/jobs/older/trials/1/epochs").json()["epochs"]
        assert [each["epoch"] for each in kept] == [1, 2, 4]
        assert len(list((state_directory / "outbox").glob("newer*.refused"))) == 1
        # The next run registers the lost job again.
        assert plain(server.url, job_of("newer"), lambda _: None)["epochs"] == EPOCHS


def wait_until_received(primary: Cluster) -> None:
    """Wait until the standby has received everything that the primary has written."""
    lag = "SELECT bool_and(flush_lsn >= pg_current_wal_lsn()) FROM pg_stat_replication"

    async def run() -> None:
        engine = create_async_engine(primary.url)
        async with asyncio.timeout(PATIENCE_S), engine.connect() as connection:
            while not (await connection.execute(text(lag))).scalar():
                await asyncio.sleep(0.05)
        await engine.dispose()

    asyncio.run(run())
