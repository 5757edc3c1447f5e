"""Life of a job: how each event changes the job and its trials.

The service (with records in a database) and the simulator share these functions, so that they get the same records.
Each function takes the state of a job and the record of a trial, and returns the changed state and record. The
functions are pure: they get the present time as a `Moment`, draw from a generator that the caller gives, and write
nothing. So the store can repeat a transaction that the database has aborted.

`TRANSITIONS` lists the transitions between the states of a trial that trainings and expired leases may cause. An
ABANDONED trial is neither `ALIVE` nor `FINAL`: its batch size may be tried again, but the trial's next report or
heartbeat revives it, so that no measurement is lost.

`JobState.event_count` is the job's logical clock, with one tick for each dispatch, each end of a trial, each revision,
and each trial that an administrator discards. It orders events without relying on the clocks of many machines. The arms
include the ends of trials up to the event `folded_event`. A revived trial loses the event of its end, and gets a new
event when it ends again. Its revival requires no correction of the arms, because an abandoned trial has not changed
them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypeVar

import numpy as np

from bso_server.core import policy
from bso_server.core.model import (
    OBSERVED,
    Arm,
    Cheapest,
    History,
    Report,
    Suggestion,
    TrialRecord,
    after_other_rank,
    after_report,
    arms_after,
    changed,
    cost_of,
    is_counted_exploration,
    is_cut_short,
)
from bso_server.core.verdict import Evidence, run_of, with_control
from bso_server.errors import IllegalTransitionError
from zeus_plugins.protocol import (
    ALIVE,
    FINAL,
    ZEUS,
    CreatedJob,
    Ending,
    EndReason,
    Origin,
    PowerLimitChoice,
    StopRule,
    TrialState,
    Verdict,
)

TRANSITIONS: Mapping[TrialState, frozenset[TrialState]] = {
    TrialState.RUNNING: frozenset(TrialState) - {TrialState.RUNNING},
    TrialState.SUSPENDED: frozenset({TrialState.RUNNING, TrialState.FAILED, TrialState.ABANDONED}),
    TrialState.ABANDONED: frozenset({TrialState.RUNNING}),
    **dict.fromkeys(FINAL, frozenset()),
}


def check_transition(before: TrialState, after: TrialState) -> None:
    """Raise `IllegalTransitionError` unless `TRANSITIONS` contains this transition."""
    if after not in TRANSITIONS[before]:
        raise IllegalTransitionError(f"a trial that is {before} cannot become {after}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasePolicy:
    """Lengths of leases: how long a trial without messages counts as alive.

    Attributes:
        heartbeat_lease_s: Lease of a training that sends heartbeats, so long that several may be lost.
        silent_lease_s: Shortest lease of a training that only reports, such as a Zeus client's.
        gaps: Factor on the longest time between two reports of such a training; the product is its lease, if it is
            longer than `silent_lease_s`.
        suspended_lease_s: Time within which a preempted training may resume.
    """

    heartbeat_lease_s: float = 360.0
    silent_lease_s: float = 3600.0
    gaps: float = 5.0
    suspended_lease_s: float = 86400.0

    @property
    def heartbeat_interval_s(self) -> float:
        """Interval between the heartbeats of a training that sends them."""
        return self.heartbeat_lease_s / 6

    def lease_s(self, *, heartbeats: bool, longest_gap_s: float) -> float:
        """Return the lease of a running trial in seconds; arguments as in `TrialRecord`."""
        return self.heartbeat_lease_s if heartbeats else max(self.silent_lease_s, self.gaps * longest_gap_s)


@dataclass(frozen=True, slots=True)
class Moment:
    """Present time (UTC) and leases of a job on a server.

    For a simulated job, callers pass None instead: it has neither instants nor leases.
    """

    now: datetime
    leases: LeasePolicy

    def lease_end(self, trial: TrialRecord) -> datetime:
        """Return the end of the lease of a trial that has just sent a message."""
        if trial.state is TrialState.SUSPENDED:
            return self.now + timedelta(seconds=self.leases.suspended_lease_s)
        lease_s = self.leases.lease_s(heartbeats=trial.heartbeats, longest_gap_s=trial.longest_gap_s)
        return self.now + timedelta(seconds=lease_s)

    @property
    def longest_lease_end(self) -> datetime:
        """Latest end of a lease granted now, except for trainings that report very rarely."""
        leases = self.leases
        longest_s = max(leases.heartbeat_lease_s, leases.silent_lease_s, leases.suspended_lease_s)
        return self.now + timedelta(seconds=longest_s)

    def bounded_lease(self, trial: TrialRecord) -> datetime | None:
        """Return a lease end from now if the trial's lease is too long, because the clock was ahead; otherwise None."""
        lease_end = self.lease_end(trial)
        latest = max(self.longest_lease_end, lease_end)
        return lease_end if trial.lease_expires_at is not None and trial.lease_expires_at > latest else None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """State of a job, without its trials and arms; `cheapest`, `bandit_entered_at` and `survivors` as in `History`.

    `event_count` is the job's logical clock, and `trial_count` the number of dispatched trials. The arms include the
    ends of trials up to the event `folded_event`. `revised_event` is the event of the latest revision, or 0.
    """

    registration: CreatedJob
    event_count: int = 0
    trial_count: int = 0
    cheapest: Cheapest | None = None
    bandit_entered_at: int | None = None
    folded_event: int = 0
    survivors: tuple[int, ...] | None = None
    revised_event: int = 0

    @property
    def job_id(self) -> str:
        """Id of the job."""
        return self.registration.job_id

    @property
    def min_cost_j(self) -> float | None:
        """Lowest cost of a trial that reached the target, in joules, or None."""
        return None if self.cheapest is None else self.cheapest.cost_j

    @property
    def needs_explorations(self) -> bool:
        """True in the pruning stage, whose decisions need the record of each exploration."""
        return self.survivors is None and policy.find(self.registration.policy).prunes

    def history(
        self,
        arms: Mapping[int, Arm],
        memory: Any,
        explorations: Callable[[], Iterable[TrialRecord]],
        in_flight: Iterable[TrialRecord],
    ) -> History:
        """Return the history; `arms` and `memory` include every end so far. Call `explorations` only if necessary."""
        sizes = frozenset(self.registration.batch_sizes)
        known = explorations() if self.needs_explorations else ()
        return History(
            self.registration,
            arms,
            tuple(each for each in known if each.batch_size in sizes and not self._has_cut_short(each)),
            self.cheapest,
            self.bandit_entered_at,
            self.survivors,
            tuple(each for each in in_flight if each.batch_size in sizes and each.origin is not Origin.FINISH),
            memory,
        )

    def _has_cut_short(self, trial: TrialRecord) -> bool:
        """Return True if the job's earlier terms stopped a trial that its present terms would let continue."""
        is_earlier = trial.started_event <= self.revised_event
        return is_earlier and is_cut_short(self.registration, trial, self.min_cost_j)


