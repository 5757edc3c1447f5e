"""Scaling of learning rates to the batch size, and warnings of rates that a script sets itself.

Linear: ``k = b / b0`` (Goyal et al. 2017, "Accurate, Large Minibatch SGD", the linear scaling rule), made for SGD.
Square root: ``k = sqrt(b / b0)`` (Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks";
Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", for Adam and RMSprop; You et al.
2020, "Large Batch Optimization for Deep Learning", for LAMB).
Auto: the rule that was made for the optimizer's kind, for batch sizes above the default; below it, the rate of the
default size was never worse (docs/schedules.md).

Learning rates that a script sets itself undo the scaling. The first of such problems in a training causes a warning;
docs/schedules.md describes the remedies.

This module does not import torch: it recognises optimizers and schedulers by their attributes.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from zeus_plugins.errors import ZeusBSOConfigError

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


_logger = logging.getLogger("zeus_plugins")

# Keys and attributes of learning rates in torch. "swa_lr" is SWALR's; "default_min_lr" is ReduceLROnPlateau's bound for
# groups added later.
GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
SCHEDULER_RATES = ("base_lrs", "_last_lr", "max_lrs", "min_lrs", "default_min_lr", "eta_min")

# Class names of optimizers with a scaling rule. The papers on Lion (Chen et al. 2023) and Adafactor (Shazeer & Stern
# 2018) state no rule.
_WITH_RULE = re.compile(
    r"(?:fused|paged_?|deepspeedcpu)?(?:(?P<linear>sgd)|adamw?|[nr]adam|adamax|sparseadam|rmsprop|lamb)(?:_?\d+bit)?",
    re.IGNORECASE,
)


class LrScaling(StrEnum):
    """The rule by which the learning rate follows the batch size."""

    NONE = "none"
    LINEAR = "linear"
    SQRT = "sqrt"
    AUTO = "auto"


def rule_of(optimizer: object) -> tuple[LrScaling, str]:
    """Return the rule of "auto" for an optimizer (or the name of its class), and the deciding class name.

    If the class has no known rule, use its base classes, then the optimizer that it wraps; otherwise return `NONE`.
    """
    outer: Any = optimizer
    while optimizer is not None:
        names = [optimizer] if isinstance(optimizer, str) else [base.__name__ for base in type(optimizer).__mro__]
        for found in filter(None, map(_WITH_RULE.fullmatch, names)):
            return LrScaling.LINEAR if found["linear"] else LrScaling.SQRT, found[0]
        optimizer = getattr(optimizer, "optimizer", None)
    return LrScaling.NONE, outer if isinstance(outer, str) else type(outer).__name__


def lr_factor(scaling: LrScaling | str, batch_size: int, default_batch_size: int, optimizer: object = None) -> float:
    """Return the factor on a learning rate that was chosen for the default (global) batch size.

    Under "auto", `optimizer` (or the name of its class) selects the rule, and no rate is lowered. Raise
    `ZeusBSOConfigError` for an unknown rule or a batch size below 1.
    """
    try:
        rule = LrScaling(scaling)
    except ValueError:
        choices = ", ".join(repr(rule.value) for rule in LrScaling)
        raise ZeusBSOConfigError(f"unknown learning rate scaling {scaling!r}: choose one of {choices}") from None
    if batch_size < 1 or default_batch_size < 1:
        raise ZeusBSOConfigError(f"batch sizes must be 1 or more, not {batch_size} and (default) {default_batch_size}")
    ratio = batch_size / default_batch_size
    if rule is LrScaling.AUTO:
        rule, ratio = rule_of(optimizer)[0], max(1.0, ratio)
    return {LrScaling.NONE: 1.0, LrScaling.LINEAR: ratio, LrScaling.SQRT: math.sqrt(ratio)}[rule]


def lr_scaling_in_words(scaling: str, factor: float, optimizer: object) -> str:
    """Describe the factor on an optimizer's learning rate and the scaling rule at another size than the default."""
    if scaling != LrScaling.AUTO:
        return f"× {factor:.3g} ({scaling})"
    rule, name = rule_of(optimizer)
    if rule is LrScaling.NONE:
        return f"unchanged (lr_scaling='auto' knows no rule for {name}: choose 'linear' or 'sqrt')"
    if factor == 1.0:
        return f"unchanged (lr_scaling='auto' raises it above your own size only: {rule}, for {name})"
    return f"× {factor:.3g} ({rule}, for {name})"


