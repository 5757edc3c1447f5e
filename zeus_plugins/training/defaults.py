"""Making of a job from the user's arguments and the facts of the training.

If the job is registered already, the registered values replace the guessed values.
"""

from __future__ import annotations

import hashlib
import logging
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Literal, cast

from pydantic import ValidationError

from zeus_plugins.environment import JOB_ID, JPY_SESSION_NAME
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import (
    FIXED_TERMS,
    MAX_BATCH_SIZE,
    MAX_ID_LENGTH,
    CreatedJob,
    Fingerprint,
    GpuConfig,
    JobSpec,
    certain_direction,
    epochs_in_words,
    faults_in_words,
    is_higher_better,
    is_lower_better,
)
from zeus_plugins.training.arguments import check_count, check_job_id, check_number, checked_sizes
from zeus_plugins.training.batches import BatchSplit
from zeus_plugins.training.metrics import EVALUATION_PREFIX

_DOUBLINGS = range(-3, 4)  # sizes from an eighth to eight times the script's own

_HALF_AN_ID = MAX_ID_LENGTH // 2

# Least relative change in the length of the training data that causes a warning.
_DRIFT = 0.1
_NOISE = 0.1  # share of the distance from the target that a metric may move back by chance

_logger = logging.getLogger("zeus_plugins")

# Field of a job for each argument that sets it.
_FIELDS = {
    "target": "target_metric",
    "job_id": "job_id",
    "mode": "higher_is_better_metric",
    "batch_sizes": "batch_sizes",
    "max_epochs": "max_epochs",
    "confirm": "confirm",
}


class JobWish:
    """A job as its user describes it: the whole `job`, or the `fields` of the job that the user has set.

    The arguments are those of the batch-size callbacks (`BatchSizeArguments`); a mapping as `job` may leave out fields.
    Raises `ZeusBSOConfigError` if a field is given twice, or if a value is invalid.
    """

    def __init__(
        self,
        job: JobSpec | Mapping[str, Any] | str | None = None,
        *,
        monitor: str = "",
        target: float | None = None,
        job_id: str | None = None,
        mode: Literal["max", "min"] | None = None,
        batch_sizes: tuple[int, ...] | None = None,
        max_epochs: int | None = None,
        confirm: int | None = None,
    ) -> None:
        if mode not in ("max", "min", None):
            raise ZeusBSOConfigError(
                f"mode is {mode!r}: say 'max' if the metric rises as the model improves, or 'min' if it falls"
            )
        check_number("target", target)
        check_job_id(job_id)
        check_count("max_epochs", max_epochs)
        check_count("confirm", confirm)
        values = (target, job_id, None if mode is None else mode == "max", batch_sizes, max_epochs, confirm)
        said = {name: value for name, value in zip(_FIELDS, values, strict=True) if value is not None}
        required = {name for name, each in JobSpec.model_fields.items() if each.is_required()}
        parts = job if isinstance(job, Mapping) and not required <= job.keys() else None
        self.monitor = monitor
        self.job = None if job is None or parts is not None else as_job(job)
        if self.job is not None and said:
            twice = ", ".join(f"{name}= as JobSpec({_FIELDS[name]}=…)" for name in said)
            raise ZeusBSOConfigError(f"there is a job= already: say {twice}")
        if twice := ", ".join(f"{name}=" for name in said if _FIELDS[name] in (parts or ())):
            raise ZeusBSOConfigError(f"job= and {twice} say the same: leave one out")
        self.fields = _checked_parts(parts or {}) | {_FIELDS[name]: value for name, value in said.items()}

    @property
    def said_epochs(self) -> int:
        """The user's number of epochs, which the trainer must be able to train; 0 if the user has given none."""
        return int(self.fields.get("max_epochs", 0)) if self.job is None else self.job.max_epochs

    @property
    def said_higher(self) -> bool | None:
        """True if the user has said that higher is better, False for lower, None if the user has said neither."""
        if self.job is None:
            return self.fields.get("higher_is_better_metric")
        return self.job.higher_is_better_metric if "higher_is_better_metric" in self.job.model_fields_set else None


