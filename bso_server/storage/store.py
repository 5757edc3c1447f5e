"""The store: the one place where transactions begin, share a commit, are retried, and commit.

A commit waits milliseconds for the disk, while the statements of a report take microseconds, and SQLite admits one
writer at a time. `GroupCommit` therefore lets requests share a commit: requests that arrive during a transaction wait,
and the next transaction takes all of them. No group waits for more requests; under load, groups grow because more
requests arrive during each commit. On SQLite, every write is committed in groups, except long work (`Store.patient`).
On other databases, only the items of a `Batch` (reports) are committed in groups, because no other work can avoid
waits for locks.

A request must not suffer from the other requests of its group:

- A refused request gets its own error; the other requests of its group are committed.
- If the transaction of a group fails, its requests are handled one by one, so that only the faulty request gets the
  error. But if the database is unavailable, or its SQLite file was moved away, all get the error, because the
  group may have been committed.
- A group waits for no lock. If another transaction has locked the rows of an item, the item is committed separately, in
  a transaction that may wait; later items of the same row are committed after it.
- A group that has taken too long starts no further request.
- The request of a client that disconnects is committed with its group. A request whose deadline passes while it waits
  for its group gets a timeout error, and is not executed.
- The server answers a request only after the commit.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from bso_server.core.occurrences import Listener, Outcome, TransactionDone, nobody
from bso_server.errors import BsoError, ComputeFirstError, DatabaseNotReadyError, DatabaseUnavailableError
from bso_server.storage import migrations
from bso_server.storage.database import Database
from bso_server.storage.deadlines import LONG_PATIENCE_S, MIGRATION_PATIENCE_S, PATIENCE_S, Deadline, waiting
from bso_server.storage.faults import (
    DAMAGED,
    DENIED,
    NoConnectionError,
    Retries,
    UnwritableError,
    as_unwritable,
    described,
    failure_of,
)
from bso_server.storage.sqlite import back_up, back_up_old_schema
from bso_server.storage.transaction import RowLocked, Transaction

# Turns of the event loop, a few microseconds each, before a group is closed. A request needs the same number of turns
# from the socket to `submit`, so that all requests that have reached the socket join the group.
_TURNS = 3

# Maximum number of requests in a group, which limits their wait and the size of the group's statements.
_LARGEST_GROUP = 200

# Seconds after which a group starts no further request: CPU time, because wall-clock time would make groups smaller
# when the machine is overloaded.
_LONGEST_GROUP_S = 0.05

# Maximum number of queues of waiting items that are committed at the same time, each on a connection of its own.
_LARGEST_WAITING = 4

# A request waits for computations up to this multiple of its patience for the database.
_COMPUTING = 3

# A transaction that begins later than this after the latest check of the schema checks the schema itself, in seconds.
_SCHEMA_CHECKED_S = 1.0

# Seconds between log lines about a database that accepts no writes.
_SAY_AGAIN_S = 60.0

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")
Answer = TypeVar("Answer")

Work = Callable[[Transaction], T]

logger = logging.getLogger("bso_server")


@dataclass(frozen=True, slots=True, eq=False)
class Batch(Generic[Item, Answer]):
    """Work on many items in one transaction, with few statements regardless of their number.

    Attributes:
        work: Returns an answer or an error for each item, in order. If it raises, the items are handled one by one. If
            its last argument is True, it may wait for locks. Otherwise, the outcome of an item that would have to wait,
            and of later items of the same row, is `RowLocked`.
        row_of: Row that an item changes. Items of one row keep their order.
        queue_of: Key of the queue in which an item waits; items with one key are likely to need the same locks.
    """

    work: Callable[[Transaction, Sequence[Item], bool], Sequence[Answer | Exception | RowLocked]]
    row_of: Callable[[Item], Hashable]
    queue_of: Callable[[Item], Hashable]


@dataclass(slots=True, eq=False)
class _Entry:
    """Request that waits for a group: an item of a batch or, without a batch, work of its own."""

    item: Any
    batch: Batch[Any, Any] | None
    future: asyncio.Future[Any]

    @property
    def is_over(self) -> bool:
        """True if the request's deadline has passed; False if its client disconnected, which cancels the future."""
        return self.future.done() and not self.future.cancelled()

    @property
    def row(self) -> Hashable:
        return self if self.batch is None else self.batch.row_of(self.item)

    @property
    def queue(self) -> Hashable:
        return self if self.batch is None else self.batch.queue_of(self.item)


