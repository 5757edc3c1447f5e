"""Clients, server processes and database connections die at random under load; nothing that was acknowledged is lost.

``ZEUS_TEST_CHAOS_S`` makes the test longer (seconds for each kind of database); ``ZEUS_TEST_CHAOS_SEED`` repeats the
choices of a run that failed, though not its timing.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

import pytest

from bso_server.database import open_database
from bso_server.service import BatchSizeService
from bso_server.store import Store, StoredTrial, Transaction
from tests.chaos.disasters import Scene
from tests.chaos.evidence import ALIVE, Acknowledgement, check_job, check_numbers, read_logs
from tests.chaos.jobs import JOBS
from tests.conftest import bso_server
from zeus_plugins.protocol import Origin

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(sys.platform != "linux", reason="worker processes are found by /proc"),
]

CHAOS_S = float(os.environ.get("ZEUS_TEST_CHAOS_S", "20"))
SEED = int(os.environ.get("ZEUS_TEST_CHAOS_SEED", random.getrandbits(32)))
# Acknowledgements between two disasters, at most.
LONGEST_PEACE = 40
# A suspended training may take a day to come back.
AFTER_ALL_LEASES = timedelta(days=2)

T = TypeVar("T")


def test_nothing_acknowledged_is_lost(database_url: str, tmp_path: Path) -> None:
    print(f"ZEUS_TEST_CHAOS_SEED={SEED}")
    upgrade = bso_server("db", "upgrade", "--database-url", database_url)
    assert upgrade.returncode == 0, upgrade.stderr
    acknowledged = cause_chaos(database_url, tmp_path, random.Random(SEED))  # noqa: S311 - no secret

    assert {line["kind"] for line in acknowledged} == {"dispatched", "reported", "ended"}
    check_numbers(acknowledged)
    check_jobs(database_url, acknowledged)
    let_every_job_explore(database_url)
    # The trials that were abandoned by this lose nothing either.
    check_jobs(database_url, acknowledged)


def cause_chaos(database_url: str, directory: Path, rng: random.Random) -> list[Acknowledgement]:
    """Let everything happen at least once, in another order each time; what was acknowledged meanwhile."""
    scene = Scene(database_url, directory, rng)
    end = time.monotonic() + CHAOS_S
    try:
        scene.start()
        disasters = scene.disasters()
        while True:
            for disaster in rng.sample(disasters, len(disasters)):
                scene.wait_for(rng.randint(0, LONGEST_PEACE))
                disaster()
            if time.monotonic() > end:
                break
    finally:
        scene.stop()
    return read_logs(scene.logs)


def check_jobs(database_url: str, acknowledged: list[Acknowledgement]) -> None:
    def check(transaction: Transaction) -> None:
        for job in JOBS:
            check_job(transaction, job.job_id, acknowledged)

    on_database(database_url, lambda store: store.read(check))


def let_every_job_explore(database_url: str) -> None:
    """Two days later no trial is left that a job would wait for."""

    def alive(transaction: Transaction) -> list[StoredTrial]:
        trials = [trial for job in JOBS for trial in transaction.all_trials(job.job_id)]
        return [trial for trial in trials if trial.record.state in ALIVE]

    async def ask(store: Store) -> list[Origin | None]:
        service = BatchSizeService(store, clock=lambda: datetime.now(UTC) + AFTER_ALL_LEASES)
        await service.reap()
        assert await store.read(alive) == []
        return [(await service.suggest(job.job_id)).origin for job in JOBS]

    origins = on_database(database_url, ask)
    assert set(origins) <= {Origin.EXPLORATION, Origin.BANDIT}


def on_database(database_url: str, use: Callable[[Store], Awaitable[T]]) -> T:
    """Use the database from this process."""

    async def run() -> T:
        store = Store(open_database(database_url))
        try:
            return await use(store)
        finally:
            await store.close()

    return asyncio.run(run())
