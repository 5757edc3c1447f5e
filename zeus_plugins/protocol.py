"""What trainings and the batch size optimization server say to each other.

The five routes under "wire contract", their statuses and their fields are those of Zeus 0.16's batch size optimizer:
a Zeus client works against our server and our client against Zeus's server. Everything beyond that is optional on the
wire. Fields fixed by Zeus keep its names (``time``, ``energy``, ``max_power``); fields of our own carry their unit.

This module is the only one that both packages import.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal, Protocol, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
    ValidationInfo,
    field_serializer,
    field_validator,
)

__all__ = [
    "ALIVE",
    "FINAL",
    "ID_PATTERN",
    "MAX_BATCH_SIZE",
    "MAX_BATCH_SIZES",
    "MAX_DETAIL_LENGTH",
    "MAX_ID_LENGTH",
    "MAX_POWER_LIMITS",
    "ArmView",
    "BatchSize",
    "EndReason",
    "Ending",
    "Epochs",
    "ErrorBody",
    "Evaluation",
    "FieldError",
    "Finite",
    "Goal",
    "GpuConfig",
    "Heartbeat",
    "HeartbeatResponse",
    "Identifier",
    "JobList",
    "JobRegistration",
    "JobSpec",
    "JobSummary",
    "JobView",
    "Joules",
    "NonNegativeFinite",
    "NonNegativeInt",
    "OfflineTrial",
    "Origin",
    "Paths",
    "PolicyName",
    "PositiveFinite",
    "PositiveInt",
    "PowerLimitChoice",
    "PowerLimitSample",
    "PowerLimitSamples",
    "PowerProfile",
    "ReportResponse",
    "Seconds",
    "Seed",
    "Stage",
    "StopRule",
    "Text",
    "TrainingResult",
    "TrialDispatch",
    "TrialEnd",
    "TrialId",
    "TrialPage",
    "TrialPowerProfile",
    "TrialState",
    "TrialView",
    "Verdict",
    "Watts",
    "WireMessage",
    "cost",
    "is_reached",
]

MAX_BATCH_SIZE = 2**31 - 1
MAX_BATCH_SIZES = 1000
MAX_ID_LENGTH = 255
MAX_DETAIL_LENGTH = 1000
MAX_POWER_LIMITS = 256
ID_PATTERN = "^[A-Za-z0-9._:@-]+$"  # what URLs, shells, logs and file names take as it is


class Paths:
    """URL paths, relative to the server's URL."""

    # Wire contract
    JOBS = "/jobs"
    BATCH_SIZE = "/jobs/batch_size"
    REPORT = "/report"
    TRIALS = "/trials"
    HEARTBEAT = "/trials/heartbeat"
    POWER_PROFILE = "/trials/power_profile"
    # Read API
    API_JOBS = "/api/jobs"
    IMPORT = "/api/import"
    HEALTH = "/health/live"
    READY = "/health/ready"
    VERSION = "/version"


# The numbers behind a decision, which end its reason; those of version 0.1 have none in brackets.
_NUMBERS = re.compile(r" \[[^\[\]]*\]$")


class PolicyName(StrEnum):
    """How batch sizes are chosen."""

    ZEUS = "zeus"
    GP_VOI = "gp_voi"


class Stage(StrEnum):
    """Where a job stands: eliminating arms, or drawing among the survivors."""

    PRUNING = "pruning"
    BANDIT = "bandit"


class Origin(StrEnum):
    """Why a trial was dispatched."""

    EXPLORATION = "exploration"
    INCUMBENT = "incumbent"
    CONCURRENT = "concurrent"
    BANDIT = "bandit"
    OFFLINE = "offline"


class TrialState(StrEnum):
    """The state of one trial; `bso_server.core.model` holds the legal moves."""

    RUNNING = "running"
    COMPLETED = "completed"
    EARLY_STOPPED = "early_stopped"
    EXHAUSTED = "exhausted"
    FAILED = "failed"
    INFEASIBLE = "infeasible"
    SUSPENDED = "suspended"
    ABANDONED = "abandoned"


