"""Jobs, trials and decisions on batch sizes in the read API."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
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

from zeus_plugins.protocol._jobs import CreatedJob, WarmStart
from zeus_plugins.protocol._trials import StopRule
from zeus_plugins.protocol._values import (
    BatchSize,
    EndReason,
    Finite,
    Fraction,
    Identifier,
    Joules,
    NonNegativeFinite,
    NonNegativeInt,
    Origin,
    PolicyName,
    PositiveInt,
    Quality,
    RefusalReason,
    Seconds,
    Stage,
    Text,
    TrialState,
    Watched,
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


# Smallest amount in the unit, size of the unit in joules, and its name.
_UNITS = ((1e9, 1e9, "GJ"), (1e6, 1e6, "MJ"), (1e4, 1e3, "kJ"), (0.0, 1.0, "J"))


def joules_in_words(joules: float) -> str:
    """Format an energy or a cost with three digits, such as ``81.3 J`` or ``12.4 kJ``."""
    size, unit = next((size, unit) for least, size, unit in _UNITS if joules >= least)
    return f"{float(f'{joules / size:.3g}'):g} {unit}"


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
        waited_share: Share of its time in which the training could run but waited for a core that other work used; None
            if unknown. From a fifth on, the run counts as one on a busy machine.
        startup_s: Part of `time_s` that the first steps took beyond later steps, such as compilation; None if unknown.
        watched: Last values of the metrics that the training watches, by name; None if it watches none.
        other_gpus: True if the job has other GPUs now than when the trial began: then its epochs count, not its costs.
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
    waited_share: Fraction | None = None
    startup_s: NonNegativeFinite | None = None
    watched: Watched | None = None
    other_gpus: bool = False


class TrialView(TrialFacts):
    """One trial in the read API.

    Attributes:
        cost_j: ``η·energy + (1 − η)·max_power·time`` in joules at the last report; None before the first one.
        startup_j: Joules of the start-up, in proportion to its share of the time until the first report.
        epochs: Epochs at the last report; None before the first one.
        owner: Id (no secret) of the token that the trial belongs to; None if the server asked for no token.
    """

    cost_j: float | None
    startup_j: float | None = None
    epochs: float | None
    owner: str | None = None

    @field_serializer("epochs")
    def _whole_epochs_as_integers(self, epochs: float | None) -> int | float | None:
        return int(epochs) if epochs is not None and epochs.is_integer() else epochs


class MetricView(WireMessage):
    """A metric at the end of the runs of one batch size that reached the target.

    Attributes:
        name: The metric's name; None for the job's own metric.
        runs: Number of runs.
        mean: Mean over these runs.
        std: Sample standard deviation from run to run; None for a single run.
        lower_is_better: Whether the metric falls as the model improves.
        margin: Loss against the default that counts as no worse; None while the default has no value.
        low: Lower end of the interval of the mean less the default's mean; None for the default, or if unknown.
        high: Upper end of the interval; None likewise.
        verdict: Whether the size is no worse than the default within `margin`, worse, or neither is shown yet; None for
            the default.
    """

    name: str | None
    runs: int
    mean: float
    std: float | None
    lower_is_better: bool
    margin: float | None
    low: float | None
    high: float | None
    verdict: Quality | None

    @property
    def in_words(self) -> str:
        """The verdict with its margin, such as ``no worse within ±0.005``; empty for the default."""
        match self.verdict:
            case None:
                return ""
            case Quality.NO_WORSE:
                return f"no worse within ±{self.margin:.3g}"
            case Quality.WORSE:
                return "worse"
            case Quality.NOT_SHOWN:
                return "not shown yet"


class ArmView(WireMessage):
    """The results and beliefs about one batch size.

    Attributes:
        trials: Number of trials dispatched.
        n: Number of trials that reached the target.
        infeasible: Why the size cannot run on this hardware, or None.
        mean_cost_j: Mean cost of the trials that reached the target since `JobView.since`, joules, or None.
        std_cost_j: Population standard deviation of those costs, joules; None for fewer than two.
        expected_cost_j: The cost in joules that the policy expects of a run until the target, without its start-up,
            from this size and its neighbours; None if it expects nothing yet.
        expected_low_j: Lower end of the 90 % band of `expected_cost_j`, joules, or None.
        expected_high_j: Upper end of the band, joules, or None.
        metrics: The metrics at the end of its runs, the job's own first; empty before a run has reached the target.
        left_out: Why `no_worse_than_default` leaves the size out, in words; None if it does not.
    """

    batch_size: int
    trials: int
    n: int
    mean_cost_j: float | None
    std_cost_j: float | None
    infeasible: EndReason | None
    expected_cost_j: float | None = None
    expected_low_j: float | None = None
    expected_high_j: float | None = None
    metrics: tuple[MetricView, ...] = ()
    left_out: str | None = None

    @property
    def in_words(self) -> str:
        """The expected cost of a run, and why the mean of its runs lies outside the 90 % band, if it does."""
        if self.expected_cost_j is None:
            return "no cost expected yet"
        words, mean_j = f"expected {joules_in_words(self.expected_cost_j)}", self.mean_cost_j
        low_j, high_j = self.expected_low_j, self.expected_high_j
        if low_j is None or high_j is None or mean_j is None or low_j <= mean_j <= high_j:
            return words
        runs = "its run" if self.n == 1 else "the mean of its runs"
        why = "ignores that later runs and other sizes' runs count, too"
        return f"{words} without start-up ({runs}, {joules_in_words(mean_j)}, {why})"


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


class SavingsWord(StrEnum):
    """The verdict on a run now, at the best size, against one at the default."""

    SAVES = "saves"
    LOSES = "loses"
    NOT_SHOWN = "not shown yet"


class Share(WireMessage):
    """A share of the default's cost that is saved (negative: lost), with its 90 % interval; None: no bound known."""

    low: float | None
    middle: float
    high: float

    @property
    def in_words(self) -> str:
        """The share with its interval, such as ``31 % (25 to 37 %)``; of a loss, the amount that is lost."""
        sign = -1 if self.middle < 0 else 1
        # round() returns an int, which has no negative zero.
        middle = f"{round(100 * sign * self.middle)} %"
        if self.low is None:
            return middle
        low, high = sorted((sign * self.low, sign * self.high))
        return f"{middle} ({round(100 * low)} to {round(100 * high)} %)"

    @property
    def cost_in_words(self) -> str:
        """The cost that remains, in % of the default's, such as ``69 % (63 to 75 %)``."""
        low, high = (None, 1.0) if self.low is None else (1 - self.high, 1 - self.low)
        return Share(low=low, middle=1 - self.middle, high=high).in_words


