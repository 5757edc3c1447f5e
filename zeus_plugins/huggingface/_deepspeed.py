"""DeepSpeed's own configuration beside the Trainer's arguments: the batch sizes and learning rates in it.

Transformers fills its ``"auto"`` values when the arguments are made, so that all of them are numbers by now.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers import Trainer

from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.training.loaders import BatchSplit
from zeus_plugins.training.patches import Patches

_MICRO, _ACCUMULATION, _TOTAL = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
# Of DeepSpeed's optimizers and schedulers, whose other settings are relative to these.
_RATES = ("lr", "warmup_min_lr", "warmup_max_lr", "cycle_min_lr", "cycle_max_lr", "lr_range_test_min_lr")


def check_deepspeed(trainer: Trainer, *, scales_rates: bool) -> None:
    """Refuse a DeepSpeed training whose numbers contradict each other, or whose rates could not be scaled.

    Raises:
        ZeusBSOConfigError: It is one.
    """
    # As transformers itself says in the midst of `train`.
    lines = [line.removeprefix("- ds ") for line in _configuration(trainer).mismatches]
    numbers = "; ".join(line for line in lines if line.startswith((_MICRO, _ACCUMULATION, _TOTAL)))
    if numbers:
        raise ZeusBSOConfigError(
            f"DeepSpeed's configuration and TrainingArguments contradict each other ({numbers}): set {_MICRO}, "
            f'{_ACCUMULATION} and {_TOTAL} to "auto"'
        )
    if scales_rates and type(trainer).create_optimizer is not Trainer.create_optimizer:
        raise ZeusBSOConfigError(
            "with DeepSpeed lr_scaling changes TrainingArguments.learning_rate and the rates of DeepSpeed's "
            f"configuration, which {type(trainer).__name__}.create_optimizer need not read: leave lr_scaling out"
        )


def resize_deepspeed(trainer: Trainer, split: BatchSplit, devices: int, patches: Patches) -> None:
    """Have DeepSpeed's engine, which the next training makes, count on batches of this size.

    Args:
        trainer: The trainer.
        split: Samples per batch of one device, and accumulated batches per step.
        devices: Number of devices that train on different data.
        patches: Takes note of the changes.
    """
    plugin = trainer.accelerator.state.deepspeed_plugin
    # A copy, in which the training fills in what follows from its number of steps, too.
    configuration = copy.deepcopy(plugin.hf_ds_config.config)
    configuration[_MICRO] = split.per_device
    configuration[_ACCUMULATION] = split.accumulation
    configuration[_TOTAL] = split.per_device * split.accumulation * devices
    patches.set_attribute(plugin.hf_ds_config, "config", configuration)
    patches.set_attribute(plugin, "deepspeed_config", configuration)


def scale_deepspeed_rates(trainer: Trainer, factor: float, patches: Patches) -> None:
    """Scale the rates of which optimizer and scheduler are made, after `resize_deepspeed`."""
    patches.set_attribute(trainer.args, "learning_rate", trainer.args.learning_rate * factor)
    configuration = _configuration(trainer).config
    for part in ("optimizer", "scheduler"):
        settings = configuration.get(part, {}).get("params", {})
        for name in set(_RATES).intersection(settings):
            rates = settings[name]
            settings[name] = [rate * factor for rate in rates] if isinstance(rates, list) else rates * factor


def engine_batch_sizes(trainer: Trainer, devices: int, accumulation: int) -> set[float | None]:
    """Samples per batch and device by each of the engine's own numbers; none without an engine."""
    engine: Any = trainer.deepspeed
    if engine is None:
        return set()
    return {float(engine.train_micro_batch_size_per_gpu()), engine.train_batch_size() / (devices * accumulation)}


def _configuration(trainer: Trainer) -> Any:
    return trainer.accelerator.state.deepspeed_plugin.hf_ds_config
