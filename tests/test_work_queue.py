"""Work on a SQLite file that waits shares a transaction, and none suffers for another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, make_url, text
from sqlalchemy.exc import OperationalError

from bso_server.errors import DatabaseUnavailableError, UnknownJobError
from bso_server.storage import work_queue
from bso_server.storage.async_database import NoConnectionError
from bso_server.storage.database import SqliteDatabase, SqliteFile, open_database
from bso_server.storage.store import Store
from bso_server.storage.unwritable import UnwritableError

Work = Callable[[Connection], Any]


@pytest.fixture(autouse=True)
def _patient_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    # However slow the machine is, a group takes all that waits.
    monkeypatch.setattr(work_queue, "_LONGEST_GROUP_S", 3600.0)


class Numbers:
    """Numbers in a SQLite file, and the transactions in which they were written.

    While `gate` is closed, the thread that writes is busy.
    """

    def __init__(self, database: SqliteDatabase) -> None:
        self.database = database
        self.gate = threading.Event()
        self.transactions: list[list[int]] = []

    def writing(self, number: int, error: Exception | None = None) -> Work:
        def work(connection: Connection) -> int:
            connection.execute(text("INSERT INTO numbers (n) VALUES (:number)"), {"number": number})
            self.transactions[-1].append(number)
            if error is not None:
                raise error
            return -number

        return work

    async def make_busy(self) -> asyncio.Future[None]:
        """Keep the thread that writes busy until the gate opens."""
        begun = threading.Event()

        def work(_: Connection) -> None:
            begun.set()
            self.gate.wait(10)

        busy = asyncio.ensure_future(self.database.run(work))
        await asyncio.to_thread(begun.wait, 10)
        return busy

    async def behind_another(self, *works: Work, **options: Any) -> list[Any]:
        """The outcomes of works that have waited for a busy thread."""
        busy = await self.make_busy()
        waiting = [asyncio.ensure_future(self.database.run(work, **options)) for work in works]
        await asyncio.sleep(0)
        self.gate.set()
        await busy
        return await asyncio.gather(*waiting, return_exceptions=True)

    async def kept(self) -> list[int]:
        return await self.database.run(
            lambda connection: list(connection.execute(text("SELECT n FROM numbers ORDER BY n")).scalars()),
            read_only=True,
        )


@asynccontextmanager
async def numbers_in(folder: Path) -> AsyncIterator[Numbers]:
    database = open_database(f"sqlite:///{folder / 'numbers.sqlite3'}")
    assert isinstance(database, SqliteDatabase)
    numbers = Numbers(database)

    def prepare(connection: Connection) -> None:
        connection.execute(text("CREATE TABLE numbers (n INTEGER PRIMARY KEY)"))
        driver: Any = connection.connection.driver_connection
        driver.set_trace_callback(
            lambda statement: numbers.transactions.append([]) if statement == "BEGIN IMMEDIATE" else None
        )

    await database.run(prepare)
    try:
        yield numbers
    finally:
        await database.close()


def in_numbers(folder: Path, use: Callable[[Numbers], Awaitable[None]]) -> None:
    async def run() -> None:
        async with numbers_in(folder) as numbers:
            await use(numbers)

    asyncio.run(run())


def test_what_waits_shares_a_transaction(tmp_path: Path) -> None:
    async def use(numbers: Numbers) -> None:
        assert await numbers.behind_another(*map(numbers.writing, (1, 2, 3))) == [-1, -2, -3]
        assert numbers.transactions == [[], [1, 2, 3]]
        assert await numbers.kept() == [1, 2, 3]

    in_numbers(tmp_path, use)


def test_work_that_is_refused_leaves_nothing_behind_and_the_others_go_on(tmp_path: Path) -> None:
    async def use(numbers: Numbers) -> None:
        refusal = UnknownJobError("mnist")
        works = numbers.writing(1), numbers.writing(2, refusal), numbers.writing(3)
        assert await numbers.behind_another(*works) == [-1, refusal, -3]
        assert numbers.transactions == [[], [1, 2, 3]]
        assert await numbers.kept() == [1, 3]

    in_numbers(tmp_path, use)


def test_a_transaction_that_fails_is_repeated_for_each_work(tmp_path: Path) -> None:
    async def use(numbers: Numbers) -> None:
        fault = OperationalError("INSERT", None, Exception("disk I/O error"))
        works = numbers.writing(1), numbers.writing(2, fault), numbers.writing(3)
        assert await numbers.behind_another(*works) == [-1, fault, -3]
        assert numbers.transactions == [[], [1, 2], [1], [2], [3]]
        assert await numbers.kept() == [1, 3]

    in_numbers(tmp_path, use)


def test_work_that_may_take_long_is_in_no_group(tmp_path: Path) -> None:
    async def use(numbers: Numbers) -> None:
        works = map(numbers.writing, (1, 2))
        assert await numbers.behind_another(*works, alone=True) == [-1, -2]
        assert numbers.transactions == [[], [1], [2]]

    in_numbers(tmp_path, use)


@pytest.mark.parametrize("patience_s", [3.0, 3600.0])
def test_patient_callers_and_migrations_share_no_transaction(tmp_path: Path, patience_s: float) -> None:
    alone: list[bool] = []

    class Noting(SqliteDatabase):
        async def run(self, *args: Any, **options: Any) -> Any:
            alone.append(options["alone"])
            return await super().run(*args, **options)

    async def use() -> None:
        store = Store(Noting(SqliteFile(make_url(f"sqlite:///{tmp_path / 'bso.sqlite3'}"))), patience_s=patience_s)
        try:
            await store.migrate()
            assert alone[-1]
            await store.check_writable()
            assert not alone[-1]
            await store.patient().check_writable()
            assert alone[-1]
        finally:
            await store.close()

    asyncio.run(use())


def test_work_that_nobody_waits_for_any_more_is_not_begun(tmp_path: Path) -> None:
    async def use(numbers: Numbers) -> None:
        busy = await numbers.make_busy()
        with pytest.raises(NoConnectionError):
            await numbers.database.run(numbers.writing(1), timeout_s=0.01)
        numbers.gate.set()
        await busy
        await numbers.database.run(numbers.writing(2))
        assert await numbers.kept() == [2]

    in_numbers(tmp_path, use)


def test_work_that_nobody_waits_for_any_more_is_left_out_of_a_group_that_was_taken(tmp_path: Path) -> None:
    async def use(numbers: Numbers) -> None:
        begun, gate = threading.Event(), threading.Event()

        def slow(connection: Connection) -> int:
            begun.set()
            gate.wait(10)
            return numbers.writing(1)(connection)

        busy = await numbers.make_busy()
        group = [asyncio.ensure_future(numbers.database.run(work)) for work in (slow, numbers.writing(2))]
        await asyncio.sleep(0)
        numbers.gate.set()
        await busy
        await asyncio.to_thread(begun.wait, 10)
        group[1].cancel()
        await asyncio.sleep(0)
        gate.set()
        assert await group[0] == -1
        assert await numbers.kept() == [1]

    in_numbers(tmp_path, use)


def test_reads_that_are_refused_do_not_disturb_others(tmp_path: Path) -> None:
    async def use(numbers: Numbers) -> None:
        await numbers.database.run(numbers.writing(1))

        def refused(_: Connection) -> None:
            raise DatabaseUnavailableError("nothing to see")

        reads = [numbers.kept(), numbers.database.run(refused, read_only=True)] * 20
        for found in await asyncio.gather(*reads, return_exceptions=True):
            assert found == [1] or isinstance(found, DatabaseUnavailableError)

    in_numbers(tmp_path, use)


def test_work_in_hand_ends_before_the_threads_do(tmp_path: Path) -> None:
    async def use(numbers: Numbers) -> None:
        numbers.gate.set()
        written = [asyncio.ensure_future(numbers.database.run(numbers.writing(n))) for n in range(20)]
        await asyncio.sleep(0)
        await numbers.database.close()
        assert await asyncio.gather(*written) == [-n for n in range(20)]
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("bso-")]

    in_numbers(tmp_path, use)


def test_a_read_does_not_wait_for_a_slow_one(tmp_path: Path) -> None:
    async def use(numbers: Numbers) -> None:
        begun = threading.Event()

        def slow(_: Connection) -> bool:
            begun.set()
            return numbers.gate.wait(10)

        first = asyncio.ensure_future(numbers.database.run(slow, read_only=True))
        await asyncio.to_thread(begun.wait, 10)
        assert await numbers.kept() == []
        numbers.gate.set()
        assert await first

    in_numbers(tmp_path, use)


def test_reads_one_after_another_need_one_thread(tmp_path: Path) -> None:
    async def use(numbers: Numbers) -> None:
        for _ in range(20):
            await numbers.kept()
        assert [thread.name for thread in threading.enumerate() if thread.name.startswith("bso-reader")] == [
            "bso-reader-0"
        ]

    in_numbers(tmp_path, use)


def test_a_group_that_has_taken_long_takes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_queue, "_LONGEST_GROUP_S", 0.0)

    async def use(numbers: Numbers) -> None:
        assert await numbers.behind_another(*map(numbers.writing, (1, 2, 3))) == [-1, -2, -3]
        assert numbers.transactions == [[], [1], [2], [3]]

    in_numbers(tmp_path, use)


def test_a_group_whose_file_was_taken_away_is_not_done_twice(tmp_path: Path) -> None:
    async def use(numbers: Numbers) -> None:
        file, elsewhere = tmp_path / "numbers.sqlite3", tmp_path / "elsewhere"
        writing = numbers.writing(1)

        def and_moves(connection: Connection) -> None:
            writing(connection)
            file.rename(elsewhere)

        outcomes = await numbers.behind_another(and_moves, numbers.writing(2))
        elsewhere.rename(file)
        assert [type(outcome) for outcome in outcomes] == [UnwritableError] * 2
        assert numbers.transactions == [[], [1, 2]]
        assert await numbers.kept() == [1, 2]

    in_numbers(tmp_path, use)


class _Panic(BaseException):
    """As a library in another language raises when it finds itself broken."""


def test_threads_outlive_whatever_work_raises(tmp_path: Path) -> None:
    async def use(numbers: Numbers) -> None:
        def panics(_: Connection) -> None:
            raise _Panic

        with pytest.raises(_Panic):
            await numbers.database.run(panics)
        outcomes = await numbers.behind_another(panics, numbers.writing(1))
        assert isinstance(outcomes[0], _Panic)
        assert outcomes[1] == -1

    in_numbers(tmp_path, use)


@pytest.mark.parametrize("alone", [False, True])
def test_reads_behind_a_slow_one_are_free_for_other_threads(tmp_path: Path, alone: bool) -> None:
    async def use(numbers: Numbers) -> None:
        def slow(_: Connection) -> bool:
            return numbers.gate.wait(10)

        def run(work: Work) -> asyncio.Future[Any]:
            return asyncio.ensure_future(numbers.database.run(work, read_only=True, alone=alone))

        busy, all_busy = threading.Event(), threading.Barrier(5)

        def keeps_busy(_: Connection) -> None:
            all_busy.wait(10)
            busy.wait(10)

        before = [run(keeps_busy) for _ in range(4)]
        await asyncio.to_thread(all_busy.wait, 10)
        first, *others = run(slow), run(lambda _: 1), run(lambda _: 2)
        await asyncio.sleep(0)
        busy.set()
        await asyncio.wait([*before, *others])
        assert not first.done()
        numbers.gate.set()
        assert await first

    in_numbers(tmp_path, use)
