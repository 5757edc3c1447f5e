"""Jobs, trials and decisions on batch sizes as the read API shows them."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BeforeValidator,
    Field,
    StringConstraints,
    field_serializer,
    field_validator,
)

from zeus_plugins.protocol._jobs import CreatedJob
from zeus_plugins.protocol._trials import StopRule
from zeus_plugins.protocol._values import (
    BatchSize,
    EndReason,
    Finite,
    Identifier,
    Joules,
    Origin,
    PolicyName,
    PositiveInt,
    RefusalReason,
    Seconds,
    Stage,
    Text,
    TrialState,
    Watts,
    WireMessage,
)


def _in_utc(instant: datetime) -> datetime:
    # What every database can keep; the ends of Python's range cannot even be converted to UTC.
    if not 1970 <= instant.year <= 9000:
        raise ValueError("must lie between the years 1970 and 9000")
    return instant.astimezone(UTC)


Instant = Annotated[AwareDatetime, AfterValidator(_in_utc)]
LongText = Annotated[str, StringConstraints(max_length=10_000, pattern=r"^[^\x00]*$")]


class TrialFacts(WireMessage):
    """The facts of a trial that views and exports share. Measured fields are None until the first report.

    Zeus keeps neither epochs nor metrics: those of a trial imported from it stay None, where the target does not tell
    the metric.

    Attributes:
        trial_number: Counts from 1 within the job.
        batch_size: Global batch size.
        state: Where the trial stands.
        origin: Why it was dispatched.
        reason: Why this batch size was chosen, in plain words.
        message: The last verdict or the way it ended, in words.
        started_at: When it was dispatched (UTC).
        ended_at: When it ended (UTC), or None.
        end_reason: Why it ended or was suspended, or None.
        time_s: Seconds since it began, as of its last report.
        energy_j: Joules since it began, as of its last report.
        energy_source: How the energy was measured.
        metric: The last validation metric.
        epoch_bound: Epochs after which it is stopped without the target; None until policy `gp_voi` has decided on
            them, and with other policies.
        epoch_bound_reason: Why, in the same way.
        power_limit_w: The power limit of each GPU that the training chose, watts; None where it sets none.
        power_limits: How many limits it knew the cost of; None where it looks for none.
    """

    trial_number: PositiveInt
    batch_size: BatchSize
    state: TrialState
    origin: Origin
    reason: LongText
    message: LongText | None
    started_at: Instant
    ended_at: Instant | None
    end_reason: EndReason | None
    time_s: Seconds | None
    energy_j: Joules | None
    energy_source: Text | None
    metric: Finite | None
    epoch_bound: PositiveInt | None = None
    epoch_bound_reason: LongText | None = None
    power_limit_w: Watts | None = None
    power_limits: PositiveInt | None = None


class TrialView(TrialFacts):
    """One trial as the read API shows it.

    Attributes:
        cost_j: ``η·energy + (1 − η)·max_power·time`` in joules, as of the last report; None before any.
        epochs: Epochs trained, in the same way.
        owner: Id of the token that it belongs to, which is no secret; None where the server asked for none.
    """

    cost_j: float | None
    epochs: float | None
    owner: str | None = None

    @field_serializer("epochs")
    def _whole_epochs_as_integers(self, epochs: float | None) -> int | float | None:
        return int(epochs) if epochs is not None and epochs.is_integer() else epochs


class ArmView(WireMessage):
    """The knowledge of one batch size.

    Attributes:
        batch_size: The arm.
        trials: Trials dispatched with it.
        n: How many of them reached the target.
        infeasible: Why the size cannot run on this hardware, or None.
        mean_cost_j: Mean cost of those in joules, or None.
        std_cost_j: Population standard deviation of those costs in joules; None for fewer than two.
        expected_cost_j: The cost in joules that the policy expects of a run until the target, with all that it knows of
            this size and its neighbours; None where that is nothing.
        expected_cost_std_j: Standard deviation of that expectation, as a belief, in joules; None after a single run.
    """

    batch_size: int
    trials: int
    n: int
    mean_cost_j: float | None
    std_cost_j: float | None
    infeasible: EndReason | None
    expected_cost_j: float | None = None
    expected_cost_std_j: float | None = None

    @property
    def expected_cost(self) -> str | None:
        """The expected cost in joules with its spread, such as ``480 ± 12``; None where nothing is expected."""
        if self.expected_cost_j is None:
            return None
        # Rounded, and without an exponent below a million.
        spread = "" if self.expected_cost_std_j is None else f" ± {float(f'{self.expected_cost_std_j:.2g}'):g}"
        return f"{float(f'{self.expected_cost_j:.4g}'):g}{spread}"


class JobSummary(WireMessage):
    """One line of ``GET /api/jobs``.

    Attributes:
        job_id: The job.
        job_id_prefix: Its group.
        policy: How its batch sizes are chosen.
        stage: Where it stands.
        created_at: When it was registered (UTC).
        trials: Number of trials dispatched.
        min_cost_j: Lowest cost of a trial that reached the target, in joules, or None.
        min_cost_batch_size: The batch size of that trial.
        owner: Id of the token that it belongs to, which is no secret; None where it was registered without one.
        shared: Whether other tokens may run trials of it, too.
    """

    job_id: str
    job_id_prefix: str
    policy: PolicyName
    stage: Stage
    created_at: datetime
    trials: int
    min_cost_j: float | None
    min_cost_batch_size: int | None
    owner: str | None = None
    shared: bool = False


class JobList(WireMessage):
    """Answer of ``GET /api/jobs``: a page of jobs, ordered by id, and the ``cursor`` of the next page or None."""

    jobs: tuple[JobSummary, ...]
    next_cursor: str | None = None


class SavedView(WireMessage):
    """The amount of energy (J), time (s) or cost (J) that was saved.

    Attributes:
        spent: By all trials that have ended.
        default: What as many recurrences at the default batch size would have taken, as far as its runs tell.
        saved: The difference; negative for a loss.
        low: With a probability of 5 % it is less than that; None while no batch size has two runs.
        high: With a probability of 5 % it is more than that.
    """

    spent: float
    default: float
    saved: float
    low: float | None
    high: float | None

    @property
    def in_words(self) -> str:
        """The share of the default's that was saved or lost, with its interval, such as ``saved 31 % (25 to 37 %)``."""
        if not self.default:
            return "saved nothing"
        share, word = self.saved / self.default, "saved" if self.saved >= 0 else "lost"
        text = f"{word} {abs(share):.0%}"
        if self.low is not None and self.high is not None and self.low < self.high:
            ends = sorted(end / self.default * (1 if self.saved >= 0 else -1) for end in (self.low, self.high))
            text += f" ({ends[0] * 100:.0f} to {ends[1]:.0%})"
        return text.replace("%", " %")


