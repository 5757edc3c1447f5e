"""Group commit: requests share transactions without affecting each other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from bso_server.core.occurrences import Occurrence, Outcome, TransactionDone
from bso_server.errors import DatabaseUnavailableError, UnknownJobError
from bso_server.storage import store as store_module
from bso_server.storage.database import open_database
from bso_server.storage.migrations import HEAD
from bso_server.storage.store import Batch, GroupCommit, Store, Work
from bso_server.storage.transaction import RowLocked, Transaction


class Doubler:
    """Double numbers, refuse 13, and fail any group that contains 0.

    Rows in `locked` are doubled only in groups that wait, once `lock` is open. Numbers that differ only in
    their sign share a row, and numbers with the same last digit share a queue.
    """

    def __init__(self, locked: Collection[int] = (), *, patience_s: float = 60.0) -> None:
        self.groups: list[list[int]] = []
        self.waited: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.locked = set(locked)
        self.lock = asyncio.Event()
        self._commits = GroupCommit(self._commit, patience_s=patience_s)
        self._batch = Batch(self._double, row_of=abs, queue_of=lambda item: abs(item) % 10)

    async def submit(self, item: int) -> int:
        answer: int = await self._commits.submit(item, self._batch)
        return answer

    async def outcomes(self, *items: int) -> list[int | BaseException]:
        return await asyncio.gather(*map(self.submit, items), return_exceptions=True)

    async def _commit(self, work: Work[list[Any]], waits: bool) -> list[Any]:
        # The group is complete when its transaction begins.
        outcomes = work(cast("Transaction", None))
        await self.gate.wait()
        if waits:
            await self.lock.wait()
        if any(isinstance(outcome, RuntimeError) for outcome in outcomes):
            raise RuntimeError("the transaction failed")
        return outcomes

    def _double(
        self, _transaction: Transaction, items: Sequence[int], waits: bool
    ) -> Sequence[int | Exception | RowLocked]:
        (self.waited if waits else self.groups).append(list(items))
        return [self._outcome(item, waits=waits) for item in items]

    def _outcome(self, item: int, *, waits: bool) -> int | Exception | RowLocked:
        if item == 0:
            return RuntimeError("the transaction failed")
        if not waits and abs(item) in self.locked:
            return RowLocked.ROW_LOCKED
        return ValueError("unlucky") if item == 13 else 2 * item


async def turn(times: int) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


class TestBatches:
    async def test_items_arriving_together_share_a_group(self) -> None:
        doubler = Doubler()
        first = asyncio.create_task(doubler.submit(1))
        await turn(2)
        assert await asyncio.gather(first, doubler.submit(2)) == [2, 4]
        assert doubler.groups == [[1, 2]]

    async def test_first_item_starts_at_once_and_the_rest_share_the_next_group(self) -> None:
        doubler = Doubler()
        doubler.gate.clear()
        first = asyncio.create_task(doubler.submit(1))
        await turn(5)
        assert doubler.groups == [[1]]
        rest = asyncio.create_task(doubler.outcomes(2, 3, 4))
        await asyncio.sleep(0)
        doubler.gate.set()
        assert (await first, await rest) == (2, [4, 6, 8])
        assert doubler.groups == [[1], [2, 3, 4]]

    async def test_size_of_groups_is_bounded(self) -> None:
        doubler = Doubler()
        assert await doubler.outcomes(*range(100, 550)) == [2 * item for item in range(100, 550)]
        assert [len(group) for group in doubler.groups] == [200, 200, 50]

    async def test_item_of_a_disconnected_client_is_processed(self) -> None:
        doubler = Doubler()
        doubler.gate.clear()
        client = asyncio.create_task(doubler.submit(1))
        waiting = asyncio.create_task(doubler.submit(2))
        await asyncio.sleep(0)
        client.cancel()
        doubler.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await client
        assert await waiting == 4
        assert [item for group in doubler.groups for item in group] == [1, 2]

    async def test_items_with_locked_rows_are_processed_separately_per_queue(self) -> None:
        doubler = Doubler(locked=[11, 21, 12])
        held = asyncio.create_task(doubler.outcomes(11, 5, 21, 12))
        await turn(20)
        assert doubler.groups == [[11, 5, 21, 12]]
        assert sorted(doubler.waited) == [[11, 21], [12]]
        assert await doubler.outcomes(6, 31) == [12, 62]
        assert not held.done()
        doubler.lock.set()
        assert await held == [22, 10, 42, 24]

    async def test_items_of_a_row_stay_in_order_after_an_early_unlock(self) -> None:
        doubler = Doubler(locked=[11])
        first = asyncio.create_task(doubler.submit(11))
        await turn(20)
        # The row is unlocked now, but the first item still waits for something else.
        doubler.locked.clear()
        rest = asyncio.create_task(doubler.outcomes(-11, 4))
        await turn(20)
        assert (doubler.groups, doubler.waited) == ([[11], [4]], [[11]])
        doubler.lock.set()
        assert (await first, await rest) == (22, [-22, 8])
        assert doubler.waited == [[11], [-11]]
        # No item is held up any more.
        assert await doubler.submit(11) == 22
        assert doubler.groups[-1] == [11]

    async def test_items_of_a_row_stay_in_order_in_a_failed_group(self) -> None:
        doubler = Doubler(locked=[11])
        task = asyncio.create_task(doubler.outcomes(11, -11, 0))
        await turn(20)
        assert (doubler.groups, doubler.waited) == ([[11, -11, 0], [11], [0]], [[11, -11]])
        doubler.lock.set()
        assert (await task)[:2] == [22, -22]

    async def test_expired_item_is_answered_without_processing(self) -> None:
        doubler = Doubler(patience_s=2.0)
        doubler.gate.clear()
        answers = asyncio.create_task(doubler.outcomes(1))
        await turn(5)
        late = await doubler.outcomes(2, 3)
        assert {type(answer) for answer in [*late, *await answers]} == {DatabaseUnavailableError}
        doubler.gate.set()
        assert await doubler.submit(4) == 8
        assert doubler.groups == [[1], [4]]


class Numbers:
    """Numbers in a SQLite file, with the transactions that wrote them.

    While `gate` is closed, another transaction keeps the file busy.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.gate = threading.Event()
        self.transactions: list[list[int]] = []
        self.outcomes: list[Outcome] = []

    def hear(self, occurrence: Occurrence) -> None:
        if isinstance(occurrence, TransactionDone) and occurrence.writes:
            self.outcomes.append(occurrence.outcome)

    def writing(self, number: int, error: BaseException | None = None) -> Work[int]:
        def work(transaction: Transaction) -> int:
            transaction.connection.execute(text("INSERT INTO numbers (n) VALUES (:number)"), {"number": number})
            transaction.log("wrote %d", number)
            self.transactions[-1].append(number)
            if error is not None:
                raise error
            return -number

        return work

    async def make_busy(self, *, read_only: bool = False) -> asyncio.Future[bool]:
        """Keep the writer, or one of the readers, busy until the gate opens."""
        begun = threading.Event()

        def work(_: Transaction) -> bool:
            begun.set()
            return self.gate.wait(60)

        busy = asyncio.ensure_future(self.store.read(work) if read_only else self.store.write(work))
        await asyncio.to_thread(begun.wait, 60)
        return busy

    async def behind_another(self, *works: Work[Any], store: Store | None = None) -> list[Any]:
        """Return the outcomes of works that waited while the file was busy."""
        busy = await self.make_busy()
        waiting = [asyncio.ensure_future((store or self.store).write(work)) for work in works]
        await turn(5)
        self.gate.set()
        await busy
        return await asyncio.gather(*waiting, return_exceptions=True)

    async def kept(self) -> list[int]:
        query = text("SELECT n FROM numbers ORDER BY n")
        return await self.store.read(lambda transaction: list(transaction.connection.execute(query).scalars()))


