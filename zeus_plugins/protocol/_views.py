"""Jobs, trials and decisions on batch sizes in the read API."""

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
    # Every database stores these years. The first and last years of Python's range cannot be converted to UTC.
    if not 1970 <= instant.year <= 9000:
        raise ValueError("must lie between the years 1970 and 9000")
    return instant.astimezone(UTC)


Instant = Annotated[AwareDatetime, AfterValidator(_in_utc)]
LongText = Annotated[str, StringConstraints(max_length=10_000, pattern=r"^[^\x00]*$")]


class TrialFacts(WireMessage):
    """The facts of a trial that views and exports share. Measured fields are None until the first report.

    A trial imported from Zeus has no epochs, and a metric only if it reached the target: Zeus stores neither.

    Attributes:
        trial_number: Counts from 1 within the job.
        batch_size: Global batch size.
        origin: Why it was dispatched.
        reason: Why this batch size was chosen, in words.
        message: The last verdict or the ending, in words.
        started_at: When it was dispatched (UTC).
        ended_at: When it ended (UTC), or None.
        end_reason: Why it ended or was suspended, or None.
        time_s: Seconds from its start to its last report.
        energy_j: Joules from its start to its last report.
        energy_source: How the energy was measured.
        metric: The last validation metric.
        epoch_bound: Epochs after which it is stopped without the target; None before policy `gp_voi` has set a bound,
            and with other policies.
        epoch_bound_reason: The reason for `epoch_bound`, in words.
        power_limit_w: The power limit that the training sets, watts of each GPU; None if it sets none.
        power_limits: Number of limits whose cost the training knew; None if it looks for no limit.
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
    """One trial in the read API.

    Attributes:
        cost_j: ``η·energy + (1 − η)·max_power·time`` in joules at the last report; None before the first one.
        epochs: Epochs at the last report; None before the first one.
        owner: Id (no secret) of the token that the trial belongs to; None if the server asked for no token.
    """

    cost_j: float | None
    epochs: float | None
    owner: str | None = None

    @field_serializer("epochs")
    def _whole_epochs_as_integers(self, epochs: float | None) -> int | float | None:
        return int(epochs) if epochs is not None and epochs.is_integer() else epochs


class ArmView(WireMessage):
    """The results and beliefs about one batch size.

    Attributes:
        trials: Number of trials dispatched.
        n: Number of trials that reached the target.
        infeasible: Why the size cannot run on this hardware, or None.
        mean_cost_j: Mean cost of the trials that reached the target, joules, or None.
        std_cost_j: Population standard deviation of those costs, joules; None for fewer than two.
        expected_cost_j: The cost in joules that the policy expects of a run until the target, from this size and its
            neighbours; None if it expects nothing yet.
        expected_cost_std_j: Standard deviation of the belief about `expected_cost_j`, joules; None after a single run.
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
        """The expected cost in joules with its spread, such as ``480 ± 12``, or None."""
        if self.expected_cost_j is None:
            return None
        # Round without an exponent below a million.
        spread = "" if self.expected_cost_std_j is None else f" ± {float(f'{self.expected_cost_std_j:.2g}'):g}"
        return f"{float(f'{self.expected_cost_j:.4g}'):g}{spread}"


class JobSummary(WireMessage):
    """One line of ``GET /api/jobs``.

    Attributes:
        created_at: When it was registered (UTC).
        trials: Number of trials dispatched.
        min_cost_j: Lowest cost of a trial that reached the target, in joules, or None.
        min_cost_batch_size: The batch size of that trial.
        owner: Id (no secret) of the token that the job belongs to; None if it was registered without a token.
        shared: Whether other tokens may run trials of it.
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
    """The savings in energy (J), time (s) or cost (J).

    Attributes:
        spent: Total of all ended trials.
        default: Estimated total of the same number of recurrences at the default batch size.
        saved: The difference; negative for a loss.
        low: Lower end of the 90 % interval of `saved`; None while no batch size has two runs.
        high: Upper end of the interval; None likewise.
    """

    spent: float
    default: float
    saved: float
    low: float | None
    high: float | None

    @property
    def in_words(self) -> str:
        """The share of `default` that was saved or lost, with its interval, such as ``saved 31 % (25 to 37 %)``."""
        if not self.default:
            return "saved nothing"
        share, word = self.saved / self.default, "saved" if self.saved >= 0 else "lost"
        text = f"{word} {abs(share):.0%}"
        if self.low is not None and self.high is not None and self.low < self.high:
            ends = sorted(end / self.default * (1 if self.saved >= 0 else -1) for end in (self.low, self.high))
            text += f" ({ends[0] * 100:.0f} to {ends[1]:.0%})"
        return text.replace("%", " %")


class SavingsView(WireMessage):
    """The savings of a job against always using its default batch size, including the cost of exploration.

    Attributes:
        recurrences: Number of runs that reached the target.
        exploration_cost_j: Cost of exploring trials beyond the cost of runs at the best size, joules.
    """

    recurrences: int
    energy_j: SavedView
    time_s: SavedView
    cost_j: SavedView
    exploration_cost_j: float


class JobView(WireMessage):
    """Answer of ``GET /api/jobs/{job_id}`` and of ``bso-server jobs show --json``.

    Attributes:
        min_cost_j: Lowest cost of a trial that reached the target, in joules, or None.
        best_batch_size: The incumbent, which has the lowest expected cost of the sizes that have reached the target, or
            None.
        arms: Every batch size, ascending.
        trial_count: Number of trials dispatched.
        trial_states: Number of trials in each state, without states that no trial has.
        trials: The latest trials, up to the limit of the request, in order of dispatch.
        savings: The job's savings; None before the default has reached the target.
        owner: As in `JobSummary`.
        shared: As in `JobSummary`.
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
        """Return the arm of this size, or None."""
        return next((arm for arm in self.arms if arm.batch_size == batch_size), None)


