"""The learning rate that goes with another batch size.

Linear: ``k = b / b0`` (Goyal et al. 2017, "Accurate, Large Minibatch SGD", the linear scaling rule), made for SGD.
Square root: ``k = sqrt(b / b0)`` (Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks";
Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", for Adam and RMSprop).

Importing this module loads no torch: optimizers and schedulers are known by their attributes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, MutableMapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from zeus_plugins.errors import ZeusBSOConfigError

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


logger = logging.getLogger(__name__)

# Where torch keeps learning rates. "swa_lr" is SWALR's, "default_min_lr" ReduceLROnPlateau's for groups added later.
GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
SCHEDULER_RATES = ("base_lrs", "_last_lr", "max_lrs", "min_lrs", "default_min_lr", "eta_min")


class LrScaling(StrEnum):
    """The rule by which the learning rate follows the batch size."""

    NONE = "none"
    LINEAR = "linear"
    SQRT = "sqrt"


def lr_factor(scaling: LrScaling | str, batch_size: int, default_batch_size: int) -> float:
    """Return what the learning rate chosen for one batch size is multiplied with for another.

    Args:
        scaling: The rule, as a value of `LrScaling` or its text.
        batch_size: The global batch size to train with.
        default_batch_size: The global batch size that the learning rate was chosen for.

    Raises:
        ZeusBSOConfigError: There is no such rule, or a batch size is not positive.
    """
    if batch_size < 1 or default_batch_size < 1:
        raise ZeusBSOConfigError(f"batch sizes must be 1 or more, not {batch_size} and (default) {default_batch_size}")
    ratio = batch_size / default_batch_size
    match _rule(scaling):
        case LrScaling.NONE:
            return 1.0
        case LrScaling.LINEAR:
            return ratio
        case LrScaling.SQRT:
            return math.sqrt(ratio)


def _rule(scaling: LrScaling | str) -> LrScaling:
    try:
        return LrScaling(scaling)
    except ValueError:
        choices = ", ".join(repr(rule.value) for rule in LrScaling)
        raise ZeusBSOConfigError(f"unknown learning rate scaling {scaling!r}: choose one of {choices}") from None


def scale_learning_rate(optimizers: Iterable[Optimizer], schedulers: Iterable[LRScheduler], factor: float) -> None:
    """Make optimizers and their schedulers what they would be, had they been built with `factor` times the rates.

    Every rate is scaled: the optimizer's current one, and the bounds and bases that schedulers compute later ones from.
    A parameter group, scheduler or tensor that is reached twice is scaled once. Rates held as tensors change in place,
    because compiled steps and captured graphs refer to those tensors.

    Args:
        optimizers: All optimizers of the training.
        schedulers: All their schedulers, before their first step. Schedulers inside `SequentialLR` and
            `ChainedScheduler` are found without being listed.
        factor: k, as from `lr_factor`.

    Raises:
        ZeusBSOConfigError: The factor is not a finite number above 0.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise ZeusBSOConfigError(f"the learning rate cannot be scaled by {factor!r}: give a finite number above 0")
    scaler = _Scaler(factor)
    for optimizer in optimizers:
        scaler.scale_optimizer(optimizer)
    for scheduler in schedulers:
        scaler.scale_scheduler(scheduler)


class _Scaler:
    """One scaling of a set of objects that may refer to each other."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._done: dict[int, object] = {}  # holds the objects too, so that no id is given to another meanwhile

    def scale_optimizer(self, optimizer: Any) -> None:
        # Groups are what is remembered, not the optimizer: wrappers of one optimizer share its groups. The defaults
        # are for groups that are added later.
        for rates in (*optimizer.param_groups, getattr(optimizer, "defaults", {})):
            if self._is_first_visit(rates):
                self._scale_items(rates)

    def scale_scheduler(self, scheduler: Any) -> None:
        if not self._is_first_visit(scheduler):
            return
        held = [attribute for attribute in SCHEDULER_RATES if hasattr(scheduler, attribute)]
        if not held:
            logger.warning(
                "%s keeps its learning rates where they cannot be found, and may undo their scaling by %g: scale them"
                " yourself, or use a scheduler of torch.optim.lr_scheduler",
                type(scheduler).__name__,
                self._factor,
            )
        for attribute in held:
            setattr(scheduler, attribute, self._scaled(getattr(scheduler, attribute)))
        for inner in getattr(scheduler, "_schedulers", ()):
            self.scale_scheduler(inner)

    def _scale_items(self, rates: MutableMapping[str, Any]) -> None:
        for key in GROUP_RATES:
            if key in rates:
                rates[key] = self._scaled(rates[key])

    def _scaled(self, rate: Any) -> Any:
        """Return `factor` times a rate: a number, a tensor, None, or a list of those."""
        if rate is None:
            return None
        if isinstance(rate, (list, tuple)):
            return [self._scaled(each) for each in rate]  # a new list: SequentialLR shares its first scheduler's
        if hasattr(rate, "mul_"):
            if self._is_first_visit(rate):
                rate.detach().mul_(self._factor)
            return rate
        return rate * self._factor

    def _is_first_visit(self, thing: object) -> bool:
        if id(thing) in self._done:
            return False
        self._done[id(thing)] = thing
        return True
