"""What the callbacks need to know of Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import distributed as dist

from zeus_plugins import energy
from zeus_plugins.energy import ClusterMonitor, EnergyMonitor, WindowMonitor

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities.combined_loader import CombinedLoader
except ModuleNotFoundError:
    # The same classes under their other name, for those who install only that: distinct types to a type checker.
    from pytorch_lightning import Trainer  # type: ignore[assignment]

__all__ = [
    "STEP_HOOKS",
    "Callback",
    "CombinedLoader",
    "LightningModule",
    "Trainer",
    "all_gathered",
    "cluster_of",
    "finders",
    "gpu_indices",
    "is_rehearsal",
    "node_monitor",
]

# What Lightning calls of each callback in each step. It leaves out what is no function; calling all of these, to do
# nothing, costs more than 10 µs a step.
STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


def is_rehearsal(trainer: Trainer) -> bool:
    """Whether this `fit` is a `fast_dev_run` or a `Tuner`'s trial, and so no recurrence of the job."""
    # Lightning's connectors set this attribute, out of a type checker's sight.
    found = finders(trainer, "BatchSizeFinder", "LearningRateFinder")
    return bool(getattr(trainer, "fast_dev_run", False)) or any(finder._early_exit for finder in found)


def finders(trainer: Trainer, *kinds: str) -> list[Any]:
    """The trainer's callbacks of these kinds, of whichever of Lightning's two packages."""
    callbacks = getattr(trainer, "callbacks", ())
    return [each for each in callbacks if any(kind.__name__ in kinds for kind in type(each).__mro__)]


def node_monitor(trainer: Trainer, monitor: EnergyMonitor | WindowMonitor | None) -> EnergyMonitor:
    return energy.adapted(monitor) if monitor is not None else energy.auto(device_indices=gpu_indices(trainer))


def cluster_of(trainer: Trainer, monitor: EnergyMonitor | WindowMonitor | None) -> ClusterMonitor | None:
    """What measures a training on several machines, made by all ranks together; None for one machine."""
    if trainer.num_nodes == 1:
        return None
    measures = trainer.local_rank == 0
    return ClusterMonitor(
        (lambda: node_monitor(trainer, monitor)) if measures else None,
        rank=trainer.global_rank,
        all_gather=all_gathered,
    )


def all_gathered(thing: object) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, thing)
    return gathered


def gpu_indices(trainer: Trainer) -> Sequence[int]:
    """The GPUs that train, as indices into the visible ones; none on another accelerator."""
    return trainer.device_ids if trainer.strategy.root_device.type == "cuda" else ()