# Outcome of a request that its group had no time to start.
_NOT_BEGUN = object()


def _in_one_transaction(group: Sequence[_Entry], waits: bool, transaction: Transaction) -> list[Any]:
    """Handle a group; return an answer or an error for each entry, in order."""
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
        # Each request publishes its own log lines and occurrences, because it may be refused on its own.
        own = Transaction(transaction.connection)
        if len(group) == 1:
            return [(entry.item(own), own)]
        try:
            with own.savepoint():
                outcomes[entry] = entry.item(own), own
        except BsoError as error:
            outcomes[entry] = error
    return [outcomes[entry] for entry in group]


class GroupCommit:
    """Commits of requests in groups, one group at a time, and of items that must wait for locks, in separate queues.

    Args:
        commit: Commits a group's work in one transaction, which may wait for locks if its second argument is True.
        patience_s: Seconds after which a waiting request gets `DatabaseUnavailableError`.
    """

    def __init__(
        self, commit: Callable[[Work[list[Any]], bool], Awaitable[list[Any]]], *, patience_s: float = PATIENCE_S
    ) -> None:
        self._commit = commit
        self._patience_s = patience_s
        self._waiting: list[_Entry] = []
        self._worker: asyncio.Task[None] | None = None
        self._held: dict[Hashable, list[_Entry]] = {}
        self._held_rows: Counter[Hashable] = Counter()
        self._workers_apart: set[asyncio.Task[None]] = set()
        self._apart = asyncio.Semaphore(_LARGEST_WAITING)

    async def submit(self, item: Any, batch: Batch[Any, Any] | None = None) -> Any:
        """Commit an item of a batch, or other work, together with other requests; return its answer after the commit.

        Raises:
            DatabaseUnavailableError: The deadline has passed. The item may be committed, now or later.
            Exception: The item's own error, or its transaction's error.
        """
        loop = asyncio.get_running_loop()
        with waiting(self._patience_s) as deadline:
            entry = _Entry(item, batch, loop.create_future())
            too_late = DatabaseUnavailableError(f"not committed within {self._patience_s:g} s")
            limit = loop.call_later(deadline.left_s, _settle, entry.future, too_late)
            self._waiting.append(entry)
            if self._worker is None or self._worker.done():
                # A new context, because the worker outlives this request and must not share its deadline.
                self._worker = loop.create_task(self._work(), context=Context())
            try:
                return await entry.future
            finally:
                limit.cancel()

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
        try:
            outcomes = await self._commit(partial(_in_one_transaction, group, waits), waits)
        except DatabaseUnavailableError as error:
            outcomes = [error] * len(group)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # libraries in other languages raise errors that are no Exception
            if len(group) > 1:
                for each in group:
                    await self._take([each], waits=waits)
                return
            outcomes = [error]
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
    # The future of a client that disconnected is cancelled; its request is committed nevertheless.
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


class _Health:
    """Last known fault of a database, and when it was logged.

    Attributes:
        fault: Reason why the last write failed, or None.
        damage: The first error about damage, or None. A later successful write does not reset it, because writes to
            intact parts still succeed.
        has_other_schema: True if the last check of the schema found another version's.
        schema_checked_at: Monotonic instant of that check; infinite before the first one.
    """

    def __init__(self) -> None:
        self.fault: str | None = None
        self.damage: str | None = None
        self.has_other_schema = False
        self.schema_checked_at = math.inf
        self._said, self._say_again = "", -math.inf

    def error_of(self, error: UnwritableError, database: str) -> DatabaseUnavailableError:
        """Return the error for a request that failed with `error`; log a lasting fault at most once a minute."""
        if error.fault == DAMAGED:
            detail = f"the database {database} cannot be read or written, for {error}"
            self.damage = self.damage or detail
            then = "/health/ready is 503 until the server is started again: run bso-server db verify, restore a backup"
        else:
            detail = f"nothing can be kept in the database {database}, for {error}"
            self.fault = error.fault
            then = "every request gets 503 until that is mended"
        self.say(error.fault, f"{detail}; {then}")
        return DatabaseUnavailableError(detail, fault=error.fault)

    def mended(self, database: str) -> None:
        """Record a successful write after a fault."""
        logger.warning("the database %s accepts writes again", database)
        self.fault, self._say_again = None, -math.inf

    def say(self, fault: str, line: str) -> None:
        """Log an error about a fault, unless one about the same fault was logged within a minute."""
        now = time.monotonic()
        if fault != self._said or now > self._say_again:
            logger.error("%s", line)
            self._said, self._say_again = fault, now + _SAY_AGAIN_S


