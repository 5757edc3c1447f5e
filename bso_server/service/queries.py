"""The use cases that only read, each a plain function over one transaction. None of them locks anything.

Those that take a `job_id` or a `trial_number` raise `UnknownJobError` or `UnknownTrialError` if there is none.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.metadata import version
from itertools import accumulate
from typing import Concatenate, ParamSpec, TypeVar

from bso_server.core import policy
from bso_server.core.model import TrialRecord
from bso_server.errors import DatabaseNotReadyError, DatabaseUnavailableError, UnknownJobError
from bso_server.service import transfer, views
from bso_server.service.loading import generator_of, known_job, known_trial, load_history
from bso_server.service.messages import (
    DEFAULT_PAGE,
    ArmList,
    EpochList,
    EventPage,
    ExportHead,
    PowerProfileList,
    VersionView,
)
from bso_server.storage import queries as store_reads
from bso_server.storage.migrations import HEAD
from bso_server.storage.rows import StoredDecision, StoredEpoch, StoredJob, StoredPowerProfile
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import Explanation, JobList, JobView, Stage, TrialPage, TrialState

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger("bso_server")

# Seconds for which a database that has taken a write counts as taking writes, unless one has failed since. Whoever asks
# each second must not wear the disk.
_WRITABLE_FOR_S = 10.0

# Trials, and roughly reports, that are read at a time for an export.
_EXPORTED_AT_ONCE = 100
_REPORTS_AT_ONCE = 1000

ExportedRows = tuple[
    Sequence[TrialRecord], Sequence[StoredEpoch], Sequence[StoredPowerProfile], Sequence[StoredDecision]
]


def list_jobs(
    transaction: Transaction,
    *,
    prefix: str | None = None,
    stage: Stage | None = None,
    limit: int | None = DEFAULT_PAGE,
    cursor: str | None = None,
) -> JobList:
    """A page of at most `limit` jobs, or all of them, ordered by id as the database orders text.

    Only those with this `job_id_prefix` and in this stage; `cursor`, from the page before, says where it begins.
    """
    most = None if limit is None else limit + 1
    found = store_reads.jobs_page(transaction, prefix=prefix, stage=stage, after=cursor, limit=most)
    jobs = tuple(views.summary(stored) for stored in found[:limit])
    return JobList(jobs=jobs, next_cursor=jobs[-1].job_id if len(found) > len(jobs) else None)


def show_job(transaction: Transaction, job_id: str, *, limit: int | None = None) -> JobView:
    """One job with its arms and its latest trials, at most so many of them; None: all."""
    stored = known_job(transaction, job_id)
    history, _ = load_history(transaction, stored)
    tallies = store_reads.tallies(transaction, job_id)
    return views.job(stored, history, tallies, store_reads.latest_trials(transaction, job_id, limit=limit))


def list_trials(
    transaction: Transaction,
    job_id: str,
    *,
    state: TrialState | None = None,
    limit: int = DEFAULT_PAGE,
    cursor: int = 0,
) -> TrialPage:
    """A page of a job's trials, perhaps only of those in one state, in order of dispatch; see `list_jobs`."""
    job = known_job(transaction, job_id).registration
    found = store_reads.trials_page(transaction, job_id, state=state, after=cursor, limit=limit + 1)
    trials = tuple(views.trial(job, each) for each in found[:limit])
    return TrialPage(trials=trials, next_cursor=trials[-1].trial_number if len(found) > limit else None)


def list_arms(transaction: Transaction, job_id: str) -> ArmList:
    """The knowledge of each batch size."""
    history, _ = load_history(transaction, known_job(transaction, job_id))
    return ArmList(arms=views.arms(history))


def list_epochs(transaction: Transaction, job_id: str, trial_number: int) -> EpochList:
    """A trial's reports, in order."""
    job, trial = known_trial(transaction, job_id, trial_number)
    return views.epochs(job.registration, trial, store_reads.epochs_of(transaction, job_id, trial_number))


def explain(transaction: Transaction, job_id: str, trial_number: int | None = None) -> Explanation:
    """The reason for a trial's batch size; without one, what would be chosen next, and why. Nothing is started.

    Raises:
        NoSurvivorError: Without a trial, as in `policy.suggest`; likewise PolicyNotInstalledError.
    """
    if trial_number is None:
        job = known_job(transaction, job_id)
        history, _ = load_history(transaction, job)
        return views.explanation_of_next(job, policy.suggest(history, generator_of(job), explains=True))
    return explanation_of(transaction, *known_trial(transaction, job_id, trial_number))


def explanation_of(transaction: Transaction, job: StoredJob, trial: TrialRecord) -> Explanation:
    """The reason for a trial's batch size, as it was kept."""
    (stored,) = store_reads.decisions_of(transaction, job.job_id, trial.trial_number, trial.trial_number) or (None,)
    return views.explanation(job, trial, None if stored is None else stored.decision)


