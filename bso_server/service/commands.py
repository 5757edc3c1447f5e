"""The use cases that write, each a plain function over one transaction: lock, load, decide, save.

`Commands` holds the clock and the rules for silent and crashing trials. Its caller opens the transaction, repeats it
after a failure of the database, and commits it: `BatchSizeService` in the server, `zeus_plugins.client.local` in a
training's own process. `core.policy` decides. `service.reports` records reports.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, Concatenate, ParamSpec, TypeVar

from bso_server.core.access import UNRESTRICTED, Caller
from bso_server.core.job import (
    NO_CRASHES,
    LeasePolicy,
    Moment,
    abandon_trial,
    discard_trial,
    dispatch_trial,
    end_by_training,
    renew_lease,
)
from bso_server.core.model import Suggestion, TrialRecord
from bso_server.core.occurrences import TrialEnded
from bso_server.core.policy import installed
from bso_server.errors import InvalidReportError, UnknownJobError, UnknownTrialError
from bso_server.service import reading
from bso_server.service.decisions import (
    TRIES,
    Basis,
    Decided,
    Turns,
    basis_of,
    decide,
    dispatch_of,
    save_start,
    started_with,
    turn,
    with_job,
)
from bso_server.service.loading import known_job, known_trial, locked_job, locked_trial, open_trials, recomputed
from bso_server.service.refusals import (
    log_replaced,
    refuse_difference,
    refuse_folder_name,
    refuse_long_window,
    refuse_margins,
    refuse_other_size,
    require_job,
    require_trial,
)
from bso_server.service.reports import Reports
from bso_server.service.revisions import counted, revise, terms_of
from bso_server.service.targets import asks_for_other_target, learn_target, refuse_unclear, replace_target
from bso_server.service.warm import warm_start_of
from bso_server.storage.rows import StoredDecision, StoredJob
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import (
    ALIVE,
    FINAL,
    CreatedJob,
    Explanation,
    Heartbeat,
    HeartbeatResponse,
    JobSpecFromClient,
    OfflineTrial,
    Origin,
    TrialDispatch,
    TrialEnd,
    TrialState,
    TrialView,
    finishing_reason,
)

# Largest number of reports that one transaction deletes.
PRUNED_AT_ONCE = 1000

# Decisions in threads of the event loop, which has at least five; a job has one at a time.
_DECISIONS_AT_ONCE = 4

P = ParamSpec("P")
T = TypeVar("T")


def utc_now() -> datetime:
    """Return the present instant."""
    return datetime.now(UTC)


class Commands:
    """Everything that changes jobs and trials.

    The caller may repeat a method in another transaction, even if the first one has committed and its answer was lost.
    Only `begin_trial` and `begin_decided` without a key then start a second trial, and `delete_job` without `again`
    raises an error.

    Methods with a `job_id` raise `UnknownJobError`. Methods with a message about a trial raise `UnknownTrialError`, or
    `InvalidReportError` if the trial has another batch size. Methods with a `caller` raise `ForbiddenError` if the job
    or the trial belongs to another token (`service.refusals`).

    Args:
        leases: The lengths of leases.
        clock: Returns the present instant, aware.
    """

    def __init__(
        self,
        *,
        leases: LeasePolicy | None = None,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        self._leases = leases or LeasePolicy()
        self._clock = clock

    def registered(
        self, transaction: Transaction, registration: CreatedJob, caller: Caller = UNRESTRICTED
    ) -> CreatedJob | None:
        """Return the job as it is registered, or None if `register` has something to write; this only reads.

        Raises:
            JobConflictError: The id belongs to a job with another configuration.
        """
        existing = transaction.job(registration.job_id)
        if existing is None:
            return None
        require_job(transaction, existing, caller)
        known = existing.registration
        if refuse_difference(transaction, existing, registration) or asks_for_other_target(known, registration):
            return None
        return known if known.with_fingerprint(registration.fingerprint) == known else None

    def register(
        self, transaction: Transaction, registration: CreatedJob, caller: Caller = UNRESTRICTED
    ) -> tuple[CreatedJob, bool]:
        """Register a job of the caller, or find it; return the job, and True if it is new.

        A registration with `revise` changes the terms of an existing job. Parts of the fingerprint that the existing
        job lacks are added. A target replaces that of a job that was registered without one, and its runs are judged
        again. A window that is too small for the explorations that a Zeus client asks for is enlarged.

        Raises:
            JobConflictError: The id belongs to a job with another configuration.
            InvalidJobError: The job cannot be served under these terms.
            PolicyNotInstalledError: The job's policy is not installed.
        """
        known = self.registered(transaction, registration, caller)
        if known is not None:
            return known, False
        existing = transaction.job(registration.job_id) and locked_job(transaction, registration.job_id)
        if existing:
            # Another transaction may have inserted the job, or revised it, since `registered`.
            changes = refuse_difference(transaction, existing, registration)
            if changes:
                existing = revise(transaction, existing, changes, self._clock())
            known = existing.registration.with_fingerprint(registration.fingerprint)
            if known.warm_in_force != existing.registration.warm_in_force:
                transaction.forget_memory(known.job_id)
            existing = replace(existing, registration=known)
            if asks_for_other_target(known, registration):
                existing = replace_target(transaction, existing, registration.target_metric, self.moment())
            else:
                transaction.update_jobs([existing])
                if "higher_is_better_metric" in changes:  # in the other direction, the runs so far may set the target
                    existing = learn_target(transaction, existing, self.moment())
            return existing.registration, False
        refuse_folder_name(registration)
        own = installed(registration.policy)
        # The policy amends a job that names none, as a Zeus client's, instead of refusing it.
        if "policy" in registration.model_fields_set:
            own.check(registration)
        refuse_margins(registration)
        made = {"registration_id": secrets.token_hex(8), "warm": warm_start_of(transaction, registration)}
        registration = registration.model_copy(update={**made, "revise": False})
        if registration.target_metric is None or registration.target_runs is not None:
            registration = registration.model_copy(update={"target_runs": ()})
        asked, registration = registration, own.amended(registration)
        refuse_long_window(registration)
        transaction.insert_job(registration, self._clock(), owner=caller.token_id, shared=caller.shares_jobs)
        if registration != asked:
            transaction.log(
                "job %s: window_size is %d and not %d, which could never hold mab_num_explorations",
                registration.job_id,
                registration.window_size,
                asked.window_size,
            )
        transaction.log("job %s registered: %s", registration.job_id, list(registration.batch_sizes))
        if registration.warm is not None:
            transaction.log("job %s starts warm: %s", registration.job_id, registration.warm.in_words)
        return registration, True

    def begin_trial(
        self,
        transaction: Transaction,
        job_id: str,
        idempotency_key: str | None = None,
        caller: Caller = UNRESTRICTED,
    ) -> TrialDispatch:
        """Choose a batch size, with the job locked, and start a trial of the caller with it.

        A repeated request, with the idempotency key that the client made, finds the trial that the first one started.

        Raises:
            NoSurvivorError: See `policy.suggest`.
            PolicyNotInstalledError: See `policy.suggest`.
            KeyConflictError: The trial that the key started has ended.
        """
        job = locked_job(transaction, job_id)
        started = started_with(transaction, job, idempotency_key, caller)
        if started is not None:
            return started
        owner = require_job(transaction, job, caller)
        refuse_unclear(transaction, job)
        found, moment = open_trials(transaction, job), self.moment()
        if any(_is_expired(trial, moment) for trial in found.trials):
            job = self._abandon_expired(transaction, job, moment)
            found = open_trials(transaction, job)
        return self._begin(transaction, decide(basis_of(transaction, job, found)), idempotency_key, caller, owner)

    def considered(
        self,
        transaction: Transaction,
        job_id: str,
        idempotency_key: str | None = None,
        caller: Caller = UNRESTRICTED,
    ) -> Basis | None:
        """Read the basis of a job's next decision in a snapshot.

        Return None if nothing is to be decided yet: the key has already started a trial, or leases have expired.
        """
        job = known_job(transaction, job_id)
        if idempotency_key is not None and transaction.trial_with_key(job_id, idempotency_key) is not None:
            return None
        require_job(transaction, job, caller)
        refuse_unclear(transaction, job)
        found, moment = open_trials(transaction, job), self.moment()
        return None if any(_is_expired(each, moment) for each in found.trials) else basis_of(transaction, job, found)

    def begin_decided(
        self,
        transaction: Transaction,
        job_id: str,
        idempotency_key: str | None,
        caller: Caller,
        decided: Decided | None,
    ) -> TrialDispatch | None:
        """Start a trial as `begin_trial` does, by a decision on the basis that `considered` returned.

        Return None if the caller must call `considered` again: the job has changed since, or `decided` is None because
        leases had expired. In the second case, this method abandons the trials with expired leases.
        """
        job = locked_job(transaction, job_id)
        started = started_with(transaction, job, idempotency_key, caller)
        if started is not None:
            return started
        owner = require_job(transaction, job, caller)
        if decided is None:
            transaction.update_jobs([self._abandon_expired(transaction, job, self.moment())])
            return None
        if decided.read != job:
            return None
        return self._begin(transaction, decided, idempotency_key, caller, owner)

    def _begin(
        self, transaction: Transaction, decided: Decided, idempotency_key: str | None, caller: Caller, owner: str | None
    ) -> TrialDispatch:
        """Save a decision on a locked job, and its trial; `owner` is by `require_job`."""
        suggestion = decided.suggestion
        job, trial = dispatch_trial(
            decided.job, suggestion, self.moment(), owner=caller.token_id, idempotency_key=idempotency_key
        )
        log_replaced(transaction, *trial.key, caller, owner)
        decided.unsaved.save(transaction, job)
        dispatch = save_start(transaction, job, trial)
        if suggestion.decision is not None:
            transaction.insert_decisions([StoredDecision(*trial.key, suggestion.decision)])
        return with_job(transaction, job, dispatch)

    def record_offline(
        self,
        transaction: Transaction,
        offline: OfflineTrial,
        idempotency_key: str,
        caller: Caller = UNRESTRICTED,
    ) -> TrialDispatch:
        """Start a trial of a training that chose its batch size itself, and whose reports follow.

        Either the server was away, or the training finishes the run of a trial without the target. The trial is no
        exploration at any size.

        Raises:
            InvalidReportError: The job has no such batch size; the trial that the key started has another one; or the
                trial to finish has reached the target.
        """
        job = locked_job(transaction, offline.job_id)
        recorded = transaction.trial_with_key(offline.job_id, idempotency_key)
        if recorded is not None:
            require_trial(transaction, job, recorded, caller)
            refuse_other_size(recorded, offline.batch_size)
            # A trial that has ended is answered, too: the client also repeats its reports.
            return dispatch_of(terms_of(transaction, job, recorded), recorded)
        owner = require_job(transaction, job, caller)
        arm = transaction.arms(offline.job_id).get(offline.batch_size)
        if arm is None or offline.batch_size not in job.registration.batch_sizes:
            raise InvalidReportError(
                f"{offline.batch_size} is not one of the job's batch sizes {list(job.registration.batch_sizes)}",
                field="batch_size",
            )
        origin, reason = Origin.OFFLINE, "not chosen: the training began while the server was away"
        if offline.continues is not None:
            missed = known_trial(transaction, offline.job_id, offline.continues)[1]
            # The missed trial may still run here, if its last reports wait in the outbox of its training.
            if missed.state is TrialState.COMPLETED:
                raise InvalidReportError(
                    f"trial {missed.trial_number} has reached the target: there is nothing to finish", field="continues"
                )
            origin = Origin.FINISH
            reason = finishing_reason(f"trial {missed.trial_number}", missed.batch_size)
        suggestion = Suggestion(offline.batch_size, origin, reason)
        job, trial = dispatch_trial(
            job, suggestion, self.moment(), owner=caller.token_id, idempotency_key=idempotency_key
        )
        log_replaced(transaction, *trial.key, caller, owner)
        if origin is Origin.OFFLINE:
            transaction.update_arms(job.job_id, [arm.after_dispatch()])
        return save_start(transaction, job, trial)

    def end_trial(self, transaction: Transaction, end: TrialEnd, caller: Caller = UNRESTRICTED) -> None:
        """End a trial, unless it has ended already."""
        job, trial = locked_trial(transaction, end, caller)
        if not transaction.locks_jobs_with_trials:
            job = locked_job(transaction, end.job_id)
        # An abandoned trial ends, too: its end may show that the batch size cannot run.
        if trial.state in FINAL or end.outcome is trial.state:
            return
        earlier = transaction.crashes(end.job_id) if end.outcome is TrialState.FAILED else NO_CRASHES
        ended = end_by_training(job, trial, end, self.moment(), earlier=earlier)
        job, trial = counted(transaction, job, *ended)
        transaction.update_trials([trial])
        if trial.ended_event is not None:
            transaction.update_jobs([job])
            transaction.tell(TrialEnded(trial.state))
        transaction.log("job %s trial %d: %s", *trial.key, trial.message)
        if trial.state is TrialState.COMPLETED:
            learn_target(transaction, job, self.moment())

    def heartbeat(
        self, transaction: Transaction, heartbeat: Heartbeat, caller: Caller = UNRESTRICTED
    ) -> HeartbeatResponse:
        """Renew a trial's lease; a suspended or abandoned trial runs again, perhaps in a new run of its training."""
        _, trial = locked_trial(transaction, heartbeat, caller)
        if trial.state not in FINAL:
            trial = renew_lease(trial, self.moment(), regular=heartbeat.regular, resumes=heartbeat.resumes)
            if heartbeat.resumes:
                transaction.log("job %s trial %d: resumed by run %d of its training", *trial.key, trial.lease_epoch)
            transaction.update_trials([trial])
        return HeartbeatResponse(
            state=trial.state,
            lease_s=self._leases.lease_s(heartbeats=trial.heartbeats, longest_gap_s=trial.longest_gap_s),
            interval_s=self._leases.heartbeat_interval_s,
            time_s=trial.time_s,
            energy_j=trial.energy_j,
            epochs=trial.epoch,
            lease_epoch=trial.lease_epoch,
        )

    def jobs_to_reap(self, transaction: Transaction) -> list[str]:
        """Return the ids of jobs with expired leases."""
        moment = self.moment()
        return transaction.jobs_with_expired_trials(moment.now, moment.longest_lease_end)

    def reap(self, transaction: Transaction, job_id: str) -> int:
        """Abandon the job's trials with expired leases, except locked ones; return their number."""
        job = transaction.locked_job(job_id, skip=True)
        if job is None:
            return 0
        after = self._abandon_expired(transaction, job, self.moment())
        transaction.update_jobs([after])
        return after.event_count - job.event_count

    def discard(self, transaction: Transaction, job_id: str, trial_number: int) -> TrialView:
        """Withdraw a trial that has ended, and compute the job's arms again without it.

        The trial's reports stay visible. Pruned sizes stay pruned.

        Raises:
            UnknownTrialError: The job has no such trial.
            IllegalTransitionError: The trial has not ended.
        """
        # Lock order: a report that ends a trial also locks the trial before the job.
        found = transaction.locked_trials([(job_id, trial_number)])
        job = locked_job(transaction, job_id)
        if not found:
            raise UnknownTrialError(job_id, trial_number)
        ((_, before),) = found.values()
        trial = discard_trial(before)
        if trial is not before:
            transaction.update_trials([trial])
            # A new event, so that a decision that was made with this trial counts as outdated.
            job = replace(job, event_count=job.event_count + 1)
            transaction.update_jobs([recomputed(transaction, job, transaction.all_trials(job_id))])
            transaction.log("job %s trial %d: %s", *trial.key, trial.message)
        return reading.trial_view(job.registration, trial)

    def delete_job(self, transaction: Transaction, job_id: str, *, again: bool = False) -> None:
        """Delete a job with all its trials; a repeated attempt (`again`) accepts that the job is gone."""
        if not transaction.delete_job(job_id) and not again:
            raise UnknownJobError(job_id)
        transaction.log("job %s deleted", job_id)

    def moment(self) -> Moment:
        """Return the present."""
        return Moment(self._clock(), self._leases)

    def _abandon_expired(self, transaction: Transaction, job: StoredJob, moment: Moment) -> StoredJob:
        """Abandon the job's trials with expired leases; return the job's next row, which the caller saves.

        A lease beyond `longest_lease_end` was granted while the clock was ahead, and is renewed from now.
        """
        changed = []
        for expired in transaction.locked_expired_trials(job.job_id, moment.now, moment.longest_lease_end):
            lease_end = moment.bounded_lease(expired)
            if lease_end is not None:
                changed.append(replace(expired, lease_expires_at=lease_end))
                transaction.log(
                    "job %s trial %d: the clock was ahead, or leases longer, at its lease until %s; that ends %s",
                    *expired.key,
                    expired.lease_expires_at,
                    lease_end,
                )
            elif expired.lease_expires_at is not None and expired.lease_expires_at < moment.now:
                job, trial = abandon_trial(job, expired, moment)
                changed.append(trial)
                transaction.tell(TrialEnded(trial.state))
                transaction.log("job %s trial %d: %s", *trial.key, trial.message)
        transaction.update_trials(changed)
        return job


