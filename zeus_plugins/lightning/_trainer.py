"""Lightning's Trainer as the callbacks need it: every private attribute and every patch of Lightning stands here.

`tests/test_lightning_contract.py` checks each of them against the Lightning that is installed.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor
from torch import distributed as dist

from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.training.loaders import BatchSplit, delivered_batch_size, resize_loader
from zeus_plugins.training.patches import Patches

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities.combined_loader import CombinedLoader
except ModuleNotFoundError:
    # The same classes under their other name, for those who install only that: distinct types to a type checker.
    from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[assignment]
    from pytorch_lightning.utilities.combined_loader import CombinedLoader  # type: ignore[assignment]

__all__ = [
    "STEP_HOOKS",
    "Callback",
    "CombinedLoader",
    "LightningModule",
    "LightningPort",
    "Trainer",
    "before_each_epoch",
    "continues_checkpoint",
    "delivered_batch_sizes",
    "epochs_trained",
    "finders",
    "hide_step_hooks",
    "is_last_batch",
    "is_rehearsal",
    "mean_of_ranks",
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


class LightningPort:
    """A `TrainerPort` of Lightning's Trainer.

    Args:
        trainer: The trainer, within `fit`.
        module: What it trains.
    """

    # `configure_optimizers` makes new ones for each `fit`, and a checkpoint that is saved after one keeps their rates.
    keeps_optimizers = False

    def __init__(self, trainer: Trainer, module: LightningModule | None = None) -> None:
        self._trainer = trainer
        self._module = module
        self.rank = trainer.global_rank
        self.local_rank = trainer.local_rank
        self.world_size = self.devices = trainer.world_size
        self.spans_nodes = trainer.num_nodes > 1
        by_hand = module is not None and not module.automatic_optimization
        self.no_accumulation = "with manual optimization Lightning accumulates no gradients" if by_hand else None

    @property
    def gpu_indices(self) -> Sequence[int]:
        """The GPUs that train, as indices into the visible ones; none on another accelerator."""
        trainer = self._trainer
        return trainer.device_ids if trainer.strategy.root_device.type == "cuda" else ()

    @property
    def accumulation(self) -> int:
        """Batches per optimizer step, as is in force now."""
        return self._trainer.accumulate_grad_batches

    def broadcast(self, thing: Any) -> Any:
        """Return what rank 0 passes."""
        return self._trainer.strategy.broadcast(thing, src=0)

    def all_gather(self, thing: Any) -> list[Any]:
        """Return what each rank passes."""
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, thing)
        return gathered

    def deliver(self, split: BatchSplit, patches: Patches) -> None:
        """Set the accumulation, `batch_size` where there is one, and the size of every train loader there will be."""
        patches.set_attribute(self._trainer, "accumulate_grad_batches", split.accumulation)
        for holder in (getattr(self._trainer, "datamodule", None), self._module):
            _set_batch_size_attributes(holder, split.per_device, patches)
        # Every way to a train loader leads through this method: Lightning's own set-up, the estimate of the number of
        # steps, and the reloading of loaders every n epochs.
        source = self._trainer.fit_loop._data_source
        original = source.dataloader

        def resized() -> Any:
            loaders = original()
            combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
            for loader in combined.flattened:
                resize_loader(loader, split.per_device, patches)
                for batcher in (getattr(loader, "batch_sampler", None), loader):
                    _resize_saved_arguments(batcher, split.per_device, patches)
            return loaders

        patches.set_attribute(source, "dataloader", resized)

    def delivered(self) -> list[float | None]:
        """Samples per batch of each train loader."""
        return delivered_batch_sizes(self._trainer)

    def optimizers(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """All optimizers and schedulers."""
        return self._trainer.optimizers, [config.scheduler for config in self._trainer.lr_scheduler_configs]

    def log(self, metrics: Mapping[str, float]) -> None:
        """Log to all loggers of the trainer."""
        for logger in self._trainer.loggers:
            logger.log_metrics(dict(metrics), step=self._trainer.global_step)

    def stop(self) -> None:
        """Have `fit` end."""
        self._trainer.should_stop = True


def is_rehearsal(trainer: Trainer) -> bool:
    """Whether this `fit` is a `fast_dev_run` or a `Tuner`'s trial, and so no recurrence of the job."""
    # Lightning's connectors set this attribute, out of a type checker's sight.
    found = finders(trainer, "BatchSizeFinder", "LearningRateFinder")
    return bool(getattr(trainer, "fast_dev_run", False)) or any(finder._early_exit for finder in found)


