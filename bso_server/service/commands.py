"""The use cases, one async function each: begin, lock, load, decide, save, commit, and only then answer.

This module owns the transactions, the clock and the seeds; decisions are `core.policy`'s.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from functools import partial

import numpy as np

from bso_server.core import policy
from bso_server.core.access import UNRESTRICTED, Caller, Scope
from bso_server.core.history import Arm, History, arms_after
from bso_server.core.lease import LeasePolicy
from bso_server.core.model import Report, Suggestion, TrialRecord
from bso_server.errors import (
    BsoError,
    DatabaseUnavailableError,
    ForbiddenError,
    InvalidReportError,
    JobConflictError,
    KeyConflictError,
    ReportConflictError,
    UnknownJobError,
    UnknownTrialError,
)
from bso_server.service import moves, transfer, views
from bso_server.service.groups import Groups
from bso_server.service.messages import JobExport
from bso_server.service.transfer import ImportedJob
from bso_server.storage.rows import StoredJob, StoredPowerProfile, StoredTrial, TrialKey
from bso_server.storage.store import Store
from bso_server.storage.transaction import JobExistsError, Transaction
from zeus_plugins.protocol import (
    EndReason,
    GpuConfig,
    Heartbeat,
    HeartbeatResponse,
    JobRegistration,
    JobSummary,
    OfflineTrial,
    Origin,
    PolicyName,
    PowerProfile,
    ReportResponse,
    TrainingResult,
    TrialDispatch,
    TrialEnd,
    TrialId,
    TrialPowerProfile,
    TrialState,
)

logger = logging.getLogger("bso_server")

# A trial in one of these may report and beat; in any other it has ended for good.
_ALIVE = {TrialState.RUNNING, TrialState.SUSPENDED, TrialState.ABANDONED}

# Reports, or power-limit profiles, that one transaction forgets at most.
_PRUNED_AT_ONCE = 1000


def _utc_now() -> datetime:
    return datetime.now(UTC)


class BatchSizeService:
    """Everything that the server can be asked to do.

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
        clock: Callable[[], datetime] = _utc_now,
    ) -> None:
        self._store = store
        self._leases = leases or LeasePolicy()
        self._crash_retries = crash_retries
        self._clock = clock
        self._reports: Groups[tuple[TrainingResult, Caller], ReportResponse] = Groups(self._take_reports)

    async def register(self, registration: JobRegistration) -> tuple[JobRegistration, bool]:
        """Register a job, or find it registered the same way.

        Returns:
            The job with its id, and whether it is new.

        Raises:
            JobConflictError: The id is taken by a job that differs.
        """
        job_id = registration.job_id
        if job_id is None:
            job_id = f"{registration.job_id_prefix}-{secrets.token_hex(4)}"
            registration = registration.model_copy(update={"job_id": job_id})
        existing = await self._find(job_id)
        if existing is None:
            now = self._clock()
            try:
                await self._store.write(lambda transaction: transaction.insert_job(registration, now))
            except JobExistsError:
                existing = await self._find(job_id)
            else:
                logger.info("job %s registered: %s", job_id, list(registration.batch_sizes))
                return registration, True
        if existing is None:
            raise UnknownJobError(job_id)
        _refuse_difference(existing.registration, registration)
        return existing.registration, False

    async def suggest(
        self, job_id: str, idempotency_key: str | None = None, *, caller: Caller = UNRESTRICTED
    ) -> TrialDispatch:
        """Choose a batch size and start a trial with it.

        Args:
            job_id: The job.
            idempotency_key: Made by the client for this request; when the request is repeated with it, the answer is
                the trial that the first one started.
            caller: Who asks; the trial is theirs.

        Raises:
            UnknownJobError: No such job.
            NoSurvivorError: No batch size reached the target in a whole exploration round.
            KeyConflictError: The key's trial has ended.
            ForbiddenError: The key's trial is another caller's.
        """
        dispatch, new = await self._store.write(
            lambda transaction: self._suggest(transaction, job_id, idempotency_key, caller)
        )
        if new:
            logger.info("job %s trial %d: batch size %d, %s", *_told(dispatch))
        return dispatch

    async def record_offline(
        self, offline: OfflineTrial, idempotency_key: str, *, caller: Caller = UNRESTRICTED
    ) -> TrialDispatch:
        """Start a trial of a training that chose its batch size itself, because the server was away.

        Its reports come next. It counts for what it measured, and never as an exploration that was asked for.

        Args:
            offline: The trial.
            idempotency_key: Made by the client for this trial; repeated with it, the answer is the same trial.
            caller: Who asks; the trial is theirs.

        Raises:
            UnknownJobError: No such job.
            InvalidReportError: The job has no such batch size, or the key's trial has another one.
            ForbiddenError: The key's trial is another caller's.
        """
        dispatch, new = await self._store.write(
            lambda transaction: self._record_offline(transaction, offline, idempotency_key, caller)
        )
        if new:
            logger.info("job %s trial %d: batch size %d, %s", *_told(dispatch))
        return dispatch

    async def report(self, result: TrainingResult, *, caller: Caller = UNRESTRICTED) -> ReportResponse:
        """Record where a trial stands and decide whether it goes on.

        A report sent again gets the same answer again. A late report brings an abandoned trial back to life.

        Raises:
            UnknownTrialError: No such trial.
            InvalidReportError: The report contradicts the trial or what it reported before.
            ReportConflictError: The trial has ended, and not with this report.
            ForbiddenError: The trial is another caller's.
        """
        return await self._reports.submit((result, caller))

    async def end_trial(self, end: TrialEnd, *, caller: Caller = UNRESTRICTED) -> None:
        """End a trial that the server has not ended; one that has ended stays as it is.

        Raises:
            UnknownTrialError: No such trial.
            InvalidReportError: The trial has another batch size.
            ForbiddenError: The trial is another caller's, and this one is no administrator.
        """
        message = await self._store.write(lambda transaction: self._end_trial(transaction, end, caller))
        if message is not None:
            logger.info("job %s trial %d: %s", end.job_id, end.trial_number, message)

    async def heartbeat(self, heartbeat: Heartbeat, *, caller: Caller = UNRESTRICTED) -> HeartbeatResponse:
        """Keep a trial alive; a suspended or abandoned one runs again.

        Raises:
            UnknownTrialError: No such trial.
            InvalidReportError: The trial has another batch size.
            ForbiddenError: The trial is another caller's.
        """
        return await self._store.write(lambda transaction: self._heartbeat(transaction, heartbeat, caller))

    async def store_power_profile(self, profile: TrialPowerProfile, *, caller: Caller = UNRESTRICTED) -> None:
        """Keep what a trial's training knows of its power limits, for later trials of its size; said again, as it is.

        It makes no difference where the trial stands: what was measured is true.

        Raises:
            UnknownTrialError: No such trial.
            InvalidReportError: The trial has another batch size, or its job other GPUs.
            ForbiddenError: The trial is another caller's.
        """
        await self._store.write(lambda transaction: self._store_power_profile(transaction, profile, caller))
        logger.info(
            "job %s trial %d: power limit %s of %d known ones",
            profile.job_id,
            profile.trial_number,
            "not chosen" if profile.chosen_limit_w is None else f"{profile.chosen_limit_w:g} W",
            len(profile.samples),
        )

    async def reap(self) -> int:
        """Abandon every trial whose lease has run out; their number."""
        now = self._clock()
        job_ids = await self._store.read(lambda transaction: transaction.jobs_with_expired_trials(now))
        abandoned = 0
        for job_id in job_ids:
            abandoned += await self._store.write(partial(self._reap, job_id=job_id))
        return abandoned

    async def delete_job(self, job_id: str) -> None:
        """Delete a job with all that is known of it.

        Raises:
            UnknownJobError: No such job.
        """
        if await self._find(job_id) is None:
            raise UnknownJobError(job_id)
        # When this is repeated after a commit whose answer was lost, the job is gone already.
        await self._store.write(lambda transaction: transaction.delete_job(job_id))
        logger.info("job %s deleted", job_id)

    async def import_job(self, export: JobExport) -> JobSummary:
        """Create a job with its trials as another server exported it.

        Raises:
            JobConflictError: Its id is taken.
            InvalidImportError: Its facts contradict each other.
        """
        job = transfer.imported(export)
        job_id = job.stored.job.job_id
        inserted = False

        def insert(transaction: Transaction) -> None:
            nonlocal inserted
            # The first try may have been committed, and the connection lost before it said so.
            if not inserted or transaction.job(job_id) != job.stored:
                _insert_imported(transaction, job)
            inserted = True

        try:
            await self._store.write(insert)
        except JobExistsError as error:
            raise JobConflictError(
                f"job {job_id!r} exists: import under another job_id, or delete the job first", field="job.job_id"
            ) from error
        logger.info("job %s imported with %d trials", job_id, len(job.trials))
        return views.summary(job.stored)

    async def prune_epochs(self, age: timedelta) -> int:
        """Forget reports that are older than `age`; each trial keeps its last. Their number.

        Decisions rest on trials and go on as before.
        """
        instant = self._clock() - age
        return await self._prune(lambda transaction: transaction.delete_epochs_before(instant, limit=_PRUNED_AT_ONCE))

    async def prune_power_profiles(self, age: timedelta) -> int:
        """Forget power-limit profiles that are older than `age`; of each batch size the newest stays. Their number."""
        instant = self._clock() - age
        return await self._prune(
            lambda transaction: transaction.delete_power_profiles_before(instant, limit=_PRUNED_AT_ONCE)
        )

    async def _prune(self, delete_some: Callable[[Transaction], int]) -> int:
        pruned = 0
        while True:
            # A transaction for each few: between two of them, others get their turn.
            deleted = await self._store.write(delete_some)
            pruned += deleted
            if deleted < _PRUNED_AT_ONCE:
                return pruned

    async def _find(self, job_id: str) -> StoredJob | None:
        return await self._store.read(lambda transaction: transaction.job(job_id))

    def _suggest(
        self, transaction: Transaction, job_id: str, idempotency_key: str | None, caller: Caller
    ) -> tuple[TrialDispatch, bool]:
        now = self._clock()
        job = transaction.locked_job(job_id)
        if job is None:
            raise UnknownJobError(job_id)
        if idempotency_key is not None:
            started = transaction.trial_with_key(job_id, idempotency_key)
            if started is not None:
                _refuse_other_owner(started, caller)
                return _with_power_profile(transaction, job, _dispatch_again(job, started)), False
        job = self._abandon_expired(transaction, job, now)
        history, changed = load_history(transaction, job)
        rng = _generator(job)
        suggestion = policy.suggest(history, rng)
        drawn = suggestion.origin is Origin.BANDIT
        started = moves.dispatched(job, suggestion, now, self._leases, owner=caller.token_id)
        transaction.insert_trial(started, idempotency_key=idempotency_key)
        changed[suggestion.batch_size] = history.arms[suggestion.batch_size].after_dispatch()
        transaction.update_arms(job_id, changed.values())
        event = started.record.started_event
        job = replace(
            job,
            event_count=event,
            trial_count=started.record.trial_number,
            folded_event=job.event_count,
            bandit_entered_at=event if drawn and job.bandit_entered_at is None else job.bandit_entered_at,
            survivors=suggestion.survivors,
            rng_state=json.dumps(rng.bit_generator.state) if drawn and job.job.mab_seed is not None else job.rng_state,
        )
        transaction.update_jobs([job])
        return _with_power_profile(transaction, job, _dispatch(job, started)), True

    def _record_offline(
        self, transaction: Transaction, offline: OfflineTrial, idempotency_key: str, caller: Caller
    ) -> tuple[TrialDispatch, bool]:
        job = transaction.locked_job(offline.job_id)
        if job is None:
            raise UnknownJobError(offline.job_id)
        recorded = transaction.trial_with_key(offline.job_id, idempotency_key)
        if recorded is not None:
            _refuse_other_owner(recorded, caller)
            _refuse_other_size(recorded, offline.batch_size)
            # Even if it has ended: its reports may come again, too.
            return _dispatch(job, recorded), False
        arm = transaction.arms(offline.job_id).get(offline.batch_size)
        if arm is None:
            raise InvalidReportError(
                f"{offline.batch_size} is not one of the job's batch sizes {list(job.job.batch_sizes)}",
                field="batch_size",
            )
        suggestion = Suggestion(
            offline.batch_size, Origin.OFFLINE, "not chosen: the training began while the server was away"
        )
        started = moves.dispatched(job, suggestion, self._clock(), self._leases, owner=caller.token_id)
        transaction.insert_trial(started, idempotency_key=idempotency_key)
        transaction.update_arms(offline.job_id, [arm.after_dispatch()])
        record = started.record
        job = replace(job, event_count=record.started_event, trial_count=record.trial_number)
        transaction.update_jobs([job])
        return _dispatch(job, started), True

    async def _take_reports(self, results: Sequence[tuple[TrainingResult, Caller]]) -> list[ReportResponse | Exception]:
        try:
            answers, ended = await self._store.write(lambda transaction: self._report_all(transaction, results))
        except DatabaseUnavailableError as error:
            # Every report's own error: one by one they would fare no better, only later.
            return [error] * len(results)
        for trial in ended:
            logger.info("job %s trial %d: %s", trial.job_id, trial.record.trial_number, trial.record.message)
        return answers

    def _report_all(
        self, transaction: Transaction, results: Sequence[tuple[TrainingResult, Caller]]
    ) -> tuple[list[ReportResponse | Exception], list[StoredTrial]]:
        now = self._clock()
        found = transaction.locked_trials({(result.job_id, result.trial_number) for result, _ in results})
        histories: dict[str, History] = {}
        if any(policy.needs_bound(job.job, trial.record) for job, trial in found.values()):
            # Bounds rest on the job's history, which must not move on while it is read.
            found = _with_locked_jobs(transaction, found, [job.job.job_id for job, _ in found.values()])
            histories = _histories_for_bounds(transaction, found)
        page, answers = self._judged(found, histories, results, now)
        if page.changed_jobs and not transaction.locks_jobs_with_trials:
            # Which jobs end a trial is known only now. What the others of their trials did meanwhile may matter.
            found = _with_locked_jobs(transaction, found, page.changed_jobs)
            page, answers = self._judged(found, histories, results, now)
        page.save(transaction)
        return answers, page.ended_trials

    def _judged(
        self,
        found: Mapping[TrialKey, tuple[StoredJob, StoredTrial]],
        histories: Mapping[str, History],
        results: Sequence[tuple[TrainingResult, Caller]],
        now: datetime,
    ) -> tuple[_Page, list[ReportResponse | Exception]]:
        page = _Page(found)
        answers: list[ReportResponse | Exception] = []
        for result, caller in results:
            try:
                answers.append(self._report(page, histories, result, caller, now))
            except BsoError as error:
                answers.append(error)
        return page, answers

    def _report(
        self, page: _Page, histories: Mapping[str, History], result: TrainingResult, caller: Caller, now: datetime
    ) -> ReportResponse:
        job, trial = page.find(result)
        _refuse_other_owner(trial, caller)
        report = Report(time_s=result.time, energy_j=result.energy, epoch=result.current_epoch, metric=result.metric)
        repeated = trial.record.state is TrialState.RUNNING and trial.record.last_report == report
        if repeated or trial.record.state not in _ALIVE:
            return _answer_again(job, trial.record, report)
        trial = moves.revived(trial)
        if policy.needs_bound(job.job, trial.record):
            trial = replace(trial, record=policy.bounded(histories[trial.job_id], trial.record, report))
        verdict = policy.judge(job.job, trial.record, report, _min_cost_j(job), judged_by=result.judged_by)
        job, trial = moves.reported(
            job,
            trial,
            report,
            verdict,
            energy_source=result.energy_source,
            now=now,
            leases=self._leases,
        )
        page.put(job, trial)
        return ReportResponse(
            stop_train=verdict.stop,
            converged=verdict.converged,
            message=verdict.message,
            reason=verdict.reason,
            stop_rule=None if verdict.stop else verdict.rule,
        )

    def _end_trial(self, transaction: Transaction, end: TrialEnd, caller: Caller) -> str | None:
        now = self._clock()
        job, trial = _locked_trial(transaction, end)
        if not transaction.locks_jobs_with_trials:
            job = transaction.locked_jobs([end.job_id])[end.job_id]
        if Scope.ADMIN not in caller.scopes:
            _refuse_other_owner(trial, caller)
        # What the end says of the batch size counts, even if the trial was given up before.
        if trial.record.state not in _ALIVE:
            return None
        state, reason, message = self._outcome(transaction, end)
        if state is trial.record.state:
            return None
        trial = moves.revived(trial)
        if state is TrialState.SUSPENDED:
            transaction.update_trials([moves.suspended(trial, message, now, self._leases)])
            return message
        job, trial = moves.ended(job, trial, state, reason, message, now)
        transaction.update_trials([trial])
        transaction.update_jobs([job])
        return message

    def _outcome(self, transaction: Transaction, end: TrialEnd) -> tuple[TrialState, EndReason, str]:
        """State, reason and message of a trial that its own training ends."""
        if end.outcome is TrialState.SUSPENDED:
            return TrialState.SUSPENDED, EndReason.PREEMPTED, _message("suspended: the training was preempted", end)
        if end.outcome is TrialState.INFEASIBLE:
            message = f"infeasible: {end.batch_size} ran out of memory; neither it nor a larger size is tried again"
            return TrialState.INFEASIBLE, EndReason.OUT_OF_MEMORY, _message(message, end)
        earlier, observed = transaction.crashes(end.job_id, end.batch_size)
        state, reason = policy.outcome_of_crash(crashes=earlier + 1, observed=observed, retries=self._crash_retries)
        if state is TrialState.INFEASIBLE:
            message = f"infeasible: {end.batch_size} crashed {earlier + 1} times and is not tried again"
        else:
            message = "failed: the training ended before the server said so"
        return state, reason, _message(message, end)

    def _heartbeat(self, transaction: Transaction, heartbeat: Heartbeat, caller: Caller) -> HeartbeatResponse:
        _, trial = _locked_trial(transaction, heartbeat)
        _refuse_other_owner(trial, caller)
        if trial.record.state in _ALIVE:
            trial = moves.beating(trial, self._clock(), self._leases, regular=heartbeat.regular)
            transaction.update_trials([trial])
        record = trial.record
        return HeartbeatResponse(
            state=record.state,
            lease_s=self._leases.lease_s(heartbeats=record.heartbeats, longest_gap_s=record.longest_gap_s),
            interval_s=self._leases.heartbeat_interval_s,
            time_s=record.time_s,
            energy_j=record.energy_j,
            epochs=record.epoch,
        )

    def _store_power_profile(self, transaction: Transaction, profile: TrialPowerProfile, caller: Caller) -> None:
        job, trial = _locked_trial(transaction, profile)
        _refuse_other_owner(trial, caller)
        _refuse_other_gpus(job, profile.gpus)
        trial = replace(trial, power_limit_w=profile.chosen_limit_w, power_limits=len(profile.samples))
        transaction.update_power_limit(trial)
        left = transaction.power_profile(trial.key)
        known = left or transaction.newest_power_profile(trial.job_id, trial.record.batch_size)
        if known is not None and known.samples == profile.samples:
            return  # Said before, or measured by an earlier trial.
        new = StoredPowerProfile(*trial.key, trial.record.batch_size, profile.samples, self._clock())
        if left is None:
            transaction.insert_power_profiles([new])
        else:
            transaction.update_power_profile(new)

    def _reap(self, transaction: Transaction, job_id: str) -> int:
        job = transaction.locked_job(job_id)
        if job is None:
            return 0
        after = self._abandon_expired(transaction, job, self._clock())
        transaction.update_jobs([after])
        return after.event_count - job.event_count

    def _abandon_expired(self, transaction: Transaction, job: StoredJob, now: datetime) -> StoredJob:
        """Abandon the job's trials whose leases have run out; the job's row as it becomes, not yet saved."""
        abandoned = []
        for expired in transaction.locked_expired_trials(job.job.job_id, now):
            message = f"abandoned: not heard of since {expired.reported_at or expired.started_at:%Y-%m-%d %H:%M:%S} UTC"
            state, reason = TrialState.ABANDONED, EndReason.LEASE_EXPIRED
            job, trial = moves.ended(job, expired, state, reason, message, now)
            abandoned.append(trial)
            logger.info("job %s trial %d: %s", job.job.job_id, trial.record.trial_number, message)
        transaction.update_trials(abandoned)
        return job


