"""The store: the one place where transactions begin, share a commit, are repeated, and commit.

What a write costs is its commit: the database answers only when the disk has the transaction, which takes milliseconds
whatever the transaction holds, while the statements of a report take microseconds. SQLite lets in one writer at a time,
so that separate commits would queue behind the disk; PostgreSQL and MariaDB would sync their logs once per report.

`GroupCommit` therefore lets requests share a commit: those that arrive while one transaction runs wait, and the next
transaction takes them all. No delay is added to form a group. A request that arrives at an idle server starts at
once, with whatever has reached the socket together with it; under load the groups grow by themselves, because more
arrives while the disk is busy. On SQLite everything that writes is in the groups. On other databases only the items of
a `Batch` (reports) are, because only they can be handled without waiting for locks.

A group must not make one request suffer for another:

- A request that is refused gets its own error; the others of its group go on.
- A transaction that fails as a whole leaves nothing behind, and its requests are taken one by one: the request that is
  to blame gets the error, the others their answers.
- While the database is away all of them get that error at once: one by one they would fare no better, only later. A
  transaction on a SQLite file that was taken away may be in force, and is not repeated either.
- A group waits for no lock. An item whose rows somebody else has locked is left out of it and committed apart, where it
  may wait, and so are the later items of its row; the others go on.
- A group that has taken long takes no more, and what may take long (`Store.patient`) is in no group.
- A client that leaves does not take its request back: the request is committed with its group. One whose time is over
  while it waits gets that error, and is not taken.
- No answer precedes its commit.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from bso_server.core.occurrences import Listener, Occurrence, Outcome, TransactionDone, nobody
from bso_server.errors import BsoError, DatabaseNotReadyError, DatabaseUnavailableError
from bso_server.storage import migrations
from bso_server.storage.database import Database
from bso_server.storage.deadlines import LONG_PATIENCE_S, MIGRATION_PATIENCE_S, PATIENCE_S, waiting
from bso_server.storage.faults import NoConnectionError, Retries, UnwritableError, as_unwritable, described, failure_of
from bso_server.storage.sqlite import back_up
from bso_server.storage.transaction import RowLocked, Transaction

# Turns of the event loop before a group is taken, some microseconds each: a request that has reached the socket by then
# is in the group. That many lie between the socket and `submit`.
_TURNS = 3

# One group must not grow so large that its members wait long, or that a database refuses the statement.
_LARGEST_GROUP = 200

# Seconds of CPU time: were it the clock's, groups would become smaller when the machine has too much to do.
_LONGEST_GROUP_S = 0.05

# Queues of items that wait for locks at the same time. Each has a connection meanwhile; further ones wait their turn.
_LARGEST_WAITING = 4

# A database that can keep nothing is spoken of when that begins and ends, and each time that so many seconds are over.
_SAY_AGAIN_S = 60.0

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")
Answer = TypeVar("Answer")

Work = Callable[[Transaction], T]

logger = logging.getLogger("bso_server")


@dataclass(frozen=True, slots=True, eq=False)
class Batch(Generic[Item, Answer]):
    """Work on many items in one transaction, with few statements whatever their number.

    Attributes:
        work: Returns an answer, or the error of that item alone, per item, in order. When it raises, the items are
            handled one by one. Unless its last argument says that it may wait for locks, `RowLocked` is the outcome of
            items that could not be handled without waiting, and of later items of their rows.
        row_of: The row that an item changes. Items of one row keep their order.
        queue_of: Rows with the same value are likely to be locked together; their items wait together.
    """

    work: Callable[[Transaction, Sequence[Item], bool], Sequence[Answer | Exception | RowLocked]]
    row_of: Callable[[Item], Hashable]
    queue_of: Callable[[Item], Hashable]


@dataclass(slots=True, eq=False)
class _Entry:
    """A request that waits for a group: an item of a batch, or, without a batch, work of its own."""

    item: Any
    batch: Batch[Any, Any] | None
    future: asyncio.Future[Any]
    heard: list[Occurrence] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """True if its sender was told that its time is over; one that has left has cancelled the future."""
        return self.future.done() and not self.future.cancelled()

    @property
    def row(self) -> Hashable:
        return self if self.batch is None else self.batch.row_of(self.item)

    @property
    def queue(self) -> Hashable:
        return self if self.batch is None else self.batch.queue_of(self.item)


# The outcome of a request that a group had no more time for.
_NOT_BEGUN = object()


def _in_one_transaction(group: Sequence[_Entry], waits: bool, transaction: Transaction) -> list[Any]:
    """Handle a group; return an answer or an error per entry, in order."""
    outcomes: dict[_Entry, Any] = {}
    for batch in dict.fromkeys(each.batch for each in group if each.batch is not None):
        items = [each for each in group if each.batch is batch]
        answers = batch.work(transaction, [each.item for each in items], waits)
        outcomes |= zip(items, answers, strict=True)
    ends = time.thread_time() + _LONGEST_GROUP_S
    for entry in group:
        if entry.batch is not None:
            continue
        if outcomes and time.thread_time() > ends:
            outcomes[entry] = _NOT_BEGUN
            continue
        # Each logs and tells on its own, as it may be refused on its own.
        own = Transaction(transaction.connection)
        if len(group) == 1:
            return [(entry.item(own), own)]
        try:
            with own.savepoint():
                outcomes[entry] = entry.item(own), own
        except BsoError as error:
            outcomes[entry] = error
    return [outcomes[entry] for entry in group]


Commit = Callable[[Work[list[Any]], bool, Listener], Awaitable[list[Any]]]


class GroupCommit:
    """Commits requests in groups, one group at a time; items whose rows are locked to others, apart.

    Items that are held up queue by their batch's `queue_of`, and each queue is committed on its own, with waiting,
    group by group. While an item is held up, later ones of the same row queue behind it.

    Args:
        commit: Runs a group in one transaction: work over a transaction, whether it may wait for locks, and who hears
            of the transaction.
        listener: Hears of transactions that are shared. A request that shares none hears of its own by itself.
        patience_s: Seconds after which a request that waits is answered with `DatabaseUnavailableError`.
    """

    def __init__(self, commit: Commit, listener: Listener = nobody, *, patience_s: float = PATIENCE_S) -> None:
        self._commit, self._listener = commit, listener
        self._patience_s = patience_s
        self._waiting: list[_Entry] = []
        self._worker: asyncio.Task[None] | None = None
        self._held: dict[Hashable, list[_Entry]] = {}
        self._held_rows: Counter[Hashable] = Counter()
        self._workers_apart: set[asyncio.Task[None]] = set()
        self._apart = asyncio.Semaphore(_LARGEST_WAITING)

    async def submit(self, item: Any, batch: Batch[Any, Any] | None = None) -> Any:
        """Commit an item, or work that has no batch, with others; return its answer after the commit.

        Raises:
            DatabaseUnavailableError: It did not come in time. The item may be in force, or come to be.
            Exception: The item's own error, or that of its transaction.
        """
        loop = asyncio.get_running_loop()
        with waiting(self._patience_s) as deadline:
            entry = _Entry(item, batch, loop.create_future())
            limit = loop.call_later(deadline.left_s, self._give_up, entry.future)
            self._waiting.append(entry)
            if self._worker is None or self._worker.done():
                # It outlives this request, whose deadline is not that of the groups.
                self._worker = loop.create_task(self._work(), context=Context())
            try:
                return await entry.future
            finally:
                limit.cancel()
                self._tell_of(entry)

    def _tell_of(self, entry: _Entry) -> None:
        while entry.heard:
            self._listener(entry.heard.pop(0))

    def _give_up(self, future: asyncio.Future[Any]) -> None:
        _settle(future, DatabaseUnavailableError(f"not committed within {self._patience_s:g} s"))

    async def _work(self) -> None:
        while self._waiting:
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            group, self._waiting = self._waiting[:_LARGEST_GROUP], self._waiting[_LARGEST_GROUP:]
            await self._take(group, waits=False)

    async def _work_apart(self, queue: Hashable) -> None:
        while self._held[queue]:
            async with self._apart:
                held = self._held[queue]
                group, self._held[queue] = held[:_LARGEST_GROUP], held[_LARGEST_GROUP:]
                await self._take(group, waits=True)
            self._held_rows -= Counter(each.row for each in group)
        del self._held[queue]

    def _hold(self, entries: Sequence[_Entry]) -> None:
        for entry in entries:
            self._held_rows[entry.row] += 1
            if entry.queue not in self._held:
                self._held[entry.queue] = []
                worker = asyncio.create_task(self._work_apart(entry.queue))
                self._workers_apart.add(worker)
                worker.add_done_callback(self._workers_apart.discard)
            self._held[entry.queue].append(entry)

    async def _take(self, group: Sequence[_Entry], *, waits: bool) -> None:
        if self._held_rows and not waits:
            self._hold([each for each in group if each.row in self._held_rows])
            group = [each for each in group if each.row not in self._held_rows]
        group = [each for each in group if not each.is_over]
        if not group:
            return
        # The trace of a request has its transaction, unless others share it.
        is_own = len(group) == 1 and group[0].batch is None
        listener = group[0].heard.append if is_own else self._listener
        try:
            outcomes = await self._commit(partial(_in_one_transaction, group, waits), waits, listener)
        except DatabaseUnavailableError as error:
            outcomes = [error] * len(group)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a library in another language may raise more than an Exception
            if len(group) > 1:
                for each in group:
                    await self._take([each], waits=waits)
                return
            outcomes = [error]
        finally:
            if is_own and group[0].future.done():
                self._tell_of(group[0])
        held: list[_Entry] = []
        later: list[_Entry] = []
        for entry, outcome in zip(group, outcomes, strict=True):
            if outcome is RowLocked.ROW_LOCKED:
                held.append(entry)
            elif outcome is _NOT_BEGUN:
                later.append(entry)
            else:
                _settle(entry.future, outcome)
        self._hold(held)
        self._waiting[:0] = later


def _settle(future: asyncio.Future[Any], outcome: Any) -> None:
    # A client that left has cancelled its future; what it sent is committed all the same.
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


class _Health:
    """The database's ability to keep anything, and what the log has said of it."""

    def __init__(self) -> None:
        self.fault: str | None = None
        self._say_again = -math.inf

    def error_of(self, error: UnwritableError, database: str) -> DatabaseUnavailableError:
        """Return the error of a write that failed by this one, and log it now and then."""
        detail, now = f"nothing can be kept in the database {database}, for {error}", time.monotonic()
        if error.fault != self.fault or now > self._say_again:
            logger.error("%s; every request gets 503 until that is mended", detail)
            self._say_again = now + _SAY_AGAIN_S
        self.fault = error.fault
        return DatabaseUnavailableError(detail, fault=error.fault)

    def mended(self, database: str) -> None:
        """Note that a write was kept again."""
        logger.warning("the database %s keeps what is written again", database)
        self.fault, self._say_again = None, -math.inf


