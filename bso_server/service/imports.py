"""Imports: a job comes in pieces and is written in small transactions, which nobody sees before the last.

All that takes time is done in a thread, a piece at a time, so that the event loop serves others meanwhile; and each
transaction is short, so that other writers have their turn.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Callable
from datetime import datetime, timedelta

from bso_server.core.registry import installed
from bso_server.errors import InvalidImportError, JobConflictError
from bso_server.service import views
from bso_server.service.messages import ExportHead
from bso_server.service.refusals import refuse_folder_name
from bso_server.service.transfer import ExportReader, ImportedJob, ImportedTrial
from bso_server.storage import imports, queries
from bso_server.storage.rows import StoredEpoch
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import JobSummary

# Rows that one transaction writes, or removes, at most.
_ROWS_AT_ONCE = 500

# Bytes that are read at a time, and trials that are remembered: some milliseconds of work.
_PIECE_BYTES = 65536
_TRIALS_AT_ONCE = 100

# After so long without anything new an import has been broken off, and its job is removed.
SILENCE = timedelta(minutes=10)
_REFRESH = SILENCE / 10

logger = logging.getLogger("bso_server")


class Imports:
    """Imports into one database.

    Args:
        store: The database.
        clock: Gives the present instant, aware.
    """

    def __init__(self, store: Store, clock: Callable[[], datetime]) -> None:
        self._store = store
        self._clock = clock

    async def run(self, pieces: AsyncIterable[bytes]) -> JobSummary:
        """Create a job with all its trials from an export; it is there as a whole or not at all.

        Raises:
            MalformedJsonError: It is no JSON.
            InvalidImportError: It is no export, or its facts contradict each other.
            JobConflictError: Its id is taken, or being imported.
            InvalidJobError: It could not be served under its id.
            PolicyNotInstalledError: Its policy is not here.
        """
        staged: _StagedJob | None = None
        reader = ExportReader()
        try:
            async for piece in _sized(pieces):
                trials = await asyncio.to_thread(reader.feed, piece)
                if staged is None and reader.head is not None:
                    job = ImportedJob(reader.head)
                    staged = _StagedJob(self._store, job, await self._begun(job.head, job.job_id), self._clock)
                if staged is not None:
                    await staged.add(await asyncio.to_thread(staged.job.take_all, trials))
            if staged is None:
                raise InvalidImportError("nothing was sent", field="body")
            return await staged.finished()
        except Exception:
            # What ends the process leaves it to `remove_broken`.
            if staged is not None:
                await self._remove(staged.job.job_id, staged.mark)
            raise

    async def remove_broken(self) -> None:
        """Remove what imports have left that were broken off, by a crash of their process for one."""
        for job_id, mark in (await self._store.read(imports.silent_since, self._clock() - SILENCE)).items():
            if await self._remove(job_id, mark):
                logger.warning("job %s: its import was broken off, and what it had written is removed", job_id)

    async def _begun(self, head: ExportHead, job_id: str) -> datetime:
        """The mark of a new import."""
        await self.remove_broken()
        mark = _mark(self._clock())
        await self._store.write(_begin, head, job_id, mark)
        return mark

    async def _remove(self, job_id: str, mark: datetime) -> bool:
        """Remove a job that is being imported, unless its import has gone on since this mark; whether that is done."""
        while True:
            after = _mark(self._clock())
            removed = await self._store.write(_remove_some, job_id, mark, after)
            if not removed:
                return removed is not None
            mark = after


class _StagedJob:
    """A job that is being imported, and the mark of its last transaction."""

    def __init__(self, store: Store, job: ImportedJob, mark: datetime, clock: Callable[[], datetime]) -> None:
        self.job, self.mark = job, mark
        self._store, self._clock = store, clock
        # Trials, with their profiles, and reports that wait until there are enough of them.
        self._trials: list[ImportedTrial] = []
        self._epochs: list[StoredEpoch] = []

    async def add(self, trials: list[ImportedTrial]) -> None:
        """Write trials, perhaps later."""
        for each in trials:
            self._trials.append(each)
            self._epochs += each.epochs
            if len(self._trials) + len(self._epochs) >= _ROWS_AT_ONCE:
                await self._write()

    async def finished(self) -> JobSummary:
        """Write what is left, and what follows from all trials: from now on the job is there."""
        await self._write()
        self.job.close()
        event = 0
        while True:
            ended = await self._store.read(queries.ended_after, self.job.job_id, event, _TRIALS_AT_ONCE)
            if not ended:
                break
            await asyncio.to_thread(self.job.fold, ended)
            event = ended[-1].ended_event or 0
            if self._clock() - self.mark > _REFRESH:
                await self._write_rows([], [])
        return await self._store.write(_finish, self.job, self.mark)

    async def _write(self) -> None:
        """Write the rows that wait, so many at a time: trials before their reports."""
        trials, self._trials = self._trials, []
        epochs, self._epochs = self._epochs, []
        await self._write_rows(trials, epochs[:_ROWS_AT_ONCE])
        for first in range(_ROWS_AT_ONCE, len(epochs), _ROWS_AT_ONCE):
            await self._write_rows([], epochs[first : first + _ROWS_AT_ONCE])

    async def _write_rows(self, trials: list[ImportedTrial], epochs: list[StoredEpoch]) -> None:
        before, after = self.mark, _mark(self._clock())
        await self._store.write(_add, self.job.job_id, trials, epochs, before=before, after=after)
        self.mark = after


async def _sized(pieces: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """The same bytes in pieces that are not too large, and an empty one as the end."""
    async for piece in pieces:
        for first in range(0, len(piece), _PIECE_BYTES):
            yield piece[first : first + _PIECE_BYTES]
    yield b""


def _mark(now: datetime) -> datetime:
    """A mark of this second that no other import has."""
    return now.replace(microsecond=secrets.randbelow(1_000_000))


def _begin(transaction: Transaction, head: ExportHead, job_id: str, mark: datetime) -> None:
    if transaction.job(job_id) is not None:
        raise JobConflictError(
            f"job {job_id!r} exists: import under another job_id, or delete the job first", field="job.job_id"
        )
    other = imports.mark_of(transaction, job_id)
    if other == mark:
        return  # Committed before the connection was lost.
    if other is not None:
        raise JobConflictError(
            f"job {job_id!r} is being imported at present: if that was broken off, it is forgotten {SILENCE} later",
            field="job.job_id",
        )
    refuse_folder_name(head.job)
    installed(head.job.policy)
    # Another server's, perhaps: nobody here has that token, so the job is open to all.
    owner = None if transaction.token(head.owner or "") is None else head.owner
    transaction.insert_job(head.job, head.created_at, owner=owner, shared=head.shared, importing_at=mark)


def _add(
    transaction: Transaction,
    job_id: str,
    trials: list[ImportedTrial],
    epochs: list[StoredEpoch],
    *,
    before: datetime,
    after: datetime,
) -> None:
    if not imports.replace_mark(transaction, job_id, before, after):
        if imports.mark_of(transaction, job_id) != after:
            raise JobConflictError(f"the import of job {job_id!r} fell silent for {SILENCE}, and was given up")
        return  # Committed before the connection was lost.
    transaction.insert_trials([each.trial for each in trials])
    transaction.insert_epochs(epochs)
    transaction.insert_power_profiles(each.power_profile for each in trials if each.power_profile is not None)
    transaction.insert_decisions(each.decision for each in trials if each.decision is not None)


def _finish(transaction: Transaction, job: ImportedJob, mark: datetime) -> JobSummary:
    if imports.replace_mark(transaction, job.job_id, mark, None):
        transaction.update_jobs([job.stored])
        job.unsaved.save(transaction, job.stored)
        transaction.log("job %s imported with %d trials", job.job_id, job.stored.trial_count)
    # Or it was committed before the connection was lost.
    stored = transaction.job(job.job_id)
    if stored is None:
        raise JobConflictError(f"the import of job {job.job_id!r} fell silent for {SILENCE}, and was given up")
    return views.summary(stored)


def _remove_some(transaction: Transaction, job_id: str, before: datetime, after: datetime) -> int | None:
    """The number of rows that are removed, 0 with the job's own; None where the import has gone on."""
    is_held = imports.replace_mark(transaction, job_id, before, after)
    # It may have been committed before the connection was lost.
    if not is_held and imports.mark_of(transaction, job_id) != after:
        return None
    return imports.remove_some(transaction, job_id, limit=_ROWS_AT_ONCE)
