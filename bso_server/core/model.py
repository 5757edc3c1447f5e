"""What the decisions are made of: the job, its trials, and the states a trial may pass through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bso_server.errors import IllegalTransitionError
from zeus_plugins.protocol import EndReason, Origin, PolicyName, TrialState

# Every legal move between trial states; what is not here raises. RUNNING ends in any way. ABANDONED and SUSPENDED
# trials come back to life when their training does: nothing that was measured is thrown away.
TRANSITIONS: Mapping[TrialState, frozenset[TrialState]] = {
    TrialState.RUNNING: frozenset(TrialState) - {TrialState.RUNNING},
    TrialState.SUSPENDED: frozenset({TrialState.RUNNING, TrialState.FAILED, TrialState.ABANDONED}),
    TrialState.ABANDONED: frozenset({TrialState.RUNNING}),
    TrialState.COMPLETED: frozenset(),
    TrialState.EARLY_STOPPED: frozenset(),
    TrialState.EXHAUSTED: frozenset(),
    TrialState.FAILED: frozenset(),
    TrialState.INFEASIBLE: frozenset(),
}

# States whose trials were measured to the end that the server decided on, so that they have a cost.
OBSERVED = frozenset({TrialState.COMPLETED, TrialState.EARLY_STOPPED, TrialState.EXHAUSTED})

# States of trials that are under way, or may go on.
ALIVE = frozenset({TrialState.RUNNING, TrialState.SUSPENDED})

# States in which a trial takes reports and heartbeats; in any other it has ended for good.
TAKES_REPORTS = ALIVE | {TrialState.ABANDONED}

# States that say nothing about the batch size: its exploration is owed again.
UNCOUNTED = frozenset({TrialState.FAILED, TrialState.ABANDONED})


def check_transition(before: TrialState, after: TrialState) -> None:
    """Refuse an illegal move.

    Raises:
        IllegalTransitionError: `TRANSITIONS` does not hold the move.
    """
    if after not in TRANSITIONS[before]:
        raise IllegalTransitionError(f"a trial that is {before} cannot become {after}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The part of a job's immutable specification that decisions need; fields as in `zeus_plugins.protocol.JobSpec`."""

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
    """When a running trial is stopped that has not reached its target.

    Attributes:
        epochs: After so many epochs.
        reason: Why, in the form of `Suggestion.reason`.
    """

    epochs: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """One trial as the database remembers it.

    Attributes:
        trial_number: Counts from 1 within the job, in order of dispatch.
        batch_size: Global batch size.
        state: Where the trial stands.
        origin: Why it was dispatched.
        started_event: Value of the job's event counter at dispatch.
        ended_event: The same when the trial took its present terminal state, or None. The counter is the job's logical
            clock: it orders dispatches and endings without trusting wall clocks.
        time_s: Seconds since the trial began, as of its last report; 0 before any.
        energy_j: Joules since the trial began, as of its last report; 0 before any.
        epoch: Epochs trained as of its last report; 0 before any.
        metric: Validation metric of its last report, or None before any.
        message: The latest verdict, or how it ended; None before any.
        end_reason: Why it ended, or None.
        reports: Number of reports taken.
        longest_gap_s: Longest time that passed between two of its reports, seconds.
        heartbeats: Whether its training sends heartbeats.
        first_epoch: Epochs trained as of its first report; 0 before any.
        first_cost_j: Its cost in joules by then.
        bound: The epochs after which it is stopped for its cost; None until policy `gp_voi` knows what an epoch of it
            costs, and with other policies.
    """

    trial_number: int
    batch_size: int
    state: TrialState
    origin: Origin
    started_event: int = 0
    ended_event: int | None = None
    time_s: float = 0.0
    energy_j: float = 0.0
    epoch: float = 0.0
    metric: float | None = None
    message: str | None = None
    end_reason: EndReason | None = None
    reports: int = 0
    longest_gap_s: float = 0.0
    heartbeats: bool = False
    first_epoch: float = 0.0
    first_cost_j: float = 0.0
    bound: EpochBound | None = None

    @property
    def last_report(self) -> Report | None:
        """The last report, or None before any."""
        if self.metric is None:
            return None
        return Report(time_s=self.time_s, energy_j=self.energy_j, epoch=self.epoch, metric=self.metric)


@dataclass(frozen=True, slots=True)
class Report:
    """What one evaluation found: totals since the trial began, and the metric.

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
    """Which batch size the next trial gets, and why.

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