def _checked_parts(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return these fields of a job as a `JobSpec` holds them."""
    sizes = checked_sizes(parts["batch_sizes"]) if "batch_sizes" in parts else (parts.get("default_batch_size", 1),)
    missing = {"job_id_prefix": parts.get("job_id", "job"), "batch_sizes": sizes, "default_batch_size": sizes[0]}
    checked = as_job({**missing, **parts})
    return {name: getattr(checked, name) for name in parts}


@dataclass(frozen=True, kw_only=True)
class TrainingFacts:
    """Facts about a training, as known before it begins.

    Attributes:
        samples: Length of the training data; None for a stream.
        step_size: The script's samples per optimizer step, over all devices and accumulated batches; None if unknown.
        devices: Number of devices that train on different data.
        unit: Number by which every global batch size must be divisible: devices × accumulated batches.
        max_epochs: Epochs after which the trainer ends, including an epoch that has begun; None for no limit.
        data: Name of the training data or of their class; None if unknown.
        obstacle: Returns the reason why the trainer and its data cannot train with a split of a batch size, or None.
    """

    script: str
    model: str
    samples: int | None
    step_size: int | None
    devices: int = 1
    unit: int = 1
    max_epochs: int | None = None
    data: str | None = None
    obstacle: Callable[[BatchSplit], str | None] = lambda _: None


def hash_of_parameters(model: Any) -> str | None:
    """Return a hash of the number and the shapes of a model's parameters, in their order.

    The names of parameters are left out, because wrappers such as DDP and `torch.compile` add prefixes to them. Return
    None if the model has no parameters, or if the shape of a parameter is not known yet.
    """
    parameters = [] if model is None else list(model.parameters())
    # Parameters of lazy modules, which have `materialize`, have no shape yet.
    if not parameters or any(hasattr(each, "materialize") for each in parameters):
        return None
    # `ds_shape` is the full shape of a parameter that DeepSpeed has spread over devices.
    shapes = [tuple(getattr(each, "ds_shape", each.shape)) for each in parameters]
    return hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]


def name_of_data(data: Any) -> str | None:
    """Return the name of a Hugging Face data set, or the class name of other data; for a subset, that of the whole."""
    while type(data).__name__ == "Subset":
        data = data.dataset
    name = getattr(getattr(data, "info", None), "dataset_name", None)
    return None if data is None else str(name or type(data).__name__)[:255]


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """A job to register.

    Attributes:
        job: The job; if its `job_id` is guessed, the method `on` adds the `job_id`.
        guessed: Names of the job's fields that were guessed.
        monitor: Name of the metric; may be empty.
        warning: Warning of a probable mistake, or None.
        devices: As in `TrainingFacts`.
        fingerprint: Model, framework, optimizer and metric of the training, or None.
        target_in_words: The server's target in words, if the user has given no target; otherwise None.
        script_size: The script's samples per optimizer step, over all devices; None if unknown.
        scaling: How the training's learning rates and steps follow the batch size; None if unknown.
    """

    job: JobSpec
    guessed: frozenset[str] = frozenset()
    monitor: str = ""
    warning: str | None = None
    devices: int = 1
    fingerprint: Fingerprint | None = None
    target_in_words: str | None = None
    script_size: int | None = None
    scaling: str | None = None

    @property
    def follows(self) -> frozenset[str]:
        """Names of the job's fields for which an existing registration of the job supplies the values.

        Neither the user nor the trainer has stated these fields. The trainer's number of epochs counts as stated: if it
        changes, the job is revised. The number of epochs of a `JobSpec` that the user gives counts as stated, too,
        because the trainer's number has been compared with it.
        """
        stated = self.job.model_fields_set
        unsaid = frozenset(JobSpec.model_fields) - stated - FIXED_TERMS - ({"max_epochs"} - self.guessed)
        return (self.guessed - (stated & {"max_epochs"})) | unsaid

    @property
    def guesses(self) -> list[str]:
        """The guessed fields that concern the user, in words, with the server's values once they are received."""
        job, better = self.job, "higher" if self.job.higher_is_better_metric else "lower"
        words = {
            "batch_sizes": f"batch sizes {', '.join(map(str, job.batch_sizes))}",
            "max_epochs": f"at most {epochs_in_words(job.max_epochs)}",
            "higher_is_better_metric": f"{better} {self.monitor} is better",
            "job_id": "the job's id",
        }
        return [text for name, text in words.items() if name in self.guessed]

    def watched(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the distinct metrics to watch: `names`, and those with margins in `no_worse_than_default`.

        The metric of the target is left out, because each report contains it.
        """
        found = dict.fromkeys((*names, *(self.job.no_worse_than_default or ())))
        return tuple(name for name in found if self.fingerprint is None or not self.fingerprint.is_monitor(name))

    def on(self, gpus: GpuConfig) -> JobSpec:
        """Return the job with its id; a guessed id names the script, model, metric, target and hardware.

        A guessed id leaves out the length of the data and stated watts, which may change within one job.
        """
        if self.job.job_id is not None or "job_id" not in self.guessed:
            return self.job
        setup = _slug(f"{self.devices}x{gpus.gpu_model}")
        return self.job.model_copy(update={"job_id": f"{self.job.job_id_prefix}-{setup}"})

    def named(self, job_id: str) -> JobPlan:
        """Return the plan with this job id."""
        update = {"job_id": job_id} | ({"job_id_prefix": job_id} if "job_id_prefix" in self.guessed else {})
        fields = {**self.job.model_dump(exclude_unset=True), **update}
        return replace(self, job=JobSpec(**fields), guessed=self.guessed - {"job_id"})

    def compare(self, known: CreatedJob) -> None:
        """Warn if the fingerprint of the job's earlier trainings differs."""
        own, before = self.fingerprint, known.fingerprint
        differences = [] if own is None or before is None else before.differences(own)
        if own is None or not differences:
            return
        _logger.warning(
            "the trainings of job %s were made of something else (%s), so their results may not hold for this "
            "training. Give it a job of its own, such as job_id=%r",
            *(known.job_id, "; ".join(differences), f"{known.job_id}-{own.model}"),
        )

    def compare_samples(self, known: CreatedJob) -> None:
        """Warn if the length of the training data has changed by more than 10 % since the job began."""
        before, now = (None if each is None else each.samples for each in (known.fingerprint, self.fingerprint))
        if before is not None and now is not None and abs(now - before) > _DRIFT * before:
            _logger.warning(
                "the training data have %s samples, %s when job %s began: costs of its earlier runs may no longer hold",
                *(f"{now:,}", f"{before:,}", known.job_id),
            )

    def with_id_of_environment(self) -> JobPlan:
        """Return the plan with the id in ``ZEUS_JOB_ID`` if the job has none.

        Raises:
            ZeusBSOConfigError: The id does not begin with the job's `job_id_prefix`, or is invalid.
        """
        job_id = JOB_ID.text()
        if self.job.job_id is not None or not job_id:
            return self
        try:
            return self.named(job_id)
        except ValidationError as error:
            raise ZeusBSOConfigError(f"{JOB_ID}={job_id} does not fit the job: {faults_in_words(error)}") from None


def planned(
    wish: JobWish,
    facts: TrainingFacts | None = None,
    modes: Mapping[str, Literal["max", "min"]] | None = None,
    check_size: Callable[[int], object] = lambda _: None,
) -> JobPlan:
    """Return the plan for a user's wish; unless the wish is a whole job, `facts` are needed.

    `modes` maps other settings of the script to the direction ("max" or "min") that they give the metric. Sizes for
    which `check_size` raises `ZeusBSOConfigError` are not guessed. Raise `ZeusBSOConfigError` if the facts do not
    suffice, if the direction remains unknown, or if the script's own batch size cannot work.
    """
    higher = _direction(wish, modes or {})
    warning = None if wish.said_higher is None else _contradiction(wish.monitor, said=higher)
    margins = (wish.fields if wish.job is None else dict(wish.job)).get("no_worse_than_default") or {}
    margin = margins.get(wish.monitor)
    if margin is not None and is_lower_better(wish.monitor, margin) is higher:
        raise ZeusBSOConfigError(
            f"no_worse_than_default={{{wish.monitor!r}: {margin:g}}} means that {'lower' if higher else 'higher'} "
            f"is better, and the job says higher_is_better_metric={higher}: a negative margin is for metrics of "
            "which lower is better"
        )
    if wish.job is not None:
        if higher is wish.job.higher_is_better_metric:
            return JobPlan(job=wish.job, monitor=wish.monitor, warning=warning)
        job = wish.job.model_copy(update={"higher_is_better_metric": higher})
        return JobPlan(job=job, guessed=frozenset({"higher_is_better_metric"}), monitor=wish.monitor)
    if facts is None:
        raise ValueError("a job cannot be guessed without facts")
    if facts.step_size is None:
        raise ZeusBSOConfigError(
            "the batch size of this training is unknown before it begins: give the data a batch_size (of the data "
            "module, the model or a DataLoader passed to fit), or describe the job by job=JobSpec(…)"
        )
    if facts.samples is not None and facts.step_size > facts.samples:
        raise ZeusBSOConfigError(
            f"the batch size of this training ({facts.step_size}) is larger than its data ({facts.samples} samples): "
            "lower it, or describe the job by job=JobSpec(…)"
        )
    own = facts.step_size
    check_size(own)
    said_sizes, default = wish.fields.get("batch_sizes"), wish.fields.get("default_batch_size", own)
    if said_sizes is not None and len(said_sizes) == 1:
        (default,) = said_sizes  # pinned: there is nothing to choose
    sizes = {default, *(said_sizes or _sizes(own, facts, check_size))}
    # The Hugging Face Trainer lets its users leave out the prefix of a metric.
    named = [facts.script, facts.model, wish.monitor.removeprefix(EVALUATION_PREFIX)]
    target = wish.fields.get("target_metric")
    if target is not None:
        named.append(f"{'minus' if target < 0 else ''}{abs(float(target))!r}".removesuffix(".0"))
    if higher is not is_higher_better(wish.monitor):
        named.append("max" if higher else "min")
    guess = {
        "job_id_prefix": wish.fields.get("job_id") or _slug(*named),
        "target_metric": None,
        "higher_is_better_metric": higher,
        **({} if facts.max_epochs is None else {"max_epochs": facts.max_epochs}),
    }
    return JobPlan(
        job=as_job({**guess, **wish.fields, "batch_sizes": sorted(sizes), "default_batch_size": default}),
        # If this run states no target, the registered job keeps its own target.
        guessed=frozenset(JobSpec.model_fields)
        - wish.fields.keys()
        - ({"target_metric"} if default == own else {"target_metric", "default_batch_size"}),
        monitor=wish.monitor,
        warning=warning,
        devices=facts.devices,
    )


def first_report_warning(job: JobSpec, monitor: str, metric: float, *, is_reached: bool) -> str | None:
    """Return a warning if the first report suggests a mistake in the target, or None.

    `is_reached` says whether the report ended the trial with the target reached.
    """
    name, target = monitor or "the metric", job.target_metric
    if target is None:
        return None
    if is_reached:
        side, other = ("at or above", "lower") if job.higher_is_better_metric else ("at or below", "higher")
        return (
            f"{name} was {metric:.4g} at the first report, {side} the target {target:g}, so that the training ends "
            f"there, or at the next evaluation. If it should not, set another target, or, where {other} is better, "
            f"mode={'max' if other == 'higher' else 'min'!r}"
        )
    if job.higher_is_better_metric and 1 < target <= 100 and 0 <= metric <= 1:
        return (
            f"the target is {target:g}, and {name} was {metric:.4g} at the first report: if it lies between 0 and 1, "
            f"it can never reach the target, and {target / 100:g} may be meant"
        )
    return None


def check_direction(job: JobSpec, monitor: str, first: float, second: float) -> None:
    """Raise `ZeusBSOConfigError` if the job's first run moves away from the target, which its first evaluation reached.

    If the metric's name is well known, its direction is certain, and the target is only easy. A small step may be
    noise.
    """
    higher = job.higher_is_better_metric
    away = first - second if higher else second - first
    least = _NOISE * abs(first - cast("float", job.target_metric))
    if away <= least or certain_direction(monitor) is higher:
        return
    side, moved = ("at or above", "fell") if higher else ("at or below", "rose")
    raise ZeusBSOConfigError(
        f"{monitor or 'the metric'} was {first:.4g} at the first evaluation, {side} the target {job.target_metric:g}, "
        f"and then {moved} to {second:.4g}: if "
        f"{'lower' if higher else 'higher'} is better, say mode={'min' if higher else 'max'!r} (in a job= "
        f"higher_is_better_metric={not higher}), otherwise set a target that an untrained model does not reach"
    )


def as_job(job: JobSpec | Mapping[str, Any] | str) -> JobSpec:
    """Return the job, made from a mapping of its fields if necessary; raise `ZeusBSOConfigError` for invalid fields."""
    if isinstance(job, JobSpec):
        return job
    if not isinstance(job, Mapping):
        raise ZeusBSOConfigError(f"job is a {type(job).__name__}: give a JobSpec, or its fields as a dict")
    # pydantic accepts lists, but not other sequences such as OmegaConf's.
    fields = {
        name: list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        for name, value in job.items()
    }
    try:
        return JobSpec.model_validate(fields)
    except ValidationError as error:
        raise ZeusBSOConfigError(f"job does not describe a JobSpec: {faults_in_words(error)}") from None


def check_epochs(needed: int, limit: int, setting: str, *, trained: int = 0) -> None:
    """Raise `ZeusBSOConfigError` if a trainer ends before the `needed` epochs of the user's job.

    The trainer ends after `limit` epochs in all, of which it has trained `trained` before this trial. `setting` is the
    argument of the script that sets the limit, such as ``Trainer(max_epochs={})``.
    """
    if limit - trained >= needed:
        return
    already, remedy = "", f"set the job's max_epochs={limit} or {setting.format(needed)}"
    if trained:
        already = f" after the {trained} epochs that this trainer has trained already"
        remedy = "make a new Trainer for each training"
    raise ZeusBSOConfigError(
        f"{setting.format(limit)} ends before the job's max_epochs ({needed}){already}, so the server would "
        f"never learn that a batch size cannot reach the target: {remedy}"
    )


def script_name(argv0: str) -> str:
    """Return the name of a script or notebook, given the first of the process's arguments."""
    path = PurePath(argv0)
    if path.stem.endswith("kernel_launcher"):  # ipykernel, Colab, Databricks
        shown = getattr(sys.modules.get("__main__"), "__vsc_ipynb_file__", None) or JPY_SESSION_NAME.text() or ""
        notebook = PurePath(shown)
        return notebook.stem if notebook.suffix == ".ipynb" else "notebook"
    if path.stem == "__main__":  # python -m package
        return path.parent.name or "python"
    return path.stem if path.stem not in ("", "-c", "-") else "python"


def _direction(wish: JobWish, modes: Mapping[str, Literal["max", "min"]]) -> bool:
    """Return True if higher is better, by the user's word, or else by other settings of the script and the name."""
    if wish.said_higher is not None:
        return wish.said_higher
    if wish.job is not None and not wish.monitor:
        return wish.job.higher_is_better_metric
    say = "mode='max' or mode='min'" if wish.job is None else "JobSpec(higher_is_better_metric=…), True or False"
    by_name = certain_direction(wish.monitor)
    found = {setting: mode == "max" for setting, mode in modes.items()}
    if by_name is not None:
        found[f"the name {wish.monitor!r}"] = by_name
    if not found:
        raise ZeusBSOConfigError(
            f"the name {wish.monitor!r} does not say for certain whether the metric rises or falls as the model "
            f"improves: say {say}"
        )
    if len(set(found.values())) > 1:
        sides = " and ".join(f"{source} says {'higher' if found[source] else 'lower'}" for source in found)
        raise ZeusBSOConfigError(f"whether higher or lower is better is unclear ({sides}): say {say}")
    return next(iter(found.values()))


def _contradiction(monitor: str, *, said: bool) -> str | None:
    """Return a warning if the name of the metric contradicts the direction that its user has said, or None."""
    by_name = certain_direction(monitor)
    if by_name is None or by_name is said:
        return None
    return (
        f"the job says that {'higher' if said else 'lower'} is better, and of a metric called {monitor!r} "
        f"{'higher' if by_name else 'lower'} values are usually better: if they are, the training ends at once or never"
    )


def _sizes(own: int, facts: TrainingFacts, check_size: Callable[[int], object]) -> tuple[int, ...]:
    """Return the batch sizes to choose from: the script's own, and its halvings and doublings that can be trained."""
    scaled = [own * 2**n if n >= 0 else own // 2**-n for n in _DOUBLINGS if n >= 0 or own % 2**-n == 0]
    most = min(MAX_BATCH_SIZE, facts.samples or MAX_BATCH_SIZE)

    def is_possible(size: int) -> bool:
        if size % facts.unit or size > most:
            return False
        try:
            check_size(size)
        except ZeusBSOConfigError:
            return False
        return True

    return tuple(size for size in scaled if size == own or is_possible(size))


def _slug(*parts: str) -> str:
    """Join the parts to an identifier of at most half an id's length; if it is too long, end it with a digest."""
    text = "-".join(re.sub(r"[^A-Za-z0-9._:@-]+", "-", part).strip("-") or "x" for part in parts)
    if len(text) <= _HALF_AN_ID:
        return text
    return f"{text[: _HALF_AN_ID - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
