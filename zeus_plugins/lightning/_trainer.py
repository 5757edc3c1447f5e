"""Access to Lightning's Trainer: this module alone uses private attributes of Lightning and patches its objects.

The trainings of `tests/lightning` use these attributes; `test_contract.py` checks those that several devices need.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeVar, cast

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch import distributed as dist
from torch.utils.data import BatchSampler, DistributedSampler

from zeus_plugins.energy.nvml import cuda_devices
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.placement import this_machine
from zeus_plugins.protocol import Fingerprint
from zeus_plugins.training.batches import (
    LONE_SAMPLE,
    BatchSplit,
    SampleCount,
    check_resizable,
    delivered_batch_size,
    leave_out_lone_sample,
    resize_loader,
    scaled_together,
)
from zeus_plugins.training.defaults import TrainingFacts, hash_of_parameters, name_of_data, script_name
from zeus_plugins.training.lr_scaling import GROUP_RATES
from zeus_plugins.training.patches import Patches
from zeus_plugins.training.steps import StepScale, StepSettings, length_of

try:
    from lightning.fabric.utilities.data import sized_len
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
    from lightning.pytorch.trainer.states import RunningStage
    from lightning.pytorch.utilities.combined_loader import CombinedLoader
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ModuleNotFoundError:
    # Lightning's other package has the same classes, which are distinct types to a type checker.
    from lightning_fabric.utilities.data import sized_len
    from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[assignment]
    from pytorch_lightning.core.optimizer import _init_optimizers_and_lr_schedulers  # type: ignore[assignment]
    from pytorch_lightning.trainer.states import RunningStage  # type: ignore[assignment]
    from pytorch_lightning.utilities.combined_loader import CombinedLoader  # type: ignore[assignment]
    from pytorch_lightning.utilities.model_helpers import is_overridden

# The callbacks import these names from here, because either package may provide them.
__all__ = ["Callback", "LightningModule", "Trainer"]

HookT = TypeVar("HookT", bound=Callable[..., Any])

_logger = logging.getLogger("zeus_plugins")

_FOLLOW = (
    "make the loader in train_dataloader() with the data module's batch_size, or have its sampler read batch_size in "
    "each __iter__"
)


class LightningPort:
    """A `TrainerPort` of Lightning's Trainer within `fit`, which trains a module."""

    # Each `fit` makes new optimizers, and a checkpoint that is saved after `fit` keeps the scaled rates.
    keeps_optimizers = False

    def __init__(self, trainer: Trainer, module: LightningModule | None = None) -> None:
        self._trainer = trainer
        self._module = module
        self.rank = trainer.global_rank
        self.local_rank = trainer.local_rank
        self.world_size = trainer.world_size
        # With tensor parallelism several processes work on the same data.
        sharing = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": trainer.world_size}
        self.devices = sharing["num_replicas"]
        self.machine = this_machine()
        by_hand = module is not None and not module.automatic_optimization
        # Samples per batch of each train loader, and the counts of its batches.
        self._targets: list[int] = []
        self._counts: list[SampleCount] = []
        self._counted = Patches()
        self._leaves_out = False
        self._script_epochs = trainer.max_epochs
        # Train loaders that `facts` has made, until Lightning asks for train loaders.
        self._made: list[Any] = []
        self._has_size_attributes = False
        self.no_accumulation = "with manual optimization Lightning accumulates no gradients" if by_hand else None
        # The largest train loader and its split, as the script has made them; None if unknown.
        self._largest: Any = None
        self._own_split: BatchSplit | None = None

    @property
    def gpu_indices(self) -> Sequence[int | str]:
        kind = self._trainer.strategy.root_device.type
        return self._trainer.device_ids if kind == "cuda" else () if kind == "cpu" else [kind]

    @property
    def own_gpus(self) -> Sequence[str]:
        device, known = self._trainer.strategy.root_device, cuda_devices(torch)
        return () if device.type != "cuda" or known is None else known[device.index or 0 :][:1]

    @property
    def accumulation(self) -> int:
        return self._trainer.accumulate_grad_batches

    def broadcast(self, thing: Any) -> Any:
        return self._trainer.strategy.broadcast(thing, src=0)

    def all_gather(self, thing: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, thing)
        return gathered

    def deliver(self, split: BatchSplit, patches: Patches, *, is_own: bool = False) -> None:
        """Set the accumulation, any `batch_size` attribute, and the size of all present and future train loaders."""
        trainer = self._trainer
        patches.set_attribute(trainer, "accumulate_grad_batches", split.accumulation)
        attributes = Patches()
        patches.include(attributes)
        if _batch_size_attribute(*self._holders) not in (None, split.per_device):
            self._made.clear()  # loaders made before may have the attributes' old size

        def set_attributes() -> None:
            for holder in self._holders:
                _set_batch_size_attributes(holder, split.per_device, attributes)

        set_attributes()
        # Lightning gets its train loaders only from `dataloader` of this source: for its set-up, to estimate the number
        # of steps, and to reload them every n epochs.
        source = trainer.fit_loop._data_source
        original = source.dataloader
        self._has_size_attributes = has_attributes = attributes.has_changes

        def sizes_of(loaders: Any) -> list[int | None]:
            return [delivered_batch_size(loader) for loader in _combined(loaders).flattened]

        def targets(loaders: Any) -> list[int]:
            sizes = sizes_of(loaders)
            if len(sizes) > 1 and has_attributes:  # the attributes may have changed some loaders
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
            # Undo the counting first, because Lightning may make new loaders from these by their samplers' classes.
            self._counted.undo()
            self._counts.clear()
            loaders = original()
            self._targets = self._targets or targets(loaders)
            for loader, size in zip(_combined(loaders).flattened, self._targets, strict=True):
                # A loader that states no size may have read an attribute; counting its samples verifies the size.
                if delivered_batch_size(loader) is not None or not has_attributes:
                    if delivered_batch_size(loader) == size and not has_attributes:
                        check_resizable(loader)  # fails in the first launch, not only at another size
                    resize_loader(loader, size, patches)
                for batcher in (getattr(loader, "batch_sampler", None), loader):
                    _resize_saved_arguments(batcher, size, patches)
            return loaders

        patches.set_attribute(source, "dataloader", resized)
        self._count_samples(patches, is_own=is_own)

    def fingerprint(self) -> Fingerprint:
        """Return model, parameters and framework; the optimizers do not exist yet."""
        module = self._module
        return Fingerprint(model=type(module).__name__, framework="lightning", parameters=hash_of_parameters(module))

    def facts(self, patches: Patches, *, counts_samples: bool) -> TrainingFacts:
        """Read the facts from trainer, data and module.

        `facts` makes the train loader, and gives it to Lightning the next time that Lightning asks for one, unless a
        `batch_size` attribute changes before. A module with a `setup` of its own cannot make its loader yet: then the
        size is its integer `batch_size`, if it has one.
        """
        trainer, source = self._trainer, self._trainer.fit_loop._data_source
        made_in_setup = isinstance(source.instance, LightningModule) and is_overridden("setup", source.instance)
        largest = None
        if made_in_setup:
            size, samples = _batch_size_attribute(*self._holders), None
        else:
            original, made = source.dataloader, self._made
            made.append(loaders := original())
            patches.set_attribute(source, "dataloader", lambda: made.pop() if made else original())
            sized = [(delivered_batch_size(loader) or 0, loader) for loader in _combined(loaders).flattened]
            size, largest = max(sized, key=lambda each: each[0])
            samples = sized_len(getattr(largest, "dataset", None))
        unit = self.devices * self.accumulation
        own = BatchSplit(size, self.accumulation) if size else None
        self._largest, self._own_split = largest, own
        limit = trainer.max_epochs
        return TrainingFacts(
            script=script_name(sys.argv[0]),
            model=type(self._module).__name__,
            samples=samples,
            step_size=size * unit if size else None,
            devices=self.devices,
            unit=unit,
            max_epochs=None if limit is None or limit < 0 else max(1, limit - trainer.current_epoch),
            data=name_of_data(getattr(largest, "dataset", None)),
            obstacle=lambda split: self._shortage(split) or self._obstacle((own or split) if counts_samples else split),
        )

    def follow_samples(self, default: int, split: BatchSplit, patches: Patches) -> tuple[StepScale, list[str]]:
        trainer: Any = self._trainer  # a type checker does not see what Lightning's connectors set
        if self._own_split is None:
            with contextlib.suppress(Exception):  # in a resumed training, later hooks may make the data
                self.facts(patches, counts_samples=True)
        own = self._own_split or BatchSplit(default // (self.devices * self.accumulation) or 1, self.accumulation)
        scale = StepScale.between(own, split, {each: self._batches(each) for each in (own, split)})
        settings = StepSettings(patches)
        if isinstance(trainer.val_check_interval, int):
            settings.interval(trainer, "val_check_interval", scale.batches)
        if isinstance(trainer.limit_train_batches, int) and not trainer.overfit_batches:
            settings.limit(trainer, "limit_train_batches", scale.batches)
        if trainer.max_steps > 0:
            settings.limit(trainer.fit_loop.epoch_loop, "max_steps", scale.steps)
        if trainer.log_every_n_steps:
            settings.interval(trainer, "log_every_n_steps", scale.steps)
        for saver in finders(trainer, "ModelCheckpoint"):
            if saver._every_n_train_steps:
                settings.interval(saver, "_every_n_train_steps", scale.steps)
        return scale, settings.told

    def _batches(self, split: BatchSplit) -> int | None:
        """Return the batches in a device's epoch of the largest loader at this split; None if unknown."""
        samples = None if getattr(self._trainer, "overfit_batches", 0) else self._samples(self._largest)
        if samples is None:
            return None
        is_cut = self._largest.batch_sampler.drop_last
        return samples // split.per_device if is_cut else math.ceil(samples / split.per_device)

    def _shortage(self, split: BatchSplit) -> str | None:
        """Return the reason why the data have no batch at this split, or None."""
        samples = None if self._batches(split) is None else self._samples(self._largest)
        if samples is None or samples >= split.per_device * split.accumulation:
            return None
        return f"a batch is larger than an epoch, which has {samples} samples for each device"

    def _obstacle(self, split: BatchSplit) -> str | None:
        """Return the reason why a training of this split's batches would never be validated, or None."""
        trainer: Any = self._trainer
        batches = self._batches(split)
        if batches is None:
            return None
        limit = trainer.limit_train_batches
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
        if batches == 0:
            return None
        every, interval = trainer.check_val_every_n_epoch, trainer.val_check_interval
        until = batches  # batches until the first report
        if trainer.enable_validation and getattr(trainer, "_val_check_time_interval", None) is None:
            setting = f"Trainer(val_check_interval={interval})"
            if isinstance(interval, float):
                interval = max(1, int(batches * interval))
            elif every is not None and interval > batches:
                return f"an epoch has {batches} batches, fewer than {setting}"
            elif every is None and 0 < (trainer.max_epochs or 0) * batches < interval:
                return f"the whole training has {trainer.max_epochs * batches} batches, fewer than {setting}"
            until = ((every or 1) - 1) * batches + interval
        epochs, rest = divmod(until, batches)
        steps = epochs * math.ceil(batches / split.accumulation) + rest // split.accumulation
        # With manual optimization, each batch has at least one step.
        if 0 < trainer.max_steps - trainer.global_step < steps:
            return f"Trainer(max_steps={trainer.max_steps}) ends before the first report, which is after {steps} steps"
        return None

    def _samples(self, loader: Any) -> int | None:
        """Return the samples in a device's epoch of this loader, or None if they cannot be known."""
        batch_sampler = getattr(loader, "batch_sampler", None)
        sampler = getattr(batch_sampler, "sampler", None)
        # Other samplers may count otherwise, and a stream has no length.
        if type(batch_sampler) is not BatchSampler or (samples := sized_len(sampler)) is None:
            return None
        is_divided = isinstance(sampler, DistributedSampler)
        if not is_divided and self._trainer._accelerator_connector.use_distributed_sampler:
            samples = math.ceil(samples / self.devices)
        return samples

    @property
    def _holders(self) -> tuple[Any, Any]:
        """The objects that may have a `batch_size`: data module and module."""
        return getattr(self._trainer, "datamodule", None), self._module

    def modes(self, monitor: str) -> Mapping[str, Literal["max", "min"]]:
        """Return the modes of the checkpoints and stoppers that monitor the metric."""
        return {
            f"{type(each).__name__}(mode={each.mode!r})": each.mode
            for each in finders(self._trainer, "ModelCheckpoint", "EarlyStopping")
            if each.monitor == monitor
        }

    def say(self, line: str) -> None:
        """Write to Lightning's own logger, which prints even if the script configures no logging."""
        rank_zero_info(line)

    def log_hyperparameters(self, values: Mapping[str, str | int], patches: Patches) -> None:
        """Add the values to the hyperparameters of the script, because some loggers keep only their first values."""
        for holder in (self._module, getattr(self._trainer, "datamodule", None)):
            if getattr(holder, "_log_hyperparams", False) and getattr(self._trainer, "enable_autolog_hparams", True):
                for name, value in values.items():
                    patches.set_item(cast("Any", holder)._hparams_initial, name, value)
                return
        for logger in self._trainer.loggers:
            try:
                logger.log_hyperparams(dict(values))
            except Exception as error:  # MLflow refuses to change a parameter
                _logger.warning("%s did not take the batch size: %s", type(logger).__name__, error)

    def delivered(self) -> list[float | None]:
        """Return the sizes that the train loaders state, each scaled to the size of the largest loader."""
        sizes = delivered_batch_sizes(self._trainer)
        largest = max(self._targets, default=0)
        return [size * largest / target for size, target in zip(sizes, self._targets, strict=True) if size is not None]

    def check_samples(self) -> None:
        for count in self._counts:
            count.check()

    def end_counts(self) -> None:
        for count in self._counts:
            count.end()

    def optimizers(self) -> tuple[Sequence[Any], Sequence[Any]]:
        return self._trainer.optimizers, [config.scheduler for config in self._trainer.lr_scheduler_configs]

    def dependence(self) -> tuple[bool, Sequence[Any]]:
        """Configure the module again, as at half the batch size, and compare rates and schedules."""
        module, trainer = self._module, self._trainer
        configs = [each for each in trainer.lr_scheduler_configs if each.interval == "step"]
        if module is None or not (configs or self._has_size_attributes):
            return False, ()
        kept, halved = dict(vars(module)), Patches()
        # A module may return the same optimizers again, whose rates a new scheduler would set.
        groups = [(group, dict(group)) for each in trainer.optimizers for group in each.param_groups]
        try:
            self._halve_sizes(halved)
            made, schedules = _init_optimizers_and_lr_schedulers(module)
            computes_rates = [_rates_of(each) for each in made] != [_rates_of(each) for each in trainer.optimizers]
            pairs = zip(trainer.lr_scheduler_configs, schedules, strict=True)
            fixed = [
                now.scheduler
                for now, again in pairs
                if now in configs and length_of(now.scheduler) == length_of(again.scheduler)
            ]
        except Exception as error:  # the module need not support a second call
            _logger.debug("configure_optimizers cannot be called again: %s", error)
            return False, ()
        else:
            return computes_rates and self._has_size_attributes, fixed
        finally:
            halved.undo()
            vars(module).clear()
            vars(module).update(kept)
            for group, values in groups:
                group.update(values)

    def _halve_sizes(self, patches: Patches) -> None:
        """Halve the batch size in all places from which a module may compute a number of steps."""
        loop = self._trainer.fit_loop
        for holder in self._holders:
            size = _batch_size_attribute(holder)
            if size is not None:
                _set_batch_size_attributes(holder, size // 2 or 2, patches)
        loaders = () if loop._combined_loader is None else loop._combined_loader.flattened
        for batcher in (getattr(each, "batch_sampler", None) for each in loaders):
            if isinstance(size := getattr(batcher, "batch_size", None), int):
                patches.set_attribute(batcher, "batch_size", size // 2 or 2)
        patches.set_attribute(loop, "max_batches", 2 * loop.max_batches)
        if loop.epoch_loop.max_steps > 0:
            patches.set_attribute(loop.epoch_loop, "max_steps", 2 * loop.epoch_loop.max_steps)

    def log(self, metrics: Mapping[str, float]) -> None:
        for logger in self._trainer.loggers:
            logger.log_metrics(dict(metrics), step=self._trainer.global_step)

    def stop(self) -> None:
        trainer = self._trainer
        trainer.should_stop = True
        epochs, steps = trainer.min_epochs or 0, trainer.min_steps or 0
        if epochs > trainer.current_epoch + 1 or steps > trainer.global_step:
            least = f"min_epochs={epochs}" if epochs > trainer.current_epoch + 1 else f"min_steps={steps}"
            self.say(f"zeus: Trainer({least}) lets this training continue, which is not counted")

    @property
    def no_continuation(self) -> str | None:
        strategy = self._trainer.strategy
        return f"{type(strategy).__name__} sets up its model once" if strategy.restore_checkpoint_after_setup else None

    @property
    def model(self) -> Any:
        return self._module

    given_model = model

    @property
    def epochs_before(self) -> int:
        return int(self._trainer.current_epoch)

    @property
    def is_in_last_epoch(self) -> bool:
        return self._script_epochs is not None and self._trainer.current_epoch + 1 >= self._script_epochs >= 0

    def train_again(self, epochs: int, patches: Patches, *, keeps_state: bool) -> None:
        """Let the next call of the fit loop's `run` train further `epochs`; epochs and steps are numbered on."""
        trainer, loop = self._trainer, self._trainer.fit_loop
        trained, steps, most_steps = trainer.current_epoch, trainer.global_step, loop.epoch_loop.max_steps
        trainer.should_stop = False
        _end_epoch(trainer)
        loop.teardown()
        loop._combined_loader = None  # so that Lightning makes the loaders again
        strategy: Any = trainer.strategy
        if not keeps_state and strategy.model is not self._module and hasattr(strategy, "configure_ddp"):
            # A wrapper still waits for the gradients of a step that an error has ended.
            strategy.model = self._module
            strategy.configure_ddp()
        # While optimizers and schedules are made, Lightning estimates the steps of this training alone.
        patches.set_attribute(loop, "max_epochs", epochs)
        before = trainer.optimizers
        trainer.strategy.setup_optimizers(trainer)
        for old, new in zip(before, trainer.optimizers, strict=False):
            if keeps_state and type(old) is type(new):
                new.state.update(old.state)
            elif new is old:  # the module made it once
                new.state.clear()
        patches.set_attribute(loop, "max_epochs", trained + epochs)
        if most_steps >= 0:
            patches.set_attribute(loop.epoch_loop, "max_steps", steps + most_steps)
        for stopper in [] if keeps_state else finders(trainer, "EarlyStopping"):
            stopper.wait_count, stopper.best_score = 0, torch.tensor(math.inf if stopper.mode == "min" else -math.inf)

    def _count_samples(self, patches: Patches, *, is_own: bool) -> None:
        """Count the samples of every loader that Lightning trains with; for several devices, these are new loaders."""
        connector = self._trainer._data_connector
        prepare = connector._prepare_dataloader

        def prepared(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
            loader = prepare(dataloader, *args, **kwargs)
            if kwargs["mode"] == RunningStage.TRAINING:
                if sized_len(loader) == 0:  # Lightning itself only warns
                    raise ZeusBSOConfigError(
                        f"the train loader has no batch of {self._targets[0]} samples: the data set is smaller, and "
                        "drop_last is set; give JobSpec(batch_sizes=…) only sizes that it can fill",
                        of_size=True,
                    )
                if not is_own and leave_out_lone_sample(loader, self._module, patches) and not self._leaves_out:
                    self._leaves_out = True
                    self.say(LONE_SAMPLE)
                count = SampleCount(delivered_batch_size(loader) or self._targets[0], _FOLLOW, is_own=is_own)
                count.watch(loader, self._counted)
                self._counts.append(count)
            return loader

        patches.include(self._counted)
        patches.set_attribute(connector, "_prepare_dataloader", prepared)


def _end_epoch(trainer: Trainer) -> None:
    """Count an epoch that an exception has ended as not begun; do nothing between two epochs."""
    loop, module = trainer.fit_loop, trainer.lightning_module
    if trainer.validating:
        loop.epoch_loop.val_loop._module_mode.restore(module)
    trainer.training = True
    loop.epoch_progress.reset_on_restart()
    for results in (loop.epoch_loop._results, loop.epoch_loop.val_loop._results):
        results.reset()
    trainer._logger_connector.reset_results()
    module._current_fx_name = None
    module.zero_grad()


def _rates_of(optimizer: Any) -> list[dict[str, Any]]:
    return [{key: group[key] for key in GROUP_RATES if key in group} for group in optimizer.param_groups]


def _batch_size_attribute(*holders: Any) -> int | None:
    """Return the first integer `batch_size` of the holders or their hyperparameters."""
    for holder in holders:
        for size in (getattr(holder, "batch_size", None), getattr(holder, "hparams", {}).get("batch_size")):
            if isinstance(size, int):
                return size
    return None


def is_rehearsal(trainer: Trainer) -> bool:
    """Return True if this `fit` is a `fast_dev_run` or a trial of a `Tuner`, and so no recurrence of the job."""
    # A type checker does not see `fast_dev_run`, which Lightning's connectors set.
    found = finders(trainer, "BatchSizeFinder", "LearningRateFinder")
    return bool(getattr(trainer, "fast_dev_run", False)) or any(finder._early_exit for finder in found)


def finders(trainer: Trainer, *kinds: str) -> list[Any]:
    """Return the trainer's callbacks of these classes, from either of Lightning's packages."""
    callbacks = getattr(trainer, "callbacks", ())
    return [each for each in callbacks if any(kind.__name__ in kinds for kind in type(each).__mro__)]


def scale_in_finetuning(
    trainer: Trainer, unscaled: Callable[[], AbstractContextManager[None]], patches: Patches
) -> None:
    """Let callbacks that add parameter groups see and set unscaled learning rates."""
    for callback in finders(trainer, "BaseFinetuning"):
        finetune = callback.finetune_function

        def scaled(*args: Any, finetune: Any = finetune, **kwargs: Any) -> None:
            with unscaled():
                finetune(*args, **kwargs)

        patches.set_attribute(callback, "finetune_function", scaled)


def missed_validation(trainer: Trainer) -> str | None:
    """Describe an epoch that ended too early for the validation that was due at its end; None if none was missed."""
    batches, done = trainer.num_training_batches, trainer.fit_loop.epoch_loop.batch_progress.current.ready
    every = trainer.check_val_every_n_epoch
    is_limited = trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step
    if is_limited or done >= batches or not math.isfinite(batches) or every is None:
        return None
    if (trainer.current_epoch + 1) % every:
        return None
    return f"epoch {trainer.current_epoch + 1} ended after {done} of the {batches} batches"


def continues_checkpoint(trainer: Trainer) -> bool:
    """Return True if this `fit` will load a checkpoint.

    When Lightning sets up callbacks, only a local variable of its running method `_run` has the checkpoint's path.

    Raises:
        ZeusBSOConfigError: The strategy loads the checkpoint after the batch size must be set.
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


def of_an_instance(hook: HookT) -> HookT:
    """Wrap a hook to raise an error if the trainer was given the callback's class, which Lightning does not check."""

    @functools.wraps(hook)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(args[0], Callback):
            name = hook.__qualname__.partition(".")[0]
            raise ZeusBSOConfigError(
                f"the Trainer was given the class {name}: give it an object, callbacks=[{name}('val_acc', …)]"
            )
        return hook(*args, **kwargs)

    return cast("HookT", called)


def delivered_batch_sizes(trainer: Trainer) -> list[float | None]:
    """Return the samples per batch of each train loader of one device; None for a loader that does not state it."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else [delivered_batch_size(loader) for loader in combined.flattened]


def is_last_batch(trainer: Trainer) -> bool:
    """Return True if the latest batch was the last of its epoch."""
    return trainer.fit_loop.epoch_loop.batch_progress.is_last_batch


def epochs_trained(trainer: Trainer) -> float:
    """Return the number of epochs trained, with fractions; a begun epoch of unknown length counts as half an epoch."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    if progress.is_last_batch:
        return trainer.current_epoch + 1
    batches = trainer.num_training_batches
    return trainer.current_epoch + (progress.current.ready / batches if math.isfinite(batches) else 0.5)


def early_end(trainer: Trainer) -> str | None:
    """Return the rule that ended the training before its last epoch, in words; None if no rule is known."""
    stoppers = [each for each in finders(trainer, "EarlyStopping") if each.stopped_epoch > 0]
    if stoppers:
        return f"EarlyStopping(monitor={stoppers[0].monitor!r}) in epoch {stoppers[0].stopped_epoch + 1}"
    for timer in finders(trainer, "Timer"):
        if timer._duration is not None and timer.time_elapsed() >= timer._duration:
            return "max_time"
    if 0 <= trainer.max_steps <= trainer.global_step:
        return f"max_steps={trainer.max_steps}"
    return "Trainer.should_stop" if trainer.should_stop else None


def mean_of_ranks(trainer: Trainer, metric: Tensor) -> float:
    """Return the metric's mean over all ranks, all of which must make this call."""
    if trainer.world_size > 1:
        # Lightning reduces in place, and other callbacks read the metric: reduce a copy.
        metric = cast("Tensor", trainer.strategy.reduce(metric.detach().clone(), reduce_op="mean"))
    return float(metric)


def logs_now(trainer: Trainer, name: str) -> bool:
    """Return True if the present loop, of the validation or of the training epoch, has logged this metric."""
    return name in trainer._logger_connector.metrics["callback"]


def logged_means(trainer: Trainer, names: Sequence[str]) -> dict[str, float]:
    """Return each logged metric as the mean over the ranks that have it; all ranks must make this call."""
    if not names:
        return {}
    logged = trainer.callback_metrics
    # A name may be missing on some ranks, and each rank takes part in each reduction: sum values and counts at once.
    sums = torch.tensor([[float(logged.get(name, 0.0)), float(name in logged)] for name in names], dtype=torch.float64)
    if trainer.world_size > 1:
        sums = cast("Tensor", trainer.strategy.reduce(sums.to(trainer.strategy.root_device), reduce_op="sum"))
    return {name: value / ranks for name, (value, ranks) in zip(names, sums.tolist(), strict=True) if ranks}


def _combined(loaders: Any) -> CombinedLoader:
    return loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)


def _resize_saved_arguments(batcher: Any, batch_size: int, patches: Patches) -> None:
    """Change the constructor's arguments that Lightning saved to make the loader again for several devices."""
    if getattr(batcher, "batch_size", None) is None:  # a loader with a batch sampler has no size of its own
        return
    names = getattr(batcher, "__pl_saved_arg_names", ())
    if "batch_size" in names:
        arguments = list(getattr(batcher, "__pl_saved_args"))
        arguments[names.index("batch_size")] = batch_size
        patches.set_attribute(batcher, "__pl_saved_args", tuple(arguments))
    keywords = getattr(batcher, "__pl_saved_kwargs", {})
    # Without a saved value, the new loader would take the default of `batch_size`.
    if "batch_size" in keywords or "batch_size" in getattr(batcher, "__pl_saved_default_kwargs", {}):
        patches.set_attribute(batcher, "__pl_saved_kwargs", {**keywords, "batch_size": batch_size})


def _set_batch_size_attributes(holder: Any, batch_size: int, patches: Patches) -> None:
    """Set `batch_size` and the hyperparameter of that name, if they are integers and not read-only."""
    if holder is None:
        return
    if isinstance(getattr(holder, "batch_size", None), int):
        # A read-only property follows from something else, and `deliver` resizes the loaders in any case.
        with contextlib.suppress(AttributeError):
            patches.set_attribute(holder, "batch_size", batch_size)
    hparams = getattr(holder, "hparams", {})
    # Lightning logs `_hparams_initial` to the experiment trackers.
    for values in (hparams, getattr(holder, "_hparams_initial", {})):
        if isinstance(values.get("batch_size"), int):
            patches.set_item(values, "batch_size", batch_size)