class _Page:
    """The rows that a group of reports has locked, and what becomes of them."""

    def __init__(self, found: Mapping[TrialKey, tuple[StoredJob, StoredTrial]]) -> None:
        self._jobs = {job.job.job_id: job for job, _ in found.values()}
        self._trials = {trial.key: trial for _, trial in found.values()}
        self._jobs_before, self._trials_before = dict(self._jobs), dict(self._trials)
        self._epochs: list[dict[str, object]] = []

    def find(self, trial_id: TrialId) -> tuple[StoredJob, StoredTrial]:
        """The trial's rows.

        Raises:
            UnknownTrialError: It is not among them.
            InvalidReportError: It has another batch size.
        """
        trial = self._trials.get((trial_id.job_id, trial_id.trial_number))
        if trial is None:
            raise UnknownTrialError(trial_id.job_id, trial_id.trial_number)
        _refuse_other_size(trial, trial_id.batch_size)
        return self._jobs[trial.job_id], trial

    def put(self, job: StoredJob, trial: StoredTrial) -> None:
        """Take note of a report."""
        self._jobs[trial.job_id] = job
        self._trials[trial.key] = trial
        record = trial.record
        if record.ended_event is None:
            # The last report of a trial that has ended stands in its own row.
            self._epochs.append(
                {
                    "job_id": trial.job_id,
                    "trial_number": record.trial_number,
                    "report_number": record.reports,
                    "epoch": record.epoch,
                    "time_s": record.time_s,
                    "energy_j": record.energy_j,
                    "metric": record.metric,
                    "reported_at": trial.reported_at,
                }
            )

    @property
    def ended_trials(self) -> list[StoredTrial]:
        """The trials that reports have ended."""
        changed = (trial for key, trial in self._trials.items() if trial is not self._trials_before[key])
        return [trial for trial in changed if trial.record.ended_event is not None]

    @property
    def changed_jobs(self) -> list[str]:
        """Ids of the jobs that reports have changed."""
        return [job_id for job_id, job in self._jobs.items() if job is not self._jobs_before[job_id]]

    def save(self, transaction: Transaction) -> None:
        """Write what has changed."""
        changed = [(self._trials_before[key], trial) for key, trial in self._trials.items()]
        changed = [(before, after) for before, after in changed if after is not before]
        progressed = [after for before, after in changed if _has_only_progressed(before.record, after.record)]
        moved = [after for before, after in changed if not _has_only_progressed(before.record, after.record)]
        transaction.update_progress(progressed)
        transaction.update_trials(moved)
        transaction.insert_epochs(self._epochs)
        transaction.update_jobs([self._jobs[job_id] for job_id in self.changed_jobs])


