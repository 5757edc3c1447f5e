"""Data on which decisions are based: a job's trials, their reports, and the history that summarises them.

The size of a `History` does not grow with the number of trials. `core.job.replay` computes it from all trials. The
database stores the same summary, and updates it with the same functions (`Arm.after_dispatch`, `Arm.after_end`). So a
decision costs the same after ten trials and after ten thousand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from zeus_plugins.protocol import (
    ALIVE,
    MAX_WATCHED,
    CreatedJob,
    Decision,
    EndReason,
    Finite,
    NonNegativeFinite,
    Origin,
    Stage,
    TrialState,
)

# States of trials that ran until the server stopped them, so their cost is known.
OBSERVED = frozenset({TrialState.COMPLETED, TrialState.EARLY_STOPPED, TrialState.EXHAUSTED})

# States of trials that have ended without the target.
MISSED = frozenset(TrialState) - ALIVE - {TrialState.COMPLETED, TrialState.WITHDRAWN}

# States that say nothing about the batch size, so that the policy repeats its exploration.
UNCOUNTED = frozenset({TrialState.FAILED, TrialState.ABANDONED, TrialState.WITHDRAWN})

BAND_SDS = 1.645
"""A normal variable lies within this number of σ around its mean with a probability of 90 %."""

Record = TypeVar("Record")


def changed(record: Record, /, **values: Any) -> Record:
    """Return a copy of a dataclass (without slots) with these values, ten times as fast as `dataclasses.replace`.

    Raises:
        TypeError: The record has no such field.
    """
    copy = object.__new__(type(record))
    copy.__dict__.update(record.__dict__, **values)
    if len(copy.__dict__) != len(record.__dict__):
        raise TypeError(f"{type(record).__name__} has no field {', '.join(values.keys() - record.__dict__.keys())}")
    return copy


@dataclass(frozen=True, slots=True)
class EpochBound:
    """Number of epochs after which a trial that has not reached the target is stopped, and the reason in words."""

    epochs: int
    reason: str


class Deviations(NamedTuple):
    """Spread of the time and energy per epoch of a trial: Σ e · (r − m)² over all reports but the first.

    Here e is the number of epochs since the previous report, r the time (or energy) of one of these epochs, and m the
    mean of r. From these sums follows the spread of the costs under every η (`cost_deviations_j2`).

    Attributes:
        time_s2: The sum for the time, s² per epoch.
        energy_j2: The sum for the energy, J² per epoch.
        joint_js: The sum of the products, Σ e · (r − m) · (r' − m'), J·s per epoch.
    """

    time_s2: NonNegativeFinite = 0.0
    energy_j2: NonNegativeFinite = 0.0
    joint_js: Finite = 0.0


TrialKey = tuple[str, int]
"""The job_id and the number of a trial."""


@dataclass(frozen=True, kw_only=True)  # without slots, for `changed` and `of_row`
class TrialRecord:
    """Trial: a row of table ``trials``, with one field per column.

    Decisions ignore instants, owners and leases; a simulated trial has their defaults. `service.exports.TrialExport`
    describes the other fields. Here, totals are 0 before the first report, and the epochs of a trial imported from Zeus
    are 0, because Zeus does not keep them.

    Attributes:
        idempotency_key: Key made by the client; a repeated request with this key returns the same trial.
        owner: Id of the token that dispatched the trial; None if the server requires none.
        lease_epoch: Number of the current run of the trial's training, see `renew_lease` in `core.job`.
        waited_share: Share of its time in which the training waited for a CPU core; None if unknown.
        startup_s: Part of `first_time_s` that the first steps took beyond later steps; None if unknown.
        other_gpus: True if the job has other GPUs now than when the trial began. Then the trial's epochs and metrics
            still count, but not its costs.
        deviations: Spread of the epochs' times and energies; None before the first report, and for trials imported from
            Zeus.
        confirmed: Number of evaluations in a row, up to the latest, that reached the target.
    """

    job_id: str = ""
    trial_number: int
    batch_size: int
    state: TrialState
    origin: Origin
    reason: str = ""
    message: str | None = None
    end_reason: EndReason | None = None
    started_at: datetime | None = None
    started_event: int = 0
    reported_at: datetime | None = None
    ended_at: datetime | None = None
    ended_event: int | None = None
    time_s: float = 0.0
    energy_j: float = 0.0
    energy_source: str | None = None
    epoch: float = 0.0
    metric: float | None = None
    report_count: int = 0
    longest_gap_s: float = 0.0
    lease_expires_at: datetime | None = None
    heartbeats: bool = False
    lease_epoch: int = 1
    first_epoch: float = 0.0
    first_time_s: float = 0.0
    first_energy_j: float = 0.0
    deviations: Deviations | None = None
    epoch_bound: int | None = None
    epoch_bound_reason: str | None = None
    idempotency_key: str | None = None
    owner: str | None = None
    power_limit_w: float | None = None
    power_limits: int | None = None
    confirmed: int = 0
    waited_share: float | None = None
    startup_s: float | None = None
    watched: Mapping[str, float] | None = None
    other_gpus: bool = False

    @classmethod
    def of_row(cls, values: dict[str, Any]) -> TrialRecord:
        """Return a trial with these values, by field, without checks; other fields have their defaults."""
        trial = object.__new__(cls)
        trial.__dict__.update(_DEFAULTS | values)
        return trial

    @property
    def key(self) -> TrialKey:
        """The job_id and the number."""
        return self.job_id, self.trial_number

    @property
    def bound(self) -> EpochBound | None:
        """The bound on epochs, or None before it is decided."""
        return None if self.epoch_bound is None else EpochBound(self.epoch_bound, self.epoch_bound_reason or "")

    def bounded_by(self, bound: EpochBound | None) -> TrialRecord:
        """Set the bound on epochs."""
        epochs, reason = (None, None) if bound is None else (bound.epochs, bound.reason)
        return changed(self, epoch_bound=epochs, epoch_bound_reason=reason)

    @property
    def last_report(self) -> Report | None:
        """The last report; None before the first, and for a trial imported from Zeus, whose epochs are unknown."""
        if self.metric is None or not self.epoch:
            return None
        return Report(time_s=self.time_s, energy_j=self.energy_j, epoch=self.epoch, metric=self.metric)


_DEFAULTS = {field.name: field.default for field in fields(TrialRecord) if field.default is not MISSING}


@dataclass(frozen=True, slots=True)
class Report:
    """Result of one evaluation: totals since the trial began, over all GPUs, and the validation metric.

    `epoch` is 1 after the first epoch, and fractional within an epoch.
    """

    time_s: float
    energy_j: float
    epoch: float
    metric: float


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Batch size of the next trial, and the reason.

    Attributes:
        reason: The decision in plain words, for newcomers.
        survivors: Sizes with which the bandit stage began, ascending; None outside that stage.
        bound: Bound on the trial's epochs, if already decided.
        decision: Numbers behind the decision, if requested.
        basis: Results that the policy's own `explain` reuses.
    """

    batch_size: int
    origin: Origin
    reason: str
    survivors: tuple[int, ...] | None = None
    bound: EpochBound | None = None
    decision: Decision | None = None
    basis: object = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ExpectedCost:
    """Expected cost of a run until the target, and the ends of its 90 % band (None if unknown), in joules."""

    mean_j: float
    band_j: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Expectations:
    """Expectations of a job's policy.

    Attributes:
        costs: Expected cost by batch size, ascending, without sizes that cannot run or are unknown.
        best: Size with the lowest expected cost among the sizes known to reach the target, or None. The policy runs it
            unless a trial of another size is worth more.
        since: Number of the first trial after the latest change of the job's costs or epochs; 0 without a change.
    """

    costs: Mapping[int, ExpectedCost]
    best: int | None
    since: int = 0


