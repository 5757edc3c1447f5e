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
- A client that leaves does not take its report back: the report is committed with its group.

All reports of a group are judged in the order of their arrival, each by the rows as the one before has left them, and
written by few statements, whatever their number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from bso_server.core import job as life
from bso_server.core import policy
from bso_server.core.access import Caller
from bso_server.core.history import History
from bso_server.core.job import Moment
from bso_server.core.model import OBSERVED, Report, TrialKey, TrialRecord
from bso_server.errors import BsoError, ReportConflictError, UnknownTrialError
from bso_server.service.loading import load_history
from bso_server.service.ownership import log_replaced, require_trial
from bso_server.service.refusals import refuse_other_registration, refuse_other_size, refuse_stale_run
from bso_server.storage.rows import TRIAL_AT_REPORT, StoredEpoch, StoredJob, last_report
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import FINAL, EndReason, ReportResponse, TrainingResult, TrialState

Item = TypeVar("Item")
Answer = TypeVar("Answer")

CallersReport = tuple[TrainingResult, Caller]
"""A report and its sender."""

# Turns of the event loop before a group is taken, some microseconds each: a request that has reached the socket by then
# is in the group. That many lie between the socket and `submit`.
_TURNS = 3

# One group must not grow so large that its members wait long, or that a database refuses the statement.
_LARGEST_GROUP = 200


class GroupCommit(Generic[Item, Answer]):
    """Hands items to `commit` in groups, one group at a time.

    Args:
        commit: Handles a group in one transaction: an answer, or the error of that item alone, per item, in order. When
            it raises, nothing of the group is in force, and its items are committed one by one.
    """

    def __init__(self, commit: Callable[[Sequence[Item]], Awaitable[Sequence[Answer | Exception]]]) -> None:
        self._commit = commit
        self._waiting: list[tuple[Item, asyncio.Future[Answer]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def submit(self, item: Item) -> Answer:
        """Commit an item with others; the answer comes after the commit.

        Raises:
            Exception: The item's own error, or that of its transaction.
        """
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        while self._waiting:
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            group, self._waiting = self._waiting[:_LARGEST_GROUP], self._waiting[_LARGEST_GROUP:]
            await self._take(group)

    async def _take(self, group: Sequence[tuple[Item, asyncio.Future[Answer]]]) -> None:
        outcomes: Sequence[Answer | Exception]
        try:
            outcomes = await self._commit([item for item, _ in group])
        except Exception as error:
            if len(group) > 1:
                # One of them is to blame: the others must not suffer for it.
                for each in group:
                    await self._take([each])
                return
            outcomes = [error]
        for (_, future), outcome in zip(group, outcomes, strict=True):
            _settle(future, outcome)


def _settle(future: asyncio.Future[Answer], outcome: Answer | Exception) -> None:
    # A client that left has cancelled its future; what it sent is committed all the same.
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


class ReportBatch:
    """The reports that one transaction takes, in the order of their arrival, and the rows that they lock."""

    def __init__(self, transaction: Transaction, reports: Sequence[CallersReport], moment: Moment) -> None:
        self._transaction = transaction
        self._reports = reports
        self._moment = moment
        found = transaction.locked_trials({(result.job_id, result.trial_number) for result, _ in reports})
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
            with this report; ForbiddenError, the trial is another caller's, and this one is no administrator.
        """
        with_bounds_to_come = {
            trial.job_id
            for trial in self._trials_before.values()
            if policy.needs_bound(self._jobs_before[trial.job_id].registration, trial)
        }
        if with_bounds_to_come:
            # Bounds rest on the job's history, which must not move on while it is read.
            self._lock_jobs(self._jobs_before)
            for job_id in with_bounds_to_come:
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
            self._jobs_before |= self._transaction.locked_jobs(job_ids)

    @property
    def _changed_jobs(self) -> list[StoredJob]:
        return [job for job_id, job in self._jobs.items() if job is not self._jobs_before[job_id]]

    def _judge(self) -> list[ReportResponse | Exception]:
        # Once more from what the transaction has found.
        self._jobs, self._trials = dict(self._jobs_before), dict(self._trials_before)
        self._epochs: list[StoredEpoch] = []
        self._replaced: dict[TrialKey, tuple[Caller, str]] = {}
        answers: list[ReportResponse | Exception] = []
        for result, caller in self._reports:
            try:
                answers.append(self._answer(result, caller))
            except BsoError as error:
                answers.append(error)
        return answers

    def _answer(self, result: TrainingResult, caller: Caller) -> ReportResponse:
        trial = self._trials.get((result.job_id, result.trial_number))
        if trial is None:
            raise UnknownTrialError(result.job_id, result.trial_number)
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
        job, trial, verdict = life.reported(
            job,
            trial,
            report,
            self._moment,
            history=self._histories.get(trial.job_id),
            judged_by=result.judged_by,
            energy_source=result.energy_source,
        )
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