def _has_only_progressed(before: TrialRecord, after: TrialRecord) -> bool:
    return before.state is after.state and before.bound == after.bound


def _with_locked_jobs(
    transaction: Transaction, found: Mapping[TrialKey, tuple[StoredJob, StoredTrial]], job_ids: Sequence[str]
) -> dict[TrialKey, tuple[StoredJob, StoredTrial]]:
    """The same rows with those of these jobs locked, and as they are by then."""
    if transaction.locks_jobs_with_trials:
        return dict(found)
    jobs = transaction.locked_jobs(set(job_ids))
    return {key: (jobs.get(job.job.job_id, job), trial) for key, (job, trial) in found.items()}


def _histories_for_bounds(
    transaction: Transaction, found: Mapping[TrialKey, tuple[StoredJob, StoredTrial]]
) -> dict[str, History]:
    """The histories of jobs that have a trial here which needs a bound."""
    jobs = {job.job.job_id: job for job, trial in found.values() if policy.needs_bound(job.job, trial.record)}
    return {job_id: load_history(transaction, job)[0] for job_id, job in jobs.items()}


def load_history(transaction: Transaction, job: StoredJob) -> tuple[History, dict[int, Arm]]:
    """The summary that decisions rest on, and the arms in it that are newer than those in the database."""
    job_id = job.job.job_id
    arms = transaction.arms(job_id)
    ended = transaction.ended_after(job_id, job.folded_event)
    changed = arms_after(job.job, arms, ended, bandit_entered_at=job.bandit_entered_at)
    explorations: Sequence[TrialRecord] = ()
    in_flight: Sequence[TrialRecord] = ()
    if job.job.policy is PolicyName.GP_VOI:
        in_flight = transaction.in_flight(job_id)
    elif job.survivors is None:
        # The bandit stage needs them no more.
        explorations = transaction.counted_explorations(job_id)
    history = History(
        job.job,
        arms | changed,
        tuple(explorations),
        job.cheapest,
        job.bandit_entered_at,
        job.survivors,
        tuple(in_flight),
    )
    return history, changed