class SavingsView(WireMessage):
    """The savings of a job over always playing its default batch size, exploration paid.

    Attributes:
        recurrences: Runs that reached the target.
        energy_j: Energy; `time_s` and `cost_j` likewise.
        exploration_cost_j: The part of the cost that trials made to learn took more than runs at the best size.
    """

    recurrences: int
    energy_j: SavedView
    time_s: SavedView
    cost_j: SavedView
    exploration_cost_j: float


class JobView(WireMessage):
    """Answer of ``GET /api/jobs/{job_id}`` and of ``bso-server jobs show --json``.

    Attributes:
        job: The job as registered.
        stage: Where it stands.
        min_cost_j: Lowest cost of a trial that reached the target, in joules, or None.
        best_batch_size: The size with the lowest expected cost of those that reach the target, which the policy plays
            when nothing is to be learned; None while none has reached it.
        arms: Every batch size, ascending.
        trial_count: Number of trials dispatched.
        trial_states: How many of them are in each state, where any is.
        trials: The latest trials, in order of dispatch: as many as were asked for.
        savings: What the job has saved until now; None before the default has reached the target.
        owner: As in `JobSummary`; likewise `shared`.
    """

    job: CreatedJob
    stage: Stage
    min_cost_j: float | None
    best_batch_size: int | None
    arms: tuple[ArmView, ...]
    trial_count: int
    trial_states: dict[TrialState, int] = Field(default_factory=dict)
    trials: tuple[TrialView, ...]
    savings: SavingsView | None = None
    owner: str | None = None
    shared: bool = False

    def arm_of(self, batch_size: int | None) -> ArmView | None:
        """The arm of this size, or None."""
        return next((arm for arm in self.arms if arm.batch_size == batch_size), None)


class TrialList(WireMessage):
    """Answer of ``GET /api/jobs/{job_id}/trials``: trials in order of dispatch, and the next page's ``cursor``."""

    trials: tuple[TrialView, ...]
    next_cursor: int | None


# What one decision keeps at most, so that a trial's takes less than 4 KiB however many sizes its job has.
MAX_BELIEFS = 64
MAX_CANDIDATES = 16


# Of no cost, nor of a part of one; numbers beyond it would take a digit more.
_LARGEST = 1e99


