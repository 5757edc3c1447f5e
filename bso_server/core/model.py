"""The values that decisions are made of: a job's trials, their reports, and the history that summarises them.

The size of a `History` does not grow with the number of trials. `core.job.replay` makes it from all of them. The
database keeps the same summary beside the trials and moves it forward by the same steps (`Arm.after_dispatch`,
`Arm.after_end`), so that a decision costs the same after ten trials and after ten thousand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from datetime import datetime
from functools import cached_property
from typing import Any, TypeVar

from zeus_plugins.protocol import CreatedJob, Decision, EndReason, Origin, Stage, TrialState

# States whose trials were measured to the end that the server decided on, so that they have a cost.
OBSERVED = frozenset({TrialState.COMPLETED, TrialState.EARLY_STOPPED, TrialState.EXHAUSTED})

# States that say nothing about the batch size: its exploration is owed again.
UNCOUNTED = frozenset({TrialState.FAILED, TrialState.ABANDONED, TrialState.WITHDRAWN})


Record = TypeVar("Record")


def changed(record: Record, /, **values: Any) -> Record:
    """The same record with other values in these fields; `dataclasses.replace` takes ten times as long.

    It is for dataclasses without slots. A TypeError tells of a field that the record does not have.
    """
    copy = object.__new__(type(record))
    copy.__dict__.update(record.__dict__, **values)
    if len(copy.__dict__) != len(record.__dict__):
        raise TypeError(f"{type(record).__name__} has no field {', '.join(values.keys() - record.__dict__.keys())}")
    return copy


@dataclass(frozen=True, slots=True)
class EpochBound:
    """The epochs after which a running trial is stopped that has not reached its target; why, as in `Suggestion`."""

    epochs: int
    reason: str


TrialKey = tuple[str, int]
"""A trial's job_id and number."""