def cost_of(job: CreatedJob, totals: Report | TrialRecord) -> float:
    """Return the cost (J) of a trial up to a report or, given the trial's record, up to its last report."""
    return job.cost_j(time_s=totals.time_s, energy_j=totals.energy_j)


def after_report(job: CreatedJob, trial: TrialRecord, report: Report) -> TrialRecord:  # noqa: ARG001 - policies call it
    """Return the trial after one more report."""
    reported = changed(
        trial,
        time_s=report.time_s,
        energy_j=report.energy_j,
        epoch=report.epoch,
        metric=report.metric,
        report_count=trial.report_count + 1,
        longest_gap_s=max(trial.longest_gap_s, report.time_s - trial.time_s),
    )
    if trial.report_count:
        return changed(reported, deviations=_deviations(trial, reported))
    first = {"first_epoch": report.epoch, "first_time_s": report.time_s, "first_energy_j": report.energy_j}
    return changed(reported, **first, deviations=Deviations())


def _deviations(trial: TrialRecord, reported: TrialRecord) -> Deviations | None:
    """Return the `deviations` of a trial after a further report (West's method, as in `WeightedStatistics`)."""
    known, epochs, earlier = trial.deviations, reported.epoch - trial.epoch, trial.epoch - trial.first_epoch
    if known is None or epochs <= 0 or earlier <= 0:
        return known
    weight = epochs * earlier / (earlier + epochs)
    off_s = (reported.time_s - trial.time_s) / epochs - (trial.time_s - trial.first_time_s) / earlier
    off_j = (reported.energy_j - trial.energy_j) / epochs - (trial.energy_j - trial.first_energy_j) / earlier
    added = (weight * off_s * off_s, weight * off_j * off_j, weight * off_s * off_j)
    # Finite even for absurd totals.
    return Deviations(*(min(max(old + new, -1e300), 1e300) for old, new in zip(known, added, strict=True)))


