"""The use cases, one async function each: begin, lock, load, decide, save, commit, and only then answer.

This module owns the transactions, the clock and the seeds; decisions are `core.policy`'s.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable
from datetime import UTC, datetime

import numpy as np

from bso_server import views
from bso_server.core import policy
from bso_server.core.cost import cost
from bso_server.core.model import TRANSITIONS, History, Job, Report, TrialRecord, check_transition
from bso_server.errors import (
    InvalidReportError,
    JobConflictError,
    ReportConflictError,
    UnknownJobError,
    UnknownTrialError,
)
from bso_server.store import JobExistsError, Store, StoredJob, StoredTrial, Transaction
from zeus_plugins.protocol import (
    EndReason,
    JobList,
    JobRegistration,
    JobView,
    Origin,
    ReportResponse,
    TrainingResult,
    TrialDispatch,
    TrialId,
    TrialState,
)

logger = logging.getLogger("bso_server")


def _utc_now() -> datetime:
    return datetime.now(UTC)


class BatchSizeService:
    """Everything that the server can be asked to do.

    Args:
        store: The database.
        clock: Gives the present instant, aware.
    """

    def __init__(self, store: Store, *, clock: Callable[[], datetime] = _utc_now) -> None:
        self._store = store
        self._clock = clock

    async def register(self, registration: JobRegistration) -> tuple[JobRegistration, bool]:
        """Register a job, or find it registered the same way.

        Returns:
            The job with its id, and whether it is new.

        Raises:
            JobConflictError: The id is taken by a job that differs.
        """
        if registration.job_id is None:
            made_id = f"{registration.job_id_prefix}-{secrets.token_hex(4)}"
            registration = registration.model_copy(update={"job_id": made_id})
        job_id = _id_of(registration)
        existing = await self._find(job_id)
        if existing is None:
            try:
                async with self._store.write() as transaction:
                    await transaction.insert_job(registration, self._clock())
            except JobExistsError:
                existing = await self._find(job_id)
            else:
                logger.info("job %s registered: %s", job_id, list(registration.batch_sizes))
                return registration, True
        if existing is None:
            raise UnknownJobError(job_id)
        _refuse_difference(existing.registration, registration)
        return existing.registration, False

    async def suggest(self, job_id: str) -> TrialDispatch:
        """Choose a batch size and start a trial with it.

        Raises:
            UnknownJobError: No such job.
            NoSurvivorError: No batch size reached the target in a whole exploration round.
        """
        async with self._store.write() as transaction:
            stored = await transaction.locked_job(job_id)
            if stored is None:
                raise UnknownJobError(job_id)
            history = await _history(transaction, stored)
            rng = _generator(stored)
            suggestion = policy.suggest(history, rng)
            event = stored.event_count + 1
            record = TrialRecord(
                trial_number=stored.trial_count + 1,
                batch_size=suggestion.batch_size,
                state=TrialState.RUNNING,
                origin=suggestion.origin,
                started_event=event,
            )
            await transaction.insert_trial(job_id, record, reason=suggestion.reason, started_at=self._clock())
            columns = {"event_count": event, "trial_count": record.trial_number}
            if suggestion.origin is Origin.BANDIT and stored.job.mab_seed is not None:
                await transaction.update_job(job_id, **columns, rng_state=json.dumps(rng.bit_generator.state))
            else:
                await transaction.update_job(job_id, **columns)
        logger.info(
            "job %s trial %d: batch size %d, %s", job_id, record.trial_number, record.batch_size, suggestion.reason
        )
        return TrialDispatch(
            job_id=job_id,
            batch_size=record.batch_size,
            trial_number=record.trial_number,
            origin=suggestion.origin,
            reason=suggestion.reason,
        )

    async def report(self, result: TrainingResult) -> ReportResponse:
        """Record where a trial stands and decide whether it goes on.

        The report that ended a trial, sent again, gets the same answer again.

        Raises:
            UnknownTrialError: No such trial.
            InvalidReportError: The report contradicts the trial or what it reported before.
            ReportConflictError: The trial has ended, and not with this report.
        """
        report = Report(time_s=result.time, energy_j=result.energy, epoch=result.current_epoch, metric=result.metric)
        async with self._store.write() as transaction:
            stored, trial = await _locked_trial(transaction, result)
            record = trial.record
            if record.state is not TrialState.RUNNING:
                return _answer_again(record, report)
            verdict = policy.judge(stored.job, record, report, stored.min_cost_j)
            columns = {
                "reported_at": self._clock(),
                "time_s": report.time_s,
                "energy_j": report.energy_j,
                "energy_source": result.energy_source,
                "epoch": report.epoch,
                "metric": report.metric,
                "message": verdict.message,
            }
            if verdict.stop:
                columns |= await self._ending(transaction, stored, record, verdict.state, report)
            await transaction.update_trial(result.job_id, result.trial_number, **columns)
        if verdict.stop:
            logger.info("job %s trial %d: %s", result.job_id, result.trial_number, verdict.message)
        return ReportResponse(
            stop_train=verdict.stop, converged=verdict.converged, message=verdict.message, reason=verdict.reason
        )

    async def end_trial(self, trial_id: TrialId) -> None:
        """End a trial: one that still runs has failed, and its batch size is owed another; an ended one stays as it is.

        Raises:
            UnknownTrialError: No such trial.
            InvalidReportError: The trial has another batch size.
        """
        async with self._store.write() as transaction:
            stored, trial = await _locked_trial(transaction, trial_id)
            if TrialState.FAILED not in TRANSITIONS[trial.record.state]:
                return
            message = "failed: the training ended before the server said so"
            columns = await self._ending(transaction, stored, trial.record, TrialState.FAILED, report=None)
            await transaction.update_trial(trial_id.job_id, trial_id.trial_number, message=message, **columns)
        logger.info("job %s trial %d: %s", trial_id.job_id, trial_id.trial_number, message)

    async def delete_job(self, job_id: str) -> None:
        """Delete a job with all that is known of it.

        Raises:
            UnknownJobError: No such job.
        """
        async with self._store.write() as transaction:
            if not await transaction.delete_job(job_id):
                raise UnknownJobError(job_id)
        logger.info("job %s deleted", job_id)

    async def list_jobs(self) -> JobList:
        """All jobs, ordered by id."""
        async with self._store.read() as transaction:
            return JobList(jobs=tuple(views.summary(stored) for stored in await transaction.all_jobs()))

    async def show_job(self, job_id: str) -> JobView:
        """One job with its arms and trials.

        Raises:
            UnknownJobError: No such job.
        """
        async with self._store.read() as transaction:
            stored = await transaction.job(job_id)
            if stored is None:
                raise UnknownJobError(job_id)
            return views.job(stored, await transaction.all_trials(job_id))

    async def _find(self, job_id: str) -> StoredJob | None:
        async with self._store.read() as transaction:
            return await transaction.job(job_id)

    async def _ending(
        self,
        transaction: Transaction,
        stored: StoredJob,
        record: TrialRecord,
        state: TrialState,
        report: Report | None,
    ) -> dict[str, object]:
        """Advance the job past the end of a trial; the columns in which the trial's own row says so."""
        check_transition(record.state, state)
        event = stored.event_count + 1
        job_columns: dict[str, object] = {"event_count": event}
        if state is TrialState.COMPLETED and report is not None:
            cost_j = _cost(stored.job, report)
            if stored.min_cost_j is None or cost_j < stored.min_cost_j:
                job_columns |= {"min_cost_j": cost_j, "min_cost_batch_size": record.batch_size}
        await transaction.update_job(stored.job.job_id, **job_columns)
        return {"state": state.value, "ended_at": self._clock(), "ended_event": event}


