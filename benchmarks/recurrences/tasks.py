"""The recurring trainings to measure, described so that importing this module loads no training framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal

from zeus_plugins.protocol import GP_VOI, OWN_POLICIES, ZEUS, JobSpec
from zeus_plugins.training.lr_scaling import LrScaling

Device = Literal["cpu", "gpu"]
CPU: Final = "cpu"
GPU: Final = "gpu"

DEFAULT = "default"
"""Contender that always trains at the default size; policies are compared with it."""

CONTENDERS = (*OWN_POLICIES, DEFAULT)
"""All contenders: policies `zeus` and `gp_voi`, and the default size."""

HOUR_CONTENDERS = (GP_VOI, DEFAULT)
"""The contenders of the hour on a GPU."""

REFUSED = "refused"
"""State of a recurrence that trains nothing, because the policy has no size left."""

SIMULATED = "simulated GPU"
"""Start of the device name if a CPU runs the tasks of a GPU; its figures do not apply to a GPU."""


@dataclass(frozen=True, slots=True)
class Task:
    """A training that recurs.

    Attributes:
        name: Name of the task in commands and results.
        title: Model and data, as named in tables.
        framework: ``lightning`` or ``transformers``.
        batch_sizes: Global batch sizes, ascending.
        default_batch_size: Size at which the script trains without a policy.
        metric: Name under which the training logs the metric.
        target: Value of the metric at which a run ends with success.
        higher_is_better: Whether the metric rises as the model improves.
        max_epochs: Number of epochs after which a run without the target has failed.
        lr_scaling: Rule by which all runs scale the learning rate with the batch size.
        device: Device for which the task is made.
        drifts: Whether the data change after half of the recurrences.
        shrink: Divisor of the model's width and depth and of the data, for tests; 1: full size. Shrunken data are
            easier to learn.
        shrunk_target: Target of the shrunken model, with batch sizes up to 256 only; None: `target`, with all sizes.
    """

    name: str
    title: str
    framework: Literal["lightning", "transformers"]
    batch_sizes: tuple[int, ...]
    default_batch_size: int
    metric: str
    target: float
    higher_is_better: bool
    max_epochs: int
    lr_scaling: LrScaling
    device: Device = CPU
    drifts: bool = False
    shrink: int = 1
    shrunk_target: float | None = None

    def job(
        self,
        job_id: str,
        *,
        policy: str | None = None,
        batch_size: int | None = None,
        seed: int = 0,
    ) -> JobSpec:
        """Return a job for a policy; or, given `batch_size`, a job of only this size that stops no run for its cost."""
        fields: dict[str, Any] = {
            "job_id_prefix": job_id,
            "job_id": job_id,
            "target_metric": self.target,
            "higher_is_better_metric": self.higher_is_better,
            "max_epochs": self.max_epochs,
            "mab_seed": seed,
        }
        if batch_size is not None:
            fields |= {"batch_sizes": (batch_size,), "default_batch_size": batch_size}
            return JobSpec(**fields, policy=ZEUS, beta_knob=None, num_pruning_rounds=0)
        fields |= {"batch_sizes": self.batch_sizes, "default_batch_size": self.default_batch_size}
        return JobSpec(**fields, policy=policy)

    def drifted_at(self, recurrence: int, recurrences: int) -> bool:
        """Return True if recurrence number `recurrence`, counted from 0, uses the data after the drift."""
        return self.drifts and recurrence >= recurrences // 2


_TWO_DECADES = (8, 16, 32, 64, 128, 256, 512, 1024)

_CPU_TASKS = (
    Task(
        name="digits",
        title="CNN on scikit-learn's digits (Lightning)",
        framework="lightning",
        batch_sizes=_TWO_DECADES,
        default_batch_size=32,
        metric="val_acc",
        target=0.965,
        higher_is_better=True,
        max_epochs=40,
        lr_scaling=LrScaling.LINEAR,
    ),
    Task(
        name="tabular",
        title="MLP on Friedman's function (Lightning)",
        framework="lightning",
        batch_sizes=_TWO_DECADES,
        default_batch_size=32,
        metric="val_r2",
        target=0.9,
        higher_is_better=True,
        max_epochs=60,
        lr_scaling=LrScaling.SQRT,
    ),
    Task(
        name="characters",
        title="tiny GPT-2 on Python's documentation, by characters (Hugging Face)",
        framework="transformers",
        batch_sizes=_TWO_DECADES,
        default_batch_size=8,
        metric="eval_loss",
        target=2.4,
        higher_is_better=False,
        max_epochs=12,
        lr_scaling=LrScaling.SQRT,
    ),
    Task(
        name="topics",
        title="small BERT finds the topic of excerpts of Python's documentation (Hugging Face)",
        framework="transformers",
        batch_sizes=_TWO_DECADES,
        default_batch_size=8,
        metric="eval_accuracy",
        target=0.7,
        higher_is_better=True,
        max_epochs=15,
        lr_scaling=LrScaling.SQRT,
    ),
    Task(
        name="drift",
        title="the MLP, on four times the data with more noise from half of the recurrences on (Lightning)",
        framework="lightning",
        batch_sizes=_TWO_DECADES,
        default_batch_size=32,
        metric="val_r2",
        target=0.78,
        higher_is_better=True,
        max_epochs=30,
        lr_scaling=LrScaling.SQRT,
        drifts=True,
    ),
)

# ResNet-50 and GPT-2-small fill a GPU. The steps of ResNet-18 consist mostly of kernel launches, unless batches have
# several hundred samples. The calibration replaces the targets.
_on_gpu = partial(Task, max_epochs=12, lr_scaling=LrScaling.SQRT, device=GPU)
_of_images = partial(
    _on_gpu,
    framework="lightning",
    batch_sizes=(16, 32, 64, 128, 256, 512, 1024, 2048),
    default_batch_size=64,
    metric="val_acc",
    target=0.9,
    shrunk_target=0.3,
    higher_is_better=True,
)

HOUR_TASKS = ("resnet50", "gpt2-small")
"""The tasks of the hour on a GPU."""

_GPU_TASKS = (
    _of_images(name="resnet18", title="ResNet-18 on generated images of 64 px (Lightning)"),
    _of_images(
        name="resnet50",
        title="ResNet-50 on generated images of 160 px (Lightning)",
        batch_sizes=(16, 32, 64, 128, 256, 512, 1024),
        max_epochs=40,
    ),
    _on_gpu(
        name="gpt2-small",
        title="GPT-2-small on generated texts of 512 words (Hugging Face)",
        framework="transformers",
        batch_sizes=(8, 16, 32, 64, 128, 256, 512),
        default_batch_size=32,
        max_epochs=40,
        metric="eval_loss",
        target=3.0,
        shrunk_target=3.7,
        higher_is_better=False,
    ),
)

_LARGEST_SHRUNK = 256
"""Largest size of shrunken tasks. Their data fill no larger batch, and the callbacks refuse sizes that no batch has."""

TASKS = {task.name: task for task in (*_CPU_TASKS, *_GPU_TASKS)}
"""All tasks by name."""


def tasks_for(device: Device, names: Sequence[str] = (), *, shrink: int = 1) -> list[Task]:
    """Return the tasks of `device` called `names`, or all tasks of `device` without names.

    Raises:
        ValueError: A name belongs to no task of this device.
    """
    known = {name: task for name, task in TASKS.items() if task.device == device}
    if unknown := sorted(set(names) - known.keys()):
        raise ValueError(f"no task for {device}: {', '.join(unknown)}; there are {', '.join(known)}")
    return [_shrunk(known[name], shrink) for name in names or known]


def _shrunk(task: Task, shrink: int) -> Task:
    if shrink == 1 or task.shrunk_target is None:
        return replace(task, shrink=shrink)
    sizes = tuple(size for size in task.batch_sizes if size <= _LARGEST_SHRUNK)
    return replace(task, shrink=shrink, target=task.shrunk_target, batch_sizes=sizes)
