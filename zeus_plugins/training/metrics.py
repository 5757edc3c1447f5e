"""The reported metric and epochs of a training, computed from dictionaries and numbers.

A training with evaluations takes its metric from an `EvaluationMetric`, a training without evaluations from the
`LoggedMetric` of its logs. The dictionaries are those of the Hugging Face Trainer, in which the names of metrics of
evaluations begin with ``eval_``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from ctypes import c_float
from dataclasses import dataclass

from zeus_plugins.errors import ZeusBSOConfigError

EVALUATION_PREFIX = "eval_"

# Metrics that every Trainer logs in training.
TRAINING_METRICS = ("loss", "grad_norm", "learning_rate")

# Metrics of evaluations without `compute_metrics`.
_EVALUATED_METRICS = ("loss", "runtime", "samples_per_second", "steps_per_second", "model_preparation_time")

# Nine significant digits distinguish all numbers of single precision.
_SINGLE_DIGITS = 9


class EvaluationMetric:
    """The monitored metric in evaluations and their logs. Its name `monitor` may lack the prefix ``eval_``."""

    def __init__(self, monitor: str) -> None:
        self._monitor = monitor
        # Some trainers log metrics of an evaluation without returning them.
        self._log: dict[str, float] = {}
        # The latest evaluated step; for its evaluations without the metric, their number and metric names.
        self._step = -1
        self._lacking = 0
        self._names: list[str] = []
        # Number of all evaluations at this step, and the metric until it is returned.
        self._evaluated = 0
        self._value: float | None = None

    @staticmethod
    def is_evaluation(metrics: Iterable[str]) -> bool:
        """Return True if the trainer made this evaluation; a script's own evaluations lack the prefix ``eval_``."""
        return any(name.startswith(EVALUATION_PREFIX) for name in metrics)

    def note(self, logs: Mapping[str, float]) -> None:
        """Keep the log of an evaluation for the next call of `value`, which belongs to the same evaluation."""
        if self.is_evaluation(logs):
            self._log = dict(logs)

    def value(
        self, metrics: Mapping[str, float], *, step: int, data_sets: int = 1, waits: bool = False
    ) -> float | None:
        """Return the metric of an evaluation after `step` steps; None if that of another data set may have it.

        If `waits` is True, return the metric only with the evaluation of the last of the `data_sets`, so that the
        metrics of all data sets are known. Raise `ZeusBSOConfigError` if no evaluation of this step has the metric.
        """
        known = {**self._log, **metrics}
        self._log = {}
        if step != self._step:
            self._step, self._lacking, self._names, self._evaluated, self._value = step, 0, [], 0, None
        self._evaluated += 1
        found = value_in(known, self._monitor)
        if found is not None:
            self._value = float(found)
        else:
            self._names.extend(sorted(known))
            self._lacking += 1
            if self._lacking == self._evaluated >= data_sets:
                raise ZeusBSOConfigError(
                    f"monitor={self._monitor!r} is not among the metrics of the evaluation {self._names}: return it "
                    "from compute_metrics, or name one of these"
                )
        if waits and self._evaluated < data_sets:
            return None
        value, self._value = self._value, None
        return value


def value_in(metrics: Mapping[str, float], name: str) -> float | None:
    """Return the metric `name`, which may lack the prefix ``eval_``; None if `metrics` does not contain it."""
    return next((metrics[each] for each in (name, f"{EVALUATION_PREFIX}{name}") if each in metrics), None)


def check_evaluated_metric(monitor: str, data: object) -> None:
    """Raise `ZeusBSOConfigError` for a metric that evaluations without a `compute_metrics` never return.

    `monitor` may lack the prefix ``eval_``; `data` is the evaluated data set, or a dictionary of data sets by name.
    """
    sets = [f"{name}_" for name in data] if isinstance(data, dict) else [""]
    names = [f"{each}{metric}" for each in sets for metric in _EVALUATED_METRICS]
    if monitor.removeprefix(EVALUATION_PREFIX) not in names:
        raise ZeusBSOConfigError(
            f"monitor={monitor!r} will never be among the metrics of the evaluations, as this Trainer has no "
            f"compute_metrics: pass Trainer(compute_metrics=…), or monitor one of {names[:: len(_EVALUATED_METRICS)]}"
        )


class LoggedMetric:
    """The monitored metric in the logs of a training without evaluations."""

    def __init__(self, monitor: str) -> None:
        self._monitor = monitor
        self._value: float | None = None
        self._step = -1
        self._is_awaited = False

    def note(self, logs: Mapping[str, float], *, step: int) -> bool:
        """Keep the metric of a step's log; return True if the report of the previous epoch was waiting for this log."""
        if self._monitor not in logs:
            return False
        self._value, self._step = float(logs[self._monitor]), step
        was_awaited, self._is_awaited = self._is_awaited, False
        return was_awaited

    def awaits_log(self, *, step: int) -> bool:
        """Return True if the epoch that ends at this step must wait for the trainer's next log to be reported.

        Only metrics that every trainer logs are waited for, because a script may log its own metrics at any time.
        """
        self._is_awaited = self._monitor in TRAINING_METRICS and self._step < step
        return self._is_awaited

    def value(self) -> float:
        """Return the latest value; raise `ZeusBSOConfigError` if the metric was never logged."""
        if self._value is None:
            raise ZeusBSOConfigError(
                f"monitor={self._monitor!r} was not logged in the first epoch, and "
                "TrainingArguments(eval_strategy='no') makes no evaluations: log it with trainer.log({…}), or monitor "
                "'loss'"
            )
        return self._value


@dataclass
class EpochCount:
    """Rounds epochs for reports: if all reports so far had whole epochs, a fraction is rounded up.

    `has_fractions` is True if a report had a fraction of an epoch, and None before the first report.
    """

    has_fractions: bool | None = None

    def reported(self, epochs: float) -> float:
        """Return the epochs to report, given the epochs trained."""
        if self.has_fractions is False:
            epochs = math.ceil(epochs)
        self.has_fractions = bool(self.has_fractions) or not float(epochs).is_integer()
        return float(epochs)


def as_written(metric: float) -> float:
    """Return the shortest decimal number with the same value in single precision: 0.9 for 0.89999998.

    A number that single precision cannot represent exactly is returned unchanged.
    """
    if not math.isfinite(metric) or c_float(metric).value != metric:
        return metric
    written = (float(f"{metric:.{digits}g}") for digits in range(1, _SINGLE_DIGITS + 1))
    return next(number for number in written if c_float(number).value == metric)