AnyJob = TypeVar("AnyJob", bound=JobState)
"""A `JobState` or a subclass with further fields, such as the storage's."""


def dispatch_trial(
    job: AnyJob,
    suggestion: Suggestion,
    moment: Moment | None = None,
    *,
    owner: str | None = None,
    idempotency_key: str | None = None,
) -> tuple[AnyJob, TrialRecord]:
    """Start a trial; return the changed job, and the trial.

    Unless the training chose the size itself (`Origin.OFFLINE`, `Origin.FINISH`), the suggestion comes from a history
    whose arms include every end so far. The caller counts the trial in its arm (`Arm.after_dispatch`), unless the trial
    finishes another trial's run (`Origin.FINISH`).
    """
    trial = TrialRecord(
        job_id=job.job_id,
        trial_number=job.trial_count + 1,
        batch_size=suggestion.batch_size,
        state=TrialState.RUNNING,
        origin=suggestion.origin,
        reason=suggestion.reason,
        started_event=job.event_count + 1,
        idempotency_key=idempotency_key,
        owner=owner,
    ).bounded_by(suggestion.bound)
    if moment is not None:
        trial = changed(trial, started_at=moment.now, lease_expires_at=moment.lease_end(trial))
    after = replace(job, event_count=trial.started_event, trial_count=trial.trial_number)
    if trial.origin not in (Origin.OFFLINE, Origin.FINISH):
        after = replace(after, folded_event=job.event_count, survivors=suggestion.survivors)
    if trial.origin is Origin.BANDIT and job.bandit_entered_at is None:
        after = replace(after, bandit_entered_at=trial.started_event)
    return after, trial


