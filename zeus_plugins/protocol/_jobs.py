"""Jobs and their hardware."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    FailFast,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from zeus_plugins.protocol._values import (
    CONTROLS,
    GP_VOI,
    MAX_BATCH_SIZES,
    MAX_MARGINS,
    ZEUS,
    BatchSize,
    Controls,
    Finite,
    Identifier,
    MetricName,
    NonNegativeFinite,
    NonNegativeInt,
    PolicyName,
    PositiveFinite,
    PositiveInt,
    RegistrationId,
    Seed,
    Tags,
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


class _FirstErrorOnly(FailFast):
    """A hashable `FailFast`: jsonargparse, which builds command lines from types, looks types up by their hash."""

    __hash__ = object.__hash__


TARGET_RUNS = 3
"""Number of runs from which the server learns the target of a job that has no target."""


FIXED_TERMS = frozenset({"job_id", "job_id_prefix", "target_metric", "higher_is_better_metric", "confirm"})
"""Fields of a job that no revision changes: a job with another target is another job. The direction of the metric is an
exception while no run has been judged by it (`refuse_difference` in `bso_server/service/refusals.py`)."""


class JobParams(WireMessage):
    """The fields of `JobSpec` except the id."""

    # The order matters: a validator sees only the fields above its own.
    job_id_prefix: Identifier
    batch_sizes: Annotated[
        tuple[BatchSize, ...],
        # One error is enough: errors for 100,000 sizes would be a hundred times as long as the request.
        _FirstErrorOnly(),
        Field(min_length=1, max_length=MAX_BATCH_SIZES),
        AfterValidator(_ascending_and_unique),
    ]
    default_batch_size: BatchSize
    eta_knob: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.5
    beta_knob: PositiveFinite | None = 2.0
    target_metric: Finite | None = 0.5
    higher_is_better_metric: bool = True
    max_epochs: PositiveInt = 100
    num_pruning_rounds: NonNegativeInt = 2
    window_size: NonNegativeInt = 0
    mab_prior_mean: Finite = 0.0
    mab_prior_precision: NonNegativeFinite = 0.0
    mab_num_explorations: NonNegativeInt = 2
    mab_seed: Seed | None = None
    policy: PolicyName = GP_VOI
    controls: Controls = CONTROLS
    warm_start: Identifier = "auto"
    no_worse_than_default: Annotated[dict[MetricName, Finite], Field(min_length=1, max_length=MAX_MARGINS)] | None = (
        None
    )
    confirm: PositiveInt = 1
    tags: Tags | None = None

    @field_validator("default_batch_size")
    @classmethod
    def _is_a_batch_size(cls, default: int, others: ValidationInfo) -> int:
        sizes = others.data.get("batch_sizes")
        if sizes is not None and default not in sizes:
            raise ValueError(f"{default} is not one of batch_sizes {list(sizes)}")
        return default

    @property
    def monitor(self) -> str:
        """Name of the target's metric; ``metric`` if unknown."""
        return "metric"

    def is_reached_by(self, metric: float) -> bool:
        """Return whether the metric has reached the target; without a target, return False."""
        if self.target_metric is None:
            return False
        return metric >= self.target_metric if self.higher_is_better_metric else metric <= self.target_metric


