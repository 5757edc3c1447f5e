"""The recurring trainings that are measured, apart from the frameworks: reading them loads none."""

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
"""The rival of the policies: always the default size."""

PROBED = "probed"
"""Policy `gp_voi` with a probe in a job's first run, which trains at the size that the probe predicts."""

CONTENDERS = (*OWN_POLICIES, PROBED, DEFAULT)
"""The policies, without probes and with one, and their rival."""

HOUR_CONTENDERS = (GP_VOI, PROBED, DEFAULT)
"""The contenders of the hour on a GPU."""

REFUSED = "refused"
"""State of a recurrence for which the policy has no size left: nothing is trained."""

SIMULATED = "simulated GPU"
"""Begins the name of a CPU that stands for a GPU: no figure of it is a GPU's."""


@dataclass(frozen=True, slots=True)
class Task:
    """A training that recurs.

    Attributes:
        name: Of the task, in commands and in results.
        title: What learns what, for tables.
        framework: ``lightning`` or ``transformers``.
        batch_sizes: Global batch sizes, ascending.
        default_batch_size: The size without an optimizer.
        metric: As the training logs it.
        target: Its value at which a run is done.
        higher_is_better: Whether the metric rises as the model improves.
        max_epochs: A run that has not reached the target by then has failed.
        lr_scaling: How the learning rate follows the batch size, in all runs alike.
        device: What it is made for.
        drifts: Whether its data change at half of the recurrences.
        shrink: Divides the model's width and depth and the size of the data, which become easier, for tests; 1: not at
            all.
        shrunk_target: The target of a model that was shrunk, which gets no batch above 256; None: the same.
        ease: Factor on the contrast of generated images, which `calibrate` sets.
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
    ease: float = 1.0

    def job(
        self,
        job_id: str,
        *,
        policy: str | None = None,
        batch_size: int | None = None,
        seed: int = 0,
        predicts: bool = False,
    ) -> JobSpec:
        """The job that a policy chooses sizes for; or, with a batch size, one that has no other and stops nothing."""
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
        return JobSpec(**fields, policy=policy, first_run="predicted" if predicts else "default")

    def drifted_at(self, recurrence: int, recurrences: int) -> bool:
        """True if the data of a recurrence, from 0, are those after the drift."""
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

# The first two fill a GPU; `calibrate` sets their targets. A step of the others is mostly the launches of its kernels
# until batches are some hundreds.
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
_of_texts = partial(_on_gpu, framework="transformers", batch_sizes=_TWO_DECADES, default_batch_size=32)

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
    _of_texts(
        name="bert-base",
        title="BERT-base on generated text (Hugging Face)",
        metric="eval_accuracy",
        target=0.9,
        shrunk_target=0.4,
        higher_is_better=True,
    ),
    _of_texts(
        name="gpt2-small",
        title="GPT-2-small on generated texts of 512 words (Hugging Face)",
        batch_sizes=(8, 16, 32, 64, 128, 256, 512),
        max_epochs=40,
        metric="eval_loss",
        target=3.0,
        shrunk_target=3.7,
        higher_is_better=False,
    ),
)

_LARGEST_SHRUNK = 256
"""Shrunken data fill no larger batch, and the callbacks refuse a size that is never delivered."""

TASKS = {task.name: task for task in (*_CPU_TASKS, *_GPU_TASKS)}
"""All tasks by name."""


def tasks_for(device: Device, names: Sequence[str] = (), *, shrink: int = 1) -> list[Task]:
    """The tasks of a device, or those of them that are named.

    Raises:
        ValueError: A name is no task of this device.
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
