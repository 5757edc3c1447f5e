"""Settings and schedules that count steps: a script means steps at its own batch size, and a trial may have another.

A trial has the same samples between two events: limits are rounded up and intervals down, so that everything that
happens at the own size happens at each size. A schedule whose length does not depend on the batch size was made for the
own size; each step of the trial then advances it by several of its steps, or by none.

This module does not import torch: it recognises schedulers by their attributes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from zeus_plugins.training.batches import BatchSplit
from zeus_plugins.training.lr_scaling import SCHEDULER_RATES
from zeus_plugins.training.patches import Patches

# Steps at which two functions of the step are compared: so dense that functions of different lengths differ at one.
_PROBES = sorted({int(1.1**power) for power in range(170)})
_NOT_COMPARED = {*SCHEDULER_RATES, "optimizer", "lr_lambdas", "_schedulers"}


@dataclass(frozen=True)
class StepScale:
    """The trial's batches and optimizer steps for each one at the script's own size."""

    batches: Fraction = Fraction(1)
    steps: Fraction = Fraction(1)

    @classmethod
    def between(cls, own: BatchSplit, new: BatchSplit, lengths: Mapping[BatchSplit, int | None]) -> StepScale:
        """Return the scale of two splits, given the batches of an epoch at each; without them, by the samples alone."""
        mine, theirs = lengths[own], lengths[new]
        if not mine or not theirs:
            samples = Fraction(own.per_device, new.per_device)
            return cls(samples, samples * own.accumulation / new.accumulation)
        return cls(
            Fraction(theirs, mine),
            Fraction(math.ceil(theirs / new.accumulation), math.ceil(mine / own.accumulation)),
        )


@dataclass
class StepSettings:
    """Changes of a script's settings, which `patches` undoes; `told` has them in words."""

    patches: Patches
    told: list[str] = field(default_factory=list)

    def limit(self, target: object, name: str, scale: Fraction) -> None:
        """Scale a limit, such as the number of steps of the whole training."""
        self._set(target, name, lambda steps: math.ceil(steps * scale))

    def interval(self, target: object, name: str, scale: Fraction) -> None:
        """Scale an interval, such as the number of steps between two evaluations, or an item of a dictionary."""
        self._set(target, name, lambda steps: max(1, math.floor(steps * scale)))

    def _set(self, target: object, name: str, scaled: Callable[[int], int]) -> None:
        before = int(target[name] if isinstance(target, dict) else getattr(target, name))
        count = scaled(before)
        if count == before:
            return
        self.told.append(f"{name.removeprefix('_')} {before} → {count}")
        if isinstance(target, dict):
            self.patches.set_item(target, name, count)
        else:
            self.patches.set_attribute(target, name, count)


def length_of(scheduler: Any) -> object:
    """Return what two schedulers of equal length have in common: all numbers but rates, and values of functions."""
    numbers = {name: _plain(value) for name, value in vars(scheduler).items() if name not in _NOT_COMPARED}
    factors = [[_value(factor, step) for step in _PROBES] for factor in getattr(scheduler, "lr_lambdas", ())]
    return numbers, factors, [length_of(each) for each in getattr(scheduler, "_schedulers", ())]


def drive_by_samples(scheduler: Any, scale: Fraction, patches: Patches) -> None:
    """Let each `step` of a scheduler advance it by the steps that the script's own size makes for the same samples.

    The object gets a subclass of its class, because an attribute would enter its `state_dict`. The number of steps does
    enter it, so that a resumed training continues at the same place.
    """
    kind: Any = type(scheduler)

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        if args or kwargs:  # the script names the step or a metric
            kind.step(self, *args, **kwargs)
            return
        before, self.zeus_steps = self.zeus_steps, self.zeus_steps + 1
        for _ in range(math.floor(self.zeus_steps / scale) - math.floor(before / scale)):
            if not _has_ended(self):
                kind.step(self)

    patches.set_attribute(scheduler, "zeus_steps", 0)
    patches.set_attribute(scheduler, "__class__", type(kind.__name__, (kind,), {"step": step}))


def _has_ended(scheduler: Any) -> bool:
    """Return True after the last step of a `OneCycleLR`, which raises an error at the next one."""
    total = getattr(scheduler, "total_steps", None)
    is_over = total is not None and scheduler.last_epoch >= total
    return is_over or any(map(_has_ended, getattr(scheduler, "_schedulers", ())))


def _plain(value: Any) -> object:
    """Return numbers, texts and containers of them; None for other objects, which are never equal."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if isinstance(value, (int, float, str)) else None


def _value(factor: Any, step: int) -> object:
    try:
        return factor(step)
    except Exception as error:  # such as a table that ends
        return type(error).__name__