class JobSpec(JobParams):
    """A recurring training job, as its owner describes it.

    `num_pruning_rounds`, `window_size` and the ``mab_…`` fields have no effect on policy `gp_voi`.

    Attributes:
        job_id_prefix: Groups jobs; `job_id` starts with it.
        job_id: Names the job across its recurrences. None: the server makes ``{job_id_prefix}-{8 hex digits}``.
        batch_sizes: Global batch sizes to choose from (samples per optimizer step over all devices). Kept ascending.
        default_batch_size: The size that the owner would use without an optimizer; exploration starts there.
        eta_knob: η of ``cost = η·energy + (1 − η)·max_power·time``: 0 minimises time, 1 energy.
        beta_knob: A trial is stopped when its cost exceeds β times the lowest cost so far. None: never.
        target_metric: Value of the validation metric at which the training is done. None: learned from the first three
            runs, which train at the default size to their own end (docs/target.md).
        higher_is_better_metric: Whether the metric rises as the model improves.
        max_epochs: Epochs after which a trial that has not reached the target has failed.
        num_pruning_rounds: How often every batch size is tried before sizes are drawn. 0: never.
        window_size: Number of latest observations per batch size that count, at most 1000 for a new job. 0: all.
        mab_prior_mean: Mean of the prior over the reward (−cost, joules) of a batch size.
        mab_prior_precision: Precision (1/joules²) of the prior. 0: uninformative.
        mab_num_explorations: Least number of observations per batch size before it is drawn by merit.
        mab_seed: Seed of the job's random draws. None: fresh entropy at each decision.
        policy: Chooses batch sizes: ``"gp_voi"``, ``"zeus"`` or a policy installed with the server (docs/policy.md).
        controls: Share of the job's cost that control runs at the default, which measure the saving, may forgo
            (docs/savings.md), at most 0.5; ``"off"``, or 0, makes none, as does the policy `zeus`.
        warm_start: Job from which a new job takes over the epochs to the target (docs/policy.md): ``"auto"``, the job
            of the same training on other GPUs, if the server has one; the id of a job; or ``"off"``, no job.
        no_worse_than_default: Margins by the names of metrics, which the callbacks then watch. A size is left out once
            a metric is shown to be worse than the default's by more than its margin. Higher is better, unless the name
            says otherwise (such as ``val_loss``) or the margin is negative (docs/target.md). Not with policy ``zeus``.
        confirm: Number of evaluations in a row that must reach the target (docs/target.md); a Zeus server ignores it.
        tags: Names for groups of jobs in reports, such as ``{"team": "ads"}`` (docs/report.md): at most 16, without
            effect on the optimization; a Zeus server ignores them. None: those with which the job is registered.

    Raises:
        pydantic.ValidationError: An unknown field, a value out of range, or fields that contradict each other.
    """

    job_id: Identifier | None = None

    @model_validator(mode="before")
    @classmethod
    def _has_known_names(cls, given: Any) -> Any:
        if isinstance(given, Mapping):
            unknown = [_not_a_field(str(name), cls.model_fields) for name in given if name not in cls.model_fields]
            if unknown:
                raise ValueError("; ".join(unknown))
        return given

    @field_validator("job_id")
    @classmethod
    def _starts_with_prefix(cls, job_id: str | None, others: ValidationInfo) -> str | None:
        prefix = others.data.get("job_id_prefix")
        if job_id is not None and prefix is not None and not job_id.startswith(prefix):
            raise ValueError(f"{job_id!r} does not start with job_id_prefix {prefix!r}")
        return job_id


def _not_a_field(name: str, fields: Mapping[str, Any]) -> str:
    near = get_close_matches(name, fields, n=1) or [field for field in fields if field.startswith(f"{name}_")][:1]
    return f"JobSpec has no {name!r}" + (f": did you mean {near[0]!r}?" if near else "")


class GpuConfig(WireMessage):
    """The accelerators of one run.

    Attributes:
        max_power: Maximum power limit in watts, summed over the GPUs.
        number_of_gpus: Number of GPUs.
        gpu_model: The model's name, from its driver.
    """

    max_power: Watts
    number_of_gpus: PositiveInt
    gpu_model: Annotated[Text, StringConstraints(min_length=1)]


