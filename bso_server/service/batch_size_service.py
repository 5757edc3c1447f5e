"""The server's side of `Commands`: each use case in a transaction of its own, and reports many to a transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from itertools import count

from bso_server.core.access import UNRESTRICTED, Caller
from bso_server.core.job import LeasePolicy
from bso_server.errors import DatabaseUnavailableError
from bso_server.service import transfer
from bso_server.service.commands import PRUNED_AT_ONCE, Commands, utc_now, with_job_id
from bso_server.service.messages import JobExport
from bso_server.service.reports import CallersReport, GroupCommit, ReportBatch
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import (
    Heartbeat,
    HeartbeatResponse,
    JobRegistration,
    JobSummary,
    OfflineTrial,
    ReportResponse,
    TrainingResult,
    TrialDispatch,
    TrialEnd,
    TrialPowerProfile,
)


class BatchSizeService:
    """Everything that the server can be asked to change. Each method answers after its commit.

    Arguments and errors are those of the methods of `Commands`; besides, each raises `DatabaseUnavailableError` when
    the database stays away.

    Args:
        store: The database.
        leases: How long silent trials count as alive.
        crash_retries: Crashes after which a batch size that was never measured to the end counts as infeasible.
        clock: Gives the present instant, aware.
    """

    def __init__(
        self,
        store: Store,
        *,
        leases: LeasePolicy | None = None,
        crash_retries: int = 3,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        self._store = store
        self._commands = Commands(leases=leases, crash_retries=crash_retries, clock=clock)
        self._reports: GroupCommit[CallersReport, ReportResponse] = GroupCommit(self._report_all)

    async def register(self, registration: JobRegistration) -> tuple[JobRegistration, bool]:
        """See `Commands.register`; a registration without a job_id gets one."""
        registration = with_job_id(registration)
        # Most are registered already, and to look makes no writer wait.
        known = await self._store.read(lambda transaction: self._commands.registered(transaction, registration))
        if known is not None:
            return known, False
        return await self._store.write(lambda transaction: self._commands.register(transaction, registration))

    async def suggest(
        self, job_id: str, idempotency_key: str | None = None, *, caller: Caller = UNRESTRICTED
    ) -> TrialDispatch:
        """Choose a batch size and start a trial with it."""
        return await self._store.write(
            lambda transaction: self._commands.suggest(transaction, job_id, idempotency_key, caller)
        )

    async def record_offline(
        self, offline: OfflineTrial, idempotency_key: str, *, caller: Caller = UNRESTRICTED
    ) -> TrialDispatch:
        """Start a trial of a training that chose its batch size itself, because the server was away."""
        return await self._store.write(
            lambda transaction: self._commands.record_offline(transaction, offline, idempotency_key, caller)
        )

    async def report(self, result: TrainingResult, *, caller: Caller = UNRESTRICTED) -> ReportResponse:
        """Record where a trial stands and decide whether it goes on; see `ReportBatch.take`."""
        return await self._reports.submit((result, caller))

    async def end_trial(self, end: TrialEnd, *, caller: Caller = UNRESTRICTED) -> None:
        """End a trial that the server has not ended; one that has ended stays as it is."""
        await self._store.write(lambda transaction: self._commands.end_trial(transaction, end, caller))

    async def heartbeat(self, heartbeat: Heartbeat, *, caller: Caller = UNRESTRICTED) -> HeartbeatResponse:
        """Keep a trial alive; a suspended or abandoned one runs again."""
        return await self._store.write(lambda transaction: self._commands.heartbeat(transaction, heartbeat, caller))

    async def store_power_profile(self, profile: TrialPowerProfile, *, caller: Caller = UNRESTRICTED) -> None:
        """Keep what a trial's training knows of its power limits, for later trials of its size."""
        await self._store.write(lambda transaction: self._commands.store_power_profile(transaction, profile, caller))

    async def reap(self) -> int:
        """Abandon every trial whose lease has run out; their number."""
        abandoned = 0
        for job_id in await self._store.read(self._commands.jobs_to_reap):
            abandoned += await self._store.write(partial(self._commands.reap, job_id=job_id))
        return abandoned

    async def delete_job(self, job_id: str) -> None:
        """Delete a job with all that is known of it."""
        attempts = count()
        await self._store.write(
            lambda transaction: self._commands.delete_job(transaction, job_id, again=next(attempts) > 0)
        )

    async def import_job(self, export: JobExport) -> JobSummary:
        """Create a job with its trials as another server exported it.

        Raises:
            InvalidImportError: Its facts contradict each other.
        """
        job, attempts = transfer.imported(export), count()
        return await self._store.write(
            lambda transaction: self._commands.import_job(transaction, job, again=next(attempts) > 0)
        )

    async def prune_epochs(self, age: timedelta) -> int:
        """Forget reports that are older than `age`; each trial keeps its last. Their number."""
        return await self._prune(lambda transaction: self._commands.prune_epochs(transaction, age))

    async def prune_power_profiles(self, age: timedelta) -> int:
        """Forget power-limit profiles that are older than `age`; of each batch size the newest stays. Their number."""
        return await self._prune(lambda transaction: self._commands.prune_power_profiles(transaction, age))

    async def _prune(self, delete_some: Callable[[Transaction], int]) -> int:
        pruned = 0
        while True:
            # A transaction for each few: between two of them, others get their turn.
            deleted = await self._store.write(delete_some)
            pruned += deleted
            if deleted < PRUNED_AT_ONCE:
                return pruned

    async def _report_all(self, reports: Sequence[CallersReport]) -> list[ReportResponse | Exception]:
        try:
            return await self._store.write(
                lambda transaction: ReportBatch(transaction, reports, self._commands.moment()).take()
            )
        except DatabaseUnavailableError as error:
            # Every report's own error: one by one they would fare no better, only later.
            return [error] * len(reports)