def revive_trial(trial: TrialRecord) -> TrialRecord:
    """Set a suspended or abandoned trial to running, because its training has sent a message."""
    if trial.state is TrialState.RUNNING:
        return trial
    check_transition(trial.state, TrialState.RUNNING)
    return changed(trial, state=TrialState.RUNNING, ended_at=None, ended_event=None, end_reason=None)


def renew_lease(trial: TrialRecord, moment: Moment, *, regular: bool, resumes: bool = False) -> TrialRecord:
    """Renew the lease of a trial after a heartbeat.

    `regular` means that its training will send more heartbeats, `resumes` that a new run of its training takes it over:
    messages of earlier runs, with an earlier lease epoch, are then refused.
    """
    trial = revive_trial(trial)
    if regular:
        trial = changed(trial, heartbeats=True)
    return changed(trial, lease_expires_at=moment.lease_end(trial), lease_epoch=trial.lease_epoch + resumes)


def _at_power_limit(trial: TrialRecord, choice: PowerLimitChoice | None) -> TrialRecord:
    """Return the trial with the power limit in a message, or as it was if the message has none."""
    if choice is None or choice.power_limits is None:
        return trial
    return changed(trial, power_limit_w=choice.power_limit_w, power_limits=choice.power_limits)


def end_trial(
    job: AnyJob,
    trial: TrialRecord,
    state: TrialState,
    reason: EndReason,
    message: str | None,
    moment: Moment | None = None,
) -> tuple[AnyJob, TrialRecord]:
    """End a trial in `state`; advance the job's clock and update its cheapest trial."""
    check_transition(trial.state, state)
    event = job.event_count + 1
    trial = changed(
        trial,
        state=state,
        end_reason=reason,
        message=message,
        ended_event=event,
        ended_at=None if moment is None else moment.now,
        lease_expires_at=None,
    )
    return replace(job, event_count=event, cheapest=Cheapest.of_both(job.cheapest, job.registration, trial)), trial


CRASH_REASONS = frozenset({EndReason.CRASHED, EndReason.CRASHED_ALIKE, EndReason.ENDED_EARLY})
"""End reasons of trials that ended before the server stopped them: by a rule of the training, or by an error other than
out of memory."""


class Crash(NamedTuple):
    """A trial that ended for one of `CRASH_REASONS`; its message ends with the error in parentheses."""

    batch_size: int
    message: str
    ended_event: int


@dataclass(frozen=True, slots=True)
class Crashes:
    """Crashes of a job, and the sizes that have been shown to run.

    Attributes:
        crashes: Trials that crashed or ended early.
        measured: Sizes of which a trial was measured to its end.
        reached: Sizes of which a trial reached the target.
        proven_event: Latest event at which a trial that was later measured to its end began; 0 without such a trial.
    """

    crashes: tuple[Crash, ...] = ()
    measured: frozenset[int] = frozenset()
    reached: frozenset[int] = frozenset()
    proven_event: int = 0

    def including(self, trials: Iterable[TrialRecord]) -> Crashes:
        """Add trials that have ended."""
        trials = tuple(trials)
        observed = [trial for trial in trials if trial.state in OBSERVED]
        crashed = (
            Crash(trial.batch_size, trial.message or "", trial.ended_event or 0)
            for trial in trials
            if trial.end_reason in CRASH_REASONS
        )
        return Crashes(
            (*self.crashes, *crashed),
            self.measured.union(trial.batch_size for trial in observed),
            self.reached.union(trial.batch_size for trial in observed if trial.state is TrialState.COMPLETED),
            max([self.proven_event, *(trial.started_event for trial in observed)]),
        )


