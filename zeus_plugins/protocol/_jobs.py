"""Jobs, and the hardware that they run on."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Protocol

from pydantic import AfterValidator, FailFast, Field, StringConstraints, ValidationInfo, field_validator

from zeus_plugins.protocol._values import (
    MAX_BATCH_SIZES,
    BatchSize,
    Finite,
    Identifier,
    NonNegativeFinite,
    NonNegativeInt,
    PolicyName,
    PositiveFinite,
    PositiveInt,
    Seed,
    Text,
    Watts,
    WireMessage,
    cost,
)


def _ascending_and_unique(sizes: tuple[int, ...]) -> tuple[int, ...]:
    repeated = sorted(size for size, times in Counter(sizes).items() if times > 1)
    if repeated:
        raise ValueError(f"must be unique; given more than once: {repeated}")
    return tuple(sorted(sizes))


class Goal(Protocol):
    """The target of a trial; a `JobRegistration` is one."""

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
        """The cost of a run of the job, joules; see `cost`."""
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
