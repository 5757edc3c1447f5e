"""Stored verdicts: when they are computed, read and compared, on each kind of database."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from bso_server.core.model import History
from bso_server.core.savings import JobVerdict
from bso_server.errors import DatabaseUnavailableError
from bso_server.service import verdicts
from bso_server.service.fleet import FleetReader
from bso_server.service.loading import known_job
from bso_server.service.pages import Pages
from bso_server.service.verdicts import update_all
from bso_server.service.views import Tariff
from bso_server.storage import queries, tables
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from bso_server.ui import fleet
from tests.support.exports import exported, import_lines, renamed
from tests.support.service import HOUR_S, JobService, job_service, new_job
from zeus_plugins.protocol import GP_VOI, ZEUS, TrialState

pytestmark = pytest.mark.storage


@pytest.fixture(params=[ZEUS, GP_VOI])
async def bso(store: Store, request: pytest.FixtureRequest) -> JobService:
    """A job with two runs and the stored verdict on them."""
    server = await new_job(store, policy=request.param, mab_seed=1)
    for _ in range(2):
        await server.reach(await server.suggest())
    assert await update_all(store) == 0
    return server


async def stored(server: JobService) -> JobVerdict | None:
    def read(transaction: Transaction) -> JobVerdict | None:
        kept = transaction.verdict(known_job(transaction, server.job_id))
        return kept and kept[1]

    return await server.store.read(read)


async def is_outdated(server: JobService) -> bool:
    return server.job_id in dict(await server.store.read(queries.outdated_verdicts))


async def test_only_the_end_of_a_trial_makes_a_verdict_outdated(bso: JobService) -> None:
    before = await stored(bso)
    assert before is not None
    trial = await bso.suggest()
    await bso.report(trial, cost_j=10.0)
    assert not await is_outdated(bso)
    await bso.reach(trial)
    assert await is_outdated(bso)
    assert await stored(bso) == before
    assert await update_all(bso.store) == 0
    after = await stored(bso)
    assert after is not None
    assert after.savings == (await bso.show()).savings
    assert after.savings.recurrences == before.savings.recurrences + 1


async def test_revision_and_discarded_trial_delete_the_verdict(bso: JobService) -> None:
    known = (await bso.show()).job
    await bso.service.register(known.model_copy(update={"eta_knob": 0.9, "revise": True}))
    assert await stored(bso) is None
    assert await update_all(bso.store) == 0
    await bso.discard((await bso.show()).trials[1].model_copy())
    assert await stored(bso) is None
    assert await is_outdated(bso)


async def test_imported_job_has_no_verdict_and_deleted_job_leaves_none(bso: JobService) -> None:
    copy = renamed(await exported(bso.store, bso.job_id))
    imported = (await import_lines(bso.store, copy)).job_id
    assert imported in dict(await bso.store.read(queries.outdated_verdicts))
    assert await update_all(bso.store) == 0
    await bso.service.delete_job(imported)

    def count(transaction: Transaction) -> int:
        found = sa.select(sa.func.count()).where(tables.verdicts.c.job_id == imported)
        return transaction.connection.scalar(found) or 0

    assert await bso.store.read(count) == 0


async def test_verdict_of_another_version_is_neither_read_nor_kept(bso: JobService) -> None:
    def age(transaction: Transaction) -> None:
        older = sa.update(tables.verdicts).where(tables.verdicts.c.job_id == bso.job_id)
        transaction.connection.execute(older.values(version="0/1", verdict=sa.literal("{}", sa.Text)))

    await bso.store.write(age)
    assert await stored(bso) is None
    assert (await FleetReader(bso.store.patient(), Tariff(), lambda: bso.now).read("1h", "job")).outdated == 0
    assert await stored(bso) is not None


async def test_verify_finds_a_changed_verdict(bso: JobService) -> None:
    assert await bso.differences() == []
    kept = await stored(bso)
    assert kept is not None
    view = kept.savings
    wrong = view.model_copy(
        update={"energy_j": view.energy_j.model_copy(update={"spent": 1.001 * view.energy_j.spent})}
    )

    def spoil(transaction: Transaction) -> None:
        transaction.save_verdict(known_job(transaction, bso.job_id), replace(kept, savings=wrong))

    await bso.store.write(spoil)
    (said,) = await bso.differences()
    assert said.startswith("energy_j of the stored verdict is {")
    # The next end of a trial renews the verdict.
    await bso.reach(await bso.suggest())
    assert await bso.differences() == []
    assert await update_all(bso.store) == 0
    assert await bso.differences() == []


async def test_revived_trial_is_no_contradiction(bso: JobService) -> None:
    trial = await bso.suggest()
    await bso.report(trial, cost_j=100.0)
    bso.wait(25 * HOUR_S)
    await bso.service.reap()
    assert await update_all(bso.store) == 0
    await bso.report(trial, cost_j=120.0, epoch=2)
    assert (await bso.states())[-1] is TrialState.RUNNING
    assert await bso.differences() == []


async def test_list_is_ordered_by_missed_target_then_loss_then_id(store: Store) -> None:
    servers = [await new_job(store, job_id_prefix="listed", job_id=f"listed-{name}") for name in "abcd"]
    assert await update_all(store) == 0
    troubles = dict(zip(servers, (4, 2, 1, 3), strict=True))
    for server, trouble in troubles.items():
        kept = await stored(server)
        assert kept is not None

        def save(transaction: Transaction, server: JobService, verdict: JobVerdict) -> None:
            transaction.save_verdict(known_job(transaction, server.job_id), verdict)

        await store.write(save, server, replace(kept, trouble=trouble))
    found, after = [], None
    for _ in servers:
        page = await store.read(queries.job_versions, containing="listed-", after=after, limit=1)
        after = page[0][0]
        found.append(after[1:])
    assert found == ["listed-c", "listed-b", "listed-d", "listed-a"]
    _, view = await store.read(Pages(Tariff()).jobs, containing="listed-")
    assert view is not None
    assert [line.trouble for line in view.jobs] == [1, 2, 3, 4]


class TestUpdates:
    """How much an update computes, on a database without other tests' jobs."""

    async def test_update_is_bounded_and_report_counts_the_outdated_verdicts(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(verdicts, "_TRIALS_AT_ONCE", 1)
        monkeypatch.setattr(verdicts, "_ROUNDS", 2)
        async with job_service(f"sqlite:///{tmp_path / 'bso.sqlite3'}") as server:
            for _ in range(4):
                await server.service.register(server.job.named(f"job-{_}"))
            await server.reach(await server.suggest())
            page = await FleetReader(server.store, Tariff(), lambda: server.now).read("1h", "job")
            assert page.outdated == 3
            said = fleet.headline(page).more.replace("\N{NO-BREAK SPACE}", " ")
            assert said == "The verdicts on 3 jobs do not include the latest runs yet."
            assert await update_all(server.store) == 0

    async def test_simultaneous_updates_compute_each_verdict_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        computed: list[str] = []
        begin = verdicts.verdict_on

        def counted(transaction: Transaction, job: Any) -> Callable[[], JobVerdict]:
            computed.append(job.job_id)
            return begin(transaction, job)

        monkeypatch.setattr(verdicts, "verdict_on", counted)
        async with job_service(f"sqlite:///{tmp_path / 'bso.sqlite3'}") as server:
            reader = FleetReader(server.store, Tariff(), lambda: server.now)
            await server.reach(await server.suggest())
            first, *others = (asyncio.create_task(reader.read("1h", by)) for by in ("job", "owner", "job"))
            await asyncio.sleep(0)
            first.cancel()
            pages = await asyncio.gather(*others)
            assert [page.outdated for page in pages] == [0, 0]
            assert computed == [server.job_id]

    async def test_verdicts_are_computed_in_threads_without_a_transaction(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        threads: list[str] = []

        def expectations(history: History) -> Any:  # noqa: ARG001 - the signature of the original
            threads.append(threading.current_thread().name)
            raise ArithmeticError

        async with job_service(f"sqlite:///{tmp_path / 'bso.sqlite3'}") as server:
            await server.reach(await server.suggest())
            monkeypatch.setattr(verdicts, "expectations", expectations)
            # A failure is logged, and leaves the verdict outdated.
            assert await update_all(server.store) == 1
            assert threads
            assert not any(name.startswith("bso-") for name in threads)
            assert threading.main_thread().name not in threads

    async def test_readers_get_the_earlier_verdicts_if_none_can_be_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object) -> None:
            raise DatabaseUnavailableError("full", fault="the disk is full")

        async with job_service(f"sqlite:///{tmp_path / 'bso.sqlite3'}") as server:
            await server.reach(await server.suggest())
            monkeypatch.setattr(Transaction, "save_verdict", refuse)
            page = await FleetReader(server.store, Tariff(), lambda: server.now).read("1h", "job")
            assert (page.outdated, page.total.runs) == (1, 1)