def cost_deviations_j2(job: CreatedJob, trial: TrialRecord) -> float | None:
    """Return the spread of the costs of a trial's epochs under the job's η, J² per epoch; None if unknown."""
    if trial.deviations is None:
        return None
    per_s, per_j = job.cost_j(time_s=1, energy_j=0), job.cost_j(time_s=0, energy_j=1)
    time_s2, energy_j2, joint_js = trial.deviations
    return min(max(per_s * per_s * time_s2 + per_j * per_j * energy_j2 + 2 * per_s * per_j * joint_js, 0.0), 1e300)


def after_other_rank(trial: TrialRecord, report: Report) -> TrialRecord:
    """Return the trial after another rank's report of an evaluation that was judged before; keep the largest totals."""
    reported = changed(trial, time_s=max(trial.time_s, report.time_s), energy_j=max(trial.energy_j, report.energy_j))
    if trial.report_count > 1:
        return reported
    return changed(reported, first_time_s=reported.time_s, first_energy_j=reported.energy_j)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Running count, mean and sum of squared deviations of a sequence (Welford, Technometrics 4(3), 1962).

    The variance of equal values is exactly 0.
    """

    count: int = 0
    mean: float = 0.0
    squared_deviations: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Statistics:
        """Return the statistics of `values`."""
        statistics = cls()
        for value in values:
            statistics = statistics.including(value)
        return statistics

    def including(self, value: float) -> Statistics:
        """Add a value."""
        count = self.count + 1
        mean = self.mean + (value - self.mean) / count
        return Statistics(count, mean, self.squared_deviations + (value - self.mean) * (value - mean))

    def negated(self) -> Statistics:
        """Return the statistics of the values' negatives."""
        return Statistics(self.count, -self.mean, self.squared_deviations)

    @property
    def variance(self) -> float:
        """Population variance; 0 for fewer than two values."""
        return self.squared_deviations / self.count if self.count else 0.0

    @property
    def sample_std(self) -> float | None:
        """Standard deviation with n − 1 in the denominator; None for fewer than two values."""
        return math.sqrt(self.squared_deviations / (self.count - 1)) if self.count > 1 else None