def _id_of(registration: JobRegistration) -> str:
    assert registration.job_id is not None  # noqa: S101 - narrows the type; `register` has just made sure
    return registration.job_id


def _refuse_difference(existing: JobRegistration, asked: JobRegistration) -> None:
    before, after = existing.model_dump(), asked.model_dump()
    differences = [f"{name} is {before[name]!r}, not {after[name]!r}" for name in before if before[name] != after[name]]
    if differences:
        raise JobConflictError(
            f"job {existing.job_id!r} exists with another configuration: {'; '.join(differences)}. "
            "Use another job_id, or delete the job to start over",
            field="job_id",
        )


async def _history(transaction: Transaction, stored: StoredJob) -> History:
    trials = await transaction.all_trials(stored.job.job_id)
    return History(stored.job, tuple(trial.record for trial in trials))


def _generator(stored: StoredJob) -> np.random.Generator:
    rng = np.random.default_rng(stored.job.mab_seed)
    if stored.rng_state is not None:
        rng.bit_generator.state = json.loads(stored.rng_state)
    return rng


async def _locked_trial(transaction: Transaction, trial_id: TrialId) -> tuple[StoredJob, StoredTrial]:
    found = await transaction.locked_trial(trial_id.job_id, trial_id.trial_number)
    if found is None:
        raise UnknownTrialError(trial_id.job_id, trial_id.trial_number)
    dispatched = found[1].record.batch_size
    if dispatched != trial_id.batch_size:
        raise InvalidReportError(
            f"trial {trial_id.trial_number} of job {trial_id.job_id!r} has batch size {dispatched}, "
            f"not {trial_id.batch_size}",
            field="batch_size",
        )
    return found


_REASON_OF_END = {
    TrialState.COMPLETED: EndReason.TARGET_REACHED,
    TrialState.EARLY_STOPPED: EndReason.COST_BOUND_CROSSED,
    TrialState.EXHAUSTED: EndReason.MAX_EPOCHS_REACHED,
}


def _answer_again(record: TrialRecord, report: Report) -> ReportResponse:
    last = Report(time_s=record.time_s, energy_j=record.energy_j, epoch=record.epoch, metric=record.metric or 0.0)
    if record.state not in _REASON_OF_END or report != last:
        raise ReportConflictError(
            f"trial {record.trial_number} has ended ({record.state}) and takes no further report",
            field="trial_number",
        )
    return ReportResponse(
        stop_train=True,
        converged=record.state is TrialState.COMPLETED,
        message=record.message or "",
        reason=_REASON_OF_END[record.state],
    )


def _cost(job: Job, report: Report) -> float:
    return cost(energy_j=report.energy_j, time_s=report.time_s, max_power_w=job.max_power, eta=job.eta_knob)