def _insert_imported(transaction: Transaction, job: ImportedJob) -> None:
    job_id = job.stored.job.job_id
    transaction.insert_job(job.stored.registration, job.stored.created_at)
    transaction.update_jobs([job.stored])
    transaction.update_arms(job_id, job.arms)
    transaction.insert_trials(job.trials)
    transaction.insert_epochs([asdict(epoch) for epoch in job.epochs])
    transaction.insert_power_profiles(job.power_profiles)


def _refuse_difference(existing: JobRegistration, asked: JobRegistration) -> None:
    before, after = existing.model_dump(), asked.model_dump()
    differences = [f"{name} is {before[name]!r}, not {after[name]!r}" for name in before if before[name] != after[name]]
    if differences:
        raise JobConflictError(
            f"job {existing.job_id!r} exists with another configuration: {'; '.join(differences)}. "
            "Use another job_id, or delete the job to start over",
            field="job_id",
        )


def _generator(job: StoredJob) -> np.random.Generator:
    rng = np.random.default_rng(job.job.mab_seed)
    if job.rng_state is not None:
        rng.bit_generator.state = json.loads(job.rng_state)
    return rng


def _min_cost_j(job: StoredJob) -> float | None:
    return None if job.cheapest is None else job.cheapest.cost_j


def _dispatch(job: StoredJob, trial: StoredTrial) -> TrialDispatch:
    record = trial.record
    return TrialDispatch(
        job_id=trial.job_id,
        batch_size=record.batch_size,
        trial_number=record.trial_number,
        origin=record.origin,
        reason=trial.reason,
        stop_rule=policy.stop_rule(job.job, record, _min_cost_j(job)),
    )