@dataclass(frozen=True, kw_only=True)  # without slots, for `changed` and `of_row`
class TrialRecord:
    """One trial: a row of table ``trials``, field by column.

    Decisions rest on the fields without an instant; the others are for people, leases and owners, and have defaults for
    jobs that know of none. `service.exports.TrialExport` describes those that an export holds, too; here, totals are 0
    before the first report. So are the epochs of a trial that was imported from Zeus, which keeps none of them.

    Attributes:
        idempotency_key: Made by the client, so that a repeated request finds the trial that the first one started.
        owner: Id of the token that dispatched it; None where the server asked for none.
        lease_epoch: Counts the runs of its training, see `core.job`.
        cost_deviations_j2: The spread of its epochs' costs, J² per epoch: over all reports but the first, the sum of
            ``e · (r − m)²`` with the epochs e since the report before, their cost r per epoch, and m, the mean of that.
            None before the first report, and for trials that were imported from Zeus.
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
    first_cost_j: float = 0.0
    cost_deviations_j2: float | None = None
    epoch_bound: int | None = None
    epoch_bound_reason: str | None = None
    idempotency_key: str | None = None
    owner: str | None = None
    power_limit_w: float | None = None
    power_limits: int | None = None

    @classmethod
    def of_row(cls, values: dict[str, Any]) -> TrialRecord:
        """The trial with these values, by field, unchecked; other fields have their defaults."""
        trial = object.__new__(cls)
        trial.__dict__.update(_DEFAULTS | values)
        return trial

    @property
    def key(self) -> TrialKey:
        """Its job_id and number."""
        return self.job_id, self.trial_number

    @property
    def bound(self) -> EpochBound | None:
        """The bound after which it is stopped without the target, if that has been decided."""
        return None if self.epoch_bound is None else EpochBound(self.epoch_bound, self.epoch_bound_reason or "")

    def bounded_by(self, bound: EpochBound | None) -> TrialRecord:
        """The same trial, stopped at this bound."""
        epochs, reason = (None, None) if bound is None else (bound.epochs, bound.reason)
        return changed(self, epoch_bound=epochs, epoch_bound_reason=reason)

    @property
    def last_report(self) -> Report | None:
        """The last report, or None before any, and where not all of it is known, as of a trial imported from Zeus."""
        if self.metric is None or not self.epoch:
            return None
        return Report(time_s=self.time_s, energy_j=self.energy_j, epoch=self.epoch, metric=self.metric)


_DEFAULTS = {field.name: field.default for field in fields(TrialRecord) if field.default is not MISSING}


@dataclass(frozen=True, slots=True)
class Report:
    """The findings of one evaluation: totals since the trial began, over all GPUs, and the validation metric.

    Epochs count from 1, and are fractional within an epoch.
    """

    time_s: float
    energy_j: float
    epoch: float
    metric: float


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The batch size of the next trial, and the reason.

    Attributes:
        reason: The decision in plain words, which a newcomer understands.
        survivors: In the bandit stage the sizes that it was entered with, ascending; else None.
        bound: When the trial is stopped, if that is known by now.
        decision: The numbers behind it, if they were asked for.
        basis: Whatever the policy's own `explain` needs not to work out again. Nobody else looks at it.
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
    """The cost that the policy expects of a run until the target, joules.

    Attributes:
        mean_j: Its mean.
        std_j: Standard deviation of that mean, as far as the runs tell; None after a single run.
    """

    mean_j: float
    std_j: float | None


@dataclass(frozen=True, slots=True)
class Expectations:
    """The expectations of a job's policy.

    Attributes:
        costs: By batch size, ascending; without those that cannot run, or of which nothing is known.
        best: The size that is played when nothing is to be learned: the cheapest one of those that reach the target.
    """

    costs: Mapping[int, ExpectedCost]
    best: int | None


def cost_of(job: CreatedJob, totals: Report | TrialRecord) -> float:
    """Cost in joules of what a trial has used by a report, or by its last one."""
    return job.cost_j(time_s=totals.time_s, energy_j=totals.energy_j)


def after_report(job: CreatedJob, trial: TrialRecord, report: Report) -> TrialRecord:
    """The trial once it has sent one more report."""
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
        return changed(reported, cost_deviations_j2=_cost_deviations_j2(job, trial, reported))
    return changed(reported, first_epoch=report.epoch, first_cost_j=cost_of(job, reported), cost_deviations_j2=0.0)


def _cost_deviations_j2(job: CreatedJob, trial: TrialRecord, reported: TrialRecord) -> float | None:
    """Those of a trial that had reported before, `reported` being its new totals (West, as `WeightedStatistics`)."""
    known_j2, epochs = trial.cost_deviations_j2, reported.epoch - trial.epoch
    if known_j2 is None or epochs <= 0:
        return known_j2
    earlier_j, earlier_epochs = cost_of(job, trial) - trial.first_cost_j, trial.epoch - trial.first_epoch
    rate_j = (cost_of(job, reported) - cost_of(job, trial)) / epochs
    off_j = rate_j - (earlier_j / earlier_epochs if earlier_epochs > 0 else rate_j)
    # Whatever absurd totals were reported.
    return min(known_j2 + epochs * earlier_epochs / (earlier_epochs + epochs) * off_j * off_j, 1e300)


def after_other_rank(job: CreatedJob, trial: TrialRecord, report: Report) -> TrialRecord:
    """The trial once another rank has reported its last evaluation, or an earlier one: the largest totals count."""
    reported = changed(trial, time_s=max(trial.time_s, report.time_s), energy_j=max(trial.energy_j, report.energy_j))
    if trial.report_count > 1:
        return reported
    return changed(reported, first_cost_j=cost_of(job, reported))


@dataclass(frozen=True, slots=True)
class Statistics:
    """Running count, mean and sum of squared deviations of a sequence (Welford, Technometrics 4(3), 1962).

    Constant in size whatever the length of the sequence, and exact (variance 0) for equal values.
    """

    count: int = 0
    mean: float = 0.0
    squared_deviations: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Statistics:
        """Statistics of `values`."""
        statistics = cls()
        for value in values:
            statistics = statistics.including(value)
        return statistics

    def including(self, value: float) -> Statistics:
        """These statistics with one more value."""
        count = self.count + 1
        mean = self.mean + (value - self.mean) / count
        return Statistics(count, mean, self.squared_deviations + (value - self.mean) * (value - mean))

    def negated(self) -> Statistics:
        """Statistics of the values' negatives."""
        return Statistics(self.count, -self.mean, self.squared_deviations)

    @property
    def variance(self) -> float:
        """Population variance; 0 for fewer than two values."""
        return self.squared_deviations / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True)
