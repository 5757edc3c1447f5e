"""The use cases that write, each a plain function over one transaction: lock, load, decide, save.

`Commands` holds the clock and the rules for silent and crashing trials; whoever runs it opens the transaction, repeats
it when the database broke it off, and commits it: `BatchSizeService` for the server, `zeus_plugins.client.local` in a
training's own process. Decisions are `core.policy`'s.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from bso_server.core import job as life
from bso_server.core import policy
from bso_server.core.access import UNRESTRICTED, Caller
from bso_server.core.fencing import FIRST_LEASE_EPOCH, taken_over
from bso_server.core.job import LeasePolicy, Moment
from bso_server.core.model import Suggestion, TrialRecord
from bso_server.core.registry import find
from bso_server.core.replay import replay
from bso_server.core.watch import TrialEnded, TrialStarted
from bso_server.errors import InvalidReportError, JobConflictError, KeyConflictError, UnknownJobError, UnknownTrialError
from bso_server.service import views
from bso_server.service.loading import generator_of, load_history, locked_job, locked_trial, open_trials
from bso_server.service.ownership import log_replaced, require_job, require_trial
from bso_server.service.refusals import (
    refuse_difference,
    refuse_folder_name,
    refuse_long_window,
    refuse_other_gpus,
    refuse_other_size,
    refuse_unserved,
)
from bso_server.storage import imports
from bso_server.storage.rows import TRIAL_AT_POWER_LIMIT, StoredDecision, StoredJob, StoredPowerProfile
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import (
    ALIVE,
    FINAL,
    Heartbeat,
    HeartbeatResponse,
    JobRegistration,
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


def utc_now() -> datetime:
    """The present instant."""
    return datetime.now(UTC)


class Commands:
    """Everything that changes jobs and trials.

    Each method does its work in the transaction that it is given, and may be called again with another one when that
    was broken off, or lost at its commit; only `suggest` without a key and `delete_job` then find what they have done.

    Those that take a `job_id` raise `UnknownJobError` if there is no such job. Those that take a message about a trial
    raise `UnknownTrialError` if there is no such trial, and `InvalidReportError` if it has another batch size. Those
    that take a `caller` raise `ForbiddenError` where the job or the trial is another's: see `service.ownership`.

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
        self, transaction: Transaction, registration: JobRegistration, caller: Caller = UNRESTRICTED
    ) -> JobRegistration | None:
        """The job as it is registered, or None if there is something to write; this only reads.

        Raises:
            JobConflictError: The id is taken by a job that differs.
        """
        existing = transaction.job(registration.job_id or "")
        if existing is None:
            return None
        require_job(transaction, existing, caller)
        known = existing.registration
        _refuse_other(known, registration)
        return known if known.with_fingerprint(registration.fingerprint) == known else None

    def register(
        self, transaction: Transaction, registration: JobRegistration, caller: Caller = UNRESTRICTED
    ) -> tuple[JobRegistration, bool]:
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
        existing = transaction.job(registration.job_id or "") and locked_job(transaction, registration.job_id or "")
        if existing:
            _refuse_other(existing.registration, registration)  # which somebody may have written since
            known = existing.registration.with_fingerprint(registration.fingerprint)
            transaction.update_jobs([replace(existing, registration=known)])
            return known, False
        refuse_folder_name(registration)
        refuse_unserved(registration)
        if imports.mark_of(transaction, registration.job_id or "") is not None:
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

    def suggest(
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
        job, trial = life.suggested(
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
        job, trial = life.dispatched(
            job, suggestion, self.moment(), owner=caller.token_id, idempotency_key=idempotency_key
        )
        log_replaced(transaction, *trial.key, caller, owner)
        transaction.update_arms(job.job_id, [arm.after_dispatch()])
        return _started(transaction, job, trial)

    def end_trial(self, transaction: Transaction, end: TrialEnd, caller: Caller = UNRESTRICTED) -> None:
        """End a trial that the server has not ended; one that has ended stays as it is."""
        job, trial = locked_trial(transaction, end, caller)
        if not transaction.locks_jobs_with_trials:
            job = transaction.locked_jobs([end.job_id])[end.job_id]
        # What the end says of the batch size counts, even if the trial was given up before.
        if trial.state in FINAL or end.outcome is trial.state:
            return
        crashes, observed = 0, False
        if end.outcome is TrialState.FAILED:
            crashes, observed = transaction.crashes(end.job_id, end.batch_size)
        job, trial = life.ended_by_training(
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
            trial = life.beating(trial, self.moment(), regular=heartbeat.regular)
            if heartbeat.resumes:
                trial = taken_over(trial)
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
        trial = life.discarded(before)
        if trial is not before:
            transaction.update_trials([trial])
            history = replay(job.registration, transaction.all_trials(job_id), job.survivors)
            transaction.update_arms(job_id, history.arms.values())
            transaction.forget_memory(job_id)
            transaction.update_jobs([replace(job, cheapest=history.cheapest, folded_event=job.event_count)])
            transaction.log("job %s trial %d: %s", *trial.key, trial.message)
        return views.trial(job.registration, trial)

    def share(self, transaction: Transaction, job_id: str, *, shared: bool = True) -> JobSummary:
        """Open a job to every token that may report, or to its owner alone; trials that have begun go on.

        One that belongs to no token stays open to all.
        """
        job = replace(locked_job(transaction, job_id), shared=shared)
        transaction.share_job(job_id, shared=shared)
        transaction.log("job %s is %s", job_id, "shared" if shared else "not shared")
        return views.summary(job)

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
                job, trial = life.abandoned(job, expired, moment)
                changed.append(trial)
                transaction.tell(TrialEnded(trial.state))
                transaction.log("job %s trial %d: %s", *trial.key, trial.message)
        transaction.update_trials(changed)
        return job


def with_job_id(registration: JobRegistration) -> JobRegistration:
    """The registration with its job_id, or with a new one where it has none."""
    if registration.job_id is not None:
        return registration
    return registration.model_copy(update={"job_id": f"{registration.job_id_prefix}-{secrets.token_hex(4)}"})


def _refuse_other(known: JobRegistration, asked: JobRegistration) -> None:
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
    profile = PowerProfile(gpus=views.gpus_of(job.registration), samples=newest.samples)
    return dispatch.model_copy(update={"power_profile": profile})
