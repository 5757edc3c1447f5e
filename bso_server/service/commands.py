"""The use cases that write, each a plain function over one transaction: lock, load, decide, save.

`Commands` holds the clock and the rules for silent and crashing trials; its caller opens the transaction, repeats it
when the database broke it off, and commits it: `BatchSizeService` for the server, `zeus_plugins.client.local` in a
training's own process. Decisions are `core.policy`'s. Reports are recorded by `service.reports`.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from bso_server.core import policy
from bso_server.core.access import UNRESTRICTED, Caller
from bso_server.core.job import (
    FIRST_LEASE_EPOCH,
    LeasePolicy,
    Moment,
    abandon_trial,
    discard_trial,
    dispatch_trial,
    end_by_training,
    renew_lease,
    replay,
    take_over,
)
from bso_server.core.model import Suggestion, TrialRecord
from bso_server.core.occurrences import TrialEnded, TrialStarted
from bso_server.core.policy import find
from bso_server.errors import (
    DatabaseUnavailableError,
    InvalidReportError,
    JobConflictError,
    KeyConflictError,
    UnknownJobError,
    UnknownTrialError,
)
from bso_server.service import reading
from bso_server.service.imports import Imports
from bso_server.service.loading import generator_of, load_history, locked_job, locked_trial, open_trials
from bso_server.service.refusals import (
    log_replaced,
    refuse_difference,
    refuse_folder_name,
    refuse_long_window,
    refuse_other_gpus,
    refuse_other_size,
    refuse_unserved,
    require_job,
    require_trial,
)
from bso_server.service.reports import Reports
from bso_server.storage.deadlines import waiting
from bso_server.storage.imports import mark_of
from bso_server.storage.rows import TRIAL_AT_POWER_LIMIT, StoredDecision, StoredJob, StoredPowerProfile
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import (
    ALIVE,
    FINAL,
    CreatedJob,
    Heartbeat,
    HeartbeatResponse,
    JobSpecFromClient,
    JobSummary,
    OfflineTrial,
    Origin,
    PowerProfile,
    TrialDispatch,
    TrialEnd,
    TrialPowerProfile,
    TrialState,
    TrialView,
)

# Reports, or power-limit profiles, that one transaction forgets at most.
PRUNED_AT_ONCE = 1000

P = ParamSpec("P")
T = TypeVar("T")


def utc_now() -> datetime:
    """The present instant."""
    return datetime.now(UTC)


class Commands:
    """Everything that changes jobs and trials.

    Each method does its work in the transaction that it is given, and may be called again with another one when that
    was broken off, or lost at its commit; only `begin_trial` without a key and `delete_job` then find what they have
    done.

    Those that take a `job_id` raise `UnknownJobError` if there is no such job. Those that take a message about a trial
    raise `UnknownTrialError` if there is no such trial, and `InvalidReportError` if it has another batch size. Those
    that take a `caller` raise `ForbiddenError` where the job or the trial is another's: see `service.refusals`.

    Args:
        leases: How long silent trials count as alive.
        crash_retries: Crashes after which a batch size that was never measured to the end counts as infeasible.
        clock: Gives the present instant, aware.
    """

    def __init__(
        self,
        *,
        leases: LeasePolicy | None = None,
        crash_retries: int = 3,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        self._leases = leases or LeasePolicy()
        self._crash_retries = crash_retries
        self._clock = clock

    def registered(
        self, transaction: Transaction, registration: CreatedJob, caller: Caller = UNRESTRICTED
    ) -> CreatedJob | None:
        """The job as it is registered, or None if there is something to write; this only reads.

        Raises:
            JobConflictError: The id is taken by a job that differs.
        """
        existing = transaction.job(registration.job_id)
        if existing is None:
            return None
        require_job(transaction, existing, caller)
        known = existing.registration
        _refuse_other(known, registration)
        return known if known.with_fingerprint(registration.fingerprint) == known else None

    def register(
        self, transaction: Transaction, registration: CreatedJob, caller: Caller = UNRESTRICTED
    ) -> tuple[CreatedJob, bool]:
        """Register a job, which belongs to the caller, or find it as `registered`: that with its id, and if it is new.

        What is told of its trainings is kept as far as nobody has told it before. A window that could never hold the
        explorations that a Zeus client asks for is raised.

        Raises:
            JobConflictError: As in `registered`.
            InvalidJobError: It is new, and could not be served.
            PolicyNotInstalledError: It is new, and its policy is not here.
        """
        known = self.registered(transaction, registration, caller)
        if known is not None:
            return known, False
        existing = transaction.job(registration.job_id) and locked_job(transaction, registration.job_id)
        if existing:
            _refuse_other(existing.registration, registration)  # which somebody may have written since
            known = existing.registration.with_fingerprint(registration.fingerprint)
            transaction.update_jobs([replace(existing, registration=known)])
            return known, False
        refuse_folder_name(registration)
        refuse_unserved(registration)
        if mark_of(transaction, registration.job_id) is not None:
            raise JobConflictError(
                f"job {registration.job_id!r} is being imported at present: register it when that is over",
                field="job_id",
            )
        registration = registration.model_copy(update={"registration_id": secrets.token_hex(8)})
        asked, registration = registration, find(registration.policy).amended(registration)
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
        return registration, True

    def begin_trial(
        self,
        transaction: Transaction,
        job_id: str,
        idempotency_key: str | None = None,
        caller: Caller = UNRESTRICTED,
    ) -> TrialDispatch:
        """Choose a batch size and start a trial with it, which belongs to the caller.

        A request that is repeated with the idempotency key that its client made finds the trial of the first one.

        Raises:
            NoSurvivorError: As in `policy.suggest`; likewise PolicyNotInstalledError.
            KeyConflictError: The key's trial has ended.
        """
        now = self._clock()
        job = locked_job(transaction, job_id)
        if idempotency_key is not None:
            started = transaction.trial_with_key(job_id, idempotency_key)
            if started is not None:
                require_trial(transaction, job, started, caller)
                if started.state in FINAL:
                    raise KeyConflictError(
                        f"the request with this Idempotency-Key started trial {started.trial_number}, which has ended "
                        f"({started.state}): make a new key for a new trial",
                        field="Idempotency-Key",
                    )
                return _with_power_profile(transaction, job, _dispatch(job, started))
        owner = require_job(transaction, job, caller)
        found = open_trials(transaction, job)
        if any(self._is_expired(trial, now) for trial in found.trials):
            job = self._abandon_expired(transaction, job, now)
            found = open_trials(transaction, job)
        history, unsaved = load_history(transaction, job, found)
        rng = generator_of(job)
        drawn_from = rng.bit_generator.state
        suggestion = policy.suggest(history, rng, explains=True)
        job, trial = dispatch_trial(
            job, suggestion, self.moment(now), owner=caller.token_id, idempotency_key=idempotency_key
        )
        if job.registration.mab_seed is not None and rng.bit_generator.state != drawn_from:
            job = replace(job, rng_state=json.dumps(rng.bit_generator.state))
        log_replaced(transaction, *trial.key, caller, owner)
        unsaved.arms[trial.batch_size] = history.arms[trial.batch_size].after_dispatch()
        unsaved.save(transaction, job)
        dispatch = _started(transaction, job, trial)
        if suggestion.decision is not None:
            transaction.insert_decisions([StoredDecision(*trial.key, suggestion.decision)])
        return _with_power_profile(transaction, job, dispatch)

    def record_offline(
        self,
        transaction: Transaction,
        offline: OfflineTrial,
        idempotency_key: str,
        caller: Caller = UNRESTRICTED,
    ) -> TrialDispatch:
        """Start a trial of a training that chose its batch size itself, because the server was away.

        Its reports come next. It counts for what it measured, and never as an exploration that was asked for.

        Raises:
            InvalidReportError: The job has no such batch size, or the key's trial has another one.
        """
        job = locked_job(transaction, offline.job_id)
        recorded = transaction.trial_with_key(offline.job_id, idempotency_key)
        if recorded is not None:
            require_trial(transaction, job, recorded, caller)
            refuse_other_size(recorded, offline.batch_size)
            # Even if it has ended: its reports may come again, too.
            return _dispatch(job, recorded)
        owner = require_job(transaction, job, caller)
        arm = transaction.arms(offline.job_id).get(offline.batch_size)
        if arm is None:
            raise InvalidReportError(
                f"{offline.batch_size} is not one of the job's batch sizes {list(job.registration.batch_sizes)}",
                field="batch_size",
            )
        suggestion = Suggestion(
            offline.batch_size, Origin.OFFLINE, "not chosen: the training began while the server was away"
        )
        job, trial = dispatch_trial(
            job, suggestion, self.moment(), owner=caller.token_id, idempotency_key=idempotency_key
        )
        log_replaced(transaction, *trial.key, caller, owner)
        transaction.update_arms(job.job_id, [arm.after_dispatch()])
        return _started(transaction, job, trial)

    def end_trial(self, transaction: Transaction, end: TrialEnd, caller: Caller = UNRESTRICTED) -> None:
        """End a trial that the server has not ended; one that has ended stays as it is."""
        job, trial = locked_trial(transaction, end, caller)
        if not transaction.locks_jobs_with_trials:
            job = locked_job(transaction, end.job_id)
        # What the end says of the batch size counts, even if the trial was given up before.
        if trial.state in FINAL or end.outcome is trial.state:
            return
        crashes, observed = 0, False
        if end.outcome is TrialState.FAILED:
            crashes, observed = transaction.crashes(end.job_id, end.batch_size)
        job, trial = end_by_training(
            job, trial, end, self.moment(), crashes=crashes, observed=observed, retries=self._crash_retries
        )
        transaction.update_trials([trial])
        if trial.ended_event is not None:
            transaction.update_jobs([job])
            transaction.tell(TrialEnded(trial.state))
        transaction.log("job %s trial %d: %s", *trial.key, trial.message)

    def heartbeat(
        self, transaction: Transaction, heartbeat: Heartbeat, caller: Caller = UNRESTRICTED
    ) -> HeartbeatResponse:
        """Keep a trial alive; a suspended or abandoned one runs again, perhaps in a new run of its training."""
        _, trial = locked_trial(transaction, heartbeat, caller)
        if trial.state not in FINAL:
            trial = renew_lease(trial, self.moment(), regular=heartbeat.regular)
            if heartbeat.resumes:
                trial = take_over(trial)
                transaction.log("job %s trial %d: goes on in run %d of its training", *trial.key, trial.lease_epoch)
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

    def store_power_profile(
        self, transaction: Transaction, profile: TrialPowerProfile, caller: Caller = UNRESTRICTED
    ) -> None:
        """Keep what a trial's training knows of its power limits, for later trials of its size; said again, as it is.

        It makes no difference where the trial stands: what was measured is true.

        Raises:
            InvalidReportError: The job has other GPUs.
        """
        job, trial = locked_trial(transaction, profile, caller)
        refuse_other_gpus(job, profile.gpus)
        trial = replace(trial, power_limit_w=profile.chosen_limit_w, power_limits=len(profile.samples))
        transaction.update_trials([trial], TRIAL_AT_POWER_LIMIT)
        chosen = "not chosen" if profile.chosen_limit_w is None else f"{profile.chosen_limit_w:g} W"
        transaction.log("job %s trial %d: power limit %s of %d known ones", *trial.key, chosen, len(profile.samples))
        left = transaction.power_profile(trial.key)
        known = left or transaction.newest_power_profile(trial.job_id, trial.batch_size)
        if known is not None and known.samples == profile.samples:
            return  # Said before, or measured by an earlier trial.
        new = StoredPowerProfile(*trial.key, trial.batch_size, profile.samples, self._clock())
        if left is None:
            transaction.insert_power_profiles([new])
        else:
            transaction.update_power_profile(new)

    def jobs_to_reap(self, transaction: Transaction) -> list[str]:
        """Ids of the jobs with trials whose leases have run out."""
        moment = self.moment()
        return transaction.jobs_with_expired_trials(moment.now, moment.longest_lease_end)

    def reap(self, transaction: Transaction, job_id: str) -> int:
        """Abandon the job's trials whose leases have run out; their number. It waits for nobody who has them locked."""
        job = transaction.locked_job(job_id, skip=True)
        if job is None:
            return 0
        after = self._abandon_expired(transaction, job, self._clock())
        transaction.update_jobs([after])
        return after.event_count - job.event_count

    def discard(self, transaction: Transaction, job_id: str, trial_number: int) -> TrialView:
        """Set a trial that has ended aside: all that is remembered of the job is made anew without it.

        What was reported of it stays to be seen. Sizes that are already pruned stay pruned.

        Raises:
            UnknownTrialError: The job has no such trial.
            IllegalTransitionError: It may still go on.
        """
        # In the order in which a report that ends a trial locks them.
        found = transaction.locked_trials([(job_id, trial_number)])
        job = locked_job(transaction, job_id)
        if not found:
            raise UnknownTrialError(job_id, trial_number)
        ((_, before),) = found.values()
        trial = discard_trial(before)
        if trial is not before:
            transaction.update_trials([trial])
            history = replay(job.registration, transaction.all_trials(job_id), job.survivors)
            transaction.update_arms(job_id, history.arms.values())
            transaction.forget_memory(job_id)
            transaction.update_jobs([replace(job, cheapest=history.cheapest, folded_event=job.event_count)])
            transaction.log("job %s trial %d: %s", *trial.key, trial.message)
        return reading.trial_view(job.registration, trial)

    def share(self, transaction: Transaction, job_id: str, *, shared: bool = True) -> JobSummary:
        """Open a job to every token that may report, or to its owner alone; trials that have begun go on.

        One that belongs to no token stays open to all.
        """
        job = replace(locked_job(transaction, job_id), shared=shared)
        transaction.share_job(job_id, shared=shared)
        transaction.log("job %s is %s", job_id, "shared" if shared else "not shared")
        return reading.job_summary(job)

    def delete_job(self, transaction: Transaction, job_id: str, *, again: bool = False) -> None:
        """Delete a job with all that is known of it; if it was tried `again`, there may be none left."""
        if not transaction.delete_job(job_id) and not again:
            raise UnknownJobError(job_id)
        transaction.log("job %s deleted", job_id)

    def prune_epochs(self, transaction: Transaction, age: timedelta) -> int:
        """Forget reports that are older than `age`, at most `PRUNED_AT_ONCE`; each trial keeps its last. Their number.

        Decisions rest on trials and go on as before.
        """
        return transaction.delete_epochs_before(self._clock() - age, limit=PRUNED_AT_ONCE)

    def prune_power_profiles(self, transaction: Transaction, age: timedelta) -> int:
        """The same with power-limit profiles; of each batch size the newest stays."""
        return transaction.delete_power_profiles_before(self._clock() - age, limit=PRUNED_AT_ONCE)

    def moment(self, now: datetime | None = None) -> Moment:
        """The present, or this instant."""
        return Moment(now or self._clock(), self._leases)

    def _is_expired(self, trial: TrialRecord, now: datetime) -> bool:
        """True if `_abandon_expired` is to look at an open trial."""
        lease_end, moment = trial.lease_expires_at, self.moment(now)
        return trial.state in ALIVE and lease_end is not None and not now <= lease_end <= moment.longest_lease_end

    def _abandon_expired(self, transaction: Transaction, job: StoredJob, now: datetime) -> StoredJob:
        """Abandon the job's trials whose leases have run out; the job's row as it becomes, not yet saved.

        A lease longer than any was granted while the clock was ahead, and ends as if its trial was heard of just now.
        """
        moment, changed = self.moment(now), []
        for expired in transaction.locked_expired_trials(job.job_id, now, moment.longest_lease_end):
            lease_end = moment.bounded_lease(expired)
            if lease_end is not None:
                changed.append(replace(expired, lease_expires_at=lease_end))
                transaction.log(
                    "job %s trial %d: the clock was ahead, or leases longer, at its lease until %s; that ends %s",
                    *expired.key,
                    expired.lease_expires_at,
                    lease_end,
                )
            elif expired.lease_expires_at is not None and expired.lease_expires_at < now:
                job, trial = abandon_trial(job, expired, moment)
                changed.append(trial)
                transaction.tell(TrialEnded(trial.state))
                transaction.log("job %s trial %d: %s", *trial.key, trial.message)
        transaction.update_trials(changed)
        return job