class AmountSaved(WireMessage):
    """The saving in one measure: energy (J), time (s) or cost (J).

    Attributes:
        spent: Total of all ended trials.
        now: Share that a run at the best size saves; None without evidence.
        so_far: Share that all trials until now have saved, exploration and control runs included; None likewise.
        saved: The amount of `so_far`; None before it is paid back, which means: its whole interval is above 0.
    """

    spent: float
    now: Share | None
    so_far: Share | None
    saved: float | None


class SavingsView(WireMessage):
    """Saving of a job against always using its default batch size, as far as it is known.

    Attributes:
        word: The verdict, by cost.
        batch_size: The best size, which is compared with the default; None before a run has reached the target.
        controls: Number of runs at the default that are evidence.
        runs_needed: Order of magnitude of the further runs that would settle the verdict: 10, 30 or 100; None if it is
            shown, or if it takes more.
        cause: Why the verdict is not shown; None if it is.
        recurrences: Number of runs that reached the target.
        exploration_cost_j: Cost of all trials that explored, joules.
        control_cost_j: Cost of all control runs, joules.
        control_runs: Sentence on the share of the job's cost that control runs have forgone; empty if unknown.
    """

    word: SavingsWord
    default_batch_size: int
    batch_size: int | None
    cost_j: AmountSaved
    energy_j: AmountSaved
    time_s: AmountSaved
    controls: int
    runs_needed: int | None
    cause: str | None
    recurrences: int
    exploration_cost_j: float
    control_cost_j: float
    control_runs: str = ""

    @property
    def is_shown(self) -> bool:
        """True if the verdict is "saves" or "loses"."""
        return self.word is not SavingsWord.NOT_SHOWN

    @property
    def claim(self) -> str:
        """Verdict on a run now, as a sentence without its full stop."""
        best, default = self.batch_size, f"your default, {self.default_batch_size}"
        if best is None:
            return "No run has reached the target yet"
        if best == self.default_batch_size:
            return f"{default.capitalize()}, is the best batch size so far"
        now = self.cost_j.now
        if self.word is SavingsWord.SAVES and now is not None:
            return f"{best} saves {now.in_words} of what a run costs at {default}"
        if self.word is SavingsWord.LOSES and now is not None:
            return f"{best} costs {now.in_words} more than {default}"
        unknown = f"Whether {best} saves against {default}, is not shown yet"
        own = self.default_batch_size
        return unknown if now is None else f"{unknown}: a run at {best} costs {now.cost_in_words} of one at {own}"

    @property
    def evidence(self) -> str:
        """Cause of a verdict that is not shown, and the runs that would settle it; empty if the verdict is shown."""
        if self.cause is None:
            return ""
        text = f"{self.cause[0].upper()}{self.cause[1:]}"
        if self.runs_needed is None:
            return f"{text}."
        return f"{text}; about {self.runs_needed} more runs would settle it."

    @property
    def so_far(self) -> str:
        """Cost of all trials together, as a sentence; empty if nothing is known."""
        share = self.cost_j.so_far
        if share is None or share.low is None or share.high > _HARDLY_KNOWN:
            return ""
        verdict = "" if self.cost_j.saved is not None else ": not shown to be paid back yet"
        cost = f"{share.cost_in_words} of what the default would have cost"
        return f"All runs so far, with exploration and control runs, cost {cost}{verdict}."

    @property
    def in_words(self) -> str:
        """The claim, the evidence and the saving so far, as sentences."""
        return " ".join(part for part in (f"{self.claim}.", self.evidence, self.control_runs, self.so_far) if part)


