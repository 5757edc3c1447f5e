"""Reports, and how many of them share one commit.

A report is the request that a training sends after each epoch, so it is most of what a server does. What a report costs
is its commit: the database answers only when the disk has the transaction, which takes milliseconds whatever the
transaction holds, while the statements of a report take microseconds. SQLite lets in one writer at a time, so that
separate commits would queue behind the disk; PostgreSQL and MariaDB would sync their logs once per report.

`GroupCommit` therefore lets reports share a commit: those that arrive while one transaction runs wait, and the next
transaction takes them all. No delay is added to form a group. One that arrives at an idle server starts at once, with
whatever has reached the socket together with it; under load the groups grow by themselves, because more arrives while
the disk is busy. No answer precedes its commit.

A group must not make one report suffer for another:

- A report that is refused gets its own error; `ReportBatch` judges the others and saves them.
- A transaction that fails as a whole leaves nothing behind, and its reports are taken one by one: the report that is to
  blame gets the error, the others their answers.
- While the database is away all of them get that error at once: one by one they would fare no better, only later.
- A group waits for no lock. A report whose rows somebody else has locked is left out of it and committed apart
  (`GroupCommit`), where it may wait, and so are the later reports of its trial; those of other trials go on.
- A client that leaves does not take its report back: the report is committed with its group. One whose time is over
  while it waits gets that error, and is not taken.

All reports of a group are judged in the order of their arrival, each by the rows as the one before has left them, and
written by few statements, whatever their number.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from contextvars import Context
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from bso_server.core import job as life
from bso_server.core import policy
from bso_server.core.access import Caller
from bso_server.core.history import History
from bso_server.core.job import Moment
from bso_server.core.model import OBSERVED, Report, TrialKey, TrialRecord
from bso_server.core.watch import TrialEnded
from bso_server.errors import BsoError, DatabaseUnavailableError, ReportConflictError, UnknownTrialError
from bso_server.service.loading import load_history
from bso_server.service.ownership import log_replaced, require_trial
from bso_server.service.refusals import refuse_other_registration, refuse_other_size, refuse_stale_run
from bso_server.storage.deadlines import PATIENCE_S, waiting
from bso_server.storage.rows import TRIAL_AT_REPORT, StoredEpoch, StoredJob, last_report
from bso_server.storage.transaction import RowLockedError, Transaction
from zeus_plugins.protocol import FINAL, EndReason, ReportResponse, TrainingResult, TrialState

Item = TypeVar("Item")
CommittedItem = TypeVar("CommittedItem", contravariant=True)
Answer = TypeVar("Answer")
GivenAnswer = TypeVar("GivenAnswer", covariant=True)

CallersReport = tuple[TrainingResult, Caller]
"""A report and its sender."""


def trial_of(report: CallersReport) -> TrialKey:
    """The trial that is reported on."""
    return report[0].job_id, report[0].trial_number


def job_of(report: CallersReport) -> str:
    """The job of that trial."""
    return report[0].job_id


# Turns of the event loop before a group is taken, some microseconds each: a request that has reached the socket by then
# is in the group. That many lie between the socket and `submit`.
_TURNS = 3

# One group must not grow so large that its members wait long, or that a database refuses the statement.
_LARGEST_GROUP = 200


# Jobs whose reports wait for locks at the same time. Each has a connection meanwhile; further ones queue.
_LARGEST_WAITING = 4


class Commit(Protocol[CommittedItem, GivenAnswer]):
    """Handles items in one transaction."""

    async def __call__(self, items: Sequence[CommittedItem], /, *, waits: bool) -> Sequence[GivenAnswer | Exception]:
        """Commit the items: an answer, or the error of that item alone, per item, in order.

        When this raises, nothing of the group is in force, and its items are committed one by one. Unless it `waits`,
        `RowLockedError` is the outcome of items that could not be handled without waiting for a lock, and of those of
        their rows that come after them.
        """


@dataclass(slots=True, eq=False)
class _Entry(Generic[Item, Answer]):
    item: Item
    future: asyncio.Future[Answer]

    @property
    def is_over(self) -> bool:
        """True if its sender was told that its time is over; one that has left has cancelled the future."""
        return self.future.done() and not self.future.cancelled()


class GroupCommit(Generic[Item, Answer]):
    """Hands items to `commit` in groups, one group at a time; those whose rows are locked to others, apart.

    Items that are held up queue by their `queue_of`, and each queue is committed on its own, with waiting, group by
    group. While an item is held up, later ones of the same `row_of` queue behind it.

    Args:
        commit: Handles a group in one transaction.
        row_of: What an item changes. Items of one row keep their order.
        queue_of: What rows are likely to be held up together.
        patience_s: Seconds after which an item that waits is answered with `DatabaseUnavailableError`.
    """

    def __init__(
        self,
        commit: Commit[Item, Answer],
        *,
        row_of: Callable[[Item], Hashable],
        queue_of: Callable[[Item], Hashable],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._commit = commit
        self._row_of, self._queue_of = row_of, queue_of
        self._patience_s = patience_s
        self._waiting: list[_Entry[Item, Answer]] = []
        self._worker: asyncio.Task[None] | None = None
        self._held: dict[Hashable, list[_Entry[Item, Answer]]] = {}
        self._held_rows: Counter[Hashable] = Counter()
        self._workers_apart: set[asyncio.Task[None]] = set()
        self._apart = asyncio.Semaphore(_LARGEST_WAITING)

    async def submit(self, item: Item) -> Answer:
        """Commit an item with others; the answer comes after the commit.

        Raises:
            DatabaseUnavailableError: It did not come in time. The item may be in force, or come to be.
            Exception: The item's own error, or that of its transaction.
        """
        loop = asyncio.get_running_loop()
        with waiting(self._patience_s) as deadline:
            entry: _Entry[Item, Answer] = _Entry(item, loop.create_future())
            limit = loop.call_later(deadline.left_s, self._give_up, entry.future)
            self._waiting.append(entry)
            if self._worker is None or self._worker.done():
                # It outlives this request, whose deadline is not that of the groups.
                self._worker = loop.create_task(self._work(), context=Context())
            try:
                return await entry.future
            finally:
                limit.cancel()

    def _give_up(self, future: asyncio.Future[Answer]) -> None:
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
            self._held_rows -= Counter(self._row_of(each.item) for each in group)
        del self._held[queue]

    def _hold(self, entries: Sequence[_Entry[Item, Answer]]) -> None:
        for entry in entries:
            queue = self._queue_of(entry.item)
            self._held_rows[self._row_of(entry.item)] += 1
            if queue not in self._held:
                self._held[queue] = []
                worker = asyncio.create_task(self._work_apart(queue))
                self._workers_apart.add(worker)
                worker.add_done_callback(self._workers_apart.discard)
            self._held[queue].append(entry)

    async def _take(self, group: Sequence[_Entry[Item, Answer]], *, waits: bool) -> None:
        if self._held_rows and not waits:
            self._hold([each for each in group if self._row_of(each.item) in self._held_rows])
            group = [each for each in group if self._row_of(each.item) not in self._held_rows]
        group = [each for each in group if not each.is_over]
        if not group:
            return
        outcomes: Sequence[Answer | Exception]
        try:
            outcomes = await self._commit([each.item for each in group], waits=waits)
        except Exception as error:
            if len(group) > 1:
                # One of them is to blame: the others must not suffer for it.
                for each in group:
                    await self._take([each], waits=waits)
                return
            outcomes = [error]
        held = []
        for entry, outcome in zip(group, outcomes, strict=True):
            if isinstance(outcome, RowLockedError):
                held.append(entry)
            else:
                _settle(entry.future, outcome)
        self._hold(held)


def _settle(future: asyncio.Future[Answer], outcome: Answer | Exception) -> None:
    # A client that left has cancelled its future; what it sent is committed all the same.
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


class ReportBatch:
    """The reports that one transaction takes, in the order of their arrival, and the rows that they lock.

    Unless it `waits`, rows that other transactions have locked are left alone: `take` says which reports need them.
    """

    def __init__(
        self, transaction: Transaction, reports: Sequence[CallersReport], moment: Moment, *, waits: bool = True
    ) -> None:
        self._transaction = transaction
        self._reports = reports
        self._moment = moment
        self._skips = not waits and transaction.can_skip
        # Jobs that others have locked, as far as they had to be locked.
        self._jobs_of_others: set[str] = set()
        found = transaction.locked_trials(set(map(trial_of, reports)), skip=self._skips)
        self._jobs_before = {job.job_id: job for job, _ in found.values()}
        self._trials_before = {key: trial for key, (_, trial) in found.items()}
        self._histories: dict[str, History] = {}

    def take(self) -> list[ReportResponse | Exception]:
        """Record where trials stand, and decide whether each goes on.

        A report sent again gets the same answer again. A late report brings an abandoned trial back to life. With
        Zeus's client every rank reports: the reports of one epoch are one evaluation, which the first of them decides
        and whose largest totals count.

        Returns:
            For each report in order its answer, or its own error: UnknownTrialError, no such trial; InvalidReportError,
            it contradicts the trial or what that reported before; ReportConflictError, the trial has ended, and not
            with this report; ForbiddenError, the trial is another caller's, and this one is no administrator;
            RowLockedError, its rows are locked by others, or it comes after a report of its trial whose rows are.
        """
        with_bounds_to_come = {
            trial.job_id
            for trial in self._trials_before.values()
            if policy.needs_bound(self._jobs_before[trial.job_id].registration, trial)
        }
        if with_bounds_to_come:
            # Bounds rest on the job's history, which must not move on while it is read.
            self._lock_jobs(self._jobs_before)
            for job_id in with_bounds_to_come - self._jobs_of_others:
                self._histories[job_id], _ = load_history(self._transaction, self._jobs_before[job_id])
        answers = self._judge()
        if self._changed_jobs and not self._transaction.locks_jobs_with_trials:
            # Which jobs end a trial is known only now. What the others of their trials did meanwhile may matter.
            self._lock_jobs([job.job_id for job in self._changed_jobs])
            answers = self._judge()
        self._save()
        return answers

    def _lock_jobs(self, job_ids: Collection[str]) -> None:
        """Lock these jobs, if their trials' locks have not, and take their rows as they are by then."""
        if not self._transaction.locks_jobs_with_trials:
            locked = self._transaction.locked_jobs(job_ids, skip=self._skips)
            self._jobs_before |= locked
            if self._skips:
                self._jobs_of_others |= set(job_ids) - set(locked)

    @property
    def _changed_jobs(self) -> list[StoredJob]:
        return [job for job_id, job in self._jobs.items() if job is not self._jobs_before[job_id]]

    def _judge(self) -> list[ReportResponse | Exception]:
        # Once more from what the transaction has found.
        self._jobs, self._trials = dict(self._jobs_before), dict(self._trials_before)
        self._epochs: list[StoredEpoch] = []
        self._replaced: dict[TrialKey, tuple[Caller, str]] = {}
        held_up: set[TrialKey] = set()
        answers: list[ReportResponse | Exception] = []
        for report in self._reports:
            try:
                if trial_of(report) in held_up:
                    raise RowLockedError
                answers.append(self._answer(*report))
            except RowLockedError as error:
                # Reports of one trial keep their order.
                held_up.add(trial_of(report))
                answers.append(error)
            except BsoError as error:
                answers.append(error)
        return answers

    def _answer(self, result: TrainingResult, caller: Caller) -> ReportResponse:
        trial = self._trials.get((result.job_id, result.trial_number))
        if trial is None:
            # Which it is, shows when it is waited for.
            raise RowLockedError if self._skips else UnknownTrialError(result.job_id, result.trial_number)
        job = self._jobs[trial.job_id]
        refuse_other_registration(job, result)
        refuse_other_size(trial, result.batch_size)
        owner = require_trial(self._transaction, job, trial, caller)
        refuse_stale_run(trial, result)
        if owner is not None:
            self._replaced[trial.key] = caller, owner
        report = Report(time_s=result.time, energy_j=result.energy, epoch=result.current_epoch, metric=result.metric)
        repeated = trial.state is TrialState.RUNNING and trial.last_report == report
        if repeated or trial.state in FINAL:
            return _answer_again(job, trial, report, is_zeus=result.is_zeus)
        if result.is_zeus and trial.report_count:
            if report.epoch <= trial.epoch:
                trial = life.reported_by_other_rank(job, trial, report, self._moment)
                self._trials[trial.key] = trial
                return _answer_of(job, trial)
            # Ranks measure by themselves: the first one to report an epoch may have used less than another one before.
            report = replace(
                report, time_s=max(report.time_s, trial.time_s), energy_j=max(report.energy_j, trial.energy_j)
            )
        before = job
        is_locked_out = job.job_id in self._jobs_of_others
        if is_locked_out and policy.needs_bound(job.registration, trial):
            raise RowLockedError
        job, trial, verdict = life.reported(
            job,
            trial,
            report,
            self._moment,
            history=self._histories.get(trial.job_id),
            judged_by=result.judged_by,
            energy_source=result.energy_source,
        )
        if is_locked_out and job is not before:
            raise RowLockedError
        self._jobs[trial.job_id], self._trials[trial.key] = job, trial
        if trial.ended_event is None:
            # The last report of a trial that has ended stands in its own row.
            self._epochs.append(last_report(trial))
        return ReportResponse.of(verdict)

    def _save(self) -> None:
        progressed: list[TrialRecord] = []
        moved: list[TrialRecord] = []
        for key, after in self._trials.items():
            before = self._trials_before[key]
            if after is not before:
                has_only_progressed = before.state is after.state and before.epoch_bound == after.epoch_bound
                (progressed if has_only_progressed else moved).append(after)
        self._transaction.update_trials(progressed, TRIAL_AT_REPORT)
        self._transaction.update_trials(moved)
        self._transaction.insert_epochs(self._epochs)
        self._transaction.update_jobs(self._changed_jobs)
        for key, (caller, owner) in self._replaced.items():
            log_replaced(self._transaction, *key, caller, owner)
        for trial in moved:
            if trial.ended_event is not None:
                self._transaction.tell(TrialEnded(trial.state))
                self._transaction.log("job %s trial %d: %s", trial.job_id, trial.trial_number, trial.message)


