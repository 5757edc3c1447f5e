"""The server's side of `Commands`: each use case in a transaction of its own, and reports many to a transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from typing import Concatenate, ParamSpec, TypeVar

from bso_server.core.access import UNRESTRICTED, Caller
from bso_server.errors import DatabaseUnavailableError
from bso_server.service import transfer
from bso_server.service.commands import PRUNED_AT_ONCE, Commands, with_job_id
from bso_server.service.messages import JobExport
from bso_server.service.reports import CallersReport, GroupCommit, ReportBatch
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import (
    JobRegistration,
    JobSummary,
    ReportResponse,
    TrainingResult,
)

P = ParamSpec("P")
T = TypeVar("T")


class BatchSizeService:
    """Everything that the server can be asked to change. Each method answers after its commit.

    Errors are those of `Commands`; besides, each method raises `DatabaseUnavailableError` when the database stays away.
    """

    def __init__(self, store: Store, commands: Commands | None = None) -> None:
        self._store = store
        self.commands = commands or Commands()
        self._reports: GroupCommit[CallersReport, ReportResponse] = GroupCommit(self._report_all)

    async def run(self, command: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do one of `commands`, with these arguments, in a transaction of its own."""
        return await self._store.write(command, *args, **kwargs)

    async def register(
        self, registration: JobRegistration, caller: Caller = UNRESTRICTED
    ) -> tuple[JobRegistration, bool]:
        """See `Commands.register`; a registration without a job_id gets one."""
        registration = with_job_id(registration)
        # Most are registered already, and to look makes no writer wait.
        known = await self._store.read(self.commands.registered, registration, caller)
        if known is not None:
            return known, False
        return await self._store.write(self.commands.register, registration, caller)

    async def report(self, result: TrainingResult, *, caller: Caller = UNRESTRICTED) -> ReportResponse:
        """Record where a trial stands and decide whether it goes on; see `ReportBatch.take`."""
        return await self._reports.submit((result, caller))

    async def reap(self) -> int:
        """Abandon every trial whose lease has run out; their number."""
        abandoned = 0
        for job_id in await self._store.read(self.commands.jobs_to_reap):
            abandoned += await self._store.write(self.commands.reap, job_id)
        return abandoned

    async def delete_job(self, job_id: str) -> None:
        """Delete a job with all that is known of it."""
        attempts = count()
        await self._store.write(
            lambda transaction: self.commands.delete_job(transaction, job_id, again=next(attempts) > 0)
        )

    async def import_job(self, export: JobExport) -> JobSummary:
        """Create a job with its trials as another server exported it, unless its facts contradict each other."""
        job, attempts = transfer.imported(export), count()
        return await self._store.write(
            lambda transaction: self.commands.import_job(transaction, job, again=next(attempts) > 0)
        )

    async def prune(self, command: Callable[[Transaction, timedelta], int], age: timedelta) -> int:
        """Forget all that `prune_epochs` or `prune_power_profiles` of the commands forgets a part of; its number."""
        pruned = 0
        while True:
            # A transaction for each few: between two of them, others get their turn.
            deleted = await self._store.write(command, age)
            pruned += deleted
            if deleted < PRUNED_AT_ONCE:
                return pruned

    async def _report_all(self, reports: Sequence[CallersReport]) -> list[ReportResponse | Exception]:
        try:
            return await self._store.write(
                lambda transaction: ReportBatch(transaction, reports, self.commands.moment()).take()
            )
        except DatabaseUnavailableError as error:
            return [error] * len(reports)
