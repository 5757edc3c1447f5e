"""Hugging Face's Trainer as the callbacks need it: its private attributes and the patches of it stand here.

`_attach.py` has the wrapping of `Trainer.train`. `tests/test_huggingface_contract.py` checks all of them against the
transformers and accelerate that are installed.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from accelerate.utils import broadcast_object_list, gather_object
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from zeus_plugins.training.environment import LOCAL_WORLD_SIZE
from zeus_plugins.training.loaders import BatchSplit, process_batch_sizes, resize_process_loader
from zeus_plugins.training.patches import Patches

__all__ = [
    "HuggingFacePort",
    "afterwards",
    "arguments_of_train",
    "beforehand",
    "checkpointed",
    "log",
    "processes_here",
    "saved_in_checkpoint",
    "trainer_under_construction",
]


class HuggingFacePort:
    """A `TrainerPort` of Hugging Face's Trainer.

    Args:
        trainer: The trainer, before `train` has done anything.

    Attributes:
        control: That of the present event; another callback may put one in place of the trainer's.
    """

    no_accumulation = None
    keeps_optimizers = True

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.control = trainer.control
        self._args = args = trainer.args
        self.rank = args.process_index
        self.local_rank = args.local_process_index
        self.world_size = args.world_size
        self.spans_nodes = args.world_size > processes_here(args)
        # Tensor, context and sequence parallelism have several processes work on the same data.
        per_process = trainer._train_batch_size * args.gradient_accumulation_steps
        self._processes = trainer.get_total_train_batch_size(args) // per_process
        self._devices_here = max(1, args.n_gpu)
        self.devices = self._processes * self._devices_here

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
        # With split batches, accelerate deals the trainer's batch out to all processes.
        shares = self._processes if trainer.accelerator.split_batches else 1
        patches.set_attribute(args, "per_device_train_batch_size", split.per_device * shares)
        patches.set_attribute(args, "gradient_accumulation_steps", split.accumulation)
        patches.set_attribute(args, "auto_find_batch_size", False)  # it would shrink the size within the training
        patches.set_attribute(trainer, "_train_batch_size", args.train_batch_size)

        def resize(loader: Any) -> None:
            if _rebalancing_sampler(loader) is None:  # that one follows the arguments
                resize_process_loader(loader, split.per_device * self._devices_here, self._processes, patches)

        afterwards(trainer, "get_train_dataloader", resize, patches)

    def delivered(self) -> set[float | None]:
        """Samples per batch and device that the parts of the present train loader would deliver."""
        loader = self._trainer.callback_handler.train_dataloader
        sampler = _rebalancing_sampler(loader)
        if sampler is None:
            return {size / self._devices_here for size in process_batch_sizes(loader, self._processes)}
        return {sampler.effective_batch_size / (self.devices * self.accumulation)}

    def optimizers(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """The optimizer and its scheduler."""
        return [self._trainer.optimizer], [self._trainer.lr_scheduler]

    def log(self, metrics: dict[str, float]) -> None:
        """Have all callbacks that log take note."""
        self._trainer.callback_handler.on_log(self._args, self._trainer.state, self.control, metrics)

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


def trainer_under_construction(args: TrainingArguments) -> Trainer | None:
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer) and getattr(owner, "args", None) is args:
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


def afterwards(trainer: Trainer, name: str, then: Callable[[Any], None], patches: Patches) -> None:
    """Do something with what a method of the trainer has returned, each time."""
    method = getattr(trainer, name)

    @functools.wraps(method)
    def extended(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        then(result)
        return result

    patches.set_attribute(trainer, name, extended)


def processes_here(args: TrainingArguments) -> int:
    """Processes of the training on this machine, as its launcher has said; without its word, all of them."""
    return int(LOCAL_WORLD_SIZE.text() or args.world_size)


def _rebalancing_sampler(loader: Any) -> Any:
    """The sampler that makes a step's batches of different sizes (``train_sampling_strategy="batch_rebalance"``)."""
    sampler = getattr(loader, "batch_sampler", None)
    while sampler is not None and not hasattr(sampler, "effective_batch_size"):
        sampler = getattr(sampler, "batch_sampler", None)
    return sampler