def _answer_again(job: StoredJob, trial: TrialRecord, report: Report, *, is_zeus: bool) -> ReportResponse:
    """The answer that this very report got; with Zeus's client, where every rank reports, that of the rank before."""
    repeated = trial.last_report == report
    was_refused = trial.state in FINAL - OBSERVED and trial.end_reason is not EndReason.DISCARDED
    if was_refused or not (repeated or is_zeus):
        raise ReportConflictError(
            f"trial {trial.trial_number} has ended ({trial.state}) and takes no further report",
            field="trial_number",
        )
    answer = _answer_of(job, trial)
    if repeated:
        return answer
    return answer.model_copy(update={"message": f"already reported: {answer.message}"})


def _answer_of(job: StoredJob, trial: TrialRecord) -> ReportResponse:
    """The answer to the trial's last report, from what the trial keeps of it."""
    alive = trial.state not in FINAL
    reason = EndReason.KEEP_TRAINING if alive else trial.end_reason
    if reason is EndReason.DISCARDED:
        # Not counted; yet the training has heard how it ended, and older clients do not know that reason.
        reason = _verdict_of_discarded(job, trial)
    return ReportResponse(
        stop_train=not alive,
        converged=reason is EndReason.TARGET_REACHED,
        message=trial.message or "",
        reason=reason,
        stop_rule=policy.stop_rule(job.registration, trial, job.min_cost_j) if alive else None,
    )


def _verdict_of_discarded(job: StoredJob, trial: TrialRecord) -> EndReason:
    registration = job.registration
    if trial.metric is not None and registration.is_reached_by(trial.metric):
        return EndReason.TARGET_REACHED
    return EndReason.MAX_EPOCHS_REACHED if trial.epoch >= registration.max_epochs else EndReason.EPOCH_BOUND_REACHED