NO_CRASHES = Crashes()


def end_by_training(
    job: AnyJob,
    trial: TrialRecord,
    ending: Ending,
    moment: Moment | None = None,
    *,
    earlier: Crashes = NO_CRASHES,
) -> tuple[AnyJob, TrialRecord]:
    """End a trial whose training ended before the policy stopped it; suspend the trial of a preempted training.

    A batch size becomes infeasible if this crash, together with the `earlier` crashes, excludes it (`_why_excluded`).
    """
    trial, size = _at_power_limit(revive_trial(trial), ending), trial.batch_size
    detail = "" if ending.detail is None else f" ({ending.detail})"
    if ending.outcome is TrialState.SUSPENDED:
        check_transition(trial.state, TrialState.SUSPENDED)
        message = f"suspended: the training was preempted{detail}"
        trial = changed(trial, state=TrialState.SUSPENDED, end_reason=EndReason.PREEMPTED, message=message)
        return job, trial if moment is None else changed(trial, lease_expires_at=moment.lease_end(trial))
    is_refused = ending.refused_size and trial.origin is not Origin.FINISH
    if ending.outcome is TrialState.WITHDRAWN and is_refused and size != job.registration.default_batch_size:
        state, reason = TrialState.INFEASIBLE, EndReason.REFUSED
        message = f"infeasible: {size} cannot be trained as configured and is not tried again"
    elif ending.outcome is TrialState.WITHDRAWN:
        state, reason = TrialState.WITHDRAWN, EndReason.REFUSED
        message = f"withdrawn: the training could not be done as configured, which says nothing about {size}"
    elif trial.origin is Origin.FINISH:
        state, reason = TrialState.FAILED, EndReason.ENDED_EARLY if ending.ended_early else EndReason.CRASHED
        message = f"failed: the training ended before it had finished the run, which says nothing about {size}"
    elif ending.outcome is TrialState.INFEASIBLE:
        state, reason = TrialState.INFEASIBLE, EndReason.OUT_OF_MEMORY
        message = f"infeasible: {size} ran out of memory; neither it nor a larger size is tried again"
    elif _ended_without_target(job, trial, ending):
        state, reason = TrialState.COMPLETED, EndReason.NO_TARGET
        message = f"completed: trained to its end to set the target, with a metric of {trial.metric:.4g}"
    elif (why := _why_excluded(job.registration, size, ending, earlier)) is not None:
        state, (reason, message) = TrialState.INFEASIBLE, why
    elif ending.ended_early:
        state, reason = TrialState.FAILED, EndReason.ENDED_EARLY
        message = "failed: the training ended by a rule of its own, before its target and its last epoch"
    else:
        state, reason = TrialState.FAILED, EndReason.CRASHED
        message = "failed: the training ended before the server said so"
    return end_trial(job, trial, state, reason, f"{message}{detail}", moment)


# Messages of the same fault differ from run to run in their numbers and addresses.
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?", re.IGNORECASE)


def _masked(text: str) -> str:
    return _NUMBER.sub("#", text)


# Crashes after which a size is excluded.
_RETRIES = 3

_Exclusion = tuple[EndReason, str]
"""Cause for which a batch size is not tried again: the end reason of the trial, and the trial's message."""


def _after_many_crashes(size: int, happened: str, crashes: Iterable[Crash]) -> _Exclusion | None:
    """Exclude a size from its crash number `_RETRIES` on; `crashes` are the earlier crashes that count."""
    count = sum(crash.batch_size == size for crash in crashes) + 1
    words = f"infeasible: {size} {happened} {count} times and is not tried again"
    return (EndReason.CRASHED, words) if count >= _RETRIES else None


