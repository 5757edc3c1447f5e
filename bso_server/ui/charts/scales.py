"""Axes: where a value lies between both ends, and the round numbers beside it; pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

# A logarithmic axis shows more of values that lie so many times apart.
_WIDE = 30.0


@dataclass(frozen=True, slots=True)
class Scale:
    """The part of an axis from `low` to `high`, of which both are finite and differ; logarithmic for positive ones."""

    low: float
    high: float
    is_log: bool = False

    @classmethod
    def over(cls, values: Iterable[float], *, zero: bool = True, log: bool | None = None) -> Scale:
        """An axis with room for these values.

        Args:
            values: The values, some of which may be missing from a chart.
            zero: Whether 0 is on the axis, unless it is logarithmic.
            log: Whether it is; None: if the values are positive and far apart.
        """
        found = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
        low, high = min(found), max(found)
        if log is None:
            log = low > 0 and high / low > _WIDE
        if log:
            room = max((high / low) ** 0.06, 1.1)
            return cls(low / room, high * room, is_log=True)
        if zero:
            low, high = min(low, 0.0), max(high, 0.0)
        if low == high:
            # A value alone is in the middle, or at the end of an axis that begins at 0.
            reach = abs(high) or 1.0
            return cls(low, low + reach) if zero else cls(low - reach / 2, high + reach / 2)
        room = (high - low) * 0.06
        return cls(low if zero and low == 0 else low - room, high if zero and high == 0 else high + room)

    def at(self, value: float) -> float:
        """The place of a value: 0 at the low end, 1 at the high one."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low) if value > 0 else 0.0
        return (value - self.low) / (self.high - self.low)

    def places(self, values: Iterable[float]) -> list[float]:
        """The places of many values."""
        if self.is_log:
            return [self.at(value) for value in values]
        low, span = self.low, self.high - self.low
        return [(value - low) / span for value in values]

    def ticks(self, most: int = 6) -> list[float]:
        """Round numbers within the axis, at most about so many: 1, 2 and 5 times powers of ten."""
        if self.is_log and self.high / self.low >= 10:
            return _log_ticks(self.low, self.high, most)
        step = round_step((self.high - self.low) / most)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def round_step(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is no less."""
    power: float = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for steps in ((1, 2, 5), (1, 3), (1,)):
        found = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        within = [tick for tick in found if low <= tick <= high]
        if len(within) <= most:
            return within
    every = math.ceil(len(within) / most)
    return within[::every]


def apart(places: list[float], least: float) -> list[bool]:
    """For each label's place, ascending, whether it keeps its distance from the one before it that is shown."""
    shown, last = [], -math.inf
    for place in places:
        is_shown = place - last >= least
        shown.append(is_shown)
        last = place if is_shown else last
    return shown
