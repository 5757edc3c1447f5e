"""Access to Hugging Face's Trainer: only this module uses private attributes of transformers and patches its objects.

The trainings of `tests/huggingface` use these attributes of the installed transformers and accelerate. Trainers
of packages that build on transformers (TRL, sentence-transformers) are recognised by attributes, not by imports.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, ClassVar, Literal, cast
from weakref import WeakKeyDictionary

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast_object_list, gather_object
from transformers import (
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint, has_length

from zeus_plugins.energy.nvml import cuda_devices
from zeus_plugins.environment import LOCAL_WORLD_SIZE
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOOperationOrderError
from zeus_plugins.placement import this_machine
from zeus_plugins.protocol import Fingerprint
from zeus_plugins.training.batches import (
    LONE_SAMPLE,
    BatchSplit,
    SampleCount,
    leave_out_lone_sample,
    nested_samplers,
    process_batch_sizes,
    resize_loader,
)
from zeus_plugins.training.defaults import TrainingFacts, hash_of_parameters, name_of_data, script_name
from zeus_plugins.training.metrics import EVALUATION_PREFIX
from zeus_plugins.training.patches import Patches
from zeus_plugins.training.steps import StepScale, StepSettings

_logger = logging.getLogger("zeus_plugins")

_FOLLOW = (
    "make the loader in get_train_dataloader() with self._train_batch_size, or have its sampler read batch_size in "
    "each __iter__"
)

# Names of the optimizers that trainers had before their first training, by the handlers of their callbacks: a trainer
# that defines `__eq__` has no hash.
_OPTIMIZERS: WeakKeyDictionary[object, str] = WeakKeyDictionary()

# Lengths of phases, in steps, of AdaLoRA and of a schedule with a constant phase (WSD).
_PHASES = ("total_step", "tinit", "tfinal", "deltaT", "num_decay_steps", "num_stable_steps")

# Parts of the names of losses that use the other samples of a batch as negative examples.
_IN_BATCH = ("Negatives", "GIST", "MegaBatch")


class TrainWrapper(TrainerCallback):
    """A callback that wraps `Trainer.train`, because the Trainer calls no hook when a training ends by an error."""

    # Name of the wrapped `train`'s attribute for the callback; a trainer may have one callback of each class.
    _OWNER: ClassVar[str]

    # The trainer while its `train` runs.
    _trainer: Trainer | None = None

    def attach(self, trainer: Trainer) -> None:
        """Add the callback to a trainer that was made without it; a second call does nothing.

        Raises:
            ZeusBSOConfigError: The trainer has another callback of this class.
        """
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        owner = getattr(trainer.train, self._OWNER, None)
        if owner is self:
            return
        if owner is not None and owner in trainer.callback_handler.callbacks:
            raise ZeusBSOConfigError(f"the trainer has two {type(self).__name__}: keep one")
        train = trainer.train

        @functools.wraps(train)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self not in trainer.callback_handler.callbacks:  # the script has removed the callback
                return train(*args, **kwargs)
            if self._trainer is not None:
                raise ZeusBSOOperationOrderError(
                    "the callback is in a training already: make a callback for each Trainer that trains at the same "
                    "time"
                )
            self._trainer = trainer
            try:
                return self._train(trainer, functools.partial(train, *args, **kwargs))
            finally:
                self._trainer = None

        vars(wrapped)[self._OWNER] = self
        vars(trainer)["train"] = wrapped

    # Hooks do not get the trainer, and later hooks run after the trainer has made its loader and counted its steps.
    # This hook does not ask the server yet, because a trainer may only evaluate.
    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Attach the callback to the trainer whose constructor calls this hook."""
        trainer = trainer_under_construction(state)
        if trainer is not None:
            self.attach(trainer)

    def _train(self, trainer: Trainer, train: functools.partial[Any]) -> Any:
        """Train by calling `train`, which holds the arguments of the call to `trainer.train`."""
        raise NotImplementedError

    def _trainer_of(self, state: TrainerState) -> Trainer:
        """Return the trainer whose training begins with this state.

        Raises:
            ZeusBSOOperationOrderError: The callback is not attached to this trainer.
        """
        if self._trainer is None or self._trainer.state is not state:
            raise not_attached()
        return self._trainer


