"""Optimum selectors: which of the power limits in a profile is the best. Pure.

All of them take the lowest limit among equals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.power_limit.profile import PowerLimitProfile
from zeus_plugins.protocol import PowerLimitSample, cost

RISE = 1.1
"""A cost has risen clearly when the lowest two limits cost so many times as much as the best, the lowest the most.

On the traces of Zeus (NSDI '23) this never misses the cheapest limit (tests/power_limit/test_traces.py); 1.05 does.
"""


class OptimumSelector(Protocol):
    """Chooses a power limit. It must choose the same one on every rank: from the profile alone."""

    def select(self, profile: PowerLimitProfile) -> float:
        """The best of the profile's limits, of which there is one at least; watts of each GPU."""

    # It may have a method `has_risen(profile)`, too: true when lower limits than those measured cannot be better.


@dataclass(frozen=True)
class ZeusCost:
    """The least cost of an epoch, `epoch_cost`; with the same η this is the cost that batch sizes are compared by.

    Args:
        eta: Weight of energy in [0, 1]: 1 minimises energy, 0 time. A job's `eta_knob`.

    Raises:
        ZeusBSOConfigError: It is not in [0, 1].
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
        """Return True when the costs measured rise clearly towards lower limits."""
        if len(profile.samples) < 3:
            return False
        lowest_j, second_j, *_ = costs_j = self._costs_j(profile)
        return lowest_j > second_j > RISE * min(costs_j)

    def _costs_j(self, profile: PowerLimitProfile) -> list[float]:
        """Joules of a step under each limit: all limits train the same steps in an epoch."""
        return [epoch_cost(sample, 1, profile.gpus.max_power, self.eta) for sample in profile.samples]


@dataclass(frozen=True)
class Energy(ZeusCost):
    """The least energy per step."""

    eta: float = field(default=1.0, init=False, repr=False)


@dataclass(frozen=True)
class Time(ZeusCost):
    """The least time per step."""

    eta: float = field(default=0.0, init=False, repr=False)


@dataclass(frozen=True)
class MaxSlowdown:
    """The lowest limit whose steps take at most so many times as long as under the highest limit.

    Args:
        factor: 1.1 allows a tenth more time.

    Raises:
        ZeusBSOConfigError: It is below 1, or no finite number.
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
        """True when the lowest two limits measured are both clearly too slow."""
        if len(profile.samples) < 3:
            return False
        bound_s = RISE * self.factor * profile.samples[-1].time_per_step_s
        return all(sample.time_per_step_s > bound_s for sample in profile.samples[:2])


def epoch_cost(sample: PowerLimitSample, steps: int, max_power_w: float, eta: float) -> float:
    """Cost of an epoch under a sample's power limit, joules.

    ``(η · AvgPower + (1 − η) · MaxPower) · T``, with ``T`` the duration of the epoch. Since ``AvgPower · T`` is its
    energy ``E``, that is ``η · E + (1 − η) · MaxPower · T``: the cost of equation 2 of Zeus (You, Chung, Chowdhury,
    NSDI '23) taken over one epoch, which that paper, too, minimises over the power limits of one batch size. The epochs
    that a training needs do not depend on the power limit, so the limit that is best for an epoch is best for all.

    Args:
        sample: What steps cost under the limit.
        steps: Steps in the epoch.
        max_power_w: Maximum power, summed over the GPUs, watts.
        eta: Weight of energy in [0, 1].
    """
    step_s, step_j = sample.time_per_step_s, sample.energy_per_step_j
    return steps * cost(energy_j=step_j, time_s=step_s, max_power_w=max_power_w, eta=eta)
