"""The number that is reported of an evaluation: plain dictionaries and numbers in, a number out.

A training with evaluations takes its metric from an `EvaluationMetric`, one without from the `LoggedMetric` of its own
logs. Dictionaries are as the Hugging Face Trainer makes them, where names of evaluations begin with ``eval_``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from ctypes import c_float
from dataclasses import dataclass

from zeus_plugins.errors import ZeusBSOConfigError

EVALUATION_PREFIX = "eval_"

# What an unmodified Trainer logs while it trains.
TRAINING_METRICS = ("loss", "grad_norm", "learning_rate")

# What its evaluations return without a `compute_metrics`.
_EVALUATED_METRICS = ("loss", "runtime", "samples_per_second", "steps_per_second", "model_preparation_time")

# Nine significant digits tell all numbers in single precision apart.
_SINGLE_DIGITS = 9


class EvaluationMetric:
    """The monitored metric of evaluations, in what each of them returns and in what is logged with it.

    The name `monitor` may lack the prefix ``eval_``.
    """

    def __init__(self, monitor: str) -> None:
        self._monitor = monitor
        # Some trainers log metrics with an evaluation that it does not return.
        self._log: dict[str, float] = {}
        # The evaluations of the latest step that lack the metric: their number, and the names that they have.
        self._step = -1
        self._lacking = 0
        self._names: list[str] = []

    @staticmethod
    def is_evaluation(metrics: Iterable[str]) -> bool:
        """Whether these are the names of an evaluation that the trainer makes; scripts use other prefixes."""
        return any(name.startswith(EVALUATION_PREFIX) for name in metrics)

    def note(self, logs: Mapping[str, float]) -> None:
        """Take note of a log, which belongs to the evaluation that returns next if it is one of an evaluation."""
        if self.is_evaluation(logs):
            self._log = dict(logs)

    def value(self, metrics: Mapping[str, float], *, step: int, data_sets: int = 1) -> float | None:
        """Return the metric, or None when it may yet come from the evaluation of another data set.

        Args:
            metrics: What the evaluation has returned.
            step: Number of optimizer steps before the evaluation.
            data_sets: Number of data sets, each of which is evaluated on its own.

        Raises:
            ZeusBSOConfigError: No evaluation of this step has it.
        """
        known = {**self._log, **metrics}
        self._log = {}
        if step != self._step:
            self._step, self._lacking, self._names = step, 0, []
        for name in (self._monitor, f"{EVALUATION_PREFIX}{self._monitor}"):
            if name in known:
                return float(known[name])
        self._names.extend(sorted(known))
        self._lacking += 1
        if self._lacking >= data_sets:
            raise ZeusBSOConfigError(
                f"monitor={self._monitor!r} is not among the metrics of the evaluation {self._names}: return it from "
                "compute_metrics, or name one of these"
            )
        return None


def check_evaluated_metric(monitor: str, data: object) -> None:
    """Refuse a metric that evaluations without a `compute_metrics` do not return.

    Args:
        monitor: Name of the metric, with or without its prefix.
        data: What is evaluated; a dictionary holds several data sets, each with its name.

    Raises:
        ZeusBSOConfigError: They return the loss and their speed, and never this.
    """
    sets = [f"{name}_" for name in data] if isinstance(data, dict) else [""]
    names = [f"{each}{metric}" for each in sets for metric in _EVALUATED_METRICS]
    if monitor.removeprefix(EVALUATION_PREFIX) not in names:
        raise ZeusBSOConfigError(
            f"monitor={monitor!r} will never be among the metrics of the evaluations, as this Trainer has no "
            f"compute_metrics: pass Trainer(compute_metrics=…), or monitor one of {names[:: len(_EVALUATED_METRICS)]}"
        )


class LoggedMetric:
    """The monitored metric of a training without evaluations, in its own logs."""

    def __init__(self, monitor: str) -> None:
        self._monitor = monitor
        self._value: float | None = None
        self._step = -1
        self._is_awaited = False

    def note(self, logs: Mapping[str, float], *, step: int) -> bool:
        """Take note of a log after so many optimizer steps.

        Return whether it has the metric of an epoch that ended before it, which is to be reported now.
        """
        if self._monitor not in logs:
            return False
        self._value, self._step = float(logs[self._monitor]), step
        was_awaited, self._is_awaited = self._is_awaited, False
        return was_awaited

    def awaits_log(self, *, step: int) -> bool:
        """Whether an epoch that ends after this step is to be reported with its next log, which the trainer owes.

        Only what every trainer logs is waited for; a script logs its own metrics when it likes.
        """
        self._is_awaited = self._monitor in TRAINING_METRICS and self._step < step
        return self._is_awaited

    def value(self) -> float:
        """The latest value.

        Raises:
            ZeusBSOConfigError: It was never logged.
        """
        if self._value is None:
            raise ZeusBSOConfigError(
                f"monitor={self._monitor!r} was not logged in the first epoch, and "
                "TrainingArguments(eval_strategy='no') makes no evaluations: log it with trainer.log({…}), or monitor "
                "'loss'"
            )
        return self._value


@dataclass
class EpochCount:
    """Epochs as the server takes them: after whole ones only whole ones, so that a fraction is rounded up.

    Attributes:
        has_fractions: Whether a fraction of an epoch was reported; None before the first report.
    """

    has_fractions: bool | None = None

    def reported(self, epochs: float) -> float:
        """Epochs to report, of those trained so far."""
        if self.has_fractions is False:
            epochs = math.ceil(epochs)
        self.has_fractions = bool(self.has_fractions) or not float(epochs).is_integer()
        return float(epochs)


def as_written(metric: float) -> float:
    """Return a number in single precision as people write it: 0.9 is 0.89999998 there, below a target of 0.9.

    A number that single precision does not hold exactly stays as it is.
    """
    if not math.isfinite(metric) or c_float(metric).value != metric:
        return metric
    written = (float(f"{metric:.{digits}g}") for digits in range(1, _SINGLE_DIGITS + 1))
    return next(number for number in written if c_float(number).value == metric)
