"""The use cases that only read. None of them locks anything, and each answer is of one moment."""

from __future__ import annotations

import asyncio
import logging
from importlib.metadata import version

from bso_server.errors import DatabaseNotReadyError, DatabaseUnavailableError, UnknownJobError, UnknownTrialError
from bso_server.service import transfer, views
from bso_server.service.loading import load_history
from bso_server.service.messages import (
    DEFAULT_PAGE,
    MAX_PAGE,
    ArmList,
    EpochList,
    EventPage,
    JobExport,
    PowerProfileList,
    VersionView,
)
from bso_server.storage import queries as store_reads
from bso_server.storage.rows import StoredJob
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import JobList, JobSummary, JobView, Stage, TrialPage, TrialState

logger = logging.getLogger("bso_server")


def jobs_page(
    transaction: Transaction,
    *,
    prefix: str | None = None,
    stage: Stage | None = None,
    limit: int = DEFAULT_PAGE,
    cursor: str | None = None,
) -> JobList:
    """See `JobReader.list_jobs`."""
    found = store_reads.jobs_page(transaction, prefix=prefix, stage=stage, after=cursor, limit=limit + 1)
    jobs = tuple(views.summary(stored) for stored in found[:limit])
    return JobList(jobs=jobs, next_cursor=jobs[-1].job_id if len(found) > limit else None)


def shown_job(transaction: Transaction, job_id: str, *, limit: int | None = None) -> JobView:
    """See `JobReader.show_job`."""
    stored = _job(transaction, job_id)
    history, _ = load_history(transaction, stored)
    states = store_reads.trial_states(transaction, job_id)
    return views.job(stored, history, states, store_reads.latest_trials(transaction, job_id, limit=limit))


class JobReader:
    """Everything that can be looked at. Methods that take a `job_id` raise `UnknownJobError` if there is no such job.

    Args:
        store: The database.
        patience_s: Seconds after which a database that says nothing counts as not answering.
    """

    def __init__(self, store: Store, *, patience_s: float = 5.0) -> None:
        self._store = store
        self._patience_s = patience_s

    async def list_jobs(
        self,
        *,
        prefix: str | None = None,
        stage: Stage | None = None,
        limit: int = DEFAULT_PAGE,
        cursor: str | None = None,
    ) -> JobList:
        """A page of jobs, ordered by id as the database orders text.

        Args:
            prefix: Only jobs with this `job_id_prefix`.
            stage: Only jobs in this stage.
            limit: Jobs on the page.
            cursor: Where the page begins, from the page before.
        """
        return await self._store.read(
            lambda transaction: jobs_page(transaction, prefix=prefix, stage=stage, limit=limit, cursor=cursor)
        )

    async def all_jobs(self) -> JobList:
        """Every job, page by page; jobs that come and go meanwhile may or may not be among them."""
        page = await self.list_jobs(limit=MAX_PAGE)
        jobs: list[JobSummary] = list(page.jobs)
        while page.next_cursor is not None:
            page = await self.list_jobs(limit=MAX_PAGE, cursor=page.next_cursor)
            jobs += page.jobs
        return JobList(jobs=tuple(jobs))

    async def show_job(self, job_id: str, *, limit: int | None = None) -> JobView:
        """One job with its arms and its latest trials.

        Args:
            job_id: The job.
            limit: At most so many trials. None: all of them.
        """
        return await self._store.read(lambda transaction: shown_job(transaction, job_id, limit=limit))

    async def list_trials(
        self, job_id: str, *, state: TrialState | None = None, limit: int = DEFAULT_PAGE, cursor: int = 0
    ) -> TrialPage:
        """A page of a job's trials, in order of dispatch.

        Args:
            job_id: The job.
            state: Only trials in this state.
            limit: Trials on the page.
            cursor: Where the page begins, from the page before.
        """

        def read(transaction: Transaction) -> TrialPage:
            stored = _job(transaction, job_id)
            found = store_reads.trials_page(transaction, job_id, state=state, after=cursor, limit=limit + 1)
            trials = tuple(views.trial(stored.config, each) for each in found[:limit])
            return TrialPage(trials=trials, next_cursor=trials[-1].trial_number if len(found) > limit else None)

        return await self._store.read(read)

    async def list_arms(self, job_id: str) -> ArmList:
        """The knowledge of each batch size."""

        def read(transaction: Transaction) -> ArmList:
            history, _ = load_history(transaction, _job(transaction, job_id))
            return ArmList(arms=tuple(map(views.arm, history.arms.values())))

        return await self._store.read(read)

    async def list_epochs(self, job_id: str, trial_number: int) -> EpochList:
        """A trial's reports, in order.

        Raises:
            UnknownTrialError: No such trial.
        """

        def read(transaction: Transaction) -> EpochList:
            stored = _job(transaction, job_id)
            trial = store_reads.trial(transaction, job_id, trial_number)
            if trial is None:
                raise UnknownTrialError(job_id, trial_number)
            return views.epochs(stored.config, trial, store_reads.epochs_of(transaction, job_id, trial_number))

        return await self._store.read(read)

    async def list_power_profiles(self, job_id: str) -> PowerProfileList:
        """A job's power-limit profiles that are kept."""
        return await self._store.read(
            lambda transaction: views.power_profiles(
                _job(transaction, job_id), store_reads.power_profiles_of(transaction, job_id)
            )
        )

    async def list_events(self, job_id: str, *, since: int = 0, limit: int = DEFAULT_PAGE) -> EventPage:
        """The events of a job after a given one.

        Args:
            job_id: The job.
            since: The event.
            limit: At most so many.
        """

        def read(transaction: Transaction) -> EventPage:
            _job(transaction, job_id)
            return views.events(
                store_reads.dispatched_after(transaction, job_id, since, limit),
                store_reads.ended_after(transaction, job_id, since, limit),
                since=since,
                limit=limit,
            )

        return await self._store.read(read)

    async def export_job(self, job_id: str) -> JobExport:
        """A whole job, to be kept or taken to another server."""
        return await self._store.read(
            lambda transaction: transfer.exported(
                _job(transaction, job_id),
                transaction.all_trials(job_id),
                store_reads.epochs_of(transaction, job_id),
                store_reads.power_profiles_of(transaction, job_id),
            )
        )

    async def trials_csv(self, job_id: str) -> str:
        """A job's trials as a table."""
        return views.trials_csv((await self.show_job(job_id)).trials)

    async def check_ready(self) -> None:
        """Make sure that requests can be served.

        Raises:
            DatabaseNotReadyError: The database does not answer, or has another schema.
        """
        try:
            async with asyncio.timeout(self._patience_s):
                await self._store.check_schema()
        except DatabaseNotReadyError as error:
            logger.warning("not ready: %s", error)
            raise DatabaseNotReadyError("the database has another schema; the server's log names both") from error
        except Exception as error:
            # Whatever it is, it would befall every request; where the database is, is not everybody's business.
            said = f"{type(error).__name__}: {error}"
            if isinstance(error, DatabaseUnavailableError):
                said = error.detail
            logger.warning("not ready: %s", said)
            raise DatabaseNotReadyError("the database does not answer; the server's log says why") from error

    def version(self) -> VersionView:
        """The running version."""
        return VersionView(version=version("zeus-plugins"), schema_revision=self._store.needed_revision)


def _job(transaction: Transaction, job_id: str) -> StoredJob:
    stored = transaction.job(job_id)
    if stored is None:
        raise UnknownJobError(job_id)
    return stored