def _rounded(value: Any) -> Any:
    """A number with four significant digits, which nobody reads more of; None for what is none."""
    if not isinstance(value, int | float):
        return value
    if not abs(value) < _LARGEST:
        return None
    return float(f"{value:.4g}") if abs(value) > 1 / _LARGEST else 0.0


def _rounded_chance(value: Any) -> Any:
    """A probability in thousandths."""
    return round(value, 3) if isinstance(value, int | float) and math.isfinite(value) else value


Rounded = Annotated[float, BeforeValidator(_rounded)]
MaybeRounded = Annotated[float | None, BeforeValidator(_rounded)]
Chance = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), BeforeValidator(_rounded_chance)]


class SizeBelief(WireMessage):
    """The belief about one batch size; None, here and below, where nothing was known.

    Attributes:
        batch_size: The size.
        expected_cost_j: Expected cost of a run until the target, joules.
        low_j: With a probability of 5 % the expected cost is below that, joules.
        high_j: With a probability of 5 % it is above that.
        chance_best: Probability that no other size has a lower expected cost.
    """

    batch_size: BatchSize
    expected_cost_j: MaybeRounded = None
    low_j: MaybeRounded = None
    high_j: MaybeRounded = None
    chance_best: Chance | None = None


class CandidateWorth(WireMessage):
    """The worth of a try of one batch size, in runs of the incumbent.

    Attributes:
        batch_size: The size.
        value: What later runs were expected to save by knowing how a run of it goes.
        loss: What that run was expected to cost more than one of the incumbent.
        stop_epochs: Epochs after which the try would have been stopped; None where that was not known yet.
    """

    batch_size: BatchSize
    value: Rounded
    loss: Rounded
    stop_epochs: PositiveInt | None = None


class Decision(WireMessage):
    """The numbers behind the choice of a batch size, rounded to four digits, and of bounded length.

    Attributes:
        sizes: The sizes that could be chosen, ascending; of more than 64 those most likely to be the best.
        candidates: The sizes whose try was considered, ascending; of more than 16 those worth most. Empty with policies
            that do not weigh tries.
        incumbent: The size that is played when nothing is to be learned; None while none has reached the target.
        stop: When the trial is stopped without the target, as far as that was known by then.
    """

    sizes: tuple[SizeBelief, ...] = ()
    candidates: tuple[CandidateWorth, ...] = ()
    incumbent: BatchSize | None = None
    stop: StopRule | None = None

    @field_validator("sizes")
    @classmethod
    def _likeliest(cls, sizes: tuple[SizeBelief, ...]) -> tuple[SizeBelief, ...]:
        likeliest = sorted(sizes, key=lambda each: -1.0 if each.chance_best is None else each.chance_best, reverse=True)
        return tuple(sorted(likeliest[:MAX_BELIEFS], key=lambda each: each.batch_size))

    @field_validator("candidates")
    @classmethod
    def _worthiest(cls, candidates: tuple[CandidateWorth, ...]) -> tuple[CandidateWorth, ...]:
        worthiest = sorted(candidates, key=lambda each: each.value - each.loss, reverse=True)
        return tuple(sorted(worthiest[:MAX_CANDIDATES], key=lambda each: each.batch_size))


class Explanation(WireMessage):
    """Answer of ``GET /api/jobs/{job_id}/explanation`` and of ``bso-server jobs explain --json``.

    Attributes:
        job_id: The job.
        policy: How its batch sizes are chosen.
        trial_number: The trial that is explained; None for the one that would be started next.
        batch_size: Its batch size.
        origin: Why it was dispatched.
        state: Where it stands; None for one that would be started.
        sentence: Why it has this size, and when it is stopped, for a person.
        decision: The numbers behind that; None for trials that no policy has chosen.
    """

    job_id: Identifier
    policy: str
    trial_number: PositiveInt | None
    batch_size: BatchSize
    origin: Origin
    state: TrialState | None
    sentence: str
    decision: Decision | None


class FieldError(WireMessage):
    """The fault of one field of a request."""

    field: str
    message: str


class ErrorBody(WireMessage):
    """Every error answer: problem details (RFC 9457) with Zeus's ``message`` beside them.

    Attributes:
        type: Always ``about:blank``: the status says it all.
        title: The status in words.
        status: The HTTP status.
        detail: What went wrong and what to change.
        message: The same text again, where a Zeus client looks for it.
        errors: The fields at fault, where there are any.
        reason: The same for programs, where there is something that one can do about it.
    """

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    message: str
    errors: tuple[FieldError, ...] = ()
    reason: RefusalReason | None = None