@dataclass(frozen=True, slots=True)
class Arm:
    """Memory of one batch size.

    Attributes:
        trials: Number of trials dispatched with it, without those of `Origin.FINISH`.
        infeasible: Reason why it cannot run on this hardware, or None.
        explored: Costs (J) of its observed exploration trials; a trial is observed if its state is in `OBSERVED`.
        observed: Costs (J) of its observed trials of every origin.
        completed: Costs (J) of its trials that reached the target.
        window: The last `window_size` observed trials as (trial number, cost in J), in order of dispatch; empty if
            `window_size` is 0.
        latest: The observed trial that ended last, as (trial number, cost in J), or None.
        refitted: True if one of its observed trials ended within the bandit stage.
        metric: Last metrics of its trials that reached the target, without trials imported from Zeus.
        watched: Last values of watched metrics in these trials, by name.
        observed_elsewhere: Number of its observed trials on other GPUs, whose costs are in none of the fields above.
        reached_elsewhere: Number of trials in `observed_elsewhere` that reached the target.
    """

    batch_size: int
    trials: int = 0
    infeasible: EndReason | None = None
    explored: Statistics = field(default_factory=Statistics)
    observed: Statistics = field(default_factory=Statistics)
    completed: Statistics = field(default_factory=Statistics)
    window: tuple[tuple[int, float], ...] = ()
    latest: tuple[int, float] | None = None
    refitted: bool = False
    metric: Statistics = field(default_factory=Statistics)
    watched: Mapping[str, Statistics] = field(default_factory=dict)
    observed_elsewhere: int = 0
    reached_elsewhere: int = 0

    @property
    def reached(self) -> int:
        """Number of its trials that reached the target, on any GPUs."""
        return self.completed.count + self.reached_elsewhere

    @property
    def measured(self) -> int:
        """Number of its observed trials, on any GPUs."""
        return self.observed.count + self.observed_elsewhere

    def after_dispatch(self) -> Arm:
        """Count one more dispatched trial."""
        return replace(self, trials=self.trials + 1)

    def after_end(self, job: CreatedJob, trial: TrialRecord, *, in_bandit: bool) -> Arm:
        """Add the end of a trial of this size; `in_bandit` is True if it ended within the bandit stage."""
        if trial.state is TrialState.INFEASIBLE:
            if trial.other_gpus:
                return self
            # Running out of memory excludes larger sizes too, so no other reason replaces it.
            known = self.infeasible is EndReason.OUT_OF_MEMORY
            return self if known else replace(self, infeasible=trial.end_reason or EndReason.CRASHED)
        if trial.state not in OBSERVED:
            return self
        explored, completed, metric, watched = self.explored, self.completed, self.metric, self.watched
        if trial.state is TrialState.COMPLETED and trial.last_report is not None:
            metric = metric.including(trial.last_report.metric)
            watched = _after_run(job, watched, trial.watched or {})
        if trial.other_gpus:
            return replace(
                self,
                metric=metric,
                watched=watched,
                observed_elsewhere=self.observed_elsewhere + 1,
                reached_elsewhere=self.reached_elsewhere + (trial.state is TrialState.COMPLETED),
            )
        cost_j = cost_of(job, trial)
        latest = (trial.trial_number, cost_j)
        window = sorted([*self.window, latest])[-job.window_size :] if job.window_size else []
        return replace(
            self,
            explored=explored.including(cost_j) if trial.origin is Origin.EXPLORATION else explored,
            observed=self.observed.including(cost_j),
            completed=completed.including(cost_j) if trial.state is TrialState.COMPLETED else completed,
            window=tuple(window),
            latest=latest,
            refitted=self.refitted or in_bandit,
            metric=metric,
            watched=watched,
        )

    @property
    def learned_costs(self) -> Statistics:
        """Costs (J) that the bandit learns from.

        Until one of its trials ends within the bandit stage, an arm learns from its exploration trials. Afterwards it
        learns from the `window_size` (0: all) observed trials of every origin that were dispatched last; if the trial
        that ended last is not among them, it replaces the oldest.
        """
        if not self.refitted:
            return self.explored
        if self.latest is None or not self.window:
            return self.observed
        if self.latest in self.window:
            return Statistics.of(cost_j for _, cost_j in self.window)
        return Statistics.of(cost_j for _, cost_j in (self.latest, *self.window[1:]))