_HARDLY_KNOWN = 0.99


class Change(WireMessage):
    """Value of a job's term before and after a revision."""

    before: Any
    after: Any


class Revision(WireMessage):
    """One revision of a job.

    Attributes:
        revision: Counts from 1 within the job.
        event: Its event in the job; trials with an earlier event of dispatch end under the terms before it.
        trials: Number of trials dispatched before it.
        revised_at: When the job was revised (UTC).
        changes: The changed terms by their names, as in `JobSpecFromClient`.
    """

    revision: PositiveInt
    event: PositiveInt
    trials: NonNegativeInt
    revised_at: Instant
    changes: dict[Text, Change]

    @property
    def in_words(self) -> str:
        """The changes, such as ``max_epochs 2 -> 6, batch_sizes +64``."""
        return changes_in_words({name: (change.before, change.after) for name, change in self.changes.items()})


def changes_in_words(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """Describe changed terms by their values before and after, but batch sizes by added and removed sizes."""
    words = []
    for name, (before, after) in changes.items():
        if name == "batch_sizes":
            came, went = sorted({*after} - {*before}), sorted({*before} - {*after})
            words.append(" ".join([name, *(f"+{size}" for size in came), *(f"-{size}" for size in went)]))
        elif name == "scaling":
            words.append(
                f"rates and steps now follow the batch size by {after!r}: other runs count at the default size only"
            )
        else:
            words.append(f"{name} {_term(before)} -> {_term(after)}")
    return ", ".join(words)


def _term(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


class JobView(WireMessage):
    """Answer of ``GET /api/jobs/{job_id}`` and of ``bso-server jobs show --json``.

    Attributes:
        min_cost_j: Lowest cost of a trial that reached the target, in joules, or None.
        best_batch_size: The incumbent, which has the lowest expected cost of the sizes that have reached the target, or
            None.
        arms: Every batch size of the job, ascending.
        trial_count: Number of trials dispatched.
        trial_states: Number of trials in each state, without states that no trial has.
        trials: The latest trials, up to the limit of the request, in order of dispatch.
        since: Number of the first trial since the costs or epochs of the job last changed; 0 without a change.
        savings: The job's saving, as far as known.
        owner: As in `JobSummary`.
        shared: As in `JobSummary`.
        revisions: Its revisions, in order.
        stuck: Advice for a job of which every batch size has missed the target, in words; None while some size
            may reach it.
    """

    job: CreatedJob
    stage: Stage
    min_cost_j: float | None
    best_batch_size: int | None
    arms: tuple[ArmView, ...]
    trial_count: int
    trial_states: dict[TrialState, int] = Field(default_factory=dict)
    trials: tuple[TrialView, ...]
    since: int = 0
    savings: SavingsView
    owner: str | None = None
    shared: bool = False
    revisions: tuple[Revision, ...] = ()
    stuck: str | None = None

    def arm_of(self, batch_size: int | None) -> ArmView | None:
        """Return the arm of this size, or None."""
        return next((arm for arm in self.arms if arm.batch_size == batch_size), None)


class TrialList(WireMessage):
    """Answer of ``GET /api/jobs/{job_id}/trials``: trials in order of dispatch, and the next page's ``cursor``."""

    trials: tuple[TrialView, ...]
    next_cursor: int | None


# With these limits, a decision takes less than 4 KiB, however many sizes the job has.
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
    """The numbers behind the choice of a batch size, rounded to four significant digits, in lists of bounded length.

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
        warm: Epochs that the job took over from another job at its registration, or None.
    """

    job_id: Identifier
    policy: str
    trial_number: PositiveInt | None
    batch_size: BatchSize
    origin: Origin
    state: TrialState | None
    sentence: str
    decision: Decision | None
    warm: WarmStart | None = None


class FieldError(WireMessage):
    """An invalid field of a request."""

    field: str
    message: str


class ErrorBody(WireMessage):
    """The body of every error: problem details (RFC 9457), and ``message`` for Zeus clients.

    Attributes:
        type: Always ``about:blank``.
        title: The status in words.
        detail: The problem, and its remedy.
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
