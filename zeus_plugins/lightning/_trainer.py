"""Lightning's Trainer as the callbacks need it: every private attribute and every patch of Lightning stands here.

`tests/lightning/test_contract.py` checks each of them against the Lightning that is installed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch import distributed as dist

from zeus_plugins.energy.visible import cuda_devices
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.placement import this_machine
from zeus_plugins.protocol import Fingerprint
from zeus_plugins.training.batches import BatchSplit, SampleCount, delivered_batch_size, resize_loader, scaled_together
from zeus_plugins.training.defaults import TrainingFacts, script_name
from zeus_plugins.training.patches import Patches

try:
    from lightning.fabric.utilities.data import sized_len
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.trainer.states import RunningStage
    from lightning.pytorch.utilities.combined_loader import CombinedLoader
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ModuleNotFoundError:
    # The same classes under their other name, for those who install only that: distinct types to a type checker.
    from lightning_fabric.utilities.data import sized_len
    from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[assignment]
    from pytorch_lightning.trainer.states import RunningStage  # type: ignore[assignment]
    from pytorch_lightning.utilities.combined_loader import CombinedLoader  # type: ignore[assignment]
    from pytorch_lightning.utilities.model_helpers import is_overridden

# The names of Lightning that the callbacks take from here, of whichever of its two packages.
__all__ = ["Callback", "LightningModule", "Trainer"]

_logger = logging.getLogger("zeus_plugins")

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


_FOLLOW = (
    "make the loader in train_dataloader() with the data module's batch_size, or have its sampler read batch_size in "
    "each __iter__"
)


class LightningPort:
    """A `TrainerPort` of Lightning's Trainer.

    Args:
        trainer: The trainer, within `fit`.
        module: What it trains.
    """

    # `configure_optimizers` makes new ones for each `fit`, and a checkpoint that is saved after one keeps their rates.
    keeps_optimizers = False
    schedule_remedy = "Make the scheduler from trainer.estimated_stepping_batches"

    def __init__(self, trainer: Trainer, module: LightningModule | None = None) -> None:
        self._trainer = trainer
        self._module = module
        self.rank = trainer.global_rank
        self.local_rank = trainer.local_rank
        self.world_size = trainer.world_size
        # Of tensor parallelism several processes work on the same data.
        sharing = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": trainer.world_size}
        self.devices = sharing["num_replicas"]
        self.machine = this_machine()
        by_hand = module is not None and not module.automatic_optimization
        # Samples per batch of each train loader, and what counts them.
        self._targets: list[int] = []
        self._counts: list[SampleCount] = []
        self._counted = Patches()
        self.no_accumulation = "with manual optimization Lightning accumulates no gradients" if by_hand else None

    @property
    def gpu_indices(self) -> Sequence[int]:
        """The GPUs that train, as indices into the visible ones; none on another accelerator."""
        trainer = self._trainer
        return trainer.device_ids if trainer.strategy.root_device.type == "cuda" else ()

    @property
    def own_gpus(self) -> Sequence[str]:
        """The UUID of the GPU that this process trains on, if CUDA tells it."""
        device, known = self._trainer.strategy.root_device, cuda_devices(torch)
        return () if device.type != "cuda" or known is None else known[device.index or 0 :][:1]

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
        trainer = self._trainer
        patches.set_attribute(trainer, "accumulate_grad_batches", split.accumulation)
        attributes = Patches()
        patches.include(attributes)

        def set_attributes() -> None:
            for holder in (getattr(trainer, "datamodule", None), self._module):
                _set_batch_size_attributes(holder, split.per_device, attributes)

        set_attributes()
        # Every way to a train loader leads through this method: Lightning's own set-up, the estimate of the number of
        # steps, and the reloading of loaders every n epochs.
        source = trainer.fit_loop._data_source
        original = source.dataloader
        has_attributes = attributes.has_changes

        def sizes_of(loaders: Any) -> list[int | None]:
            return [delivered_batch_size(loader) for loader in _combined(loaders).flattened]

        def targets(loaders: Any) -> list[int]:
            sizes = sizes_of(loaders)
            if len(sizes) > 1 and has_attributes:  # some may have followed them: ask for the script's own proportion
                attributes.undo()
                sizes = sizes_of(original())
                set_attributes()
            if len(set(sizes)) == 1 or None in sizes:
                return [split.per_device] * len(sizes)
            scaled = scaled_together(cast("list[int]", sizes), split.per_device)
            if self.rank == 0:
                _logger.info("the train loaders keep their proportion: %s samples become %s", sizes, scaled)
            return scaled

        def resized() -> Any:
            # Lightning may take these loaders to make new ones, and knows the classes of their samplers.
            self._counted.undo()
            self._counts.clear()
            loaders = original()
            self._targets = self._targets or targets(loaders)
            for loader, size in zip(_combined(loaders).flattened, self._targets, strict=True):
                # A loader that says no size may have read an attribute; its batches are counted.
                if delivered_batch_size(loader) is not None or not has_attributes:
                    resize_loader(loader, size, patches)
                for batcher in (getattr(loader, "batch_sampler", None), loader):
                    _resize_saved_arguments(batcher, size, patches)
            return loaders

        patches.set_attribute(source, "dataloader", resized)
        self._count_samples(patches)

    def fingerprint(self) -> Fingerprint:
        """Model and framework; its optimizers are made later."""
        return Fingerprint(model=type(self._module).__name__, framework="lightning")

    def facts(self, patches: Patches) -> TrainingFacts:
        """The facts that the trainer, the data and the module tell.

        Lightning asks the script for its train loader once after this; it gets the one that is made here. A module's
        own loader is not made before its own `setup`: then only an integer `batch_size` tells the size.
        """
        trainer, source = self._trainer, self._trainer.fit_loop._data_source
        made_in_setup = isinstance(source.instance, LightningModule) and is_overridden("setup", source.instance)
        size, samples = None, None
        if not made_in_setup:
            loaders = source.dataloader()
            _hand_over_once(source, loaders, patches)
            sized = [(delivered_batch_size(loader) or 0, loader) for loader in _combined(loaders).flattened]
            size, largest = max(sized, key=lambda each: each[0])
            samples = _length(getattr(largest, "dataset", None))
        else:
            size = _batch_size_attribute(getattr(trainer, "datamodule", None), self._module)
        unit = self.devices * self.accumulation
        limit = trainer.max_epochs
        return TrainingFacts(
            script=script_name(sys.argv[0]),
            model=type(self._module).__name__,
            samples=samples,
            step_size=size * unit if size else None,
            devices=self.devices,
            unit=unit,
            max_epochs=None if limit is None or limit < 0 else max(1, limit - trainer.current_epoch),
        )

    def say(self, line: str) -> None:
        """Tell it by Lightning's own log, which is seen without any logging set up."""
        rank_zero_info(line)

    def log_hyperparameters(self, values: Mapping[str, str | int], patches: Patches) -> None:
        """Have all loggers of the trainer get them with those that the script has saved.

        Some keep nothing but the first that they get.
        """
        for holder in (self._module, getattr(self._trainer, "datamodule", None)):
            if getattr(holder, "_log_hyperparams", False) and getattr(self._trainer, "enable_autolog_hparams", True):
                for name, value in values.items():
                    patches.set_item(cast("Any", holder)._hparams_initial, name, value)
                return
        for logger in self._trainer.loggers:
            logger.log_hyperparams(dict(values))

    def show_progress(self, text: str, patches: Patches) -> None:
        """Add a field to the progress bar's."""
        bar = self._trainer.progress_bar_callback
        if bar is None:
            return
        get_metrics = bar.get_metrics

        def with_ours(*args: Any, **kwargs: Any) -> Any:
            return {**get_metrics(*args, **kwargs), "zeus": text}

        patches.set_attribute(bar, "get_metrics", with_ours)

    def delivered(self) -> list[float | None]:
        """Samples per batch that the largest train loader delivers, by what each of them says."""
        sizes = delivered_batch_sizes(self._trainer)
        largest = max(self._targets, default=0)
        return [size * largest / target for size, target in zip(sizes, self._targets, strict=True) if size is not None]

    def check_samples(self) -> None:
        """Compare batches of different sizes with what was set."""
        for count in self._counts:
            count.check()

    def optimizers(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """All optimizers and schedulers."""
        return self._trainer.optimizers, [config.scheduler for config in self._trainer.lr_scheduler_configs]

    def schedules(self) -> list[tuple[Any, float | None]]:
        """All schedulers, and how often each is stepped in all."""
        trainer = self._trainer
        lengths = {"step": trainer.estimated_stepping_batches, "epoch": trainer.max_epochs}
        return [
            (each.scheduler, None if (length := lengths[each.interval]) is None else length / each.frequency)
            for each in trainer.lr_scheduler_configs
        ]

    def log(self, metrics: Mapping[str, float]) -> None:
        """Log to all loggers of the trainer."""
        for logger in self._trainer.loggers:
            logger.log_metrics(dict(metrics), step=self._trainer.global_step)

    def stop(self) -> None:
        """Have `fit` end."""
        self._trainer.should_stop = True

    def _count_samples(self, patches: Patches) -> None:
        """Count the samples of every train loader in its last form: for several devices Lightning makes new ones."""
        connector = self._trainer._data_connector
        prepare = connector._prepare_dataloader

        def prepared(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
            loader = prepare(dataloader, *args, **kwargs)
            if kwargs["mode"] == RunningStage.TRAINING:
                if sized_len(loader) == 0:  # of which Lightning only warns
                    raise ZeusBSOConfigError(
                        f"the train loader has no batch of {self._targets[0]} samples: the data set is smaller, and "
                        "drop_last is set; give JobSpec(batch_sizes=…) only sizes that it can fill"
                    )
                count = SampleCount(delivered_batch_size(loader) or self._targets[0], _FOLLOW)
                count.watch(loader, self._counted)
                self._counts.append(count)
            return loader

        patches.include(self._counted)
        patches.set_attribute(connector, "_prepare_dataloader", prepared)


def _hand_over_once(source: Any, loaders: Any, patches: Patches) -> None:
    """Have a source of loaders give these the first time, and then what it would give."""
    original, waiting = source.dataloader, [loaders]

    def handed_over() -> Any:
        return waiting.pop() if waiting else original()

    patches.set_attribute(source, "dataloader", handed_over)


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _batch_size_attribute(*holders: Any) -> int | None:
    """The first integer `batch_size` of these, or of their hyperparameters."""
    for holder in holders:
        for size in (getattr(holder, "batch_size", None), getattr(holder, "hparams", {}).get("batch_size")):
            if isinstance(size, int):
                return size
    return None


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
    calls = (frame for frame, _ in traceback.walk_stack(sys._getframe()) if frame.f_code.co_name == "_run")
    run = next((each.f_locals for each in calls if each.f_locals.get("self") is trainer), {})
    if run.get("ckpt_path") is None:
        return False
    if trainer.strategy.restore_checkpoint_after_setup:
        raise ZeusBSOConfigError(
            f"{type(trainer.strategy).__name__} loads checkpoints when it is too late to set the trial's batch size: "
            "train from the start, or with another strategy"
        )
    return True


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


def early_end(trainer: Trainer) -> str | None:
    """The rule by which a training has ended before its last epoch, in words; None where none is known."""
    stoppers = [each for each in finders(trainer, "EarlyStopping") if each.stopped_epoch > 0]
    if stoppers:
        return f"EarlyStopping(monitor={stoppers[0].monitor!r}) in epoch {stoppers[0].stopped_epoch + 1}"
    for timer in finders(trainer, "Timer"):
        if timer._duration is not None and timer.time_elapsed() >= timer._duration:
            return "Trainer(max_time=…)"
    if 0 <= trainer.max_steps <= trainer.global_step:
        return f"Trainer(max_steps={trainer.max_steps})"
    return "Trainer.should_stop" if trainer.should_stop else None


def mean_of_ranks(trainer: Trainer, metric: Tensor) -> float:
    """The metric's mean over all ranks, which make this call together."""
    if trainer.world_size > 1:
        # Of a copy: Lightning reduces in place, and the metric is what other callbacks look at.
        metric = cast("Tensor", trainer.strategy.reduce(metric.detach().clone(), reduce_op="mean"))
    return float(metric)


def _combined(loaders: Any) -> CombinedLoader:
    return loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)


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
    # The second are those that Lightning logs, to every experiment tracker.
    for values in (hparams, getattr(holder, "_hparams_initial", {})):
        if isinstance(values.get("batch_size"), int):
            patches.set_item(values, "batch_size", batch_size)