class Arm:
    """The memory of one batch size.

    Attributes:
        trials: Trials dispatched with it.
        infeasible: Why it cannot run on this hardware, or None.
        explored: Costs (J) of its exploration trials that were measured to their end.
        observed: Costs (J) of all trials that were, whatever their origin.
        completed: Costs (J) of those that reached the target.
        window: Those `window_size` observed trials that were dispatched last, as (trial number, cost in J), in order
            of dispatch; empty for a window of all.
        latest: The observed trial that ended last, in the same form, or None.
        refitted: Whether one of its trials was measured to its end within the bandit stage.
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

    def after_dispatch(self) -> Arm:
        """The arm once one more trial was dispatched with it."""
        return replace(self, trials=self.trials + 1)

    def after_end(self, job: CreatedJob, trial: TrialRecord, *, in_bandit: bool) -> Arm:
        """The arm once `trial`, one of its own, has ended; `in_bandit`: the job was in its bandit stage by then."""
        if trial.state is TrialState.INFEASIBLE:
            # Running out of memory speaks of larger sizes too, so nothing replaces it.
            known = self.infeasible is EndReason.OUT_OF_MEMORY
            return self if known else replace(self, infeasible=trial.end_reason or EndReason.CRASHED)
        if trial.state not in OBSERVED:
            return self
        cost_j = cost_of(job, trial)
        latest = (trial.trial_number, cost_j)
        window = sorted([*self.window, latest])[-job.window_size :] if job.window_size else []
        explored, completed = self.explored, self.completed
        return replace(
            self,
            explored=explored.including(cost_j) if trial.origin is Origin.EXPLORATION else explored,
            observed=self.observed.including(cost_j),
            completed=completed.including(cost_j) if trial.state is TrialState.COMPLETED else completed,
            window=tuple(window),
            latest=latest,
            refitted=self.refitted or in_bandit,
        )

    @property
    def learned_costs(self) -> Statistics:
        """Costs (J) that the bandit learns from.

        An arm enters the bandit stage with its exploration trials. Once a trial of it has ended within the stage, it is
        learned anew from its last `window_size` (0: all) trials, whatever their origin: the one that ended last, which
        brings the new learning about, and the others that were dispatched last.
        """
        if not self.refitted:
            return self.explored
        if self.latest is None or not self.window:
            return self.observed
        if self.latest in self.window:
            return Statistics.of(cost_j for _, cost_j in self.window)
        return Statistics.of(cost_j for _, cost_j in (self.latest, *self.window[1:]))


@dataclass(frozen=True, slots=True)
class Cheapest:
    """The cheapest trial that reached the target."""

    trial_number: int
    batch_size: int
    cost_j: float

    @staticmethod
    def of_both(known: Cheapest | None, job: CreatedJob, trial: TrialRecord) -> Cheapest | None:
        """The cheaper of the one known so far (kept on ties) and `trial`, which has just ended."""
        if trial.state is not TrialState.COMPLETED:
            return known
        cost_j = cost_of(job, trial)
        if known is not None and known.cost_j <= cost_j:
            return known
        return Cheapest(trial.trial_number, trial.batch_size, cost_j)


@dataclass(frozen=True)
class History:
    """The summary of a job's trials.

    Attributes:
        job: The job.
        arms: Per batch size of the job, ascending.
        explorations: Exploration trials that count, in order of dispatch; crashed and abandoned ones do not. Their
            number is bounded by the job's sizes and rounds. Only with policies that prune, until the bandit stage.
        cheapest: The cheapest trial that reached the target, or None.
        bandit_entered_at: Value of the job's event counter at which the bandit stage began, or None before that.
        survivors: The sizes with which that stage was entered, ascending, or None before that. They stay: an abandoned
            exploration that comes back later must not undo the pruning.
        in_flight: Trials that are running or may go on, in order of dispatch.
        memory: What the policy itself remembers (`registry.Memory`); None with one that needs nothing.
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
        """The stage that the last request found the job in."""
        return Stage.PRUNING if self.bandit_entered_at is None else Stage.BANDIT

    @property
    def recurrences(self) -> int:
        """The number of runs that reached the target."""
        return sum(arm.completed.count for arm in self.arms.values())

    @cached_property
    def fitting_sizes(self) -> tuple[int, ...]:
        """Batch sizes that may fit into memory: those below the smallest that did not; ascending."""
        too_large = [size for size, arm in self.arms.items() if arm.infeasible is EndReason.OUT_OF_MEMORY]
        return tuple(size for size in self.job.batch_sizes if not too_large or size < min(too_large))

    @cached_property
    def runnable_sizes(self) -> frozenset[int]:
        """Those of them that were not given up after crashes."""
        return frozenset(size for size in self.fitting_sizes if self.arms[size].infeasible is None)

    @property
    def start_size(self) -> int | None:
        """The first size of exploration: the default, or the largest size that fits below it; None when none fits."""
        if self.job.default_batch_size in self.fitting_sizes:
            return self.job.default_batch_size
        return max(self.fitting_sizes, default=None)


def arms_after(
    job: CreatedJob, arms: Mapping[int, Arm], ended: Iterable[TrialRecord], *, bandit_entered_at: int | None
) -> dict[int, Arm]:
    """Arms that change when these trials have ended, in this order; `bandit_entered_at` as in `History`."""
    changed: dict[int, Arm] = {}
    for trial in ended:
        arm = changed.get(trial.batch_size, arms[trial.batch_size])
        in_bandit = bandit_entered_at is not None and (trial.ended_event or 0) > bandit_entered_at
        changed[trial.batch_size] = arm.after_end(job, trial, in_bandit=in_bandit)
    return changed


def log_costs_per_epoch(job: CreatedJob, trial: TrialRecord) -> tuple[float | None, float | None]:
    """Log of what an epoch of the trial cost (J) until its first report, and since then; None where that is nothing.

    Until their first report trainings also start up and try power limits.
    """
    first_j, first_epochs = trial.first_cost_j, trial.first_epoch
    later_j, later_epochs = cost_of(job, trial) - first_j, trial.epoch - first_epochs
    return (
        _log(first_j / first_epochs) if first_j > 0 else None,
        _log(later_j / later_epochs) if later_j > 0 and later_epochs > 0 else None,
    )


def _log(ratio: float) -> float:
    return math.log(min(max(ratio, 1e-300), 1e300))


def is_counted_exploration(trial: TrialRecord) -> bool:
    """Whether the trial is an exploration that its batch size need not repeat."""
    return trial.origin is Origin.EXPLORATION and trial.state not in UNCOUNTED