def list_power_profiles(transaction: Transaction, job_id: str) -> PowerProfileList:
    """A job's power-limit profiles that are kept."""
    return views.power_profiles(known_job(transaction, job_id), store_reads.power_profiles_of(transaction, job_id))


def list_events(transaction: Transaction, job_id: str, *, since: int = 0, limit: int = DEFAULT_PAGE) -> EventPage:
    """The events of a job after event `since`, at most so many."""
    known_job(transaction, job_id)
    return views.events(
        store_reads.dispatched_after(transaction, job_id, since, limit),
        store_reads.ended_after(transaction, job_id, since, limit),
        since=since,
        limit=limit,
    )


def export_head(transaction: Transaction, job_id: str) -> tuple[ExportHead, int]:
    """The part of an export before the job's trials, and the number of those."""
    stored = known_job(transaction, job_id)
    return transfer.head_of(stored), stored.trial_count


def export_trials(transaction: Transaction, job_id: str, after: int, last: int) -> ExportedRows:
    """A few of the trials after this one, or one with many reports, with all that is kept of them; none after `last`.

    Raises:
        UnknownJobError: The job was deleted meanwhile.
    """
    found = store_reads.trials_page(transaction, job_id, state=None, after=after, limit=_EXPORTED_AT_ONCE)
    sums = accumulate(trial.report_count for trial in found)
    few = [trial for trial, sum_ in zip(found, sums, strict=True) if sum_ <= _REPORTS_AT_ONCE] or found[:1]
    trials = [trial for trial in few if trial.trial_number <= last]
    if not trials:
        raise UnknownJobError(job_id)
    between = trials[0].trial_number, trials[-1].trial_number
    return (
        trials,
        store_reads.epochs_between(transaction, job_id, *between),
        store_reads.power_profiles_of(transaction, job_id, *between),
        store_reads.decisions_of(transaction, job_id, *between),
    )


def version_view() -> VersionView:
    """The running version."""
    return VersionView(version=version("zeus-plugins"), schema_revision=HEAD)


def _exported(rows: ExportedRows, *, is_first: bool) -> bytes:
    return transfer.lines(transfer.exported(*rows), is_first=is_first).encode()


class JobReader:
    """Answers the queries of this module for many callers at once.

    Args:
        store: The database.
        patience_s: Seconds after which a database that says nothing counts as not answering.
    """

    def __init__(self, store: Store, *, patience_s: float = 5.0) -> None:
        self._store = store
        self._patience_s = patience_s
        self._writable_until = -math.inf

    async def read(self, query: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The answer to a query, all of it of one moment."""
        return await self._store.read(query, *args, **kwargs)

    async def read_whole(self, query: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same with a query for all that is kept of a job, which may take its time."""
        return await self._store.patient().read(query, *args, **kwargs)

    async def export(self, job_id: str) -> AsyncIterator[bytes]:
        """The text of a job's export, piece by piece: everything that is kept of the job, to be imported elsewhere.

        Each piece is read on its own, so that no transaction stays open for as long as somebody takes to receive all.
        Trials that began after the first piece are left out; of the others each is of one moment, with its reports.
        """
        store = self._store.patient()
        head, last = await store.read(export_head, job_id)
        yield transfer.beginning(head).encode()
        after = 0
        while after < last:
            rows = await store.read(export_trials, job_id, after, last)
            yield await asyncio.to_thread(_exported, rows, is_first=after == 0)
            after = rows[0][-1].trial_number
        yield transfer.END.encode()

    async def check_ready(self) -> None:
        """Make sure that requests can be served.

        Raises:
            DatabaseNotReadyError: The database does not answer, has another schema, or can keep nothing.
        """
        try:
            async with asyncio.timeout(self._patience_s):
                await self._store.check_schema()
                if self._store.fault is not None or time.monotonic() > self._writable_until:
                    await self._store.check_writable()
                    self._writable_until = time.monotonic() + _WRITABLE_FOR_S
        except DatabaseNotReadyError as error:
            logger.warning("not ready: %s", error)
            raise DatabaseNotReadyError("the database has another schema; the server's log names both") from error
        except Exception as error:
            # Whatever it is, it would befall every request; where the database is, is not everybody's business.
            said = error.detail if isinstance(error, DatabaseUnavailableError) else f"{type(error).__name__}: {error}"
            logger.warning("not ready: %s", said)
            fault = error.fault if isinstance(error, DatabaseUnavailableError) else None
            reason = "the database does not answer" if fault is None else f"nothing can be kept, for {fault}"
            raise DatabaseNotReadyError(f"{reason}; the server's log says why") from error
