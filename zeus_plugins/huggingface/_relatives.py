"""Trainers of other packages that are built on the Hugging Face one: TRL's that generate, sentence-transformers'.

They are known by their attributes: none of these packages is imported.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from transformers import Trainer

from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.training.loaders import BatchSplit
from zeus_plugins.training.patches import Patches

_logger = logging.getLogger("zeus_plugins")

# Parts of the names of losses that take the other samples of a batch as negative examples.
_IN_BATCH = ("Negatives", "GIST", "MegaBatch")


def batches_per_fetch(trainer: Trainer) -> int:
    """Batches of the training that its loader delivers at once: TRL's GRPO and RLOO generate for several of them."""
    return getattr(trainer.args, "steps_per_generation", None) or 1


def generation_unit(trainer: Trainer) -> int:
    """The number whose multiples are sizes that tear no group of completions apart; 1 where none are generated."""
    args: Any = trainer.args
    if not hasattr(args, "steps_per_generation"):
        return 1
    has_whole_steps = args.steps_per_generation % args.gradient_accumulation_steps == 0
    return int(args.num_generations * (1 if has_whole_steps else args.gradient_accumulation_steps))


def check_generations(trainer: Trainer, batch_sizes: Sequence[int]) -> None:
    """Refuse sizes that would tear groups of completions apart.

    Raises:
        ZeusBSOConfigError: There are such sizes among these.
    """
    unit = generation_unit(trainer)
    torn = [size for size in batch_sizes if size % unit]
    if torn:
        args: Any = trainer.args
        raise ZeusBSOConfigError(
            f"{type(trainer).__name__} generates num_generations={args.num_generations} completions for each prompt, "
            f"and the batch sizes {torn} hold no whole number of such groups: choose multiples of {unit}"
        )


def resize_generations(trainer: Trainer, split: BatchSplit, processes: int, patches: Patches) -> None:
    """Have a trainer that generates do so for batches of this size, before its accumulation is set."""
    args: Any = trainer.args
    if not hasattr(args, "steps_per_generation"):
        return
    # As many optimizer steps at once as before.
    steps = split.accumulation * args.steps_per_generation // args.gradient_accumulation_steps
    patches.set_attribute(args, "steps_per_generation", steps)
    patches.set_attribute(args, "generation_batch_size", split.per_device * processes * steps)


def warn_of_in_batch_negatives(trainer: Trainer) -> None:
    """Warn of a loss that the batch size is a part of, once for each training."""
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
    """A loss, those of several data sets, and those that it wraps."""
    if isinstance(loss, dict):
        for each in loss.values():
            yield from _losses(each)
    elif loss is not None:
        yield loss
        yield from _losses(getattr(loss, "loss", None))