def _why_excluded(job: CreatedJob, size: int, ending: Ending, earlier: Crashes) -> _Exclusion | None:
    """Return why a crash excludes its size from further trials; None if the size may be tried again.

    Policy `zeus` excludes a size after three crashes, unless a trial of it was measured to its end. Other policies
    never exclude a size that has reached the target. They exclude any other size after three crashes, and earlier if
    the size itself or a neighbouring size has crashed with the same error (with numbers masked).

    The fault may also be the script's. So an earlier crash counts only if a trial that began after it was measured to
    its end. An error that has also occurred at a size that reached the target counts only towards the three crashes.
    Before any size has reached the target, no crash excludes the default.
    """
    happened, reached = "ended early or crashed" if ending.ended_early else "crashed", earlier.reached
    if job.policy == ZEUS:
        is_able = size in earlier.measured
        return None if is_able else _after_many_crashes(size, happened, earlier.crashes)
    # A revision may have removed the size: then it is not offered again anyway.
    if size in reached or size not in job.batch_sizes or (size == job.default_batch_size and not reached):
        return None
    crashes = [crash for crash in earlier.crashes if crash.ended_event < earlier.proven_event]
    error = None if ending.detail is None else f"({_masked(ending.detail)})"
    alike = [crash for crash in earlier.crashes if error is not None and _masked(crash.message).endswith(error)]
    if not reached.isdisjoint(crash.batch_size for crash in alike):
        return _after_many_crashes(size, happened, crashes)
    sizes = {crash.batch_size for crash in alike if crash in crashes}
    if size in sizes:
        return EndReason.CRASHED, f"infeasible: {size} {happened} twice in the same way and is not tried again"
    place = job.batch_sizes.index(size)
    neighbours = sizes.intersection(job.batch_sizes[max(place - 1, 0) : place + 2])
    if neighbours and not ending.ended_early and reached and not min(reached) < size < max(reached):
        beyond = "larger" if size > max(reached) else "smaller"
        words = f"{size} crashed like {min(neighbours)}; neither they nor {beyond} sizes are tried again"
        return EndReason.CRASHED_ALIKE, f"infeasible: {words}"
    return _after_many_crashes(size, happened, crashes)


def _ended_without_target(job: JobState, trial: TrialRecord, ending: Ending) -> bool:
    """Return True if the job has no target, and the training ended by its own rule: its run helps to set the target."""
    registration = job.registration
    return ending.ended_early and registration.target_metric is None and cost_of(registration, trial) > 0


def abandon_trial(job: AnyJob, trial: TrialRecord, moment: Moment) -> tuple[AnyJob, TrialRecord]:
    """Abandon a trial whose lease has expired."""
    message = f"abandoned: not heard of since {trial.reported_at or trial.started_at:%Y-%m-%d %H:%M:%S} UTC"
    return end_trial(job, trial, TrialState.ABANDONED, EndReason.LEASE_EXPIRED, message, moment)


def judge_report(
    job: AnyJob,
    trial: TrialRecord,
    report: Report,
    moment: Moment | None = None,
    *,
    history: History | None = None,
    judged_by: StopRule | None = None,
    energy_source: str | None = None,
    waited_share: float | None = None,
    startup_s: float | None = None,
    watched: Mapping[str, float] | None = None,
    power_limit: PowerLimitChoice | None = None,
) -> tuple[AnyJob, TrialRecord, Verdict]:
    """Judge a report of a trial; revive the trial if necessary, and end it if the verdict says so.

    A trial with an impossible cost (`policy.doubt`) ends as withdrawn, so that no decision rests on it. `history` is
    required if `policy.needs_bound`. `judged_by` and errors as in `policy.judge`.
    """
    startup_s = trial.startup_s if trial.report_count else startup_s
    trial = _at_power_limit(revive_trial(trial), power_limit)
    trial = changed(trial, waited_share=waited_share, startup_s=startup_s)
    if history is not None and policy.needs_bound(job.registration, trial):
        trial = policy.bounded(history, trial, report)
    verdict = policy.judge(job.registration, trial, report, job.min_cost_j, judged_by=judged_by)
    state, reason = verdict.state, verdict.reason
    if verdict.stop and reason is not EndReason.COST_BOUND_CROSSED:
        doubt = policy.doubt(job.registration, report, None if trial.other_gpus else job.min_cost_j)
        if doubt is not None:
            # The training has completed and its report is kept, but later runs must not be compared with it.
            state, reason = TrialState.WITHDRAWN, EndReason.DISCARDED
            verdict = replace(verdict, message=f"{verdict.message}; not counted, as {doubt}")
    trial = after_report(job.registration, trial, report)
    trial = changed(
        trial,
        message=verdict.message,
        confirmed=verdict.rule.confirmed,
        energy_source=energy_source,
        watched=trial.watched if watched is None else watched,
        reported_at=None if moment is None else moment.now,
        lease_expires_at=None if moment is None else moment.lease_end(trial),
    )
    if verdict.stop:
        job, trial = end_trial(job, trial, state, reason, verdict.message, moment)
    return job, trial, verdict