class Store:
    """The data in a database; every transaction of the server runs here.

    Args:
        database: The database.
        patience_s: Seconds after which `write` and `read` give up, including all attempts.
        listener: Notified of each transaction, and of the occurrences in committed ones.
    """

    def __init__(self, database: Database, *, patience_s: float = PATIENCE_S, listener: Listener = nobody) -> None:
        self._database = database
        self.patience_s = patience_s
        self.listener = listener
        self._is_patient = False
        self._health = _Health()
        self._computed: dict[Hashable, asyncio.Task[None]] = {}
        self._computing = asyncio.Lock()
        self._groups = GroupCommit(self._commit_group, patience_s=patience_s)

    def patient(self) -> Store:
        """Return a store of the same data with long deadlines, for work on whole jobs and for commands."""
        store = Store(self._database, patience_s=max(self.patience_s, LONG_PATIENCE_S), listener=self.listener)
        store._health, store._is_patient = self._health, True
        store._computed, store._computing = self._computed, self._computing
        return store

    @property
    def fault(self) -> str | None:
        """Reason why the last write failed, or the first error about damage, or None."""
        return self._health.fault or self._health.damage

    @property
    def is_sqlite(self) -> bool:
        """True if the database is a SQLite file."""
        return self._database.url.get_backend_name() == "sqlite"

    @property
    def description(self) -> str:
        """URL of the database as the user wrote it, without its password."""
        return described(self._database.written)

    async def write(self, work: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Execute `work` in a transaction; retry it after a deadlock, a lost connection or a collision of new jobs.

        `work` must have no effect except through the transaction, its first argument, so that the store can repeat it.
        If the connection is lost during the commit, the store repeats `work`, which may already have been committed.

        Raises:
            DatabaseUnavailableError: The database cannot be reached, aborts every attempt, does not answer in time, or
                accepts no writes. `work` may have been committed.
        """
        return await self._computing_first(lambda: self._write(lambda transaction: work(transaction, *args, **kwargs)))

    async def _computing_first(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Await an attempt, and repeat it after each computation that it needs first (`ComputeFirstError`).

        Computations take turns in a thread, and each is done once for all requests that need it. The wait for a
        computation is no wait for the database, and may last a few times as long.
        """
        deadline = Deadline(_COMPUTING * self.patience_s)
        while True:
            try:
                return await attempt()
            except ComputeFirstError as needed:
                await self._shared(needed, deadline)

    async def _shared(self, needed: ComputeFirstError, deadline: Deadline) -> None:
        task = self._computed.get(needed.key)
        if task is None:
            task = self._computed[needed.key] = asyncio.create_task(self._compute(needed), context=Context())
        done, _ = await asyncio.wait({task}, timeout=deadline.left_s)
        if not done:
            raise needed
        try:
            task.result()
        except ComputeFirstError as earlier:
            await self._shared(earlier, deadline)

    async def _compute(self, needed: ComputeFirstError) -> None:
        try:
            async with self._computing:
                compute, _ = await self._transact(needed.read, read_only=True)
                await self._write(await asyncio.to_thread(compute))
        finally:
            del self._computed[needed.key]

    async def write_in_batch(self, batch: Batch[Item, Answer], item: Item) -> Answer:
        """Execute a batch's work for an item, with other waiting items; raise like `write`, or the item's own error."""
        answer: Answer = await self._computing_first(lambda: self._groups.submit(item, batch))
        return answer

    async def read(self, work: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Execute `work`, which only reads, in a transaction that blocks no writer; retry and raise like `write`."""
        done, _ = await self._computing_first(
            lambda: self._transact(lambda transaction: work(transaction, *args, **kwargs), read_only=True)
        )
        return done

    async def _write(self, work: Work[T]) -> T:
        done: T
        if self.is_sqlite and not self._is_patient:
            # Writers of a SQLite file wait for its only lock anyway.
            done, transaction = await self._groups.submit(work)
        else:
            done, transaction = await self._transact(work)
        transaction.publish(self.listener)
        return done

    async def _commit_group(self, work: Work[list[Any]], waits: bool) -> list[Any]:
        outcomes, transaction = await self._transact(work, waits=waits)
        transaction.publish(self.listener)
        return outcomes

    async def _transact(
        self,
        work: Work[T],
        *,
        read_only: bool = False,
        waits: bool = True,
        patience_s: float | None = None,
    ) -> tuple[T, Transaction]:
        """Execute `work` as `write` does; return its result, and its transaction for publication."""
        is_maintenance = patience_s is not None  # an upgrade or a check of the database, with any schema
        alone = self._is_patient or is_maintenance
        begun, outcome = time.monotonic(), Outcome.FAILED
        is_due = self._health.has_other_schema or begun > self._health.schema_checked_at + _SCHEMA_CHECKED_S
        if is_due and not is_maintenance:
            work = self._checking_schema(work)
        with waiting(patience_s or self.patience_s, alone=alone) as deadline:
            retries = Retries(deadline)
            try:
                while True:
                    try:
                        done = await self._attempt(work, read_only=read_only, waits=waits, timeout_s=deadline.left_s)
                    except Exception as error:
                        failure = failure_of(error)
                        if failure is None:
                            if not isinstance(error, BsoError) and not is_maintenance:
                                # Perhaps another version has changed the schema.
                                with suppress(DatabaseUnavailableError):
                                    self._refuse_request(await self.current_revision())
                            raise
                        wait_s = retries.wait_s(failure, error)
                        if wait_s is None:
                            raise retries.given_up(error) from error
                        await asyncio.sleep(wait_s)
                    else:
                        retries.succeeded()
                        outcome = Outcome.COMMITTED
                        break
            except ComputeFirstError:
                outcome = Outcome.COMMITTED  # no refusal: a later transaction gives the answer
                raise
            except BsoError as error:
                is_away = isinstance(error, (DatabaseUnavailableError, DatabaseNotReadyError))
                outcome = Outcome.UNAVAILABLE if is_away else Outcome.REFUSED
                raise
            finally:
                took_s = time.monotonic() - begun
                self.listener(TransactionDone(not read_only, outcome, took_s))
        if self._health.fault is not None and not read_only:
            self._health.mended(self.description)
        return done

    def _checking_schema(self, work: Work[T]) -> Work[T]:
        def checked(transaction: Transaction) -> T:
            self._refuse_request(_current_revision(transaction))
            return work(transaction)

        return checked

    def _refuse_request(self, found: str | None) -> None:
        """Raise like `refuse_other_schema`, but without the address of the database, which clients must not see."""
        try:
            self.refuse_other_schema(found)
        except DatabaseNotReadyError as error:
            self._health.say("schema", f"{error}; every request gets 503 until then")
            raise DatabaseNotReadyError(
                "the server's database has another schema: send the request again when its operator has installed the "
                "version that fits; the server's log names both"
            ) from error

    async def _attempt(
        self, work: Work[T], *, read_only: bool, waits: bool = True, timeout_s: float
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
        """Insert and delete a row, which fails on a full disk and on a standby server.

        Raise like `write`, and also if an earlier request has found damage in the database.
        """
        if self._health.damage is not None:
            raise DatabaseUnavailableError(self._health.damage, fault=DAMAGED)
        await self.write(Transaction.write_probe, secrets.token_hex(16))

    async def migrate(self) -> None:
        """Upgrade the database to this version's schema; before that, copy a SQLite file that has an older schema.

        Raises:
            DatabaseNotReadyError: A newer version has written the schema, or the database refuses to change it.
        """
        found = await self.current_revision()
        migrations.refuse_newer(found, self.description)
        if self.is_sqlite and found not in (None, migrations.HEAD):
            await asyncio.to_thread(back_up_old_schema, Path(self._database.url.database or ""))
        try:
            await self._transact(
                lambda transaction: migrations.upgrade(transaction.connection), patience_s=MIGRATION_PATIENCE_S
            )
        except (DBAPIError, DatabaseUnavailableError) as error:
            if isinstance(error, DatabaseUnavailableError) and error.fault != DENIED:
                raise
            said = NoConnectionError(error) if isinstance(error, DBAPIError) else error.detail
            raise DatabaseNotReadyError(
                f"the database {self.description} could not be brought to schema {migrations.HEAD}: {said}. "
                "Its user needs the rights to create, change and drop tables there"
            ) from error

    async def current_revision(self) -> str | None:
        """Return the revision of the schema, or None for an empty database; raise like `read`, without retries."""
        found, _ = await self._attempt(_current_revision, read_only=True, timeout_s=self.patience_s)
        return found

    async def check_schema(self) -> None:
        """Raise `DatabaseNotReadyError` unless the database has this version's schema; retry and raise like `read`."""
        self.refuse_other_schema(await self.read(_current_revision))
        if not self.is_sqlite:
            await self.read(_use_two_sessions)

    def refuse_other_schema(self, found: str | None) -> None:
        """Raise `DatabaseNotReadyError` unless the database's revision, `found`, is this version's revision."""
        # While the revisions differ, every transaction begins with this check.
        self._health.schema_checked_at = time.monotonic()
        self._health.has_other_schema = found != migrations.HEAD
        migrations.refuse_newer(found, self.description)
        if found != migrations.HEAD:
            raise DatabaseNotReadyError(
                f"the database {self.description} is at schema {found or 'none'}, this version needs "
                f"{migrations.HEAD}; run: bso-server db upgrade --database-url '{self.description}'"
            )

    async def check_integrity(self) -> tuple[list[str], str]:
        """Return the damage that SQLite finds in tables and indexes, and the kind of damage that is not detected."""
        if not self.is_sqlite:
            tool = "let pg_amcheck or mariadb-check look for it (docs/operations.md#a-damaged-database)"
            return [], f"damage that the replay does not meet: {tool}"
        try:
            # This check includes `quick_check`, and also compares each index with its table.
            said, _ = await self._transact(
                lambda transaction: transaction.connection.exec_driver_sql("PRAGMA integrity_check").scalars().all(),
                read_only=True,
                patience_s=MIGRATION_PATIENCE_S,
            )
        except DatabaseUnavailableError as error:
            if error.fault != DAMAGED:
                raise
            return [error.detail], "damage behind the place where the check ended"
        return [
            each for each in said if each != "ok"
        ], "changed values in intact pages, because SQLite has no checksums"

    async def back_up(self, copy: Path) -> None:
        """Copy a SQLite file, see `sqlite.back_up`; for other databases, raise `ValueError`, which names their tool."""
        if not self.is_sqlite:
            raise ValueError(
                "nothing is copied, because this database has a tool of its own: pg_dump or mariadb-dump, see "
                "docs/operations.md#backup-and-restore"
            )
        await asyncio.to_thread(back_up, Path(self._database.url.database or ""), copy)

    async def close(self) -> None:
        """Close every connection."""
        for task in tuple(self._computed.values()):
            task.cancel()
        await self._database.close()


def _current_revision(transaction: Transaction) -> str | None:
    return migrations.current(transaction.connection)


def _use_two_sessions(transaction: Transaction) -> None:
    """Use a prepared statement while another connection has its session, if sessions are pooled; check the encoding."""
    engine = transaction.connection.engine
    if engine.dialect.name == "postgresql":
        encoding = transaction.connection.exec_driver_sql("SHOW server_encoding").scalar()
        if encoding not in ("UTF8", "SQL_ASCII"):
            raise DatabaseNotReadyError(f"the database's encoding is {encoding}: create it with ENCODING 'UTF8'")
    with engine.connect() as one, engine.connect() as other:
        for connection in (one, other, one):
            connection.exec_driver_sql("SELECT 1")
            if connection is one:
                one.rollback()