def not_attached() -> ZeusBSOOperationOrderError:
    """Return the error for a trainer that the callback is not attached to."""
    return ZeusBSOOperationOrderError(
        "the callback came to this Trainer after its construction: call callback.attach(trainer) before "
        "trainer.train(), or give it to Trainer(callbacks=[…])"
    )


class HuggingFacePort:
    """A `TrainerPort` of Hugging Face's Trainer."""

    no_accumulation = None
    epochs_before = 0  # each `train` counts from 0
    is_in_last_epoch = False  # no callback adds epochs
    keeps_optimizers = True

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.control = trainer.control  # later each event's control, which another callback may replace
        self._args = args = trainer.args
        self.rank = args.process_index
        self.local_rank = args.local_process_index
        self.world_size = args.world_size
        self.machine = this_machine()
        # With tensor, context or sequence parallelism several processes work on the same data.
        per_process = trainer._train_batch_size * args.gradient_accumulation_steps
        self._processes = trainer.get_total_train_batch_size(args) // per_process
        self._devices_here = max(1, args.n_gpu)
        self.devices = self._processes * self._devices_here
        self._count: SampleCount | None = None
        self._first_step = 0  # above 0 in a training that finishes a run

    @property
    def gpu_indices(self) -> Sequence[int | str]:
        args = self._args
        if args.device.type != "cuda":
            return () if args.device.type == "cpu" else [args.device.type]
        if args.world_size > 1:
            # The launcher's number of processes on this machine, or else the number of GPUs that CUDA shows.
            here = LOCAL_WORLD_SIZE.text() or min(args.world_size, torch.cuda.device_count() or args.world_size)
            return range(int(here))
        return range(args.n_gpu) if args.n_gpu > 1 else [args.device.index or 0]

    @property
    def own_gpus(self) -> Sequence[str]:
        device, known = self._args.device, cuda_devices(torch)
        return () if device.type != "cuda" or known is None else known[device.index or 0 :][:1]

    @property
    def accumulation(self) -> int:
        return self._args.gradient_accumulation_steps

    def broadcast(self, thing: Any) -> Any:
        return broadcast_object_list([thing])[0]

    def all_gather(self, thing: Any) -> list[Any]:
        return cast("list[Any]", gather_object([thing]))

    def deliver(self, split: BatchSplit, patches: Patches, *, is_own: bool = False) -> None:
        """Set the arguments, and the size of every future train loader."""
        trainer, args = self._trainer, self._args
        # With split batches, accelerate divides the trainer's batch among all processes.
        shares = self._processes if trainer.accelerator.split_batches else 1
        patches.set_attribute(args, "per_device_train_batch_size", split.per_device * shares)
        patches.set_attribute(args, "gradient_accumulation_steps", split.accumulation)
        patches.set_attribute(args, "auto_find_batch_size", False)  # it could reduce the size during training
        patches.set_attribute(trainer, "_train_batch_size", args.train_batch_size)

        def resize(loader: Any) -> None:
            if _rebalancing_sampler(loader) is not None:  # it reads the arguments, and has uneven batches
                return
            size = split.per_device * self._devices_here
            # A sampler that states no size may have read it from the trainer's arguments; counting verifies the size.
            resize_loader(loader, size, patches, processes=self._processes, needs_size=False)
            # One process may load the batch of all processes, to divide it.
            fetched = self._processes if getattr(loader, "split_batches", False) else 1
            if not is_own and leave_out_lone_sample(loader, trainer.model, patches):
                self.say(LONE_SAMPLE)
            self._count = SampleCount(size * fetched, _FOLLOW, is_own=is_own)
            self._count.watch(loader, patches)

        def check_search(_: Any) -> None:
            if args.per_device_train_batch_size != split.per_device * shares:
                raise ZeusBSOConfigError(
                    "the search of hyperparameters sets per_device_train_batch_size, which the "
                    "ZeusBSOTrainerCallback chooses: leave it out of hp_space"
                )

        patches.extend(trainer, "_hp_search_setup", then=check_search)
        patches.extend(trainer, "get_train_dataloader", then=resize)

    def fingerprint(self) -> Fingerprint:
        """Return model, parameters, framework, and the optimizer that the script passes or the arguments name."""
        trainer = self._trainer
        given = trainer.optimizer
        name = str(getattr(self._args.optim, "value", self._args.optim)) if given is None else type(given).__name__
        # An `AcceleratedOptimizer` is left over from an earlier `train` of the same trainer.
        name = _OPTIMIZERS.get(trainer.callback_handler, name) if isinstance(given, AcceleratedOptimizer) else name
        _OPTIMIZERS[trainer.callback_handler] = name
        return Fingerprint(
            model=type(trainer.model).__name__,
            framework="transformers",
            optimizer=name,
            parameters=hash_of_parameters(trainer.model),
        )

    @property
    def _own_split(self) -> BatchSplit:
        """The split of the arguments, before `deliver`."""
        shares = self._processes if self._trainer.accelerator.split_batches else 1
        return BatchSplit(self._args.per_device_train_batch_size // shares, self.accumulation)

    def facts(self, patches: Patches, *, counts_samples: bool) -> TrainingFacts:
        args, data, own = self._args, self._trainer.train_dataset, self._own_split
        unit = self.devices * self.accumulation
        step_size = own.per_device * unit
        samples = samples_of(data)
        epochs = args.num_train_epochs
        if args.max_steps > 0:  # all steps over a stream count as one epoch
            steps = self._steps(own)
            epochs = args.max_steps / steps if steps else 1
        return TrainingFacts(
            script=script_name(sys.argv[0]),
            model=type(self._trainer.model).__name__,
            samples=samples,
            step_size=step_size,
            devices=self.devices,
            unit=unit,
            max_epochs=max(1, math.ceil(epochs)),
            data=name_of_data(data),
            obstacle=lambda split: self._shortage(split) or self._obstacle(own if counts_samples else split),
        )

    def follow_samples(self, default: int, split: BatchSplit, patches: Patches) -> tuple[StepScale, list[str]]:
        args: Any = self._args
        own, settings, counts_rows = self._own_split, StepSettings(patches), not has_own_loader(self._trainer)
        lengths = {each: self._batches(each) if counts_rows else None for each in (own, split)}
        scale = StepScale.between(own, split, lengths)
        if args.max_steps > 0:
            settings.limit(args, "max_steps", scale.steps)
        names = ["logging_steps"] if args.logging_strategy == "steps" else []
        names += ["save_steps"] if args.save_strategy == "steps" else []
        names += ["eval_steps", "eval_delay"] if args.eval_strategy == "steps" else []
        names += [] if self._has_own_schedule else ["warmup_steps"]
        names = [name for name in names if (getattr(args, name) or 0) >= 1]  # below 1, it is a share of the training
        # The best model is saved only if each checkpoint is written at an evaluation.
        is_multiple = args.load_best_model_at_end and {"save_steps", "eval_steps"} <= {*names}
        per_checkpoint = args.save_steps // args.eval_steps if is_multiple else 1
        for name in names:
            settings.interval(args, name, scale.steps)
        if is_multiple:
            patches.set_attribute(args, "save_steps", args.eval_steps * per_checkpoint)
        adapters: Any = getattr(self._trainer.model, "peft_config", None)
        holders: list[Any] = [vars(each) for each in adapters.values()] if isinstance(adapters, dict) else []
        for holder in (*holders, args.lr_scheduler_kwargs or {}):
            for name in _PHASES:
                if holder.get(name):
                    settings.interval(holder, name, scale.steps)
        return scale, settings.told

    def _batches(self, split: BatchSplit) -> int | None:
        """Return the batches of an epoch at this split; None for a stream."""
        samples, per_batch = samples_of(self._trainer.train_dataset), split.per_device * self.devices
        if samples is None:
            return None
        batches: int = samples // per_batch if self._args.dataloader_drop_last else math.ceil(samples / per_batch)
        return batches

    def _steps(self, split: BatchSplit) -> int | None:
        """Return the optimizer steps of an epoch at this split; None for a stream."""
        batches = self._batches(split)
        return None if batches is None else math.ceil(batches / split.accumulation)

    def _shortage(self, split: BatchSplit) -> str | None:
        """Return the reason why the data have no batch at this split, or the trainer refuses it; or None."""
        if split.per_device == 1 and getattr(self._trainer, "calculate_KL", False):
            return "KTO compares the samples of a device's batch, of which there is one"
        samples = samples_of(self._trainer.train_dataset)
        needed = split.per_device * split.accumulation * self.devices
        if has_own_loader(self._trainer) or samples is None or samples >= needed:
            return None
        return f"a batch is larger than the data of {samples} samples"

    def _obstacle(self, split: BatchSplit) -> str | None:
        """Return the reason why a training of this split's steps would never be evaluated, or None."""
        args, steps, limit = self._args, self._steps(split), self._args.max_steps
        if has_own_loader(self._trainer):
            return None
        total = limit if limit > 0 else steps and math.ceil(steps * args.num_train_epochs)
        if args.eval_delay and steps and total:
            counted = total if args.eval_strategy == "steps" else total / steps
            if args.eval_delay > counted:
                return f"the training ends before TrainingArguments(eval_delay={args.eval_delay:g}), after {counted:g}"
        if args.eval_strategy == "steps":
            if total and args.eval_steps is not None and args.eval_steps > total:
                return (
                    f"the whole training has {total} steps, fewer than TrainingArguments(eval_steps={args.eval_steps})"
                )
        elif steps and 0 < limit < steps:
            return f"TrainingArguments(max_steps={limit}) ends within the first epoch, which has {steps} steps"
        return None

    def modes(self, monitor: str) -> Mapping[str, Literal["max", "min"]]:
        """Return the mode in which the Trainer finds its best model, if it does so by the monitored metric."""
        best, is_greater = self._args.metric_for_best_model, self._args.greater_is_better
        names = {name.removeprefix(EVALUATION_PREFIX) for name in (best or "", monitor)}
        if is_greater is None or len(names) > 1:
            return {}
        return {f"TrainingArguments(greater_is_better={is_greater})": "max" if is_greater else "min"}

    def say(self, line: str) -> None:
        """Print the line, because the logger of transformers shows only warnings and errors."""
        if self.rank == 0:
            print(line, file=sys.stderr, flush=True)

    def log_hyperparameters(self, values: dict[str, str | int], patches: Patches) -> None:
        """Add the values to TensorBoard, Weights & Biases and MLflow, once their integrations have begun."""
        writers: dict[str, Callable[[Any], Any]] = {
            "tb_writer": lambda writer: [writer.add_text(name, str(value)) for name, value in values.items()],
            "_wandb": lambda wandb: wandb.config.update(values, allow_val_change=True),
            "_ml_flow": lambda mlflow: mlflow.log_params(values),
        }
        for callback in self._trainer.callback_handler.callbacks if self.rank == 0 else ():
            for name, write in writers.items():
                if hasattr(callback, name):
                    then = functools.partial(_log_to_tracker, callback, name, write)
                    patches.extend(callback, "on_train_begin", then=then)

    def delivered(self) -> set[float | None]:
        """Return the set of sizes that the parts of the train loader state; if the parts agree, it has one element."""
        loader = self._trainer.callback_handler.train_dataloader
        sampler = _rebalancing_sampler(loader)
        if sampler is None:
            return {size / self._devices_here for size in process_batch_sizes(loader, self._processes)}
        return {sampler.effective_batch_size / (self.devices * self.accumulation)}

    def check_samples(self) -> None:
        if self._count is not None:
            self._count.check()

    def end_counts(self) -> None:
        if self._count is not None:
            self._count.end()

    def optimizers(self) -> tuple[Sequence[Any], Sequence[Any]]:
        return [self._trainer.optimizer], [self._trainer.lr_scheduler]

    def dependence(self) -> tuple[bool, Sequence[Any]]:
        # The arguments hold the rate as a number, and the trainer makes its schedulers for the steps of the training.
        return False, [self._trainer.lr_scheduler] if self._has_own_schedule else []

    @property
    def _has_own_schedule(self) -> bool:
        """Whether the script has made the scheduler before the training."""
        trainer = self._trainer
        is_given = trainer.lr_scheduler is not None and not trainer._created_lr_scheduler
        return is_given and type(trainer).create_scheduler is Trainer.create_scheduler

    def log(self, metrics: dict[str, float]) -> None:
        """Pass the metrics to all callbacks that log, except to those that print them on the console."""
        should_log, handler = self.control.should_log, self._trainer.callback_handler
        trackers = Patches()
        quiet = [each for each in handler.callbacks if not isinstance(each, (PrinterCallback, ProgressCallback))]
        trackers.set_attribute(handler, "callbacks", quiet)
        try:
            handler.on_log(self._args, self._trainer.state, self.control, metrics)
        finally:
            trackers.undo()
        self.control.should_log = should_log  # `on_log` cancels a request to log that is still open

    def epochs_trained(self, max_epochs: int, *, has_fractions: bool) -> float:
        """Return the epochs trained so far; over a stream, `max_epochs` × the trained share of all steps.

        When a stream ends, the Trainer begins it again, and counts more epochs than it trains. Without
        `has_fractions`, and at the end of the training, an epoch that a limit cuts short counts as a whole epoch.
        """
        state = self._trainer.state
        if not has_length(self._trainer.callback_handler.train_dataloader):
            return max_epochs * (state.global_step - self._first_step) / (state.max_steps - self._first_step)
        is_cut = not has_fractions or state.global_step >= state.max_steps
        return float(math.ceil(state.epoch) if is_cut else state.epoch)

    def stop(self) -> None:
        self.control.should_training_stop = True

    @property
    def no_continuation(self) -> str | None:
        trainer = self._trainer
        if trainer.is_fsdp_enabled:
            return "FSDP sets up its model once"
        # The Trainer keeps the script's own scheduler, whose rates would continue from the end of its schedule.
        if self._has_own_schedule:
            return "the script's own learning rate scheduler is made for one training"
        return None

    @property
    def model(self) -> Any:
        return self._trainer.model

    @property
    def given_model(self) -> Any:
        return self._trainer.model if self._trainer.model_init is None else None

    def train_again(self, epochs: int, patches: Patches, *, keeps_state: bool) -> None:
        """Let the next call of `train` train the present model for `epochs`, and continue the numbers of steps."""
        trainer, args = self._trainer, self._args
        if args.max_steps <= 0:
            patches.set_attribute(args, "num_train_epochs", epochs)
        patches.set_attribute(trainer, "model_init", None)  # which would make another model
        if not keeps_state:
            vars(trainer)["model_wrapped"] = trainer.model
            if trainer.optimizer is not None:
                trainer.optimizer.state.clear()
            for stopper in trainer.callback_handler.callbacks:
                if isinstance(stopper, EarlyStoppingCallback):
                    stopper.early_stopping_patience_counter = 0
        before = trainer.state

        def number_on() -> None:
            # Numbers of checkpoints and logs must rise, because the Trainer treats the highest number as the latest.
            state, steps = trainer.state, before.global_step
            self._first_step = steps
            state.global_step, state.max_steps = steps, state.max_steps + steps
            state.log_history[:0] = before.log_history
            trainer._globalstep_last_logged = steps

        patches.extend(trainer.callback_handler, "on_train_begin", first=number_on)


def checkpoint_of(resume_from_checkpoint: Any = None, *_: Any, **__: Any) -> str | bool | None:
    """Return the checkpoint among the arguments of `Trainer.train`."""
    return cast("str | bool | None", resume_from_checkpoint)


def from_start(train: functools.partial[Any]) -> functools.partial[Any]:
    """Return a call of `Trainer.train` with the same arguments, but without a checkpoint."""
    others = {name: value for name, value in train.keywords.items() if name != "resume_from_checkpoint"}
    return functools.partial(train.func, None, *train.args[1:], **others)


def can_find_size(trainer: Trainer) -> bool:
    """Return True if the trainer can train again in this process after it has run out of memory."""
    return bool(trainer.args.world_size == 1 and not trainer.is_fsdp_enabled)


def saved_in_checkpoint(
    checkpoint: str | os.PathLike[str] | bool, args: TrainingArguments, key: str
) -> Mapping[str, Any] | None:
    """Return the value of `checkpointed` under this key in a checkpoint's folder; None if there is no value.

    For True as `checkpoint`, read the latest checkpoint in the trainer's output folder.
    """
    find_latest: Callable[[str | None], str | None] = get_last_checkpoint  # transformers leaves out the annotations
    folder = find_latest(args.output_dir) if isinstance(checkpoint, bool) else checkpoint
    if folder is None:
        return None
    try:
        state = json.loads(Path(folder, TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:  # the trainer will raise a clearer error
        return None
    saved: Mapping[str, Any] | None = (state.get("stateful_callbacks") or {}).get(key)
    return saved


def samples_of(data: Any) -> int | None:
    """Return the number of samples in a data set, or in a mapping of data sets; None for a stream."""
    if isinstance(data, Mapping):
        parts = [samples_of(part) for part in data.values()]
        return None if None in parts else sum(cast("list[int]", parts))
    return len(data) if isinstance(data, Sized) else None


def has_own_loader(trainer: Trainer) -> bool:
    """Return True if the trainer's class makes its train loader itself, perhaps not from `train_dataset`."""
    names = ("get_train_dataloader", "_get_train_sampler")
    return any(getattr(type(trainer), name) is not getattr(Trainer, name) for name in names)


def early_end(trainer: Trainer) -> str | None:
    """Return the rule that ended the training before its last epoch, in words; None if no rule is known."""
    for each in trainer.callback_handler.callbacks:
        if isinstance(each, EarlyStoppingCallback) and each.early_stopping_patience_counter >= (
            each.early_stopping_patience
        ):
            return f"EarlyStoppingCallback(early_stopping_patience={each.early_stopping_patience})"
    if 0 < trainer.args.max_steps <= trainer.state.global_step:
        return f"max_steps={trainer.args.max_steps}"
    return "control.should_training_stop" if trainer.control.should_training_stop else None


def checkpointed(state: TrainerState) -> dict[str, Any]:
    """Return the state of callbacks, by name, that the trainer's checkpoints contain."""
    return cast("dict[str, Any]", state.stateful_callbacks)  # annotated as the list that the constructor takes


def log(trainer: Trainer, metrics: dict[str, float]) -> None:
    """Log metrics as the trainer does, with `Trainer.log`: overriding methods may average between two calls."""
    control = trainer.control
    should_log = control.should_log
    Trainer.log(trainer, metrics)
    control.should_log = should_log  # `log` cancels a request to log that is still open


def trainer_under_construction(state: TrainerState) -> Trainer | None:
    """Return the trainer with this state whose constructor runs; compare states, as trainers may share arguments."""
    owners = (frame.f_locals.get("self") for frame, _ in traceback.walk_stack(sys._getframe()))
    return next((each for each in owners if isinstance(each, Trainer) and getattr(each, "state", None) is state), None)


def _log_to_tracker(callback: Any, name: str, write: Callable[[Any], Any], _: Any) -> None:
    """Write hyperparameters to the tracker in this attribute of an integration's callback."""
    try:
        if getattr(callback, name) is not None:
            write(getattr(callback, name))
    except Exception as error:  # MLflow refuses to change a parameter
        _logger.warning("%s did not take the batch size: %s", type(callback).__name__, error)


def _rebalancing_sampler(loader: Any) -> Any:
    """Return the loader's sampler with batches of uneven sizes (``train_sampling_strategy="batch_rebalance"``)."""
    samplers = nested_samplers(getattr(loader, "batch_sampler", None))
    return next((each for each in samplers if hasattr(each, "effective_batch_size")), None)


def warn_of_in_batch_negatives(trainer: Trainer) -> None:
    """Warn of losses that depend on the batch size."""
    names = sorted({type(loss).__name__ for loss in _losses(getattr(trainer, "loss", None))})
    found = [name for name in names if any(part in name for part in _IN_BATCH)]
    if found and trainer.args.process_index == 0:
        _logger.warning(
            "%s takes the other samples of a batch as negative examples, so that the batch size changes what is "
            "trained: choose batch_sizes that you would accept all, and a monitor that is computed without batches, "
            "such as an evaluator's (eval_loss of different sizes cannot be compared)",
            " and ".join(found),
        )


def _losses(loss: Any) -> Iterator[Any]:
    """Yield a loss or the losses of several data sets, and the losses that these wrap."""
    if isinstance(loss, dict):
        for each in loss.values():
            yield from _losses(each)
    elif loss is not None:
        yield loss
        yield from _losses(getattr(loss, "loss", None))
