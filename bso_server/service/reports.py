"""Reports: trainings send one after each epoch, so that reports are most of a server's work.

The store commits reports that wait at the same time together (`storage.store.GroupCommit`). Here the reports of a group
are judged in order of arrival, each after the changes of its predecessor, and written by few statements. A refused
report gets its own error, and the others are saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from bso_server.core import policy
from bso_server.core.access import UNRESTRICTED, Caller
from bso_server.core.job import Moment, add_rank_report, is_of_same_evaluation, judge_report
from bso_server.core.model import OBSERVED, History, Report, TrialKey, TrialRecord
from bso_server.core.occurrences import TrialEnded
from bso_server.core.revisions import is_aside
from bso_server.errors import BsoError, ReportConflictError, UnknownTrialError
from bso_server.service.loading import load_history
from bso_server.service.refusals import log_replaced, refuse_message
from bso_server.service.revisions import counted, terms_of
from bso_server.service.targets import learn_target
from bso_server.storage.rows import TRIAL_AT_REPORT, StoredEpoch, StoredJob, last_report
from bso_server.storage.store import Batch, Store
from bso_server.storage.transaction import RowLocked, Transaction
from zeus_plugins.protocol import FINAL, EndReason, ReportResponse, TrainingResult, TrialState

CallersReport = tuple[TrainingResult, Caller]
"""A report and its sender."""

Outcome = ReportResponse | BsoError | RowLocked
"""A report's answer, its refusal, or `RowLocked` if another transaction has locked its rows."""


def _trial_of(report: CallersReport) -> TrialKey:
    return report[0].job_id, report[0].trial_number


def _job_of(report: CallersReport) -> str:
    return report[0].job_id


class Reports:
    """The use case of a report; reports that wait at the same time share a transaction."""

    def __init__(self, store: Store, moment: Callable[[], Moment]) -> None:
        self._store, self._moment = store, moment
        self._batch = Batch(self._record, row_of=_trial_of, queue_of=_job_of)

    async def record_report(self, result: TrainingResult, caller: Caller = UNRESTRICTED) -> ReportResponse:
        """Record a report and return the verdict, or raise an error of `ReportBatch.take`."""
        return await self._store.write_in_batch(self._batch, (result, caller))

    def _record(self, transaction: Transaction, reports: Sequence[CallersReport], waits: bool) -> list[Outcome]:
        return ReportBatch(transaction, reports, self._moment(), waits=waits).take()


