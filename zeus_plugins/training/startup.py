"""The start-up of a training: the time that its first optimizer steps take beyond later steps."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

_FIRST_STEPS = 10
_LATER_STEPS = 20
# Fewer later steps have no typical time.
_LEAST_STEPS = 3


class FirstSteps:
    """Times the next optimizer steps by a hook of torch. Of several optimizers, only the first one counts.

    The time of a step includes loading its data, and all batches if it accumulates gradients. `clock` returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends_s = [clock()]
        self._optimizer: object = None
        self._count = 0
        torch = sys.modules.get("torch.optim.optimizer")
        self._hook = None if torch is None else torch.register_optimizer_step_post_hook(self._stepped)

    def startup_s(self) -> float | None:
        """Stop timing; return the time of the first steps beyond the median of later ones, or None for few steps."""
        self.close()
        steps_s = [end_s - begin_s for begin_s, end_s in pairwise(self._ends_s)]
        first = min(_FIRST_STEPS, len(steps_s) // 2)
        if first < _LEAST_STEPS:
            return None
        return max(sum(steps_s[:first]) - first * statistics.median(steps_s[first:]), 0.0)

    def close(self) -> None:
        """Stop timing."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _stepped(self, optimizer: object, *_: Any) -> None:
        self._optimizer = self._optimizer or optimizer
        if optimizer is self._optimizer:
            self._ends_s.append(self._clock())
        self._count += 1
        if self._count == _FIRST_STEPS + _LATER_STEPS and self._hook is not None:
            # Torch is iterating over its hooks, so that none may be removed now. `"".format` takes any arguments and
            # does nothing, without a call of Python in each step.
            self._hook.hooks_dict_ref()[self._hook.id] = "".format