def _dispatch_again(job: StoredJob, trial: StoredTrial) -> TrialDispatch:
    if trial.record.state not in _ALIVE:
        raise KeyConflictError(
            f"the request with this Idempotency-Key started trial {trial.record.trial_number}, which has ended "
            f"({trial.record.state}): make a new key for a new trial",
            field="Idempotency-Key",
        )
    return _dispatch(job, trial)


def _with_power_profile(transaction: Transaction, job: StoredJob, dispatch: TrialDispatch) -> TrialDispatch:
    """The same with what is known of the power limits at its size."""
    newest = transaction.newest_power_profile(dispatch.job_id, dispatch.batch_size)
    if newest is None:
        return dispatch
    profile = PowerProfile(gpus=views.gpus_of(job.registration), samples=newest.samples)
    return dispatch.model_copy(update={"power_profile": profile})


def _told(dispatch: TrialDispatch) -> tuple[object, ...]:
    return dispatch.job_id, dispatch.trial_number, dispatch.batch_size, dispatch.reason


def _locked_trial(transaction: Transaction, trial_id: TrialId) -> tuple[StoredJob, StoredTrial]:
    key = trial_id.job_id, trial_id.trial_number
    return _Page(transaction.locked_trials([key])).find(trial_id)


def _refuse_other_size(trial: StoredTrial, batch_size: int) -> None:
    dispatched = trial.record.batch_size
    if dispatched != batch_size:
        raise InvalidReportError(
            f"trial {trial.record.trial_number} of job {trial.job_id!r} has batch size {dispatched}, not {batch_size}",
            field="batch_size",
        )