class ReportBatch:
    """The reports of one transaction, in order of arrival, and the rows that it locks.

    Unless the batch `waits`, it skips rows that other transactions have locked.
    """

    def __init__(
        self, transaction: Transaction, reports: Sequence[CallersReport], moment: Moment, *, waits: bool = True
    ) -> None:
        self._transaction = transaction
        self._reports = reports
        self._moment = moment
        self._skips = not waits and transaction.can_skip
        found = transaction.locked_trials(set(map(_trial_of, reports)), skip=self._skips)
        self._jobs_before = {job.job_id: job for job, _ in found.values()}
        self._trials_before = {key: trial for key, (_, trial) in found.items()}
        self._jobs, self._trials = dict(self._jobs_before), dict(self._trials_before)
        # By job: True after this transaction locked it, False after it failed to.
        self._has_locked = dict.fromkeys(self._jobs, True) if transaction.locks_jobs_with_trials else {}
        self._histories: dict[str, History] = {}
        self._epochs: list[StoredEpoch] = []
        self._replaced: dict[TrialKey, tuple[Caller, str]] = {}

    def take(self) -> list[Outcome]:
        """Record the reports, and return for each in order its answer, its error, or `RowLocked`.

        A repeated report gets its answer again. A late report revives an abandoned trial. Where every rank reports, as
        with Zeus's client, the reports on one evaluation (`is_of_same_evaluation`) get the answer to the first, and the
        largest totals count.

        The errors are UnknownTrialError, InvalidReportError (the report contradicts the trial or earlier reports),
        ReportConflictError (the trial has ended, not with this report), OtherRegistrationError, StaleLeaseError and
        ForbiddenError (`service.refusals`). The outcome is `RowLocked` if another transaction has locked the report's
        rows, or the rows of an earlier report of the trial.
        """
        outcomes: list[Outcome] = []
        held_up: set[TrialKey] = set()
        for report in self._reports:
            # Reports of one trial must keep their order.
            outcome = RowLocked.ROW_LOCKED if _trial_of(report) in held_up else self._outcome_of(*report)
            if outcome is RowLocked.ROW_LOCKED:
                held_up.add(_trial_of(report))
            outcomes.append(outcome)
        self._save()
        return outcomes

    def _outcome_of(self, result: TrainingResult, caller: Caller) -> Outcome:
        trial = self._trials.get((result.job_id, result.trial_number))
        if trial is None:
            # A batch that skips locked rows cannot distinguish a locked trial from a missing one.
            return RowLocked.ROW_LOCKED if self._skips else UnknownTrialError(result.job_id, result.trial_number)
        try:
            return self._judge(self._jobs[trial.job_id], trial, result, caller)
        except BsoError as error:
            return error

    def _judge(
        self, job: StoredJob, trial: TrialRecord, result: TrainingResult, caller: Caller
    ) -> ReportResponse | RowLocked:
        owner = refuse_message(self._transaction, job, trial, result, caller)
        if owner is not None:
            self._replaced[trial.key] = caller, owner
        report = Report(time_s=result.time, energy_j=result.energy, epoch=result.current_epoch, metric=result.metric)
        repeated = trial.state is TrialState.RUNNING and trial.last_report == report
        if repeated or trial.state in FINAL:
            answered = terms_of(self._transaction, job, trial)
            return _answer_again(answered, trial, report, is_of_one_rank=result.is_of_one_rank)
        if result.is_of_one_rank and trial.report_count:
            if is_of_same_evaluation(trial, report):
                trial = add_rank_report(trial, report, self._moment)
                self._trials[trial.key] = trial
                return _answer_of(terms_of(self._transaction, job, trial), trial)
            # Each rank measures on its own: the first to report an epoch may have lower totals than another rank had.
            report = replace(
                report, time_s=max(report.time_s, trial.time_s), energy_j=max(report.energy_j, trial.energy_j)
            )
        history = None
        if self._needs_bound(job, trial):
            # A bound rests on the job's history, which must not change while it is read.
            if not self._lock_job(trial.job_id):
                return RowLocked.ROW_LOCKED
            # The job may have been revised before the lock.
            if self._needs_bound(self._jobs[trial.job_id], trial):
                history = self._history_of(trial.job_id)

        def judged() -> tuple[StoredJob, TrialRecord, ReportResponse]:
            job = self._jobs[trial.job_id]
            terms = terms_of(self._transaction, job, trial)
            job_after, trial_after, verdict = judge_report(
                terms,
                trial,
                report,
                self._moment,
                history=history,
                judged_by=result.judged_by,
                energy_source=result.energy_source,
                waited_share=result.waited_share,
                startup_s=result.startup_s,
                watched=result.watched,
                power_limit=result,
            )
            # Only the job's clock and its cheapest trial may have changed.
            job_after = job if job_after is terms else replace(job_after, registration=job.registration)
            return *counted(self._transaction, job, job_after, trial_after), ReportResponse.of(verdict)

        job_after, trial_after, answer = judged()
        if job_after is not self._jobs[trial.job_id] and not self._has_locked.get(trial.job_id):
            # Only the end of a trial changes its job. Judge again by the locked row, which others may have changed.
            if not self._lock_job(trial.job_id):
                return RowLocked.ROW_LOCKED
            job_after, trial_after, answer = judged()
        self._jobs[trial.job_id], self._trials[trial.key] = job_after, trial_after
        if trial_after.ended_event is None:
            # A trial that has ended keeps its last report in its own row only.
            self._epochs.append(last_report(trial_after))
        return answer

    def _needs_bound(self, job: StoredJob, trial: TrialRecord) -> bool:
        # A trial that began under earlier terms gets no bound from the present terms; without a bound, it may run to
        # its `max_epochs`.
        return trial.started_event > job.revised_event and policy.needs_bound(job.registration, trial)

    def _lock_job(self, job_id: str) -> bool:
        """Lock and reload an unchanged job; return False if another transaction has locked it.

        The order of locks does not matter: a batch that waits has reports of one job, and others skip locked rows.
        """
        if job_id not in self._has_locked:
            job = self._transaction.locked_job(job_id, skip=self._skips)
            self._has_locked[job_id] = job is not None
            if job is not None:
                self._jobs_before[job_id] = self._jobs[job_id] = job
        return self._has_locked[job_id]

    def _history_of(self, job_id: str) -> History:
        if job_id not in self._histories:
            self._histories[job_id] = load_history(self._transaction, self._jobs_before[job_id])
        return self._histories[job_id]

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
        self._transaction.update_jobs(
            [job for job_id, job in self._jobs.items() if job is not self._jobs_before[job_id]]
        )
        for trial in moved:
            if trial.state is TrialState.COMPLETED:
                job = self._jobs[trial.job_id]
                self._jobs[trial.job_id] = learn_target(self._transaction, job, self._moment)
        for key, (caller, owner) in self._replaced.items():
            log_replaced(self._transaction, *key, caller, owner)
        for trial in moved:
            if trial.ended_event is not None:
                self._transaction.tell(TrialEnded(trial.state))
                self._transaction.log("job %s trial %d: %s", trial.job_id, trial.trial_number, trial.message)


