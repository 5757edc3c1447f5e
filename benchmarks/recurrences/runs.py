"""One run of a task: the order for its process, and its outcome."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.recurrences.tasks import TASKS, Task, tasks_for
from zeus_plugins.energy import EnergyMonitor

OUT_OF_MEMORY = "out_of_memory"
"""State of a training whose batches did not fit into memory; it is recorded as a run that missed the target."""

_NEVER = 1e9

FAILED_STATUS = 3
"""Exit status of a training that has missed its target."""


@dataclass(frozen=True, slots=True)
class Order:
    """An order for one training, passed to its process as JSON.

    Attributes:
        task: Name of the task.
        job_id: Id of the server's job.
        seed: Seed of the model and of the sample of data.
        batch_size: The only size of the job; without the callback, the script's. None: the callback chooses.
        drifted: Whether to train on the data after the drift.
        with_callback: Whether to train with the callback.
        epochs: Epochs to train, even if the target is reached earlier; None: until the target.
        lr_scaling: Argument of the callback; None: left out.
        shrink: See `Task`.
        target: Target in place of the task's; None: the task's.
        max_epochs: Limit in place of the task's; None: the task's.
        seconds: Length of a calibration training, which keeps the metric of each evaluation; None: no calibration.
        idle_s: Seconds for which the idle power is measured, twice, before a training; None: not at all.
    """

    task: str
    job_id: str
    seed: int
    batch_size: int | None = None
    drifted: bool = False
    with_callback: bool = True
    epochs: int | None = None
    lr_scaling: str | None = None
    shrink: int = 1
    target: float | None = None
    max_epochs: int | None = None
    seconds: float | None = None
    idle_s: float | None = None

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(asdict(self))

    @property
    def training(self) -> Task:
        """The task, with the changes of this order."""
        (task,) = tasks_for(TASKS[self.task].device, [self.task], shrink=self.shrink)
        target = task.target if self.target is None else self.target
        return replace(task, target=target, max_epochs=self.max_epochs or task.max_epochs)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of either framework's callback besides the metric: README's, the sizes, and compared arguments.

        If `epochs` is given, an unreachable target keeps runs from ending early. A run of a given size ends at this
        size, and no cost stops it.
        """
        task = self.training
        out_of_reach = _NEVER if task.higher_is_better else -_NEVER
        given: dict[str, Any] = {
            "target": task.target if self.epochs is None else out_of_reach,
            "batch_sizes": task.batch_sizes if self.batch_size is None else (self.batch_size,),
            "on_failure": "finish",
        }
        if self.batch_size is not None:
            given |= {"on_failure": "stop", "job": {"beta_knob": None}}
        if self.lr_scaling is not None:
            given["lr_scaling"] = self.lr_scaling
        return given


class Curve:
    """The seconds, joules and metric of a training at each evaluation, up to a limit of seconds.

    Args:
        monitor: Monitor that measures seconds and joules.
        seconds: The limit, checked after each evaluation.
        ceiling: Metric that ends the training before the limit; None: only the limit does.
    """

    _WINDOW = "curve"

    def __init__(self, monitor: EnergyMonitor, seconds: float, ceiling: float | None) -> None:
        self.epochs: list[tuple[float, float, float]] = []
        self._monitor, self._seconds, self._ceiling = monitor, seconds, ceiling
        self._spent_s = self._spent_j = 0.0
        monitor.begin_window(self._WINDOW)

    def add(self, metric: float) -> bool:
        """Record the metric of an evaluation; return True if the training should end."""
        window = self._monitor.end_window(self._WINDOW)
        self._monitor.begin_window(self._WINDOW)
        self._spent_s += window.time_s
        self._spent_j += window.energy_j
        self.epochs.append((self._spent_s, self._spent_j, metric))
        is_perfect = self._ceiling is not None and metric >= self._ceiling
        return self._spent_s >= self._seconds or is_perfect

    def close(self) -> None:
        """End the monitor's last window."""
        self._monitor.end_window(self._WINDOW)


@dataclass(frozen=True, slots=True)
class Run:
    """An order, with the task, the temporary folder and the folder of the measurement that its process uses."""

    order: Order
    task: Task
    folder: Path
    measurement: Path
    curve: Curve | None = None

    @property
    def batch_size(self) -> int:
        """The batch size in the script: the task's default, unless no callback changes it."""
        given = None if self.order.with_callback else self.order.batch_size
        return given or self.task.default_batch_size


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one training.

    Attributes:
        batch_size: Batch size of the training.
        reached: Whether it reached the target.
        state: With a trial, the reason of its verdict. Otherwise `OUT_OF_MEMORY`; `REFUSED`; ``bare``: no callback;
            ``broken``: another error.
        time_s: Seconds of the whole launch, measured around the trainer's call by the harness's monitor.
        energy_j: Joules during `time_s`, which include a run that the callback has finished at another size.
        cost_j: Cost of `time_s` and `energy_j`.
        energy_source: How the energy was obtained.
        device: Name of the device that trained.
        epochs: Epochs trained.
        metric: Metric of the last report.
        fit_wall_s: Elapsed seconds of the whole launch.
        fit_cpu_s: CPU seconds of the process during `fit_wall_s`.
        detail: Message of the error, if any.
        curve: In a calibration, seconds, joules and metric at the end of each epoch.
        samples: Samples trained in `epochs`; None if the task does not state its samples.
        idle_w: If measured, mean power before CUDA starts, watts.
        context_w: If measured, mean power with a CUDA context before the training, watts.
        peak_w: In a calibration, highest power reading of the training, watts.
        limit_w: In a calibration, the GPU's power limit, watts.
        memory_gib: In a calibration, the most memory that PyTorch allocated on the GPU, GiB.
    """

    batch_size: int
    reached: bool
    state: str
    time_s: float
    energy_j: float
    cost_j: float
    energy_source: str | None
    device: str
    epochs: float | None
    metric: float | None
    fit_wall_s: float
    fit_cpu_s: float
    detail: str = ""
    curve: Sequence[tuple[float, float, float]] = ()
    samples: float | None = None
    idle_w: float | None = None
    context_w: float | None = None
    peak_w: float | None = None
    limit_w: float | None = None
    memory_gib: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as a dictionary for JSON."""
        return asdict(self)
