"""Optimum selectors, which choose the best power limit of a profile; of equally good limits, the lowest."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.power_limit.profile import PowerLimitProfile
from zeus_plugins.protocol import cost

RISE = 1.1
"""The cost has risen clearly if both of the lowest two limits cost more than this factor × the best cost.

On the traces of Zeus (NSDI '23), this factor never misses the cheapest limit (tests/power_limit/test_traces.py), but
1.05 does.
"""


class OptimumSelector(Protocol):
    """Chooses a power limit from the profile alone, so that all ranks choose the same limit.

    An optional method ``has_risen(profile)`` returns True if limits below the measured limits cannot be better.
    """

    def select(self, profile: PowerLimitProfile) -> float:
        """Return the best limit of a profile with at least one sample, in watts of each GPU."""


@dataclass(frozen=True)
class ZeusCost:
    """The limit with the least cost of a step, ``η · E + (1 − η) · MaxPower · T``, the formula for batch sizes, too.

    This is equation 2 of Zeus (You, Chung, Chowdhury, NSDI '23). The paper, too, minimises it over the power limits of
    one batch size. The number of steps does not depend on the limit, so the best limit for a step is the best for
    the training. MaxPower is summed over the GPUs.

    Args:
        eta: Weight of energy, as a job's `eta_knob`: 1 minimises energy, 0 time. Outside of [0, 1]: ZeusBSOConfigError.
    """

    eta: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.eta <= 1:
            raise ZeusBSOConfigError(f"eta is {self.eta!r}: it is from 0 (least time) to 1 (least energy)")

    def select(self, profile: PowerLimitProfile) -> float:
        """See `OptimumSelector.select`."""
        costs_j = self._costs_j(profile)
        return profile.limits_w[costs_j.index(min(costs_j))]

    def has_risen(self, profile: PowerLimitProfile) -> bool:
        """Return True if the measured costs rise clearly towards lower limits."""
        if len(profile.samples) < 3:
            return False
        lowest_j, second_j, *_ = costs_j = self._costs_j(profile)
        return lowest_j > second_j > RISE * min(costs_j)

    def _costs_j(self, profile: PowerLimitProfile) -> list[float]:
        """Return the cost of a step under each limit in joules."""
        return [
            cost(
                energy_j=sample.energy_per_step_j,
                time_s=sample.time_per_step_s,
                max_power_w=profile.gpus.max_power,
                eta=self.eta,
            )
            for sample in profile.samples
        ]


@dataclass(frozen=True)
class Energy(ZeusCost):
    """The limit with the least energy per step."""

    eta: float = field(default=1.0, init=False, repr=False)


@dataclass(frozen=True)
class Time(ZeusCost):
    """The limit with the least time per step."""

    eta: float = field(default=0.0, init=False, repr=False)


@dataclass(frozen=True)
class MaxSlowdown:
    """The lowest limit whose steps take at most `factor` times as long as under the highest limit.

    Args:
        factor: 1.1 allows a tenth more time. Below 1 or not finite: ZeusBSOConfigError.
    """

    factor: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.factor) and self.factor >= 1):
            raise ZeusBSOConfigError(
                f"factor is {self.factor!r}: it is the longest time per step as a multiple of that under the highest "
                "limit, so 1 or more"
            )

    def select(self, profile: PowerLimitProfile) -> float:
        """See `OptimumSelector.select`."""
        bound_s = self.factor * profile.samples[-1].time_per_step_s
        return next(sample.limit_w for sample in profile.samples if sample.time_per_step_s <= bound_s)

    def has_risen(self, profile: PowerLimitProfile) -> bool:
        """Return True if the lowest two measured limits are both clearly too slow."""
        if len(profile.samples) < 3:
            return False
        bound_s = RISE * self.factor * profile.samples[-1].time_per_step_s
        return all(sample.time_per_step_s > bound_s for sample in profile.samples[:2])
