"""Hugging Face's Trainer as the callbacks need it: its private attributes and the patches of it stand here.

`_attach.py` has the wrapping of `Trainer.train`. `tests/test_huggingface_contract.py` checks all of them against the
transformers and accelerate that are installed.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import broadcast_object_list, gather_object
from transformers import EarlyStoppingCallback, ProgressCallback, Trainer, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from zeus_plugins.energy.visible import cuda_devices
from zeus_plugins.huggingface._deepspeed import engine_batch_sizes, resize_deepspeed
from zeus_plugins.huggingface._relatives import batches_per_fetch, generation_unit, resize_generations
from zeus_plugins.protocol import Fingerprint
from zeus_plugins.training.counting import SampleCount
from zeus_plugins.training.defaults import TrainingFacts, script_name
from zeus_plugins.training.environment import LOCAL_WORLD_SIZE
from zeus_plugins.training.loaders import BatchSplit, process_batch_sizes, resize_process_loader
from zeus_plugins.training.patches import Patches
from zeus_plugins.training.placement import this_machine

_logger = logging.getLogger("zeus_plugins")

_FOLLOW = (
    "make the loader in get_train_dataloader() with self._train_batch_size, or have its sampler read batch_size in "
    "each __iter__"
)


class HuggingFacePort:
    """A `TrainerPort` of Hugging Face's Trainer.

    Args:
        trainer: The trainer, before `train` has done anything.

    Attributes:
        control: That of the present event; another callback may put one in place of the trainer's.
    """

    no_accumulation = None
    keeps_optimizers = True
    schedule_remedy = "Let the trainer make the scheduler (lr_scheduler_type), or override create_scheduler"

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.control = trainer.control
        self._args = args = trainer.args
        self.rank = args.process_index
        self.local_rank = args.local_process_index
        self.world_size = args.world_size
        self.machine = this_machine()
        # Tensor, context and sequence parallelism have several processes work on the same data.
        per_process = trainer._train_batch_size * args.gradient_accumulation_steps
        self._processes = trainer.get_total_train_batch_size(args) // per_process
        self._devices_here = max(1, args.n_gpu)
        self.devices = self._processes * self._devices_here
        self._count: SampleCount | None = None

    @property
    def gpu_indices(self) -> Sequence[int]:
        """The GPUs of this machine that train, as indices into the visible ones; none on another accelerator."""
        args = self._args
        if args.device.type != "cuda":
            return ()
        if args.world_size > 1:
            return range(processes_here(args))
        return range(args.n_gpu) if args.n_gpu > 1 else [args.device.index or 0]

    @property
    def own_gpus(self) -> Sequence[str]:
        """The UUID of the GPU that this process trains on, if CUDA tells it."""
        device, known = self._args.device, cuda_devices(torch)
        return () if device.type != "cuda" or known is None else known[device.index or 0 :][:1]

    @property
    def accumulation(self) -> int:
        """Batches per optimizer step, as is in force now."""
        return self._args.gradient_accumulation_steps

    def broadcast(self, thing: Any) -> Any:
        """Return what process 0 passes."""
        return broadcast_object_list([thing])[0]

    def all_gather(self, thing: Any) -> list[Any]:
        """Return what each process passes."""
        return cast("list[Any]", gather_object([thing]))

    def deliver(self, split: BatchSplit, patches: Patches) -> None:
        """Set the arguments, and the size of every train loader there will be."""
        trainer, args = self._trainer, self._args
        resize_generations(trainer, split, self._processes, patches)
        # With split batches, accelerate deals the trainer's batch out to all processes.
        shares = self._processes if trainer.accelerator.split_batches else 1
        patches.set_attribute(args, "per_device_train_batch_size", split.per_device * shares)
        patches.set_attribute(args, "gradient_accumulation_steps", split.accumulation)
        patches.set_attribute(args, "auto_find_batch_size", False)  # it would shrink the size within the training
        patches.set_attribute(trainer, "_train_batch_size", args.train_batch_size)

        def resize(loader: Any) -> None:
            if _rebalancing_sampler(loader) is not None:  # that one follows the arguments, its batches being uneven
                return
            size = split.per_device * self._devices_here * batches_per_fetch(trainer)
            resize_process_loader(loader, size, self._processes, patches)
            # One process may fetch the batch of all, to deal it out.
            fetched = self._processes if getattr(loader, "split_batches", False) else 1
            self._count = SampleCount(size * fetched, _FOLLOW)
            self._count.watch(loader, patches)

        afterwards(trainer, "get_train_dataloader", resize, patches)
        if trainer.is_deepspeed_enabled:
            resize_deepspeed(trainer, split, self.devices, patches)

    def fingerprint(self) -> Fingerprint:
        """Model, framework, and the optimizer that was passed or is named by the arguments."""
        trainer = self._trainer
        given = trainer.optimizer
        optimizer = str(getattr(self._args.optim, "value", self._args.optim))
        return Fingerprint(
            model=type(trainer.model).__name__,
            framework="transformers",
            optimizer=optimizer if given is None else type(given).__name__,
        )

    def facts(self, patches: Patches) -> TrainingFacts:
        """The facts that the arguments and the data tell."""
        args, data = self._args, self._trainer.train_dataset
        shares = self._processes if self._trainer.accelerator.split_batches else 1
        unit = self.devices * self.accumulation
        step_size = args.per_device_train_batch_size // shares * unit
        samples = samples_of(data)
        epochs = args.num_train_epochs
        if args.max_steps > 0:  # of a stream, the Trainer takes all steps for one epoch
            epochs = args.max_steps * step_size / samples if samples else 1
        ends_by_steps = args.max_steps > 0 and args.eval_strategy != "steps" and samples is not None
        return TrainingFacts(
            script=script_name(sys.argv[0]),
            model=type(self._trainer.model).__name__,
            samples=samples,
            step_size=step_size,
            devices=self.devices,
            unit=math.lcm(unit, generation_unit(self._trainer)),
            max_epochs=max(1, int(epochs)),
            least_size=-(-(samples or 0) // args.max_steps) if ends_by_steps else 1,
        )

    def say(self, line: str) -> None:
        """Print it: the logger of transformers shows nothing below warnings."""
        if self.rank == 0:
            print(line, file=sys.stderr, flush=True)

    def log_hyperparameters(self, values: dict[str, str | int], patches: Patches) -> None:
        """Tell the integrations with a place for them, once they have begun: TensorBoard, Weights & Biases, MLflow."""
        ways: dict[str, Callable[[Any], Any]] = {
            "tb_writer": lambda writer: [writer.add_text(name, str(value)) for name, value in values.items()],
            "_wandb": lambda wandb: wandb.config.update(values, allow_val_change=True),
            "_ml_flow": lambda mlflow: mlflow.log_params(values),
        }
        for callback in self._trainer.callback_handler.callbacks if self.rank == 0 else ():
            for name, tell in ways.items():

                def told(_: Any, owner: Any = callback, name: str = name, tell: Callable[[Any], Any] = tell) -> None:
                    try:
                        if getattr(owner, name) is not None:
                            tell(getattr(owner, name))
                    except Exception as error:  # MLflow takes another value of a parameter for a mistake
                        _logger.warning("%s was not told the batch size: %s", type(owner).__name__, error)

                if hasattr(callback, name):
                    afterwards(callback, "on_train_begin", told, patches)

    def show_progress(self, text: str, patches: Patches) -> None:
        """Put it behind the bar, which is made after all other callbacks have heard of the training's begin."""
        for callback in self._trainer.callback_handler.callbacks:
            if not isinstance(callback, ProgressCallback):
                continue

            def show(_: Any, callback: ProgressCallback = callback) -> None:
                if callback.training_bar is not None:
                    callback.training_bar.set_postfix_str(f"zeus={text}")

            show(None)
            if callback.training_bar is None:
                afterwards(callback, "on_train_begin", show, patches)

    def delivered(self) -> set[float | None]:
        """Samples per batch and device that the parts of the present train loader would deliver."""
        loader = self._trainer.callback_handler.train_dataloader
        sampler = _rebalancing_sampler(loader)
        if sampler is None:
            shares = self._devices_here * batches_per_fetch(self._trainer)
            engine_sizes = engine_batch_sizes(self._trainer, self.devices, self.accumulation)
            return {size / shares for size in process_batch_sizes(loader, self._processes)} | engine_sizes
        return {sampler.effective_batch_size / (self.devices * self.accumulation)}

    def check_samples(self) -> None:
        """Compare batches of different sizes with what was set."""
        if self._count is not None:
            self._count.check()

    def optimizers(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """The optimizer and its scheduler."""
        return [self._trainer.optimizer], [self._trainer.lr_scheduler]

    def schedules(self) -> list[tuple[Any, float | None]]:
        """The scheduler, and how often it is stepped in all."""
        return [(self._trainer.lr_scheduler, self._trainer.state.max_steps)]

    def log(self, metrics: dict[str, float]) -> None:
        """Have all callbacks that log take note."""
        should_log = self.control.should_log
        self._trainer.callback_handler.on_log(self._args, self._trainer.state, self.control, metrics)
        self.control.should_log = should_log  # logging takes back a request that the trainer may still have to follow

    def stop(self) -> None:
        """Have `train` end."""
        self.control.should_training_stop = True


def arguments_of_train(
    resume_from_checkpoint: Any = None, trial: Any = None, *_: Any, **__: Any
) -> tuple[str | bool | None, Any]:
    """The arguments of `Trainer.train` that concern a trial: the checkpoint, and the trial of a search."""
    return resume_from_checkpoint, trial


def saved_in_checkpoint(
    checkpoint: str | os.PathLike[str] | bool, args: TrainingArguments, key: str
) -> Mapping[str, Any] | None:
    """The value that `checkpointed` had under this key when a checkpoint was saved, or None.

    Args:
        checkpoint: Its folder; True is the latest of the trainer's own folder.
        args: The trainer's.
        key: The name.
    """
    find_latest: Callable[[str | None], str | None] = get_last_checkpoint  # it has no annotations
    folder = find_latest(args.output_dir) if isinstance(checkpoint, bool) else checkpoint
    if folder is None:
        return None
    try:
        state = json.loads(Path(folder, TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:  # the trainer says so better
        return None
    saved: Mapping[str, Any] | None = (state.get("stateful_callbacks") or {}).get(key)
    return saved


def samples_of(data: Any) -> int | None:
    """Samples of an epoch over a data set, or over several in a mapping; None for a stream."""
    if isinstance(data, Mapping):
        parts = [samples_of(part) for part in data.values()]
        return None if None in parts else sum(cast("list[int]", parts))
    return len(data) if isinstance(data, Sized) else None


def early_end(trainer: Trainer) -> str | None:
    """The rule by which a training has ended before its last epoch, in words; None where none is known."""
    for each in trainer.callback_handler.callbacks:
        if isinstance(each, EarlyStoppingCallback) and each.early_stopping_patience_counter >= (
            each.early_stopping_patience
        ):
            return f"EarlyStoppingCallback(early_stopping_patience={each.early_stopping_patience})"
    if 0 < trainer.args.max_steps <= trainer.state.global_step:
        return f"TrainingArguments(max_steps={trainer.args.max_steps})"
    return "control.should_training_stop" if trainer.control.should_training_stop else None


def checkpointed(state: TrainerState) -> dict[str, Any]:
    """The part of the trainer's checkpoints that is the callbacks', by name."""
    return cast("dict[str, Any]", state.stateful_callbacks)  # a list is what the trainer's constructor makes it of


def log(trainer: Trainer, metrics: dict[str, float]) -> None:
    """Log metrics beside what the trainer itself logs."""
    # Logging takes back a request to log, which the trainer may still have to follow. A subclass's own `log` is left
    # out: some take their averages of the training from one call to the next.
    control = trainer.control
    should_log = control.should_log
    Trainer.log(trainer, metrics)
    control.should_log = should_log


def trainer_under_construction(state: TrainerState) -> Trainer | None:
    """The trainer that has this state, and whose constructor runs; its arguments may be those of another around it."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer) and getattr(owner, "state", None) is state:
            return owner
        frame = frame.f_back
    return None


def beforehand(trainer: Trainer, name: str, first: Callable[[], None], patches: Patches) -> None:
    """Do something before a method of the trainer runs, each time."""
    method = getattr(trainer, name)

    @functools.wraps(method)
    def extended(*args: Any, **kwargs: Any) -> Any:
        first()
        return method(*args, **kwargs)

    patches.set_attribute(trainer, name, extended)


def afterwards(owner: Any, name: str, then: Callable[[Any], None], patches: Patches) -> None:
    """Do something with what a method of a trainer or of its callback has returned, each time."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def extended(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        then(result)
        return result

    patches.set_attribute(owner, name, extended)


def processes_here(args: TrainingArguments) -> int:
    """Processes of the training on this machine: as its launcher says, else as many as CUDA shows GPUs, at most all."""
    return int(LOCAL_WORLD_SIZE.text() or min(args.world_size, torch.cuda.device_count() or args.world_size))


def _rebalancing_sampler(loader: Any) -> Any:
    """The sampler that makes a step's batches of different sizes (``train_sampling_strategy="batch_rebalance"``)."""
    sampler = getattr(loader, "batch_sampler", None)
    while sampler is not None and not hasattr(sampler, "effective_batch_size"):
        sampler = getattr(sampler, "batch_sampler", None)
    return sampler
