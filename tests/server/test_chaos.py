"""Random crashes of clients, servers and connections, and full disks, under load lose nothing acknowledged.

``ZEUS_TEST_CHAOS_S`` makes the test longer (seconds for each kind of database); ``ZEUS_TEST_CHAOS_SEED`` repeats the
choices of a failed run, but not its timing.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

import pytest

from bso_server.core.model import TrialRecord
from bso_server.service.commands import BatchSizeService, Commands
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from tests.chaos.disasters import Scene
from tests.chaos.evidence import Acknowledgement, check_job, check_numbers, read_logs
from tests.chaos.jobs import Job, jobs, result
from tests.support.databases import DATABASES
from tests.support.disks import small_disk
from tests.support.servers import bso_server
from tests.support.service import in_store
from zeus_plugins.protocol import ALIVE, Origin, TrainingResult, TrialEnd, TrialState

pytestmark = [
    pytest.mark.slow,
    pytest.mark.chaos,
]

CHAOS_S = float(os.environ.get("ZEUS_TEST_CHAOS_S", "5"))
SEED = int(os.environ.get("ZEUS_TEST_CHAOS_SEED", random.getrandbits(32)))
# At most this number of acknowledgements between two disasters.
LONGEST_PEACE = 40
# A suspended training may take a day to come back.
AFTER_ALL_LEASES = timedelta(days=2)
# More trials than any of the jobs needs to explore each of its batch sizes.
MANY_TRIALS = 20
VICTIMS = {"client", "server", "lease", "pause"}


@pytest.mark.parametrize("database_url", DATABASES, indirect=True, scope="module")
def test_chaos_loses_nothing_acknowledged(database_url: str, tmp_path: Path) -> None:
    cause_chaos_and_check(database_url, tmp_path, set() if database_url.startswith("sqlite") else {"connection"})


def test_chaos_with_a_full_disk_loses_nothing_acknowledged(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size="64m") as disk:
        cause_chaos_and_check(f"sqlite:///{disk / 'bso.sqlite3'}", tmp_path, {"disk"}, disk)


def cause_chaos_and_check(database_url: str, folder: Path, more_victims: set[str], disk: Path | None = None) -> None:
    """Cause chaos; assert that everything acknowledged is stored and that each job continues."""
    print(f"ZEUS_TEST_CHAOS_SEED={SEED}")
    upgrade = bso_server("db", "upgrade", "--database-url", database_url)
    assert upgrade.returncode == 0, upgrade.stderr
    scene = cause_chaos(database_url, folder, random.Random(SEED), disk)  # noqa: S311 - no secret
    assert set(+scene.struck) == VICTIMS | more_victims
    acknowledged = read_logs(scene.logs)
    assert {line["kind"] for line in acknowledged} == {"registered", "dispatched", "reported", "ended"}

    registered = {line["job_id"] for line in acknowledged if line["kind"] == "registered"}
    every_job = [job for generation in scene.generations for job in jobs(generation)]
    assert registered == {job.job_id for job in every_job}
    check_numbers(acknowledged)
    check_jobs(database_url, every_job, acknowledged)
    let_every_job_explore(database_url, every_job)
    # Acknowledged results of trials that this abandoned are still stored, too.
    check_jobs(database_url, every_job, acknowledged)


def cause_chaos(database_url: str, directory: Path, rng: random.Random, disk: Path | None) -> Scene:
    """Cause each kind of disaster at least once, then repeat them in random order until the time is over."""
    scene = Scene(database_url, directory, rng, disk)
    end = time.monotonic() + CHAOS_S
    try:
        scene.start()
        disasters = scene.disasters()
        to_come: list[Callable[[], None]] = []
        for number in count(1):
            to_come = to_come or rng.sample(disasters, len(disasters))
            scene.wait_for(rng.randint(0, LONGEST_PEACE))
            to_come.pop()()
            if number >= len(disasters) and time.monotonic() > end:
                break
        # Some jobs must be in the middle of their exploration at the end.
        scene.begin_new_jobs()
    finally:
        scene.stop()
    return scene


def check_jobs(database_url: str, every_job: list[Job], acknowledged: list[Acknowledgement]) -> None:
    def check(transaction: Transaction) -> None:
        for job in every_job:
            check_job(transaction, job.job_id, acknowledged)

    in_store(database_url, lambda store: store.read(check))


def let_every_job_explore(database_url: str, every_job: list[Job]) -> None:
    """Advance the clock by two days, so that no job waits for a trial, and let each job explore all its sizes."""

    def alive(transaction: Transaction) -> list[TrialRecord]:
        trials = [trial for job in every_job for trial in transaction.all_trials(job.job_id)]
        return [trial for trial in trials if trial.state in ALIVE]

    async def explore_all(store: Store) -> int:
        service = BatchSizeService(store, Commands(clock=lambda: datetime.now(UTC) + AFTER_ALL_LEASES))
        # The search leaves out locked trials, and a busy database closes the sessions of killed servers late.
        for _ in range(60):
            await service.reap()
            if not (left := await store.read(alive)):
                break
            await asyncio.sleep(1)
        assert left == []
        return sum([await explore(service, job) for job in every_job])

    assert in_store(database_url, explore_all) > 0


async def explore(service: BatchSizeService, job: Job) -> int:
    """Train until the job has nothing left to explore; return the number of trials."""
    for trials in range(MANY_TRIALS):
        trial = await service.transact(service.commands.begin_trial, job.job_id)
        if trial.origin is Origin.BANDIT:
            return trials
        assert trial.origin is Origin.EXPLORATION, trial
        identity = {"job_id": job.job_id, "batch_size": trial.batch_size, "trial_number": trial.trial_number}
        if trial.batch_size == job.out_of_memory:
            await service.transact(service.commands.end_trial, TrialEnd(**identity, outcome=TrialState.INFEASIBLE))
            continue
        for epoch in count(1):
            report = TrainingResult(**identity, **result(trial.batch_size, epoch))
            if (await service.reports.record_report(report)).stop_train:
                break
    raise AssertionError(f"{job.job_id} does not end exploring")
