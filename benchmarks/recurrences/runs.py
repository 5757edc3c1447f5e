"""One run of a task, as its process is told of it, and what it came to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.recurrences.tasks import TASKS, Task, tasks_for
from zeus_plugins.energy import EnergyMonitor
from zeus_plugins.protocol import JobSpec
from zeus_plugins.training.lr_scaling import lr_factor

OUT_OF_MEMORY = "out_of_memory"
"""State of a training whose batches did not fit: an outcome like any other that misses the target."""

_NEVER = 1e9

FAILED_STATUS = 3
"""Exit status of a training that has missed its target."""


@dataclass(frozen=True, slots=True)
class Order:
    """An order for one training, as JSON carries it.

    Attributes:
        task: Name of the task.
        job_id: Of the server's job.
        seed: Of the model and the sample of data.
        policy: Chooses the size; None: `batch_size` is given.
        batch_size: The only size of the job; None: the policy chooses.
        drifted: Whether the data are those after the drift.
        with_callback: False: a training without the callback; True and `epochs`: all epochs with it.
        epochs: Epochs to train, whatever is reached; None: until the target.
        policy_seed: Seeds the draws of policy `zeus`.
        shrink: As in `Task`.
        target: Replaces the task's; None: the same.
        max_epochs: Replaces the task's; None: the same.
        ease: As in `Task`.
        probes: The job's first run probes the sizes, and takes the size that the probe predicts.
        seconds: Calibrate: train without the callback for so long, and keep the metric of each epoch; None: train
            until the target.
        windows: Measure so many pairs of windows, with and without synchronising; 0: train.
    """

    task: str
    job_id: str
    seed: int
    policy: str | None = None
    batch_size: int | None = None
    drifted: bool = False
    with_callback: bool = True
    epochs: int | None = None
    policy_seed: int = 0
    shrink: int = 1
    target: float | None = None
    max_epochs: int | None = None
    ease: float = 1.0
    probes: bool = False
    seconds: float | None = None
    windows: int = 0

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @property
    def training(self) -> Task:
        """The task itself."""
        (task,) = tasks_for(TASKS[self.task].device, [self.task], shrink=self.shrink)
        target = task.target if self.target is None else self.target
        return replace(task, target=target, max_epochs=self.max_epochs or task.max_epochs, ease=self.ease)

    def spec(self) -> JobSpec:
        """The job for the callback; where the epochs are given, its target is out of reach."""
        task = self.training
        if self.epochs is not None:
            out_of_reach = _NEVER if task.higher_is_better else -_NEVER
            task = replace(task, target=out_of_reach, max_epochs=self.epochs)
        return task.job(
            self.job_id,
            policy=self.policy,
            batch_size=self.batch_size,
            seed=self.policy_seed,
            predicts=self.probes,
        )


class Curve:
    """The seconds, joules and metric of a training at the end of each epoch, up to a limit of seconds.

    Args:
        monitor: Measures the joules.
        seconds: Ends the training.
        ceiling: A metric that is as good as any; it ends the training, too. None: there is none.
    """

    _WINDOW = "curve"

    def __init__(self, monitor: EnergyMonitor, seconds: float, ceiling: float | None) -> None:
        self.epochs: list[tuple[float, float, float]] = []
        self._monitor, self._seconds, self._ceiling = monitor, seconds, ceiling
        self._spent_s = self._spent_j = 0.0
        monitor.begin_window(self._WINDOW)

    def add(self, metric: float) -> bool:
        """Keep the metric of an epoch that has ended; return True if the training is to end."""
        window = self._monitor.end_window(self._WINDOW)
        self._monitor.begin_window(self._WINDOW)
        self._spent_s += window.time_s
        self._spent_j += window.energy_j
        self.epochs.append((self._spent_s, self._spent_j, metric))
        is_perfect = self._ceiling is not None and metric >= self._ceiling
        return self._spent_s >= self._seconds or is_perfect

    def close(self) -> None:
        """End the last window."""
        self._monitor.end_window(self._WINDOW)


@dataclass(frozen=True, slots=True)
class Run:
    """An order in its process: where to ask, what measures, and where to write."""

    order: Order
    task: Task
    job: JobSpec | None
    server_url: str
    monitor: EnergyMonitor
    folder: Path
    curve: Curve | None = None

    @property
    def batch_size(self) -> int:
        """The size with which the script sets out."""
        return self.order.batch_size or self.task.default_batch_size

    @property
    def callback_arguments(self) -> dict[str, Any]:
        """The arguments of either framework's callback, besides the job and its metric."""
        return {
            "server_url": self.server_url,
            "lr_scaling": self.task.lr_scaling.value,
            "energy_monitor": self.monitor,
            "on_failure": "stop",
            "quiet": True,
            "probe": "auto" if self.order.probes else "off",
        }

    def scaled(self, lr: float) -> float:
        """The learning rate for that size, of the default's: a job of one size leaves the callback nothing to scale."""
        return lr * lr_factor(self.task.lr_scaling, self.batch_size, self.task.default_batch_size)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one training.

    Attributes:
        batch_size: That it trained with.
        reached: Whether it reached the target.
        state: Why it ended, as the server has it; `OUT_OF_MEMORY`; `REFUSED`; ``bare`` without a callback, ``broken``
            after another error.
        trial_number: The server's; None without a trial.
        time_s: Seconds from the start of the training to the last report, by the monitor's clock.
        energy_j: Joules in the same time.
        cost_j: Cost of both.
        energy_source: How the energy was obtained.
        device: What has trained, in words.
        epochs: Trained so far.
        metric: The last one.
        fit_wall_s: Seconds of the whole training, measured around the trainer's call.
        fit_cpu_s: CPU seconds of the process in it.
        fit_energy_j: Joules of the whole training, measured around the trainer's call.
        detail: The error, if there was one.
        curve: Of a calibration: seconds, joules and metric at the end of each epoch.
        idle_w: Of a calibration: mean power before the training, watts.
        peak_w: Of a calibration: highest power reading of the training, watts.
        limit_w: Of a calibration: the GPU's power limit, watts.
        memory_gib: Of a calibration: most memory that PyTorch has allocated on the GPU.
        windows: Whether each window was synchronised, and its joules and seconds.
    """

    batch_size: int
    reached: bool
    state: str
    trial_number: int | None
    time_s: float
    energy_j: float
    cost_j: float
    energy_source: str | None
    device: str
    epochs: float | None
    metric: float | None
    fit_wall_s: float
    fit_cpu_s: float
    fit_energy_j: float
    detail: str = ""
    curve: Sequence[tuple[float, float, float]] = ()
    idle_w: float | None = None
    peak_w: float | None = None
    limit_w: float | None = None
    memory_gib: float | None = None
    windows: Sequence[tuple[bool, float, float]] = ()

    def to_json(self) -> dict[str, Any]:
        """The outcome as JSON can hold it."""
        return asdict(self)
