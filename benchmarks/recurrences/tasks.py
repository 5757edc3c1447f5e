"""The recurring trainings to measure, described so that importing this module loads no training framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal

from zeus_plugins.protocol import GP_VOI

Device = Literal["cpu", "gpu"]
CPU: Final = "cpu"
GPU: Final = "gpu"

DEFAULT = "default"
"""Contender that always trains at the default size; policies are compared with it."""

UNSCALED = "unscaled"
"""Contender that calls the callback like `gp_voi`, with ``lr_scaling="none"`` in addition."""

CONTENDERS = (GP_VOI, UNSCALED, DEFAULT)
"""All contenders: README's call of the callback, with and without its rule for learning rates, and the default size."""

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
        device: Device for which the task is made.
        drifts: Whether the data change after half of the recurrences.
        shrink: Divisor of the model's width and depth and of the data, for tests; 1: full size. Shrunken data are
            easier to learn.
        shrunk_target: Target of the shrunken model, with batch sizes up to 256 only; None: `target`, with all sizes.
        samples: Samples of an epoch of a task for a GPU, drawn anew for each epoch.
        evaluations: Evaluations in each epoch.
        is_launch_bound: Whether the GPU is known to wait for the launches of kernels most of the time.
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
    device: Device = CPU
    drifts: bool = False
    shrink: int = 1
    shrunk_target: float | None = None
    samples: int = 0
    evaluations: int = 1
    is_launch_bound: bool = False

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
    ),
    Task(
        name="digits-adam",
        title="CNN on scikit-learn's digits with Adam (Lightning)",
        framework="lightning",
        batch_sizes=_TWO_DECADES,
        default_batch_size=64,
        metric="val_acc",
        target=0.95,
        higher_is_better=True,
        max_epochs=40,
    ),
    Task(
        name="fine-tuning",
        title="pretrained small BERT finds the topic of excerpts of Python's documentation (Hugging Face)",
        framework="transformers",
        batch_sizes=_TWO_DECADES[:-1],  # the data have 600 samples
        default_batch_size=16,
        metric="eval_accuracy",
        target=0.7,
        higher_is_better=True,
        max_epochs=20,
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
        drifts=True,
    ),
)

# ResNet-50 and GPT-2-medium fill a GPU. The steps of ResNet-18 consist mostly of kernel launches. The calibration
# replaces the targets and the numbers of epochs.
_on_gpu = partial(Task, max_epochs=200, device=GPU)
_of_images = partial(
    _on_gpu, framework="lightning", metric="val_acc", target=0.9, shrunk_target=0.3, higher_is_better=True
)

HOUR_TASKS = ("resnet50", "gpt2-medium")
"""The tasks of the hour on a GPU."""

_GPU_TASKS = (
    _of_images(
        name="resnet50",
        title="ResNet-50 on generated images of 160 px (Lightning)",
        batch_sizes=(64, 128, 256, 512, 1024),
        default_batch_size=256,
        samples=20_000,
        evaluations=4,
    ),
    _on_gpu(
        name="gpt2-medium",
        title="GPT-2-medium on 512 bytes of Python's own files (Hugging Face)",
        framework="transformers",
        batch_sizes=(8, 16, 32, 64, 128),
        default_batch_size=32,
        metric="eval_loss",
        target=2.0,
        shrunk_target=5.0,
        higher_is_better=False,
        samples=640,
    ),
    _of_images(
        name="resnet18",
        title="ResNet-18 on generated images of 64 px (Lightning), launch-bound",
        batch_sizes=(32, 64, 128, 256, 512),
        default_batch_size=64,
        samples=4_500,
        is_launch_bound=True,
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
    samples = max(task.samples // shrink**2, 360)
    smaller = replace(task, shrink=shrink, target=task.shrunk_target, batch_sizes=sizes)
    return replace(smaller, samples=samples, evaluations=1, max_epochs=12)