def discard_trial(trial: TrialRecord) -> TrialRecord:
    """Withdraw a trial that has ended. It keeps the event of its end.

    `TRANSITIONS` does not include this transition, because no training causes it.

    Raises:
        IllegalTransitionError: The trial has not ended.
    """
    if trial.state not in FINAL:
        raise IllegalTransitionError(
            f"trial {trial.trial_number} is {trial.state}, and only one that has ended can be set aside"
        )
    if trial.end_reason in (EndReason.DISCARDED, EndReason.REFUSED):
        return trial
    message = f"withdrawn: an administrator has set it aside; it was {trial.state} ({trial.message})"
    return changed(trial, state=TrialState.WITHDRAWN, end_reason=EndReason.DISCARDED, message=message)


RANKS_APART = 0.02
"""All ranks report an evaluation within this share of the trial's longest time between two evaluations."""


def is_of_same_evaluation(trial: TrialRecord, report: Report) -> bool:
    """Return True if a rank's report is about an evaluation that another rank has already reported.

    Reports do not name their rank. So a report with the same epoch and another metric is about a further evaluation
    only if its time is later by more than `RANKS_APART`, or if its totals are the same.
    """
    if report.epoch != trial.epoch or report.metric == trial.metric:
        return report.epoch <= trial.epoch
    if (report.time_s, report.energy_j) == (trial.time_s, trial.energy_j):  # Two ranks never measure the same.
        return False
    return report.time_s - trial.time_s <= RANKS_APART * trial.longest_gap_s


def add_rank_report(trial: TrialRecord, report: Report, moment: Moment) -> TrialRecord:
    """Add another rank's report of an evaluation that was judged "continue"; revive the trial if necessary."""
    if trial.state is not TrialState.RUNNING:
        trial = changed(revive_trial(trial), message="go on: another rank has reported this evaluation")
    trial = after_other_rank(trial, report)
    return changed(trial, reported_at=moment.now, lease_expires_at=moment.lease_end(trial))


def replay(
    job: CreatedJob, trials: Iterable[TrialRecord], survivors: tuple[int, ...] | None = None, *, learns: bool = True
) -> History:
    """Summarise all trials of a job, given in order of dispatch.

    `survivors`, the sizes with which the bandit stage began, are a stored decision, which is not replayed. The
    policy's memory, which takes longest, is None unless `learns`.
    """
    trials = tuple(trials)
    sizes = frozenset(job.batch_sizes)
    arms = {batch_size: Arm(batch_size) for batch_size in sorted({*sizes, *(trial.batch_size for trial in trials)})}
    for trial in trials:
        if trial.origin is not Origin.FINISH:
            arms[trial.batch_size] = arms[trial.batch_size].after_dispatch()
    entered_at = policy.bandit_entered_from_the_start(job)
    if entered_at is None:
        entered_at = next((trial.started_event for trial in trials if trial.origin is Origin.BANDIT), None)
    ended = [trial for trial in trials if trial.ended_event is not None]
    ended.sort(key=lambda trial: trial.ended_event or 0)
    cheapest: Cheapest | None = None
    for trial in ended:
        cheapest = Cheapest.of_both(cheapest, job, trial)
    arms |= arms_after(job, arms, ended, bandit_entered_at=entered_at)
    prunes = policy.find(job.policy).prunes
    offered = [trial for trial in trials if trial.batch_size in sizes and trial.origin is not Origin.FINISH]
    explorations = tuple(trial for trial in offered if prunes and is_counted_exploration(trial))
    in_flight = tuple(trial for trial in offered if trial.state in ALIVE)
    memory = policy.memory_after(job, policy.find(job.policy).begun_memory(job), ended) if learns else None
    return History(job, arms, explorations, cheapest, entered_at, survivors, in_flight, memory)