ALIVE = frozenset({TrialState.RUNNING, TrialState.SUSPENDED})
"""States of trials that are under way, or may go on: the server expects to hear of them, and they have leases."""

FINAL = frozenset(TrialState) - ALIVE - {TrialState.ABANDONED}
"""States of trials that have ended for good. An abandoned one goes on if its training does."""


class EndReason(StrEnum):
    """Why a trial ended, or that it has not."""

    KEEP_TRAINING = "keep_training"
    TARGET_REACHED = "target_reached"
    COST_BOUND_CROSSED = "cost_bound_crossed"
    EPOCH_BOUND_REACHED = "epoch_bound_reached"
    MAX_EPOCHS_REACHED = "max_epochs_reached"
    CRASHED = "crashed"
    OUT_OF_MEMORY = "out_of_memory"
    PREEMPTED = "preempted"
    LEASE_EXPIRED = "lease_expired"


def cost(*, energy_j: float, time_s: float, max_power_w: float, eta: float) -> float:
    """Cost in joules: ``η · energy + (1 − η) · max_power · time``.

    η trades energy against time, with time priced at the maximum power, so that both terms are joules
    (You, Chung, Chowdhury: Zeus, NSDI '23, equation 2).

    Args:
        energy_j: Energy over all GPUs, joules.
        time_s: Duration, seconds.
        max_power_w: Sum of the GPUs' maximum power limits, watts.
        eta: Weight of energy in [0, 1].
    """
    return eta * energy_j + (1 - eta) * max_power_w * time_s


def _ascending_and_unique(sizes: tuple[int, ...]) -> tuple[int, ...]:
    repeated = sorted(size for size, times in Counter(sizes).items() if times > 1)
    if repeated:
        raise ValueError(f"must be unique; given more than once: {repeated}")
    return tuple(sorted(sizes))