def scale_learning_rate(
    optimizers: Iterable[Optimizer], schedulers: Iterable[LRScheduler], factor_of: Callable[[Any], float]
) -> None:
    """Bring optimizers and their schedulers to the state they would have if built with `factor_of` times the rates.

    Scale the optimizers' current rates, and the bounds and base rates of schedulers, also of schedulers inside
    `SequentialLR` and `ChainedScheduler`. Schedulers must not have stepped yet. A parameter group, scheduler or tensor
    that is reached twice is scaled once. Tensors change in place, because compiled steps and captured graphs refer to
    them.
    """
    scaler, optimizer = _Scaler(), None
    for optimizer in optimizers:
        scaler.factor = factor_of(optimizer)
        scaler.scale_optimizer(optimizer)
    for scheduler in schedulers:
        scaler.factor = factor_of(getattr(scheduler, "optimizer", optimizer))
        scaler.scale_scheduler(scheduler)


class _Scaler:
    """One pass that scales optimizers and schedulers, which may share objects, and scales each object once."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._done: dict[int, object] = {}  # keeps the objects, so that their ids are not reused

    def scale_optimizer(self, optimizer: Any) -> None:
        # Remember parameter groups rather than optimizers, because the wrappers of an optimizer share its groups. Scale
        # the defaults, too: groups that are added later take their rates from the defaults.
        for rates in (*optimizer.param_groups, getattr(optimizer, "defaults", {})):
            if self._is_first_visit(rates):
                rates.update({key: self._scaled(rates[key]) for key in GROUP_RATES if key in rates})

    def scale_scheduler(self, scheduler: Any) -> None:
        if not self._is_first_visit(scheduler):
            return
        held = [attribute for attribute in SCHEDULER_RATES if hasattr(scheduler, attribute)]
        if not held:
            _logger.warning(
                "%s keeps its learning rates where they cannot be found, and may undo their scaling by %g: scale them"
                " yourself, or use a scheduler of torch.optim.lr_scheduler",
                type(scheduler).__name__,
                self.factor,
            )
        for attribute in held:
            setattr(scheduler, attribute, self._scaled(getattr(scheduler, attribute)))
        for inner in getattr(scheduler, "_schedulers", ()):
            self.scale_scheduler(inner)

    def _scaled(self, rate: Any) -> Any:
        """Return `factor` times a rate: a number, a tensor, None, or a list of rates."""
        if rate is None:
            return None
        if isinstance(rate, (list, tuple)):
            return [self._scaled(each) for each in rate]  # a new list: SequentialLR shares its first scheduler's
        if hasattr(rate, "mul_"):
            if self._is_first_visit(rate):
                rate.detach().mul_(self.factor)
            return rate
        return rate * self.factor

    def _is_first_visit(self, thing: object) -> bool:
        if id(thing) in self._done:
            return False
        self._done[id(thing)] = thing
        return True


class ScheduleWatch:
    """Warns once if a schedule has ended before the training, or if something else sets the learning rates."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        # Each scaled optimizer with its rates, and whether it has a scheduler.
        self._scaled: list[tuple[Any, list[float], bool]] = []
        self._has_warned = False

    def scaled(self, optimizers: Sequence[Any], schedulers: Sequence[Any]) -> None:
        """Remember the scaled rates of optimizers."""
        moved = {id(getattr(scheduler, "optimizer", None)) for scheduler in schedulers}
        self._scaled = [(each, _rates(each), id(each) in moved) for each in optimizers]

    def check(self, optimizers: Sequence[Any], *, goes_on: bool) -> None:
        """Warn of rates that something else has set or added, or that are 0 although the training continues."""
        for optimizer, scaled, is_moved in self._scaled:
            now = _rates(optimizer)
            for rate in now[len(scaled) :]:
                self._warn(
                    f"a parameter group with the learning rate {rate} was added after lr_scaling, which leaves it as "
                    "it is: multiply a rate that was chosen for the default size with callback.lr_factor"
                )
            if not is_moved and any(not math.isclose(*pair, rel_tol=1e-6) for pair in zip(now, scaled, strict=False)):
                self._warn(
                    "the training sets its learning rate itself, which undoes lr_scaling: multiply its rate by "
                    "callback.lr_factor"
                )
        rates = [rate for optimizer in optimizers for rate in _rates(optimizer)]
        if goes_on and rates and not any(rates):
            self._warn(
                f"the learning rate is 0 while the training at batch size {self._batch_size} goes on: its schedule was "
                "made for another size"
            )

    def _warn(self, problem: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _logger.warning("%s (docs/schedules.md)", problem)


def _rates(optimizer: Any) -> list[float]:
    # Optimizers that compute their own learning rate, such as Adafactor, have None in its place.
    return [float(rate) for group in optimizer.param_groups if (rate := group.get("lr")) is not None]