class Fingerprint(WireMessage):
    """Known properties of a training. Trainings that differ in them rarely share a best batch size.

    Attributes:
        model: The model's class.
        framework: ``lightning`` or ``transformers``.
        optimizer: The optimizer's class or name.
        monitor: Name of the target's metric; of ``transformers`` without the prefix ``eval_``.
        samples: Length of the training data. It may change from run to run.
        parameters: Hash of the number and the shapes of the model's parameters.
        data: Name of the training data, or of the class of their data set.
    """

    # The order matters: a validator sees only the fields above its own.
    model: Text | None = None
    framework: Text | None = None
    optimizer: Text | None = None
    monitor: Text | None = None
    samples: NonNegativeInt | None = None
    parameters: Text | None = None
    data: Text | None = None

    @field_validator("monitor")
    @classmethod
    def _without_prefix(cls, monitor: str | None, others: ValidationInfo) -> str | None:
        return None if monitor is None else _without_eval(monitor, others.data.get("framework"))

    def is_monitor(self, metric: str) -> bool:
        """Return whether this is a name of the target's metric."""
        return self.monitor is not None and _without_eval(metric, self.framework) == self.monitor

    def completed_by(self, other: Fingerprint) -> Fingerprint:
        """Return this fingerprint with its missing fields taken from `other`."""
        return Fingerprint(**{**dict(other), **self.model_dump(exclude_none=True)})

    def differences(self, other: Fingerprint) -> list[str]:
        """Describe each field that is known in both fingerprints and differs; data may grow, so `samples` does not."""
        return [
            f"{name} {mine} before, {theirs} now"
            for (name, mine), (_, theirs) in zip(self, other, strict=True)
            if name != "samples" and mine != theirs and None not in (mine, theirs)
        ]


class LearnedEpochs(WireMessage):
    """Epochs to the target at one batch size, as learned by another job.

    Attributes:
        batch_size: The global batch size.
        log_epochs: Mean of the log of the epochs.
        sd: Standard error of that mean.
        weight: Number of runs that the mean rests on.
        reached: True if runs of this size reach the target; otherwise they only showed that it needs more epochs.
    """

    batch_size: BatchSize
    log_epochs: Finite
    sd: PositiveFinite
    weight: PositiveFinite
    reached: bool


class WarmStart(WireMessage):
    """Epochs to the target that a new job takes over from a job of the same training on other GPUs.

    Attributes:
        job_id: The other job.
        gpus: Its GPUs.
        optimizer: Its optimizer, which that of the new job must equal; None if that does not matter.
        epochs: Its epochs, by batch size.
    """

    job_id: Identifier
    gpus: GpuConfig
    optimizer: Text | None = None
    epochs: tuple[LearnedEpochs, ...] = ()

    @property
    def in_words(self) -> str:
        """The source, such as ``epochs as learned by job nightly on A40``."""
        count = f"{self.gpus.number_of_gpus} x " if self.gpus.number_of_gpus > 1 else ""
        return f"epochs as learned by job {self.job_id} on {count}{self.gpus.gpu_model}"


def _without_eval(metric: str, framework: str | None) -> str:
    """Return the name without the prefix that the Hugging Face Trainer lets its users leave out."""
    return metric.removeprefix("eval_") if framework == "transformers" else metric


