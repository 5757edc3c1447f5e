"""Work on a SQLite file that waits shares a transaction, and none suffers for another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import OperationalError

from bso_server.errors import DatabaseUnavailableError, UnknownJobError
from bso_server.storage.async_database import NoConnectionError
from bso_server.storage.database import SqliteDatabase, open_database

Work = Callable[[Connection], Any]


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

    async def behind_another(self, *works: Work, **options: float) -> list[Any]:
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
        assert await numbers.behind_another(*works, timeout_s=60.0) == [-1, -2]
        assert numbers.transactions == [[], [1], [2]]

    in_numbers(tmp_path, use)


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