def _answer_again(job: StoredJob, trial: TrialRecord, report: Report, *, is_of_one_rank: bool) -> ReportResponse:
    """Return the first answer to a repeated report; where every rank reports, also the answer to another rank.

    Zeus's client looks for "is already reported." in the text that a rank gets after the end.
    """
    repeated = trial.last_report == report
    was_refused = (
        trial.state in FINAL - OBSERVED and trial.end_reason is not EndReason.DISCARDED and not is_aside(trial)
    )
    # A run that began without a target counts as ended where it reached the target that was set later. Once it has
    # resumed, it may train the epoch that reached it again.
    has_reached_it_before = job.registration.target_runs is not None and report.epoch >= trial.epoch
    if was_refused or not (repeated or is_of_one_rank or has_reached_it_before):
        raise ReportConflictError(
            f"trial {trial.trial_number} has ended ({trial.state}), and its end is already reported.",
            field="trial_number",
        )
    answer = _answer_of(job, trial)
    if repeated or has_reached_it_before:
        return answer
    again = f"the end of trial {trial.trial_number} is already reported. It was: {answer.message}"
    return answer.model_copy(update={"message": again})


def _answer_of(job: StoredJob, trial: TrialRecord) -> ReportResponse:
    """Return the answer to the trial's last report, from the trial's row."""
    alive = trial.state not in FINAL
    reason = EndReason.KEEP_TRAINING if alive else trial.end_reason
    if reason is EndReason.DISCARDED:
        # The training has received the verdict before an administrator discarded the trial.
        reason = _verdict_of_discarded(job, trial)
    return ReportResponse(
        stop_train=not alive,
        converged=reason in (EndReason.TARGET_REACHED, EndReason.NO_TARGET),
        message=trial.message or "",
        reason=reason,
        stop_rule=policy.stop_rule(job.registration, trial, job.min_cost_j) if alive else None,
    )


def _verdict_of_discarded(job: StoredJob, trial: TrialRecord) -> EndReason:
    registration = job.registration
    if registration.target_metric is None:
        return EndReason.NO_TARGET
    if trial.confirmed >= registration.confirm:
        return EndReason.TARGET_REACHED
    return EndReason.MAX_EPOCHS_REACHED if trial.epoch >= registration.max_epochs else EndReason.EPOCH_BOUND_REACHED