def finders(trainer: Trainer, *kinds: str) -> list[Any]:
    """The trainer's callbacks of these kinds, of whichever of Lightning's two packages."""
    callbacks = getattr(trainer, "callbacks", ())
    return [each for each in callbacks if any(kind.__name__ in kinds for kind in type(each).__mro__)]


def continues_checkpoint(trainer: Trainer) -> bool:
    """Whether this `fit` loads a checkpoint later on.

    When callbacks are set up Lightning has said so to nobody: only its own running call knows.

    Raises:
        ZeusBSOConfigError: It does, but later than the batch size must be set.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_run" and frame.f_locals.get("self") is trainer:
            break
        frame = cast("Any", frame.f_back)
    if frame is None or frame.f_locals.get("ckpt_path") is None:
        return False
    if trainer.strategy.restore_checkpoint_after_setup:
        raise ZeusBSOConfigError(
            f"{type(trainer.strategy).__name__} loads checkpoints when it is too late to set the trial's batch size: "
            "train from the start, or with another strategy"
        )
    return True


def before_each_epoch(trainer: Trainer, check: Callable[[], None], patches: Patches) -> None:
    """Call `check` when the loader of an epoch exists, before its first step.

    Callbacks and modules may change the accumulation when an epoch starts, and the only hook that follows them all,
    `on_train_batch_start`, costs something in every step.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    run_epoch = epoch_loop.run

    def run_checked(*args: Any) -> None:
        check()
        run_epoch(*args)

    patches.set_attribute(epoch_loop, "run", run_checked)


def hide_step_hooks(callback: Callback, patches: Patches) -> None:
    """Have the trainer leave out the hooks of each step, but for those of a subclass of the user's."""
    for hook in STEP_HOOKS:
        if getattr(type(callback), hook) is getattr(Callback, hook):
            patches.set_attribute(callback, hook, None)


def delivered_batch_sizes(trainer: Trainer) -> list[float | None]:
    """Samples per batch of each train loader of one device; None where one does not say."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else [delivered_batch_size(loader) for loader in combined.flattened]


def is_last_batch(trainer: Trainer) -> bool:
    """Whether the latest batch was the last one of its epoch."""
    return trainer.fit_loop.epoch_loop.batch_progress.is_last_batch


def epochs_trained(trainer: Trainer) -> float:
    """Epochs since the trainer's first one began; within an epoch of unknown length, half of it."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    if progress.is_last_batch:
        return trainer.current_epoch + 1
    batches = trainer.num_training_batches
    return trainer.current_epoch + (progress.current.ready / batches if math.isfinite(batches) else 0.5)


def mean_of_ranks(trainer: Trainer, metric: Tensor) -> float:
    """The metric's mean over all ranks, which make this call together."""
    if trainer.world_size > 1:
        # Of a copy: Lightning reduces in place, and the metric is what other callbacks look at.
        metric = cast("Tensor", trainer.strategy.reduce(metric.detach().clone(), reduce_op="mean"))
    return float(metric)


def _resize_saved_arguments(batcher: Any, batch_size: int, patches: Patches) -> None:
    """Change what Lightning saved of the constructor's call: with it, it makes the loader anew for several devices."""
    if getattr(batcher, "batch_size", None) is None:  # one that is made of a batch sampler has no size of its own
        return
    names = getattr(batcher, "__pl_saved_arg_names", ())
    if "batch_size" in names:
        arguments = list(getattr(batcher, "__pl_saved_args"))
        arguments[names.index("batch_size")] = batch_size
        patches.set_attribute(batcher, "__pl_saved_args", tuple(arguments))
    keywords = getattr(batcher, "__pl_saved_kwargs", {})
    # The default of an argument that was not given is what the constructor takes again.
    if "batch_size" in keywords or "batch_size" in getattr(batcher, "__pl_saved_default_kwargs", {}):
        patches.set_attribute(batcher, "__pl_saved_kwargs", {**keywords, "batch_size": batch_size})


def _set_batch_size_attributes(holder: Any, batch_size: int, patches: Patches) -> None:
    """Set `batch_size` and the hyperparameter of that name, where they are integers that can be set."""
    if holder is None:
        return
    if isinstance(getattr(holder, "batch_size", None), int):
        # A read-only property follows from something else; the loaders are set in any case.
        with contextlib.suppress(AttributeError):
            patches.set_attribute(holder, "batch_size", batch_size)
    hparams = getattr(holder, "hparams", {})
    if isinstance(hparams.get("batch_size"), int):
        patches.set_item(hparams, "batch_size", batch_size)
