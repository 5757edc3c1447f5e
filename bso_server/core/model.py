"""The values that decisions are made of: a job's configuration, its trials, their reports."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from zeus_plugins.protocol import EndReason, Origin, PolicyName, TrialState

# States whose trials were measured to the end that the server decided on, so that they have a cost.
OBSERVED = frozenset({TrialState.COMPLETED, TrialState.EARLY_STOPPED, TrialState.EXHAUSTED})

# States that say nothing about the batch size: its exploration is owed again.
UNCOUNTED = frozenset({TrialState.FAILED, TrialState.ABANDONED})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """The part of a job's registration that decisions need; fields as in `zeus_plugins.protocol`."""

    job_id: str
    batch_sizes: tuple[int, ...]
    default_batch_size: int
    max_power: float
    eta_knob: float = 0.5
    beta_knob: float | None = 2.0
    target_metric: float = 0.5
    higher_is_better_metric: bool = True
    max_epochs: int = 100
    num_pruning_rounds: int = 2
    window_size: int = 0
    mab_prior_mean: float = 0.0
    mab_prior_precision: float = 0.0
    mab_num_explorations: int = 2
    mab_seed: int | None = None
    policy: PolicyName = PolicyName.ZEUS


@dataclass(frozen=True, slots=True)
class EpochBound:
    """The epochs after which a running trial is stopped that has not reached its target.

    Attributes:
        epochs: After so many epochs.
        reason: Why, in the form of `Suggestion.reason`.
    """

    epochs: int
    reason: str


TrialKey = tuple[str, int]
"""A trial's job_id and number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """One trial: a row of table ``trials``, field by column.

    Decisions rest on the fields without an instant; the others are for people, leases and owners, and have defaults for
    jobs that know of none. Fields of `zeus_plugins.protocol.TrialFacts` are described there; `time_s`, `energy_j` and
    `epoch` are 0 before the first report.

    Attributes:
        job_id: Its job.
        started_event: Value of the job's event counter at dispatch.
        reported_at: When its last report was taken (UTC), or None.
        ended_event: Value of the event counter when the trial took its present terminal state, or None. The counter is
            the job's logical clock: it orders dispatches and endings without trusting wall clocks.
        epoch: Epochs trained as of its last report.
        report_count: Number of reports taken.
        longest_gap_s: Longest time that passed between two of its reports, seconds.
        lease_expires_at: When it is abandoned if nothing more is heard of it (UTC); None for one that has ended.
        heartbeats: Whether its training sends heartbeats.
        first_epoch: Epochs trained as of its first report; 0 before any.
        first_cost_j: Its cost in joules by then.
        idempotency_key: Made by the client, so that a repeated request finds the trial that the first one started.
        owner: Id of the token that dispatched it; None where the server asked for none.
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
    first_epoch: float = 0.0
    first_cost_j: float = 0.0
    epoch_bound: int | None = None
    epoch_bound_reason: str | None = None
    idempotency_key: str | None = None
    owner: str | None = None
    power_limit_w: float | None = None
    power_limits: int | None = None

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
        if bound is None:
            return replace(self, epoch_bound=None, epoch_bound_reason=None)
        return replace(self, epoch_bound=bound.epochs, epoch_bound_reason=bound.reason)

    @property
    def last_report(self) -> Report | None:
        """The last report, or None before any."""
        if self.metric is None:
            return None
        return Report(time_s=self.time_s, energy_j=self.energy_j, epoch=self.epoch, metric=self.metric)


@dataclass(frozen=True, slots=True)
class Report:
    """The findings of one evaluation: totals since the trial began, and the metric.

    Attributes:
        time_s: Seconds.
        energy_j: Joules over all GPUs.
        epoch: Epochs trained, from 1; fractional within an epoch.
        metric: The validation metric.
    """

    time_s: float
    energy_j: float
    epoch: float
    metric: float


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The batch size of the next trial, and the reason.

    Attributes:
        batch_size: Global batch size.
        origin: The kind of decision.
        reason: The decision in plain words, which a newcomer understands, and in brackets at the end its numbers.
        survivors: In the bandit stage the sizes that it was entered with, ascending; else None.
        bound: When the trial is stopped, if that is known by now.
    """

    batch_size: int
    origin: Origin
    reason: str
    survivors: tuple[int, ...] | None = None
    bound: EpochBound | None = None
