"""Learning rate schedules that were made for another batch size.

Another size makes another number of optimizer steps. A schedule that counts the steps of the script's own size runs out
before the training does, or never comes to its end, and rates that a script sets by itself undo their scaling. Both are
warned of, once each; docs/schedules.md says what to write instead.

Nothing here imports torch: optimizers and schedulers are known by their attributes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

_logger = logging.getLogger("zeus_plugins")

# Points of a training at which a schedule of functions is looked at.
_POINTS = 100
# A schedule that ends this share of the steps before the last one is one of the training's own length: rounding.
_SLACK = 0.02


class ScheduleWatch:
    """Warns of schedules that do not fit a training, and of rates that something else sets.

    Args:
        batch_size: The global batch size, for the warnings.
        remedy: How the framework has schedules made that follow the batch size.
    """

    def __init__(self, batch_size: int, remedy: str) -> None:
        self._batch_size = batch_size
        self._remedy = remedy
        # The rates of each optimizer that no scheduler moves, as they were scaled.
        self._scaled: list[tuple[Any, list[float]]] = []
        self._has_warned = False

    def scaled(self, optimizers: Sequence[Any], schedulers: Sequence[Any]) -> None:
        """Remember rates that were just scaled, of optimizers without schedulers."""
        moved = {id(getattr(scheduler, "optimizer", None)) for scheduler in schedulers}
        self._scaled = [(each, _rates(each)) for each in optimizers if id(each) not in moved]

    def begin(self, schedules: Sequence[tuple[Any, float | None]]) -> None:
        """Warn of schedules that end before the training.

        Args:
            schedules: The schedulers, and how often the whole training is going to step each; None: nobody knows.
        """
        for scheduler, steps in schedules:
            if steps is None or not math.isfinite(steps) or steps < 1:
                continue
            try:
                end = last_useful_step(scheduler, int(steps))
            except Exception as error:  # of a script's own function
                _logger.debug("%s does not tell where it ends: %s", type(scheduler).__name__, error)
                continue
            if end is not None and end < (1 - _SLACK) * steps:
                self._warn(
                    f"{type(scheduler).__name__} ends after {end} of the {steps:g} steps that this training makes at "
                    f"batch size {self._batch_size}: it was made for another size"
                )

    def check(self, optimizers: Sequence[Any], *, goes_on: bool) -> None:
        """Warn of rates that something else has set, or that have come to 0 in a training that goes on."""
        for optimizer, rates in self._scaled:
            if any(
                not math.isclose(now, then, rel_tol=1e-6) for now, then in zip(_rates(optimizer), rates, strict=False)
            ):
                self._warn(
                    "the training sets its learning rate itself, so that lr_scaling is undone: multiply what it sets "
                    "with callback.lr_factor"
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
            _logger.warning("%s. %s (docs/schedules.md)", problem, self._remedy)


def last_useful_step(scheduler: Any, steps: int) -> int | None:
    """The step after which a schedule is over: it raises, its rates stay 0, or they begin anew.

    Args:
        scheduler: One of torch's.
        steps: The steps that the training makes.

    Returns:
        That step, or None where the schedule has no end or none that can be seen.
    """
    kind = type(scheduler).__name__
    if kind == "SequentialLR":
        begun = scheduler._milestones[-1] if scheduler._milestones else 0
        end = last_useful_step(scheduler._schedulers[-1], steps - begun)
        return None if end is None else begun + end
    name = {"OneCycleLR": "total_steps", "CosineAnnealingLR": "T_max", "PolynomialLR": "total_iters"}.get(kind)
    if name is not None:
        return int(getattr(scheduler, name))
    if kind == "LambdaLR":
        return _last_step_above_zero(scheduler.lr_lambdas, steps)
    return None


def _last_step_above_zero(factors: Sequence[Any], steps: int) -> int | None:
    """The last of some points at which one of these functions of the step is above 0; None where the last point is."""
    points = sorted({steps * point // _POINTS for point in range(_POINTS)}, reverse=True)
    for number, step in enumerate(points):
        if any(factor(step) for factor in factors):
            return None if number == 0 else points[number - 1]
    return 0


def _rates(optimizer: Any) -> list[float]:
    # Some optimizers have None there, and find their rates themselves.
    return [float(rate) for group in optimizer.param_groups if (rate := group.get("lr")) is not None]