def with_job_id(job: JobSpecFromClient) -> CreatedJob:
    """Return the job with its job_id, or with a new one if it has none."""
    return job.named(job.job_id or f"{job.job_id_prefix}-{secrets.token_hex(4)}")


def _refuse_other(known: CreatedJob, asked: CreatedJob) -> None:
    """Raise `JobConflictError` unless a job is registered as it is asked for now, its window raised as it was."""
    if known.window_size == asked.mab_num_explorations:
        asked = find(asked.policy).amended(asked)
    refuse_difference(known, asked)


def _dispatch(job: StoredJob, trial: TrialRecord) -> TrialDispatch:
    return TrialDispatch(
        job_id=trial.job_id,
        batch_size=trial.batch_size,
        trial_number=trial.trial_number,
        registration_id=job.registration.registration_id,
        # Even if a later run has the trial by now: who asks is the run that it was dispatched to.
        lease_epoch=FIRST_LEASE_EPOCH,
        origin=trial.origin,
        reason=trial.reason,
        stop_rule=policy.stop_rule(job.registration, trial, job.min_cost_j),
    )


def _started(transaction: Transaction, job: StoredJob, trial: TrialRecord) -> TrialDispatch:
    """Save a new trial and its job."""
    transaction.insert_trials([trial])
    transaction.update_jobs([job])
    transaction.tell(TrialStarted(job.registration.policy, trial.origin))
    transaction.log("job %s trial %d: batch size %d, %s", *trial.key, trial.batch_size, trial.reason)
    return _dispatch(job, trial)