# Constraints stand inside `Annotated[str, …]`: from `Field` on a plain str, Litestar's OpenAPI schema loses them.
BatchSize = Annotated[int, Field(gt=0, le=MAX_BATCH_SIZE)]
Identifier = Annotated[str, StringConstraints(min_length=1, max_length=MAX_ID_LENGTH, pattern=ID_PATTERN)]
# PostgreSQL keeps every character but NUL.
Text = Annotated[str, StringConstraints(max_length=255, pattern=r"^[^\x00]*$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]
PositiveFinite = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFinite = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveInt = Annotated[int, Field(gt=0, le=2**31 - 1)]
NonNegativeInt = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
# Far beyond anything real, and small enough that costs, their sums and their squares stay finite.
Seconds = Annotated[float, Field(gt=0, le=1e10, allow_inf_nan=False)]
Joules = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Watts = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Epochs = Annotated[float, Field(gt=0, le=2**31 - 1, allow_inf_nan=False)]


class WireMessage(BaseModel):
    """Base of all messages: immutable, and deaf to fields that it does not know."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class JobSpec(WireMessage):
    """A recurring training job, as its owner describes it.

    Attributes:
        job_id_prefix: Groups jobs; `job_id` starts with it.
        job_id: Names the job across its recurrences. None: the server makes one as ``{job_id_prefix}-{8 hex digits}``.
        batch_sizes: Global batch sizes to choose from (samples per optimizer step over all devices). Kept ascending.
        default_batch_size: The size that the owner would use without an optimizer; exploration starts there.
        eta_knob: η of ``cost = η·energy + (1 − η)·max_power·time``: 0 minimises time, 1 energy.
        beta_knob: A trial is stopped when its cost exceeds β times the lowest cost so far. None: never.
        target_metric: Value of the validation metric at which the training is done.
        higher_is_better_metric: Whether the metric rises as the model improves.
        max_epochs: A trial that has not reached the target by then has failed.
        num_pruning_rounds: How often every batch size is tried before sizes are drawn. 0: not at all.
        window_size: Number of latest observations per batch size that count. 0: all.
        mab_prior_mean: Mean of the prior over the reward (−cost, joules) of a batch size.
        mab_prior_precision: Precision (1/joules²) of that prior. 0: uninformative.
        mab_num_explorations: Least number of observations per batch size before it is drawn by merit.
        mab_seed: Seed of the job's random draws. None: fresh entropy at each decision.
        policy: How batch sizes are chosen; docs/policy.md describes both ways. `num_pruning_rounds`, `window_size` and
            the ``mab_…`` fields matter to policy `zeus` alone.

    Raises:
        pydantic.ValidationError: A field is out of its range, or two fields contradict each other.
    """

    # Validators see the fields above their own only: the order matters.
    job_id_prefix: Identifier
    job_id: Identifier | None = None
    batch_sizes: Annotated[
        tuple[BatchSize, ...],
        # The first wrong size is enough: an error for each of 100,000 would be a hundred times their length.
        FailFast(),
        Field(min_length=1, max_length=MAX_BATCH_SIZES),
        AfterValidator(_ascending_and_unique),
    ]
    default_batch_size: BatchSize
    eta_knob: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.5
    beta_knob: PositiveFinite | None = 2.0
    target_metric: Finite = 0.5
    higher_is_better_metric: bool = True
    max_epochs: PositiveInt = 100
    num_pruning_rounds: NonNegativeInt = 2
    window_size: NonNegativeInt = 0
    mab_prior_mean: Finite = 0.0
    mab_prior_precision: NonNegativeFinite = 0.0
    mab_num_explorations: NonNegativeInt = 2
    mab_seed: Seed | None = None
    policy: PolicyName = PolicyName.GP_VOI

    @field_validator("job_id")
    @classmethod
    def _starts_with_prefix(cls, job_id: str | None, others: ValidationInfo) -> str | None:
        prefix = others.data.get("job_id_prefix")
        if job_id is not None and prefix is not None and not job_id.startswith(prefix):
            raise ValueError(f"{job_id!r} does not start with job_id_prefix {prefix!r}")
        return job_id

    @field_validator("default_batch_size")
    @classmethod
    def _is_a_batch_size(cls, default: int, others: ValidationInfo) -> int:
        sizes = others.data.get("batch_sizes")
        if sizes is not None and default not in sizes:
            raise ValueError(f"{default} is not one of batch_sizes {list(sizes)}")
        return default


class GpuConfig(WireMessage):
    """The accelerators one run of the job uses.

    Attributes:
        max_power: Maximum power limit in watts, summed over the GPUs.
        number_of_gpus: How many GPUs the job uses.
        gpu_model: The model's name as its driver gives it.
    """

    max_power: Watts
    number_of_gpus: PositiveInt
    gpu_model: Annotated[Text, StringConstraints(min_length=1)]


class JobRegistration(JobSpec, GpuConfig):
    """Body and answer of ``POST /jobs``: the job on its hardware, flat, as Zeus sends it.

    Who does not say which policy, as Zeus's clients do not, gets Zeus's.
    """

    policy: PolicyName = PolicyName.ZEUS

    def cost_j(self, *, time_s: float, energy_j: float) -> float:
        """What a run of the job costs, joules; see `cost`."""
        return cost(energy_j=energy_j, time_s=time_s, max_power_w=self.max_power, eta=self.eta_knob)

    def is_reached_by(self, metric: float) -> bool:
        """Whether the metric is at the target or beyond."""
        return is_reached(self, metric)

    @classmethod
    def of(cls, spec: JobSpec, gpu: GpuConfig) -> JobRegistration:
        """Join a job with the hardware that it runs on."""
        return cls(**spec.model_dump(), **gpu.model_dump())


class TrialId(WireMessage):
    """One trial of a job.

    Attributes:
        job_id: The job.
        batch_size: Its global batch size.
        trial_number: Counts from 1 within the job.
    """

    job_id: Identifier
    batch_size: BatchSize
    trial_number: PositiveInt


class PowerLimitSample(WireMessage):
    """One measurement window under one power limit.

    Attributes:
        limit_w: The power limit of each GPU, watts.
        steps: Steps measured.
        time_s: Their duration, seconds.
        energy_j: Their energy over all GPUs, joules.
        source: How the energy was obtained, as `zeus_plugins.energy.Measurement.source`.
    """

    limit_w: Watts
    steps: PositiveInt
    time_s: Seconds
    energy_j: Joules
    source: Text = ""

    @property
    def time_per_step_s(self) -> float:
        """Seconds of one step."""
        return self.time_s / self.steps

    @property
    def energy_per_step_j(self) -> float:
        """Joules of one step, over all GPUs."""
        return self.energy_j / self.steps

    @property
    def average_power_w(self) -> float:
        """Mean power over all GPUs, watts."""
        return self.energy_j / self.time_s


def _ascending_with_one_for_each_limit(samples: tuple[PowerLimitSample, ...]) -> tuple[PowerLimitSample, ...]:
    by_limit = {sample.limit_w: sample for sample in samples}
    if len(by_limit) < len(samples):
        raise ValueError("two samples have the same limit_w")
    return tuple(by_limit[limit_w] for limit_w in sorted(by_limit))


PowerLimitSamples = Annotated[
    tuple[PowerLimitSample, ...],
    FailFast(),
    Field(max_length=MAX_POWER_LIMITS),
    AfterValidator(_ascending_with_one_for_each_limit),
]


class PowerProfile(WireMessage):
    """What steps of a training cost under each power limit; the batch size is said beside it.

    Attributes:
        gpus: The devices measured; their maximum power is summed over them, watts.
        samples: One for each power limit. Kept ascending by limit.
    """

    gpus: GpuConfig
    samples: PowerLimitSamples = ()


class PowerLimitChoice(PowerProfile):
    """What a training knows of its power limits, and which of them it chose.

    Attributes:
        samples: What it has measured itself, and what it was told; at least one.
        chosen_limit_w: The limit that it trains under, watts of each GPU; None where it sets none.
    """

    samples: Annotated[PowerLimitSamples, Field(min_length=1)]
    chosen_limit_w: Watts | None = None

    @field_validator("chosen_limit_w")
    @classmethod
    def _was_measured(cls, chosen_w: float | None, others: ValidationInfo) -> float | None:
        samples: tuple[PowerLimitSample, ...] | None = others.data.get("samples")
        if chosen_w is not None and samples is not None and chosen_w not in {sample.limit_w for sample in samples}:
            raise ValueError(f"{chosen_w:g} W is not the limit_w of any of the samples")
        return chosen_w


class TrialPowerProfile(PowerLimitChoice, TrialId):
    """Body of ``PUT /trials/power_profile``: the power limits of a trial."""


class Goal(Protocol):
    """What a trial is to reach; a `JobRegistration` is one."""

    @property
    def target_metric(self) -> float:
        """Value of the validation metric at which the training is done."""

    @property
    def higher_is_better_metric(self) -> bool:
        """Whether the metric rises as the model improves."""

    @property
    def max_epochs(self) -> int:
        """Epochs after which a trial that has not reached it has failed."""


def is_reached(goal: Goal, metric: float) -> bool:
    """Whether the metric is at the target or beyond."""
    return metric >= goal.target_metric if goal.higher_is_better_metric else metric <= goal.target_metric


class StopRule(WireMessage):
    """When a trial is stopped that has not reached its target.

    The server judges by it, and so does a training while the server is away.

    Attributes:
        max_cost_j: Joules of cost beyond which the trial is stopped, be the target reached or not. None: no limit.
        max_epochs: Epochs after which it is stopped.
    """

    max_cost_j: NonNegativeFinite | None = None
    max_epochs: PositiveInt

    def judge(
        self, goal: Goal, *, metric: float, epochs: float, cost_j: float | None, because: str | None = None
    ) -> Verdict:
        """Decide whether a trial goes on.

        Beyond `max_cost_j` it stops, and so it does at its target; reaching that counts only within the bound.
        Otherwise it goes on until its epochs are over.

        Args:
            goal: What it is to reach.
            metric: Its latest validation metric.
            epochs: Epochs trained so far.
            cost_j: Its cost so far, joules; None where that is unknown, so that no bound on it applies.
            because: Reason for the rule's bound, in words: for `max_cost_j`, or without it for `max_epochs`.
        """
        spent = "at an unknown cost" if cost_j is None else f"{cost_j:.4g} J"
        measured = f"metric {metric:.4g} against a target of {goal.target_metric:g}"
        if self.max_cost_j is not None and cost_j is not None and cost_j > self.max_cost_j:
            bound = f"{self.max_cost_j:.4g} J" if because is None else f"{because}, {self.max_cost_j:.4g} J"
            state, reason = TrialState.EARLY_STOPPED, EndReason.COST_BOUND_CROSSED
            message = f"stopped: {spent} spent, more than {bound}"
        elif is_reached(goal, metric):
            state, reason = TrialState.COMPLETED, EndReason.TARGET_REACHED
            message = f"target reached: {measured} after {epochs:g} epochs, {spent}"
        elif epochs >= goal.max_epochs:
            state, reason = TrialState.EXHAUSTED, EndReason.MAX_EPOCHS_REACHED
            message = f"stopped: {measured} after {epochs:g} epochs, all that max_epochs allows"
        elif epochs >= self.max_epochs:
            state, reason = TrialState.EARLY_STOPPED, EndReason.EPOCH_BOUND_REACHED
            message = f"stopped: {measured} after {epochs:g} epochs" + (f"; {because}" if because else "")
        else:
            state, reason = TrialState.RUNNING, EndReason.KEEP_TRAINING
            message = f"go on: {measured}, {spent}" + ("" if cost_j is None else " spent")
            if because is not None and self.max_cost_j is None:
                message += f"; it has {self.max_epochs} epochs ({because})"
        return Verdict(state, reason, message, self)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a trial after an evaluation.

    Attributes:
        state: The state that the trial takes; RUNNING to go on.
        reason: Why.
        message: The same in words, with its numbers.
        rule: When a trial that goes on is going to be stopped, as far as is known by now.
    """

    state: TrialState
    reason: EndReason
    message: str
    rule: StopRule

    @property
    def stop(self) -> bool:
        """Whether the training should end."""
        return self.state is not TrialState.RUNNING

    @property
    def converged(self) -> bool:
        """Whether the target was reached within the cost bound."""
        return self.state is TrialState.COMPLETED


class TrialDispatch(TrialId):
    """Answer of ``GET /jobs/batch_size`` and of ``POST /trials``.

    Attributes:
        origin: Why a trial was dispatched; None from a Zeus server.
        reason: The same in words, with the numbers in brackets at the end; None from a Zeus server.
        stop_rule: When the trial is going to be stopped, as far as is known by now; None from a Zeus server.
        power_profile: The newest profile that an earlier trial of the job at this batch size has left; None where there
            is none, for ``POST /trials`` (that training has begun), and from a Zeus server.
    """

    origin: Origin | None = None
    reason: str | None = None
    stop_rule: StopRule | None = None
    power_profile: PowerProfile | None = None


class OfflineTrial(WireMessage):
    """Body of ``POST /trials``: a training began without the server, which was away, and wants its trial recorded.

    Attributes:
        job_id: The job.
        batch_size: The global batch size that it took.
    """

    job_id: Identifier
    batch_size: BatchSize


class Ending(WireMessage):
    """How a training ended before the server told it to.

    Attributes:
        outcome: ``failed`` (a crash: the size is tried again, up to a limit; what a Zeus client means),
            ``infeasible`` (out of memory: neither this size nor a larger one is tried again on this hardware), or
            ``suspended`` (preempted: the trial may go on later).
        detail: What happened, in words.
    """

    outcome: Literal[TrialState.FAILED, TrialState.INFEASIBLE, TrialState.SUSPENDED] = TrialState.FAILED
    detail: Annotated[str, StringConstraints(max_length=MAX_DETAIL_LENGTH, pattern=r"^[^\x00]*$")] | None = None


class TrialEnd(Ending, TrialId):
    """Body of ``PATCH /trials``: a training ends before the server told it to."""


class Heartbeat(TrialId):
    """Body of ``PATCH /trials/heartbeat``.

    Attributes:
        regular: Whether more heartbeats follow at the interval that the answer names, so that their absence soon means
            that the training is gone. A training that only asks where its trial stands says no.
    """

    regular: bool = True


class HeartbeatResponse(WireMessage):
    """Answer of ``PATCH /trials/heartbeat``.

    Attributes:
        state: Where the trial stands; a training whose trial has ended need not send more.
        lease_s: Seconds after which the trial counts as abandoned if nothing more is heard of it.
        interval_s: Seconds after which the next heartbeat is due.
        time_s: Seconds since the trial began, as of its last report; None, here and below, where unsaid.
        energy_j: Joules since then.
        epochs: Epochs trained since then.
    """

    state: TrialState
    lease_s: float
    interval_s: float
    time_s: float | None = None
    energy_j: float | None = None
    epochs: float | None = None


class Evaluation(WireMessage):
    """Where a trial stands after an evaluation.

    Attributes:
        time: Seconds since the trial began.
        energy: Joules since the trial began, over all its GPUs.
        metric: The validation metric.
        current_epoch: Epochs trained so far, counting from 1; fractional when validating within an epoch.
        energy_source: How the energy was measured, e.g. ``"nvml"`` or ``"estimate: 65 W stated"``.
        judged_by: The rule by which the training has judged this result itself, because the server was away; the
            server then judges by it, too, so that both come to the same verdict. None: the server is to judge.
    """

    time: Seconds
    energy: Joules
    metric: Finite
    current_epoch: Epochs
    energy_source: Text | None = None
    judged_by: StopRule | None = None

    @field_serializer("current_epoch")
    def _whole_epochs_as_integers(self, epoch: float) -> int | float:
        return int(epoch) if epoch.is_integer() else epoch


class TrainingResult(Evaluation, TrialId):
    """Body of ``POST /report``: an evaluation of a trial."""


class ReportResponse(WireMessage):
    """Answer of ``POST /report``.

    Attributes:
        stop_train: Whether the training should end now.
        converged: Whether it reached the target metric within the cost bound.
        message: The same in words, with numbers.
        reason: The same as a value; None from a Zeus server.
        stop_rule: When the trial is going to be stopped, as far as is known by now; None from a Zeus server.
    """

    stop_train: bool
    converged: bool
    message: str
    reason: EndReason | None = None
    stop_rule: StopRule | None = None

    @classmethod
    def of(cls, verdict: Verdict) -> Self:
        """Tell a training its verdict."""
        return cls(
            stop_train=verdict.stop,
            converged=verdict.converged,
            message=verdict.message,
            reason=verdict.reason,
            stop_rule=None if verdict.stop else verdict.rule,
        )


class TrialView(WireMessage):
    """One trial as the read API shows it. Measured fields are None until the first report.

    Attributes:
        trial_number: Counts from 1 within the job.
        batch_size: Global batch size.
        state: Where the trial stands.
        origin: Why it was dispatched.
        reason: Why this batch size was chosen: plain words, and in brackets at the end the numbers behind them.
        message: The last verdict or the way it ended, in words.
        started_at: When it was dispatched (UTC).
        ended_at: When it ended (UTC), or None.
        end_reason: Why it ended, or None.
        time_s: Seconds since it began, as of its last report.
        energy_j: Joules since it began, as of its last report.
        energy_source: How the energy was measured.
        cost_j: ``η·energy + (1 − η)·max_power·time`` in joules.
        epochs: Epochs trained.
        metric: The last validation metric.
        owner: Id of the token that it was dispatched to, which is no secret; None where the server asked for none.
        epoch_bound: Epochs after which it is stopped without the target; None until policy `gp_voi` has decided on
            them, and with other policies.
        epoch_bound_reason: Why, in the same form.
        power_limit_w: The power limit of each GPU that the training chose, watts; None where it sets none.
        power_limits: How many limits it knew the cost of; None where it looks for none.
    """

    trial_number: int
    batch_size: int
    state: TrialState
    origin: Origin
    reason: str
    message: str | None
    started_at: datetime
    ended_at: datetime | None
    end_reason: EndReason | None
    time_s: float | None
    energy_j: float | None
    energy_source: str | None
    cost_j: float | None
    epochs: float | None
    metric: float | None
    owner: str | None = None
    epoch_bound: int | None = None
    epoch_bound_reason: str | None = None
    power_limit_w: float | None = None
    power_limits: int | None = None

    @property
    def reason_in_words(self) -> str:
        """The reason without the numbers."""
        return _NUMBERS.sub("", self.reason)

    @field_serializer("epochs")
    def _whole_epochs_as_integers(self, epochs: float | None) -> int | float | None:
        return int(epochs) if epochs is not None and epochs.is_integer() else epochs


class ArmView(WireMessage):
    """What is known of one batch size.

    Attributes:
        batch_size: The arm.
        trials: Trials dispatched with it.
        n: How many of them reached the target.
        infeasible: Why the size cannot run on this hardware, or None.
        mean_cost_j: Mean cost of those in joules, or None.
        std_cost_j: Population standard deviation of those costs in joules; None for fewer than two.
    """

    batch_size: int
    trials: int
    n: int
    mean_cost_j: float | None
    std_cost_j: float | None
    infeasible: EndReason | None


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
    """

    job_id: str
    job_id_prefix: str
    policy: PolicyName
    stage: Stage
    created_at: datetime
    trials: int
    min_cost_j: float | None
    min_cost_batch_size: int | None


class JobList(WireMessage):
    """Answer of ``GET /api/jobs``: a page of jobs, ordered by id.

    Attributes:
        jobs: The page.
        next_cursor: What to ask for as ``cursor`` to get the next page, or None after the last one.
    """

    jobs: tuple[JobSummary, ...]
    next_cursor: str | None = None


class JobView(WireMessage):
    """Answer of ``GET /api/jobs/{job_id}`` and of ``bso-server jobs show --json``.

    Attributes:
        job: The job as registered.
        stage: Where it stands.
        min_cost_j: Lowest cost of a trial that reached the target, in joules, or None.
        best_batch_size: The arm with the lowest mean cost, or None.
        arms: Every batch size, ascending.
        trial_count: Number of trials dispatched; None from a server of version 0.1.0, which shows all of them.
        trial_states: How many of them are in each state, where any is.
        trials: The latest trials, in order of dispatch: as many as were asked for.
    """

    job: JobRegistration
    stage: Stage
    min_cost_j: float | None
    best_batch_size: int | None
    arms: tuple[ArmView, ...]
    trial_count: int | None = None
    trial_states: dict[TrialState, int] = {}  # pydantic copies defaults
    trials: tuple[TrialView, ...]


class TrialPage(WireMessage):
    """Answer of ``GET /api/jobs/{job_id}/trials``: a page of trials, in order of dispatch.

    Attributes:
        trials: The page.
        next_cursor: What to ask for as ``cursor`` to get the next page, or None after the last one.
    """

    trials: tuple[TrialView, ...]
    next_cursor: int | None


class FieldError(WireMessage):
    """What is wrong with one field of a request."""

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
    """

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    message: str
    errors: tuple[FieldError, ...] = ()