@asynccontextmanager
async def numbers_in(folder: Path, *, patience_s: float = 60.0) -> AsyncIterator[Numbers]:
    database = open_database(f"sqlite:///{folder / 'numbers.sqlite3'}", patience_s=patience_s)
    numbers = Numbers(Store(database, patience_s=patience_s))
    numbers.store.listener = numbers.hear

    def prepare(transaction: Transaction) -> None:
        transaction.connection.execute(text("CREATE TABLE numbers (n INTEGER PRIMARY KEY)"))
        # After an error, the store looks at the revision of the schema.
        transaction.connection.execute(text(f"CREATE TABLE alembic_version AS SELECT '{HEAD}' AS version_num"))

    try:
        await numbers.store.write(prepare)
        attempt: Any = numbers.store._attempt

        async def noted(work: Any, *, read_only: bool = False, **options: Any) -> Any:
            if not read_only:
                numbers.transactions.append([])
            return await attempt(work, read_only=read_only, **options)

        numbers.store._attempt = noted  # type: ignore[method-assign]
        yield numbers
    finally:
        await numbers.store.close()


@pytest.fixture
async def numbers(tmp_path: Path) -> AsyncIterator[Numbers]:
    async with numbers_in(tmp_path) as numbers:
        yield numbers


@pytest.fixture(autouse=True)
def _patient_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    # A group takes everything that waits, however slow the machine is.
    monkeypatch.setattr(store_module, "_LONGEST_GROUP_S", 3600.0)


