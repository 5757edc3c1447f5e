"""The server's side of `Commands`: each use case in a transaction of its own, and reports many to a transaction."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Sequence
from datetime import timedelta
from itertools import count
from typing import Any, Concatenate, ParamSpec, TypeVar

from bso_server.core.access import UNRESTRICTED, Caller
from bso_server.core.watch import ReportsCommitted
from bso_server.errors import DatabaseUnavailableError
from bso_server.service.commands import PRUNED_AT_ONCE, Commands, with_job_id
from bso_server.service.imports import Imports
from bso_server.service.reports import CallersReport, GroupCommit, ReportBatch, job_of, trial_of
from bso_server.service.turns import Turns
from bso_server.storage.store import Store
from bso_server.storage.transaction import RowLockedError, Transaction
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

    Errors are those of `Commands`; besides, each method raises `DatabaseUnavailableError` when the database stays away,
    or what it needs there stays locked.
    """

    def __init__(self, store: Store, commands: Commands | None = None) -> None:
        self._store = store
        self.commands = commands or Commands()
        self.imports = Imports(store.patient(), lambda: self.commands.moment().now)
        self._turns = Turns(store.patience_s)
        self._reports: GroupCommit[CallersReport, ReportResponse] = GroupCommit(
            self._report_all, row_of=trial_of, queue_of=job_of, patience_s=store.patience_s
        )

    async def run(self, command: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do one of `commands`, with these arguments, in a transaction of its own.

        The first argument is the id of the job that it changes, or a message that holds it.
        """
        if self._store.queues_writers:
            return await self._store.write(command, *args, **kwargs)
        job: Any = args[0]
        async with self._turns.of(job if isinstance(job, str) else job.job_id):
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
        return await self.run(self.commands.register, registration, caller)

    async def report(self, result: TrainingResult, *, caller: Caller = UNRESTRICTED) -> ReportResponse:
        """Record where a trial stands and decide whether it goes on; see `ReportBatch.take`."""
        return await self._reports.submit((result, caller))

    async def reap(self) -> int:
        """Abandon every trial whose lease has run out, but for those that others have locked; their number.

        What imports have left that were broken off is removed, too.
        """
        await self.imports.remove_broken()
        abandoned = 0
        for job_id in await self._store.read(self.commands.jobs_to_reap):
            abandoned += await self._store.write_at_once(self.commands.reap, job_id)
        return abandoned

    async def delete_job(self, job_id: str) -> None:
        """Delete a job with all that is known of it."""
        attempts = count()
        await self._store.patient().write(
            lambda transaction: self.commands.delete_job(transaction, job_id, again=next(attempts) > 0)
        )

    async def import_job(self, pieces: AsyncIterable[bytes]) -> JobSummary:
        """See `Imports.run`."""
        return await self.imports.run(pieces)

    async def prune(self, command: Callable[[Transaction, timedelta], int], age: timedelta) -> int:
        """Forget all that `prune_epochs` or `prune_power_profiles` of the commands forgets a part of; its number."""
        pruned = 0
        while True:
            # A transaction for each few: between two of them, others get their turn.
            deleted = await self._store.write(command, age)
            pruned += deleted
            if deleted < PRUNED_AT_ONCE:
                return pruned

    async def _report_all(
        self, reports: Sequence[CallersReport], *, waits: bool
    ) -> Sequence[ReportResponse | Exception]:
        write = self._store.write if waits else self._store.write_at_once
        try:
            outcomes = await write(
                lambda transaction: ReportBatch(transaction, reports, self.commands.moment(), waits=waits).take()
            )
        except DatabaseUnavailableError as error:
            return [error] * len(reports)
        self._store.listener(ReportsCommitted(sum(not isinstance(each, RowLockedError) for each in outcomes)))
        return outcomes