class JobSpecFromClient(JobSpec, GpuConfig):
    """Body of ``POST /jobs``: the job on its hardware. A job without a policy, from a Zeus client, gets ``"zeus"``.

    Attributes:
        fingerprint: Known properties of its trainings, or None. It is no part of the configuration: the server keeps
            the first value of each property.
        scaling: How learning rates and steps follow the batch size. At other sizes than the default, only runs that
            began under this value count. None, from other clients and earlier versions: by the default of the time.
        registration_id: Made by the server when it registers the job; differs from that of a deleted job of the same
            id. Clients leave it out.
        target_runs: Numbers of the trials from which the server has learned the target, for a job that was registered
            without one; empty before that, and once its user has given one. None for a job with a target. A client that
            repeats it asks for no target.
        revise: Whether the server shall revise a job with this id that differs in other fields than `FIXED_TERMS`,
            instead of refusing the registration (docs/server.md). It is not stored.
    """

    policy: PolicyName = ZEUS
    fingerprint: Fingerprint | None = None
    scaling: Text | None = None
    registration_id: RegistrationId | None = None
    target_runs: Annotated[tuple[PositiveInt, ...], Field(max_length=TARGET_RUNS)] | None = None
    revise: bool = False

    @model_validator(mode="before")
    @classmethod
    def _has_known_names(cls, given: Any) -> Any:
        # On the wire, unknown fields are ignored. Clients and stored jobs of earlier versions state "auto".
        is_earlier = isinstance(given, Mapping) and given.get("controls") == "auto"
        return {**given, "controls": CONTROLS} if is_earlier else given

    @property
    def gpus(self) -> GpuConfig:
        """The hardware that the job runs on."""
        return GpuConfig(**{name: getattr(self, name) for name in GpuConfig.model_fields})

    @property
    def monitor(self) -> str:
        """Name of the target's metric, as far as known from trainings; else ``metric``."""
        return (None if self.fingerprint is None else self.fingerprint.monitor) or super().monitor

    @property
    def target_in_words(self) -> str:
        """The target, and where it comes from if it was not registered with the job."""
        if self.target_metric is None:
            return f"no target yet: the first {TARGET_RUNS} runs set it"
        learned = f", learned from runs {self.target_runs[0]} to {self.target_runs[-1]}" if self.target_runs else ""
        return f"target {self.target_metric:g}{learned}"

    def is_monitor(self, metric: str) -> bool:
        """Return whether this is a name of the target's metric, as far as known from trainings."""
        return self.fingerprint is not None and self.fingerprint.is_monitor(metric)

    def with_fingerprint(self, told: Fingerprint | None) -> Self:
        """Return the job with the missing parts of its fingerprint taken from `told`."""
        if told is None:
            return self
        return self.model_copy(update={"fingerprint": (self.fingerprint or told).completed_by(told)})

    def cost_j(self, *, time_s: float, energy_j: float) -> float:
        """Return the cost of a run, joules; see `cost`."""
        return cost(energy_j=energy_j, time_s=time_s, max_power_w=self.max_power, eta=self.eta_knob)

    @classmethod
    def of(cls, spec: JobSpec, gpu: GpuConfig) -> Self:
        """Join a job with its hardware."""
        return cls(**spec.model_dump(), **gpu.model_dump())

    def named(self, job_id: str) -> CreatedJob:
        """Return the job under this id; fields that were unset stay unset."""
        revise = {"revise": True} if self.revise else {}
        return CreatedJob(**{**self.model_dump(exclude_unset=True), **revise, "job_id": job_id})


class CreatedJob(JobSpecFromClient):
    """Answer of ``POST /jobs``: a registered job, which always has an id.

    Attributes:
        warm: Epochs that the server took over from another job at the registration, or None.
    """

    job_id: Identifier
    revise: bool = Field(default=False, exclude=True)
    warm: WarmStart | None = None

    @property
    def warm_in_force(self) -> WarmStart | None:
        """The warm start; None if there is none, the user has switched it off, or the optimizer turned out to differ.

        Some trainings know their optimizer only after the registration.
        """
        if self.warm is None or self.warm_start == "off":
            return None
        own = None if self.fingerprint is None else self.fingerprint.optimizer
        return self.warm if None in (own, self.warm.optimizer) or own == self.warm.optimizer else None


def terms_between(before: CreatedJob, after: CreatedJob) -> dict[str, tuple[Any, Any]]:
    """Return the terms in which two registrations of a job differ, before and after, in the order of the fields.

    Targets are not compared if `after` has no target, or if the job was registered without one. Tags and the scaling
    are not compared if `after` does not state them.
    """
    left_out = {"fingerprint", "registration_id", "target_runs", "warm"}
    left_out |= {name for name in ("tags", "scaling") if getattr(after, name) is None}
    if before.target_runs is not None or after.target_runs is not None or after.target_metric is None:
        left_out.add("target_metric")
    old, new = (job.model_dump(exclude=left_out) for job in (before, after))
    return {name: (old[name], new[name]) for name in old if old[name] != new[name]}


class TrialId(WireMessage):
    """One trial of a job, with its global batch size; trials are counted from 1 within the job.

    Attributes:
        registration_id: The job's `registration_id`, so that the server refuses messages about a deleted job. None,
            from a Zeus client: unchecked.
        lease_epoch: Number of the training's run that has the trial. The server refuses messages of earlier runs.
            None, from a Zeus client: unchecked.
        dispatch_id: Idempotency-Key of the request that started the trial. A database that was restored may give the
            number of a lost trial again; the server refuses messages with the key of the lost one. None: unchecked.
    """

    job_id: Identifier
    batch_size: BatchSize
    trial_number: PositiveInt
    registration_id: RegistrationId | None = None
    lease_epoch: PositiveInt | None = None
    dispatch_id: Text | None = None