class InMemoryJob:
    """New job in memory, without instants, for the simulator."""

    def __init__(self, job: CreatedJob) -> None:
        new = replay(job, ())
        self.state = JobState(registration=job, bandit_entered_at=new.bandit_entered_at)
        self._arms, self._memory = dict(new.arms), new.memory
        self._in_flight: dict[int, TrialRecord] = {}
        self._explorations: dict[int, TrialRecord] = {}
        self._crashes = NO_CRASHES
        self._evidence = Evidence(job.default_batch_size, job.controls)

    @property
    def history(self) -> History:
        """History for the next decision."""
        return self.state.history(self._arms, self._memory, self._explorations.values, self._in_flight.values())

    def begin_trial(self, rng: np.random.Generator) -> TrialRecord:
        """Start the trial that the policy suggests, or a control run; errors as in `policy.suggest`."""
        history = self.history
        suggestion = with_control(history, policy.suggest(history, rng), self._evidence.judge)
        self.state, trial = dispatch_trial(self.state, suggestion)
        self._arms[trial.batch_size] = self._arms[trial.batch_size].after_dispatch()
        self._keep(trial)
        return trial

    def stop_rule(self, trial_number: int) -> StopRule:
        """Return the current stop rule of a trial in flight."""
        return policy.stop_rule(self.state.registration, self._in_flight[trial_number], self.state.min_cost_j)

    def judge(
        self,
        trial_number: int,
        report: Report,
        *,
        report_count: int | None = None,
        judged_by: StopRule | None = None,
        waited_share: float | None = None,
    ) -> tuple[TrialRecord, Verdict]:
        """Judge a report of a trial in flight, and end the trial if the verdict says so.

        `report_count` is the number of the trial's reports including this report, if the caller has skipped some;
        `judged_by` as in `policy.judge`.
        """
        trial = self._in_flight[trial_number]
        if report_count is not None:
            trial = changed(trial, report_count=report_count - 1)
        history = self.history if policy.needs_bound(self.state.registration, trial) else None
        self.state, trial, verdict = judge_report(
            self.state, trial, report, history=history, judged_by=judged_by, waited_share=waited_share
        )
        self._keep(trial)
        return trial, verdict

    def end_trial(self, trial_number: int, ending: Ending) -> TrialRecord:
        """End a trial in flight that the policy has not stopped."""
        trial = self._in_flight[trial_number]
        self.state, trial = end_by_training(self.state, trial, ending, earlier=self._crashes)
        self._keep(trial)
        return trial

    def _keep(self, trial: TrialRecord) -> None:
        """Store the new record of a trial, and add an ended one to the arms."""
        state = self.state
        if trial.state in ALIVE:
            self._in_flight[trial.trial_number] = trial
        else:
            del self._in_flight[trial.trial_number]
            self._crashes = self._crashes.including([trial])
            self._arms |= arms_after(state.registration, self._arms, [trial], bandit_entered_at=state.bandit_entered_at)
            self._memory = policy.memory_after(state.registration, self._memory, [trial])
            self.state = replace(state, folded_event=state.event_count)
            if trial.state is TrialState.COMPLETED:
                job = state.registration
                first_j = job.cost_j(time_s=trial.first_time_s, energy_j=trial.first_energy_j)
                self._evidence.add([run_of(trial, cost_of(job, trial), first_j)])
        if is_counted_exploration(trial):
            self._explorations[trial.trial_number] = trial
        else:
            self._explorations.pop(trial.trial_number, None)
