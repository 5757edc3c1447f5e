"""The values that decisions are made of, beside a job's registration: its trials, their reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from datetime import datetime
from typing import Any, TypeVar

from zeus_plugins.protocol import Decision, EndReason, Origin, TrialState

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
class ObservedRun:
    """A trial that was measured to its end, as simulations draw from it: its epochs, seconds and joules."""

    batch_size: int
    state: TrialState
    epochs: float
    time_s: float
    energy_j: float


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
    jobs that know of none. `service.messages.TrialExport` describes those that an export holds, too; here, totals are 0
    before the first report. So are the epochs of a trial that was imported from Zeus, which keeps none of them.

    Attributes:
        idempotency_key: Made by the client, so that a repeated request finds the trial that the first one started.
        owner: Id of the token that dispatched it; None where the server asked for none.
        lease_epoch: Counts the runs of its training, see `core.fencing`.
        cost_deviations_j2: The spread of its epochs' costs, J² per epoch: over all reports but the first, the sum of
            ``e · (r − m)²`` with the epochs e since the report before, their cost r per epoch, and m, the mean of that.
            None before the first report, and for trials that an earlier version has seen report.
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
