"""One run of a task, as its process is told of it, and what it came to."""

from __future__ import annotations

import json
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
        probes: Whether the first run of the job probes its sizes, and trains at the predicted one.
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
    probes: bool = False

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @property
    def training(self) -> Task:
        """The task itself."""
        (task,) = tasks_for(TASKS[self.task].device, [self.task], shrink=self.shrink)
        return task

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
            is_predicted=self.probes,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """An order in its process: where to ask, what measures, and where to write."""

    order: Order
    task: Task
    job: JobSpec | None
    server_url: str
    monitor: EnergyMonitor
    folder: Path

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
        time_s: Seconds from the begin of the training to the last report, by the monitor's clock.
        energy_j: Joules in the same time.
        cost_j: Cost of both.
        energy_source: How the energy was obtained.
        device: What has trained, in words.
        epochs: Trained so far.
        metric: The last one.
        fit_wall_s: Seconds of the whole training, measured around the trainer's call.
        fit_cpu_s: CPU seconds of the process in it.
        detail: The error, if there was one.
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
    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        """The outcome as JSON can hold it."""
        return asdict(self)