def _with_power_profile(transaction: Transaction, job: StoredJob, dispatch: TrialDispatch) -> TrialDispatch:
    """The same with what is known of the power limits at its size."""
    newest = transaction.newest_power_profile(dispatch.job_id, dispatch.batch_size)
    if newest is None:
        return dispatch
    profile = PowerProfile(gpus=job.registration.gpus, samples=newest.samples)
    return dispatch.model_copy(update={"power_profile": profile})


class _Turns:
    """Turns: of one process, one command at a time for each job, which waits `patience_s` seconds at most.

    Commands on one job wait for one another in the database anyway, each with a connection. If somebody else keeps the
    job's row locked, they would soon have taken all of them, and other jobs would wait, too. So they queue here. On a
    SQLite file all writers queue in the store, without a connection each.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def of(self, job_id: str) -> AsyncIterator[None]:
        """Have the job's turn.

        Raises:
            DatabaseUnavailableError: Those before took too long.
        """
        lock = self._locks.get(job_id)
        if lock is None:
            lock = self._locks[job_id] = asyncio.Lock()
        if lock.locked():
            with waiting(self._patience_s) as deadline:
                try:
                    async with asyncio.timeout(deadline.left_s):
                        await lock.acquire()
                except TimeoutError:
                    raise DatabaseUnavailableError(f"other requests on job {job_id} wait for the database") from None
        else:
            await lock.acquire()
        try:
            yield
        finally:
            lock.release()


class BatchSizeService:
    """Everything that the server can be asked to change, for many callers at once. Each answer follows its commit.

    Errors are those of `Commands`; besides, each method raises `DatabaseUnavailableError` when the database stays away,
    or what it needs there stays locked.
    """

    def __init__(self, store: Store, commands: Commands | None = None) -> None:
        self._store = store
        self.commands = commands or Commands()
        self.imports = Imports(store.patient(), lambda: self.commands.moment().now)
        self._turns = _Turns(store.patience_s)
        self.reports = Reports(store, self.commands.moment)

    async def transact(self, command: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do one of `commands`, with these arguments, in a transaction of its own.

        The first argument is the id of the job that it changes, or a message that holds it.
        """
        if self._store.is_sqlite:
            return await self._store.write(command, *args, **kwargs)
        job: Any = args[0]
        async with self._turns.of(job if isinstance(job, str) else job.job_id):
            return await self._store.write(command, *args, **kwargs)

    async def register(self, job: JobSpecFromClient, caller: Caller = UNRESTRICTED) -> tuple[CreatedJob, bool]:
        """See `Commands.register`; a job without a job_id gets one."""
        registration = with_job_id(job)
        # Most are registered already, and to look makes no writer wait.
        known = await self._store.read(self.commands.registered, registration, caller)
        if known is not None:
            return known, False
        return await self.transact(self.commands.register, registration, caller)

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

    async def import_job(self, pieces: AsyncIterable[bytes], *, first_line: int = 1) -> JobSummary:
        """See `Imports.import_job`."""
        return await self.imports.import_job(pieces, first_line=first_line)

    async def prune(self, command: Callable[[Transaction, timedelta], int], age: timedelta) -> int:
        """Forget all that `prune_epochs` or `prune_power_profiles` of the commands forgets a part of; its number."""
        pruned = 0
        while True:
            # A transaction for each few: between two of them, others get their turn.
            deleted = await self._store.write(command, age)
            pruned += deleted
            if deleted < PRUNED_AT_ONCE:
                return pruned
