"""Options of a batch-size callback, and checks of its arguments, which raise `ZeusBSOConfigError`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import signature
from numbers import Integral, Real
from typing import Any, Literal, get_args

from pydantic import TypeAdapter, ValidationError

from zeus_plugins.client.connect import check_server_url
from zeus_plugins.energy import EnergyMonitor, WindowMonitor
from zeus_plugins.environment import POWER_LIMIT_COMMAND, TOKEN, TOKEN_FILE
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import ID_PATTERN, MAX_ID_LENGTH, MAX_MARGINS, MAX_WATCHED, JobSpec, MetricName
from zeus_plugins.training.lr_scaling import lr_factor

OnFailure = Literal["raise", "stop", "finish"]
"""Choices for a training whose trial missed its target: see `on_failure` in `BatchSizeArguments`."""

AfterTarget = Literal["stop", "continue"]
"""Choices for a training whose trial has reached its target: see `after_target` in `BatchSizeArguments`."""

Steps = Literal["samples", "unchanged"]
"""Choices for settings that count steps: see `steps` in `BatchSizeArguments`."""


@dataclass(frozen=True, kw_only=True)
class TrialOptions:
    """The arguments of a batch-size callback that do not describe its job; raises `ZeusBSOConfigError`."""

    server_url: str | None = None
    lr_scaling: str = "auto"
    energy_monitor: EnergyMonitor | WindowMonitor | None = None
    max_per_device_batch_size: int | None = None
    on_failure: OnFailure = "raise"
    after_target: AfterTarget = "stop"
    watch: tuple[str, ...] = ()
    steps: Steps = "samples"

    def __post_init__(self) -> None:
        check_choice("on_failure", self.on_failure, OnFailure)
        check_choice("after_target", self.after_target, AfterTarget)
        check_choice("steps", self.steps, Steps)
        check_count("max_per_device_batch_size", self.max_per_device_batch_size)
        check_server_url(self.server_url)
        lr_factor(self.lr_scaling, 1, 1)  # raises for an unknown rule


# The rest of MAX_WATCHED is left for the names of `JobSpec.no_worse_than_default`.
_MOST_NAMES = MAX_WATCHED - MAX_MARGINS
_NAMES = TypeAdapter(tuple[MetricName, ...])

_END = (
    "there is no equivalent: a run ends at its target, at max_epochs, or when it costs more than it is worth; "
    "EarlyStopping may stay beside this callback"
)
# For each answer, the wrong argument names that get it: arguments of EarlyStopping, ModelCheckpoint, TrainingArguments
# and Zeus, arguments of earlier versions, and likely slips.
_NAMES_BY_ANSWER = {
    "say batch_sizes=[…], global sizes to choose from; your own size is the script's": "batch_size sizes",
    "there is no equivalent: a metric that is NaN or infinite always ends the run": "check_finite",
    "your own size is the script's, unless job=JobSpec(default_batch_size=…)": "default_batch_size",
    _END: "divergence_threshold early_stopping_patience early_stopping_threshold min_delta",
    f"{_END}. For several evaluations in a row that must reach the target, say confirm=…": "patience",
    "say max_epochs=…": "epochs num_train_epochs",
    "say mode='max' if the metric rises as the model improves, or mode='min' if it falls": (
        "greater_is_better higher_is_better higher_is_better_metric"
    ),
    "there is no equivalent: keep it in TrainingArguments": "load_best_model_at_end",
    "the metric is the first argument, or monitor=": "metric metric_for_best_model metric_name",
    "say target=…, the value of the metric at which the training is done": "stopping_threshold target_metric threshold",
    "say server_url=…": "url",
    "the energy of the training devices counts; energy_monitor= takes a monitor of others": "energy_scope",
    "logging.getLogger('zeus_plugins').setLevel('WARNING') leaves out the lines": "quiet verbose",
    "trainings no longer time other batch sizes: leave it out": "probe",
    "on_failure='finish' continues from the present weights, or from the first ones if the run has diverged": "restart",
    "another model, framework, optimizer or metric is a warning: give such a training another job_id": "strict",
    "a training always begins, at the default size if the server is away: zeus-plugins doctor checks the server": (
        "on_unreachable"
    ),
    f"set the environment variable {TOKEN} or {TOKEN_FILE}": "token",
    f"set the environment variable {POWER_LIMIT_COMMAND}": "command",
    "let the job's command submit the run and wait for its end (docs/master.md)": "executor",
    "each run's output is in its log, and history.json has all runs (docs/master.md)": "listener",
}
_ANSWERS = {name: answer for answer, names in _NAMES_BY_ANSWER.items() for name in names.split()}


def refuse_unknown(callback: type, unknown: Iterable[str]) -> None:
    """If there are `unknown` arguments, raise an error that names the right argument for each of them."""
    known = [name for name, each in signature(callback).parameters.items() if each.kind is not each.VAR_KEYWORD]
    answers = [f"{callback.__name__} has no {name}=: {_answer(name, known)}" for name in unknown]
    if answers:
        raise ZeusBSOConfigError(". ".join(answers))


def check_number(name: str, value: Any) -> None:
    """Check a finite number, or None."""
    if value is not None and not (_is_a(Real, value) and math.isfinite(value)):
        raise ZeusBSOConfigError(f"{name} is {value!r}: give a finite number{_unquoted(value, float)}")


def check_count(name: str, value: Any) -> None:
    """Check a whole number above 0, or None."""
    if value is not None and not (_is_a(Integral, value) and value > 0):
        raise ZeusBSOConfigError(f"{name} is {value!r}: give a whole number above 0{_unquoted(value, int)}")


def check_choice(name: str, value: str, choices: Any) -> None:
    """Check one of the texts that a `Literal` lists."""
    *others, last = map(repr, get_args(choices))
    if value not in get_args(choices):
        raise ZeusBSOConfigError(f"{name} is {value!r}: choose {', '.join(others)} or {last}")


def checked_sizes(batch_sizes: Any) -> tuple[int, ...]:
    """Validate the batch sizes, and return them in ascending order."""
    sizes = [] if isinstance(batch_sizes, str) or not isinstance(batch_sizes, Iterable) else list(batch_sizes)
    if not sizes or len(set(sizes)) < len(sizes):
        raise ZeusBSOConfigError(
            f"batch_sizes is {batch_sizes!r}: give a list of different whole numbers above 0, such as [16, 32, 64]"
        )
    for size in sizes:
        check_count("one of batch_sizes", size)
    return tuple(sorted(int(size) for size in sizes))


def check_job_id(job_id: Any) -> None:
    """Check a job's id, or None."""
    if job_id is not None and not (
        isinstance(job_id, str) and len(job_id) <= MAX_ID_LENGTH and re.fullmatch(ID_PATTERN, job_id)
    ):
        raise ZeusBSOConfigError(
            f"job_id is {job_id!r}: give 1 to {MAX_ID_LENGTH} of the characters A-Z a-z 0-9 . _ : @ -"
        )


def check_watch(names: Iterable[str], *, most: int = _MOST_NAMES) -> tuple[str, ...]:
    """Return the distinct names of watched metrics; raise `ZeusBSOConfigError` for invalid or too many names."""
    names = tuple(dict.fromkeys([names] if isinstance(names, str) else names))
    try:
        _NAMES.validate_python(names)
    except ValidationError as error:
        problem = "; ".join(each["msg"] for each in error.errors())
    else:
        if len(names) <= most:
            return names
        problem = f"there are {len(names)}"
    raise ZeusBSOConfigError(f"watch={names!r} must be names of at most {most} metrics: {problem}")


def _is_a(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _unquoted(value: Any, number: type) -> str:
    """Return a hint if the value is a number written as a string; otherwise an empty text."""
    try:
        return f", without quotes: {number(value)}" if isinstance(value, str) else ""
    except ValueError:
        return ""


def _answer(name: str, known: list[str]) -> str:
    if name in _ANSWERS:
        return _ANSWERS[name]
    if name in JobSpec.model_fields:
        return f"it is a field of a job, job={{'{name}': …}}"
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}=?" if near else "docs/reference.md lists the arguments"