def _after_run(
    job: CreatedJob, known: Mapping[str, Statistics], watched: Mapping[str, float]
) -> Mapping[str, Statistics]:
    """Add the watched metrics of a run. New names beyond `MAX_WATCHED` are ignored, so that an arm stays small.

    Scripts sometimes rename metrics. Metrics with a margin in `no_worse_than_default` are always added.
    """
    added = dict(known)
    for name, value in watched.items():
        if name in added or len(added) < MAX_WATCHED or name in (job.no_worse_than_default or ()):
            added[name] = added.get(name, Statistics()).including(value)
    return added


@dataclass(frozen=True, slots=True)
class Cheapest:
    """Cheapest trial that reached the target on the job's GPUs, at one of its batch sizes."""

    trial_number: int
    batch_size: int
    cost_j: float

    @staticmethod
    def of_both(known: Cheapest | None, job: CreatedJob, trial: TrialRecord) -> Cheapest | None:
        """Return the cheapest trial, now that `trial` has ended; on ties, keep `known`, the cheapest trial so far."""
        if trial.state is not TrialState.COMPLETED or trial.origin is Origin.FINISH:
            return known
        if trial.other_gpus or trial.batch_size not in job.batch_sizes:
            return known
        cost_j = cost_of(job, trial)
        if known is not None and known.cost_j <= cost_j:
            return known
        return Cheapest(trial.trial_number, trial.batch_size, cost_j)


@dataclass(frozen=True)
class History:
    """Summary of a job's trials.

    Attributes:
        job: The job.
        arms: Arm per batch size, ascending: for the job's sizes, and for sizes that were removed from the job after
            they had trials.
        explorations: Exploration trials in order of dispatch, without those in a state of `UNCOUNTED`; at most the
            number of sizes times the number of rounds. Empty after the pruning stage, and with policies without that
            stage.
        cheapest: Cheapest trial that reached the target, or None.
        bandit_entered_at: Event (of the job's event counter) with which the bandit stage began, or None before.
        survivors: Sizes with which the bandit stage began, ascending, or None before. Later trials do not change them,
            because an abandoned exploration that is revived must not undo the pruning.
        in_flight: Trials that are running or suspended, in order of dispatch, without those of `Origin.FINISH`.
        memory: Memory of the policy (`core.policy.Memory`), or None.
    """

    job: CreatedJob
    arms: Mapping[int, Arm]
    explorations: tuple[TrialRecord, ...] = ()
    cheapest: Cheapest | None = None
    bandit_entered_at: int | None = None
    survivors: tuple[int, ...] | None = None
    in_flight: tuple[TrialRecord, ...] = ()
    memory: Any = None

    @property
    def stage(self) -> Stage:
        """Stage of the job after its latest dispatch."""
        return Stage.PRUNING if self.bandit_entered_at is None else Stage.BANDIT

    @property
    def recurrences(self) -> int:
        """Number of runs that reached the target."""
        return sum(arm.reached for arm in self.arms.values())

    @cached_property
    def fitting_sizes(self) -> tuple[int, ...]:
        """Batch sizes below the smallest that ran out of memory, ascending."""
        too_large = [size for size, arm in self.arms.items() if arm.infeasible is EndReason.OUT_OF_MEMORY]
        return tuple(size for size in self.job.batch_sizes if not too_large or size < min(too_large))

    @cached_property
    def excluded(self) -> Mapping[int, EndReason]:
        """Reason why a batch size cannot run on this hardware, by size.

        A size is excluded by its own trials, by a smaller size that ran out of memory, or by two neighbouring sizes
        that crashed alike (`EndReason.CRASHED_ALIKE`): they exclude themselves and all sizes beyond them, away from the
        sizes that reached the target.
        """
        found = {size: arm.infeasible for size, arm in self.arms.items() if arm.infeasible is not None}
        reached = [size for size, arm in self.arms.items() if arm.completed.count]
        alike = [size for size, reason in found.items() if reason is EndReason.CRASHED_ALIKE and reached]
        for size in alike:
            if min(reached) < size < max(reached):
                continue
            outwards = sorted(self.arms, reverse=size < min(reached))
            place = outwards.index(size)
            # The neighbour that crashed alike is the inner size, unless the outer size was tried, too.
            is_outer_tried = any(self.arms[each].trials for each in outwards[place + 1 : place + 2])
            beyond = outwards[place if is_outer_tried else place - 1 :]
            found |= {each: EndReason.CRASHED_ALIKE for each in beyond if each not in (*found, *reached)}
        too_large = set(self.arms) - set(self.fitting_sizes)
        return found | dict.fromkeys(too_large, EndReason.OUT_OF_MEMORY)

    @cached_property
    def runnable_sizes(self) -> frozenset[int]:
        """Batch sizes that are not excluded."""
        return frozenset(self.job.batch_sizes) - self.excluded.keys()

    @property
    def start_size(self) -> int | None:
        """First size of exploration: the default, or the largest size that fits below it; None if no size fits."""
        if self.job.default_batch_size in self.fitting_sizes:
            return self.job.default_batch_size
        return max(self.fitting_sizes, default=None)


