"""The reported metric and epochs of a training, computed from dictionaries and numbers.

A training with evaluations takes its metric from an `EvaluationMetric`, others from the `LoggedMetric` of their logs.
The dictionaries are the Hugging Face Trainer's, in which names of evaluations begin with ``eval_``.
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
    """The monitored metric, in evaluations and their logs; `monitor` may lack the prefix ``eval_``."""

    def __init__(self, monitor: str) -> None:
        self._monitor = monitor
        # Some trainers log metrics of an evaluation without returning them.
        self._log: dict[str, float] = {}
        # Number of the latest step's evaluations without the metric, and the names of their metrics.
        self._step = -1
        self._lacking = 0
        self._names: list[str] = []
        # Number of the latest step's evaluations, and the metric until it is returned.
        self._evaluated = 0
        self._value: float | None = None

    @staticmethod
    def is_evaluation(metrics: Iterable[str]) -> bool:
        """Return whether the trainer made this evaluation; scripts use other prefixes for theirs."""
        return any(name.startswith(EVALUATION_PREFIX) for name in metrics)

    def note(self, logs: Mapping[str, float]) -> None:
        """Note a log; a log of an evaluation belongs to the next evaluation that returns."""
        if self.is_evaluation(logs):
            self._log = dict(logs)

    def value(
        self, metrics: Mapping[str, float], *, step: int, data_sets: int = 1, waits: bool = False
    ) -> float | None:
        """Return the metric of an evaluation after `step` steps; None if another of the `data_sets` may have it.

        If it `waits`, return the metric with the last of the data sets, whose metrics are then known too. Raise
        `ZeusBSOConfigError` if no evaluation of this step has the metric.
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
    """Return the metric of this name, which may lack the prefix ``eval_``; None without it."""
    return next((metrics[each] for each in (name, f"{EVALUATION_PREFIX}{name}") if each in metrics), None)


def check_evaluated_metric(monitor: str, data: object) -> None:
    """Raise `ZeusBSOConfigError` for a metric that evaluations without a `compute_metrics` never return.

    `monitor` may lack its prefix; `data` is the evaluated data set, or a dictionary of data sets by name.
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
        """Note the log of a step, and return whether the previous epoch is now to be reported with it."""
        if self._monitor not in logs:
            return False
        self._value, self._step = float(logs[self._monitor]), step
        was_awaited, self._is_awaited = self._is_awaited, False
        return was_awaited

    def awaits_log(self, *, step: int) -> bool:
        """Return whether the epoch that ends at this step is reported with the trainer's next log.

        Only metrics that every trainer logs are awaited: a script may log its own at any time.
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
    """Rounds epochs for reports: after whole epochs, fractions are rounded up.

    `has_fractions` is None before the first report.
    """

    has_fractions: bool | None = None

    def reported(self, epochs: float) -> float:
        """Return the epochs to report, given the epochs trained."""
        if self.has_fractions is False:
            epochs = math.ceil(epochs)
        self.has_fractions = bool(self.has_fractions) or not float(epochs).is_integer()
        return float(epochs)


def as_written(metric: float) -> float:
    """Return a number of single precision as people write it: 0.9, which single precision stores as 0.89999998.

    A number that single precision does not hold exactly is returned as it is.
    """
    if not math.isfinite(metric) or c_float(metric).value != metric:
        return metric
    written = (float(f"{metric:.{digits}g}") for digits in range(1, _SINGLE_DIGITS + 1))
    return next(number for number in written if c_float(number).value == metric)