def with_job_id(job: JobSpecFromClient) -> CreatedJob:
    """Return the job with its job_id, or with a new job_id."""
    return job.named(job.job_id or f"{job.job_id_prefix}-{secrets.token_hex(4)}")


def _is_expired(trial: TrialRecord, moment: Moment) -> bool:
    """Return True if `_abandon_expired` would change an open trial."""
    lease_end = trial.lease_expires_at
    return trial.state in ALIVE and lease_end is not None and not moment.now <= lease_end <= moment.longest_lease_end


class BatchSizeService:
    """The use cases that write, for many callers at once. Each answer follows its commit.

    Errors are those of `Commands`, and `DatabaseUnavailableError` if the database is away or keeps a row locked.
    """

    def __init__(self, store: Store, commands: Commands | None = None) -> None:
        self._store = store
        self.commands = commands or Commands()
        self._turns, self._turns_to_decide = Turns(store.patience_s), Turns(store.patience_s)
        self._deciding = asyncio.Semaphore(_DECISIONS_AT_ONCE)
        self.reports = Reports(store, self.commands.moment)

    async def transact(self, command: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one of `commands` in its own transaction; the first argument is a job's id, or a message with it."""
        if self._store.is_sqlite:  # The store queues all writers without connections.
            return await self._store.write(command, *args, **kwargs)
        job: Any = args[0]
        # In the database, commands on one job would wait for one another with a connection each. If another process
        # keeps the job's row locked, they would soon hold all connections, and other jobs would wait, too.
        async with self._turns.of(job if isinstance(job, str) else job.job_id):
            return await self._store.write(command, *args, **kwargs)

    async def begin_trial(
        self, job_id: str, idempotency_key: str | None = None, caller: Caller = UNRESTRICTED
    ) -> TrialDispatch:
        """Start a trial as `Commands.begin_trial` does, but decide without the lock if the job permits it.

        A decision is outdated if another process, or the end of a trial, has changed the job. After `TRIES` outdated
        decisions, the next decision is made under the lock.
        """
        key = job_id, idempotency_key, caller
        # Of two concurrent decisions on one job, the second would be outdated.
        async with self._turns_to_decide.of(job_id):
            for _ in range(TRIES):
                basis = await self._store.read(self.commands.considered, *key)
                decided = None if basis is None else await self._decided(basis)
                dispatch = await self.transact(self.commands.begin_decided, *key, decided)
                if dispatch is not None:
                    return dispatch
            return await self.transact(self.commands.begin_trial, *key)

    async def explain_next(self, job_id: str) -> Explanation:
        """Return the reason for the next choice, as `reading.explain` does."""
        return reading.explanation_of_next(await self._decided(await self._store.read(reading.basis_of_next, job_id)))

    async def _decided(self, basis: Basis) -> Decided:
        async with turn(self._deciding, self._store.patience_s, "decisions on other jobs"):
            return await asyncio.to_thread(decide, basis)

    async def register(self, job: JobSpecFromClient, caller: Caller = UNRESTRICTED) -> tuple[CreatedJob, bool]:
        """Register a job as `Commands.register` does; a job without a job_id gets one."""
        registration = with_job_id(job)
        # Most jobs are registered already, and a read makes no writer wait.
        known = await self._store.read(self.commands.registered, registration, caller)
        if known is not None:
            return known, False
        return await self.transact(self.commands.register, registration, caller)

    async def reap(self) -> int:
        """Abandon every trial with an expired lease, except locked ones; return their number."""
        abandoned = 0
        for job_id in await self._store.read(self.commands.jobs_to_reap):
            abandoned += await self._store.write(self.commands.reap, job_id)
        return abandoned

    async def delete_job(self, job_id: str) -> None:
        """Delete a job with all its trials."""
        attempts = count()
        await self._store.patient().write(
            lambda transaction: self.commands.delete_job(transaction, job_id, again=next(attempts) > 0)
        )

    async def prune(self, age: timedelta) -> int:
        """Delete reports older than `age`; return their number."""
        instant, pruned = self.commands.moment().now - age, 0
        while True:
            # Other writers get their turn between two small transactions.
            deleted = await self._store.write(Transaction.delete_epochs_before, instant, limit=PRUNED_AT_ONCE)
            pruned += deleted
            if deleted < PRUNED_AT_ONCE:
                return pruned