class TestWritersOfASqliteFile:
    async def test_concurrent_works_share_a_transaction(self, tmp_path: Path) -> None:
        async with numbers_in(tmp_path) as numbers:
            assert await asyncio.gather(*(numbers.store.write(numbers.writing(n)) for n in (1, 2, 3))) == [-1, -2, -3]
            assert numbers.transactions == [[1, 2, 3]]
            assert await numbers.kept() == [1, 2, 3]

    async def test_refused_work_leaves_nothing_and_the_rest_of_the_group_is_committed(
        self, numbers: Numbers, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", "bso_server")
        refusal = UnknownJobError("mnist")
        works = numbers.writing(1), numbers.writing(2, refusal), numbers.writing(3)
        assert await numbers.behind_another(*works) == [-1, refusal, -3]
        assert numbers.transactions == [[], [1, 2, 3]]
        assert await numbers.kept() == [1, 3]
        assert [line for line in caplog.messages if line.startswith("wrote")] == ["wrote 1", "wrote 3"]

    async def test_failed_transaction_is_repeated_separately_for_each_work(self, numbers: Numbers) -> None:
        fault = OperationalError("INSERT", None, Exception("no such column"))
        works = numbers.writing(1), numbers.writing(2, fault), numbers.writing(3)
        assert await numbers.behind_another(*works) == [-1, fault, -3]
        assert numbers.transactions == [[], [1, 2], [1], [2], [3]]
        assert await numbers.kept() == [1, 3]

    async def test_work_of_patient_callers_joins_no_group(self, numbers: Numbers) -> None:
        patient = numbers.store.patient()
        patient._attempt = numbers.store._attempt  # type: ignore[method-assign]
        works = map(numbers.writing, (1, 2))
        assert await numbers.behind_another(*works, store=patient) == [-1, -2]
        assert len(numbers.transactions) == 3
        assert await numbers.kept() == [1, 2]

    async def test_group_beyond_the_time_limit_accepts_no_more_work(
        self, numbers: Numbers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(store_module, "_LONGEST_GROUP_S", 0.0)
        assert await numbers.behind_another(*map(numbers.writing, (1, 2, 3))) == [-1, -2, -3]
        assert numbers.transactions == [[], [1], [2], [3]]

    async def test_group_with_a_removed_file_is_not_repeated(self, tmp_path: Path, numbers: Numbers) -> None:
        file, elsewhere = tmp_path / "numbers.sqlite3", tmp_path / "elsewhere"
        writing = numbers.writing(1)

        def and_moves(transaction: Transaction) -> None:
            writing(transaction)
            file.rename(elsewhere)

        outcomes = await numbers.behind_another(and_moves, numbers.writing(2))
        elsewhere.rename(file)
        assert [getattr(outcome, "fault", None) is not None for outcome in outcomes] == [True, True]
        assert numbers.transactions == [[], [1, 2]]
        assert await numbers.kept() == [1, 2]

    async def test_shared_transaction_is_reported_once(self, numbers: Numbers) -> None:
        await numbers.behind_another(*map(numbers.writing, (1, 2, 3)))
        with pytest.raises(UnknownJobError):
            await numbers.store.write(numbers.writing(4, UnknownJobError("mnist")))
        # One transaction prepares, one is busy, and one is shared.
        assert numbers.outcomes == [Outcome.COMMITTED, Outcome.COMMITTED, Outcome.COMMITTED, Outcome.REFUSED]

    async def test_timed_out_work_is_reported(self, tmp_path: Path) -> None:
        async with numbers_in(tmp_path, patience_s=3.0) as numbers:
            busy = await numbers.make_busy()
            with pytest.raises(DatabaseUnavailableError):
                await busy
            numbers.gate.set()
            await numbers.store.write(numbers.writing(1))
        assert numbers.outcomes == [Outcome.COMMITTED, Outcome.UNAVAILABLE, Outcome.COMMITTED]


class _Panic(BaseException):
    """Exception of a library in another language, raised when its state is corrupt."""


class TestThreads:
    async def test_worker_threads_survive_any_exception_of_a_work(self, numbers: Numbers) -> None:
        with pytest.raises(_Panic):
            await numbers.store.write(numbers.writing(1, _Panic()))
        outcomes = await numbers.behind_another(numbers.writing(2, _Panic()), numbers.writing(3))
        assert isinstance(outcomes[0], _Panic)
        assert outcomes[1] == -3

    async def test_worker_threads_end_after_their_current_work(self, numbers: Numbers) -> None:
        numbers.gate.set()
        written = [asyncio.ensure_future(numbers.store.write(numbers.writing(n))) for n in range(20)]
        await turn(10)
        await numbers.store.close()
        assert await asyncio.gather(*written) == [-n for n in range(20)]
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("bso-")]

    async def test_refused_reads_do_not_disturb_concurrent_reads(self, numbers: Numbers) -> None:
        await numbers.store.write(numbers.writing(1))

        def refused(_: Transaction) -> None:
            raise UnknownJobError("mnist")

        reads = [each for _ in range(20) for each in (numbers.kept(), numbers.store.read(refused))]
        for found in await asyncio.gather(*reads, return_exceptions=True):
            assert found == [1] or isinstance(found, UnknownJobError)

    async def test_read_does_not_wait_for_a_slow_read(self, numbers: Numbers) -> None:
        first = await numbers.make_busy(read_only=True)
        assert await numbers.kept() == []
        numbers.gate.set()
        assert await first