def _refuse_other_gpus(job: StoredJob, gpus: GpuConfig) -> None:
    registered = views.gpus_of(job.registration)
    if gpus != registered:
        raise InvalidReportError(
            f"job {job.job.job_id!r} runs on {_described(registered)}, and the power limits are of {_described(gpus)}",
            field="gpus",
        )


def _described(gpus: GpuConfig) -> str:
    return f"{gpus.number_of_gpus} x {gpus.gpu_model} of {gpus.max_power:g} W together"


def _refuse_other_owner(trial: StoredTrial, caller: Caller) -> None:
    if trial.owner is not None and caller.token_id not in (None, trial.owner):
        raise ForbiddenError(
            f"trial {trial.record.trial_number} of job {trial.job_id!r} was dispatched to token {trial.owner}: "
            f"token {caller.token_id} cannot report on it, keep it alive, or end it without scope {Scope.ADMIN}"
        )


def _message(message: str, end: TrialEnd) -> str:
    return message if end.detail is None else f"{message} ({end.detail})"


def _answer_again(job: StoredJob, record: TrialRecord, report: Report) -> ReportResponse:
    """The answer that this very report got, from what the trial keeps of it."""
    if record.last_report != report or record.state in {TrialState.FAILED, TrialState.INFEASIBLE}:
        raise ReportConflictError(
            f"trial {record.trial_number} has ended ({record.state}) and takes no further report",
            field="trial_number",
        )
    alive = record.state in _ALIVE
    return ReportResponse(
        stop_train=not alive,
        converged=record.state is TrialState.COMPLETED,
        message=record.message or "",
        reason=EndReason.KEEP_TRAINING if alive else record.end_reason,
        stop_rule=policy.stop_rule(job.job, record, _min_cost_j(job)) if alive else None,
    )