class Store:
    """The project's data in a database. Commit happens in one place: when the work given to `write` has returned.

    Args:
        database: The database.
        patience_s: Seconds after which `write` and `read` give up, with all their attempts.
        listener: Hears of each transaction, and of what has happened in those that are in force.
    """

    def __init__(self, database: Database, *, patience_s: float = PATIENCE_S, listener: Listener = nobody) -> None:
        self._database = database
        self.patience_s = patience_s
        self.listener = listener
        self._is_patient = False
        self._health = _Health()
        self._groups = GroupCommit(self._commit_group, self._hear, patience_s=patience_s)

    def patient(self) -> Store:
        """Return a store of the same data for what reads or writes a whole job, and for callers in no hurry."""
        store = Store(self._database, patience_s=max(self.patience_s, LONG_PATIENCE_S), listener=self.listener)
        store._health, store._is_patient = self._health, True
        return store

    @property
    def fault(self) -> str | None:
        """The fault by which the database keeps nothing, as the last write has found it, or None."""
        return self._health.fault

    @property
    def is_sqlite(self) -> bool:
        """True if the database is a SQLite file."""
        return self._database.url.get_backend_name() == "sqlite"

    @property
    def kind(self) -> str:
        """The kind of the database and its driver, such as ``postgresql+asyncpg``."""
        return self._database.url.drivername

    @property
    def description(self) -> str:
        """The database's URL as a user would write it, without its password."""
        return described(self._database.url)

    async def write(self, work: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do `work` in a transaction, and again from the start when the database broke it off or went away.

        Databases end one of two transactions that wait for each other; the other one's rows are then free. Work that
        inserts a job at the same time as another transaction is done again, too, and then finds the job. It does
        nothing but read and write through the transaction, which comes before its other arguments, so that it can be
        repeated. When the connection was lost at the commit, it is repeated though it may be in force already.

        Raises:
            DatabaseUnavailableError: The database stays away, breaks the transaction off again and again, does not
                answer in time, or can keep nothing. `work` may be in force.
        """
        return await self._write(lambda transaction: work(transaction, *args, **kwargs), waits=True)

    async def write_at_once(
        self, work: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Do `work`, which waits for no lock of others; it does not wait behind those who do. Errors as in `write`."""
        return await self._write(lambda transaction: work(transaction, *args, **kwargs), waits=False)

    async def write_in_batch(self, batch: Batch[Item, Answer], item: Item) -> Answer:
        """Do a batch's work for an item, together with others that wait. Errors as in `write`, or the item's own."""
        answer: Answer = await self._groups.submit(item, batch)
        return answer

    async def read(self, work: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do `work`, which only reads, in a transaction that makes nobody wait; again, and errors, as in `write`."""
        done, _ = await self._transact(lambda transaction: work(transaction, *args, **kwargs), read_only=True)
        return done

    async def _write(self, work: Work[T], *, waits: bool) -> T:
        done: T
        if self.is_sqlite and not self._is_patient:
            # Writers of a file wait for its one lock anyway.
            done, transaction = await self._groups.submit(work)
        else:
            done, transaction = await self._transact(work, waits=waits)
        transaction.publish(self.listener)
        return done

    async def _commit_group(self, work: Work[list[Any]], waits: bool, listener: Listener) -> list[Any]:
        outcomes, transaction = await self._transact(work, waits=waits, listener=listener)
        transaction.publish(self.listener)
        return outcomes

    def _hear(self, occurrence: Occurrence) -> None:
        self.listener(occurrence)

    async def _transact(
        self,
        work: Work[T],
        *,
        read_only: bool = False,
        waits: bool = True,
        patience_s: float | None = None,
        listener: Listener | None = None,
    ) -> tuple[T, Transaction]:
        """Do `work` as `write` does; return its result and its transaction, which has something to publish."""
        alone = self._is_patient or patience_s is not None
        begun, outcome = time.monotonic(), Outcome.FAILED
        with waiting(patience_s or self.patience_s, alone=alone) as deadline:
            retries = Retries(deadline)
            try:
                while True:
                    try:
                        left_s = deadline.left_s
                        done = await self._attempt(work, read_only=read_only, waits=waits, timeout_s=left_s)
                    except Exception as error:
                        failure = failure_of(error)
                        if failure is None:
                            raise
                        wait_s = retries.wait_s(failure, error)
                        if wait_s is None:
                            raise retries.given_up(error) from error
                        await asyncio.sleep(wait_s)
                    else:
                        retries.succeeded()
                        outcome = Outcome.COMMITTED
                        break
            except BsoError as error:
                outcome = Outcome.UNAVAILABLE if isinstance(error, DatabaseUnavailableError) else Outcome.REFUSED
                raise
            finally:
                took_s = time.monotonic() - begun
                (listener or self.listener)(TransactionDone(not read_only, outcome, took_s, retries.repeats))
        if self.fault is not None and not read_only:
            self._health.mended(self.description)
        return done

    async def _attempt(
        self,
        work: Work[T],
        *,
        read_only: bool = False,
        waits: bool = True,
        timeout_s: float = PATIENCE_S,
    ) -> tuple[T, Transaction]:
        def work_on(connection: Connection) -> tuple[T, Transaction]:
            transaction = Transaction(connection)
            return work(transaction), transaction

        try:
            return await self._database.transact(work_on, read_only=read_only, waits=waits, timeout_s=timeout_s)
        except NoConnectionError as error:
            raise DatabaseUnavailableError(f"no connection to the database {self.description}: {error}") from error
        except (DBAPIError, UnwritableError) as error:
            fault = error if isinstance(error, UnwritableError) else as_unwritable(error)
            if fault is None:
                raise
            raise self._health.error_of(fault, self.description) from error

    async def check_writable(self) -> None:
        """Write something and take it away again, so that a full disk and a standby show.

        Raises:
            DatabaseUnavailableError: As in `write`.
        """
        await self.write(Transaction.write_probe, secrets.token_hex(16))

    async def migrate(self) -> None:
        """Bring the database to this version's schema. A SQLite file is copied first, if there is anything to lose.

        Raises:
            DatabaseNotReadyError: It was made by a newer version.
        """
        found = await self.current_revision()
        migrations.refuse_newer(found, self.description)
        if self.is_sqlite and found not in (None, migrations.HEAD):
            await asyncio.to_thread(back_up, Path(self._database.url.database or ""))
        await self._transact(
            lambda transaction: migrations.upgrade(transaction.connection), patience_s=MIGRATION_PATIENCE_S
        )

    def migration_sql(self) -> str:
        """Return the SQL that makes this version's schema in an empty database of this kind."""
        return migrations.upgrade_sql(self._database.url.get_backend_name())

    async def current_revision(self) -> str | None:
        """Return the revision of the database's schema, or None for an empty database; errors as in `read`."""
        found, _ = await self._attempt(
            lambda transaction: migrations.current(transaction.connection), read_only=True, timeout_s=self.patience_s
        )
        return found

    async def check_schema(self) -> None:
        """Make sure that the database has this version's schema.

        Raises:
            DatabaseNotReadyError: It has another one, or none.
        """
        found = await self.current_revision()
        migrations.refuse_newer(found, self.description)
        if found != migrations.HEAD:
            raise DatabaseNotReadyError(
                f"the database {self.description} is at schema {found or 'none'}, this version needs "
                f"{migrations.HEAD}; run: bso-server db upgrade --database-url '{self.description}'"
            )

    async def close(self) -> None:
        """Close every connection."""
        await self._database.close()