class TrialList(WireMessage):
    """Answer of ``GET /api/jobs/{job_id}/trials``: trials in order of dispatch, and the next page's ``cursor``."""

    trials: tuple[TrialView, ...]
    next_cursor: int | None


# A decision takes less than 4 KiB for a job of any number of sizes.
MAX_BELIEFS = 64
MAX_CANDIDATES = 16


# Larger than any cost; a larger number has a longer exponent.
_LARGEST = 1e99


def _rounded(value: Any) -> Any:
    """Round a number to four significant digits; return None for infinities and NaN."""
    if not isinstance(value, int | float):
        return value
    if not abs(value) < _LARGEST:
        return None
    return float(f"{value:.4g}") if abs(value) > 1 / _LARGEST else 0.0


def _rounded_chance(value: Any) -> Any:
    """Round a probability to thousandths."""
    return round(value, 3) if isinstance(value, int | float) and math.isfinite(value) else value


Rounded = Annotated[float, BeforeValidator(_rounded)]
MaybeRounded = Annotated[float | None, BeforeValidator(_rounded)]
Chance = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), BeforeValidator(_rounded_chance)]


class SizeBelief(WireMessage):
    """The belief about one batch size; unknown values are None.

    Attributes:
        expected_cost_j: Expected cost of a run until the target, joules.
        low_j: Lower end of the 90 % interval of the expected cost, joules.
        high_j: Upper end of the interval, joules.
        chance_best: Probability that no other size has a lower expected cost.
    """

    batch_size: BatchSize
    expected_cost_j: MaybeRounded = None
    low_j: MaybeRounded = None
    high_j: MaybeRounded = None
    chance_best: Chance | None = None


class CandidateWorth(WireMessage):
    """The worth of a trial of one batch size, in units of the cost of an incumbent's run.

    Attributes:
        value: Expected savings of later runs through the information of the trial.
        loss: Expected cost of the trial above that of an incumbent's run.
        stop_epochs: Epochs after which the trial would have been stopped; None if unknown.
    """

    batch_size: BatchSize
    value: Rounded
    loss: Rounded
    stop_epochs: PositiveInt | None = None


class Decision(WireMessage):
    """The numbers behind the choice of a batch size, rounded to four digits, and of bounded length.

    Attributes:
        sizes: The sizes that could be chosen, ascending; of more than 64, those most likely to be the best.
        candidates: The sizes considered for exploration, ascending; of more than 16, those with the highest worth.
            Empty with policies that do not compute a worth.
        incumbent: The size with the lowest expected cost; None while no size has reached the target.
        stop: The stop rule that was known at the decision.
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
        trial_number: The explained trial; None for the next trial, which has not started.
        state: The trial's state; None for the next trial.
        sentence: Why it has this size, and when it is stopped, in words.
        decision: The numbers behind the choice; None for a trial whose size no policy chose.
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
    """An invalid field of a request."""

    field: str
    message: str


class ErrorBody(WireMessage):
    """The body of every error: problem details (RFC 9457), and ``message`` for Zeus clients.

    Attributes:
        type: Always ``about:blank``.
        title: The status in words.
        detail: What went wrong and what to change.
        message: The same text as `detail`.
        errors: The invalid fields, if any.
        reason: The reason for programs, if a program can act on it.
    """

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    message: str
    errors: tuple[FieldError, ...] = ()
    reason: RefusalReason | None = None