def arms_after(
    job: CreatedJob, arms: Mapping[int, Arm], ended: Iterable[TrialRecord], *, bandit_entered_at: int | None
) -> dict[int, Arm]:
    """Return the arms that change with the ends of these trials, in this order; `bandit_entered_at` as in `History`.

    A trial of `Origin.FINISH` changes no arm, because the rest of a run says nothing about a whole run.
    """
    changed: dict[int, Arm] = {}
    for trial in ended:
        if trial.origin is Origin.FINISH:
            continue
        arm = changed.get(trial.batch_size, arms[trial.batch_size])
        in_bandit = bandit_entered_at is not None and (trial.ended_event or 0) > bandit_entered_at
        changed[trial.batch_size] = arm.after_end(job, trial, in_bandit=in_bandit)
    return changed


def set_apart(startup_s: float | None, first_time_s: float, first_epoch: float) -> tuple[float, float]:
    """Return the share of a first report's cost, and its epochs, to leave out of the cost of an epoch.

    The share is the start-up's in the time, as its energy is not measured; no epochs are left out. If the start-up is
    unknown, the whole report is left out, because it may also contain a trial of power limits.
    """
    if startup_s is None or startup_s >= first_time_s:
        return 1.0, first_epoch
    return startup_s / first_time_s, 0.0


def log_costs_per_epoch(job: CreatedJob, trial: TrialRecord) -> tuple[float | None, float | None]:
    """Return the log of an epoch's mean cost (J) until the first report, and without the part that is `set_apart`.

    A cost of 0 is None.
    """
    first_j, first_epochs = job.cost_j(time_s=trial.first_time_s, energy_j=trial.first_energy_j), trial.first_epoch
    share, apart_epochs = set_apart(trial.startup_s, trial.first_time_s, first_epochs)
    usual_j, usual_epochs = cost_of(job, trial) - share * first_j, trial.epoch - apart_epochs
    return (
        _log(first_j / first_epochs) if first_j > 0 else None,
        _log(usual_j / usual_epochs) if usual_j > 0 and usual_epochs > 0 else None,
    )


def _log(ratio: float) -> float:
    return math.log(min(max(ratio, 1e-300), 1e300))


def is_cut_short(job: CreatedJob, trial: TrialRecord, min_cost_j: float | None) -> bool:
    """Return True if the job's earlier terms stopped a trial that its present terms would have let continue."""
    if trial.state is TrialState.EXHAUSTED:
        # Runs that set a target end by their own rule, not by the job's terms.
        return 0 < trial.epoch < job.max_epochs and job.target_runs is None
    if trial.end_reason is not EndReason.COST_BOUND_CROSSED or trial.epoch >= job.max_epochs:
        return False
    return job.beta_knob is None or min_cost_j is None or cost_of(job, trial) <= job.beta_knob * min_cost_j


def is_counted_exploration(trial: TrialRecord) -> bool:
    """Return True if the trial is an exploration that counts, so that its batch size needs no repetition."""
    return trial.origin is Origin.EXPLORATION and trial.state not in UNCOUNTED


def advice_in_words(job: CreatedJob) -> str:
    """Return advice for a job of which every batch size has missed the target."""
    return f"{'lower' if job.higher_is_better_metric else 'raise'} the target or raise max_epochs"
