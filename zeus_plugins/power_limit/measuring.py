"""The measurement windows of a power-limit profiler on one rank, and what they add up to on all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zeus_plugins.energy import EnergyMonitor, Measurement
from zeus_plugins.power_limit.states import Window

_WINDOW = "zeus_power_limit"

PASSING_FAILURES = 2
"""A limit is measured anew after so many failures of the monitor in a training; the next one ends the profiling."""

# So that steps that are a little faster the next time do not make the window too short again.
_MARGIN = 1.05


class RankWindow:
    """The window of the limit that is being measured, on this rank; nothing without a monitor."""

    def __init__(self, monitor: EnergyMonitor | None, synchronize: Callable[[], None]) -> None:
        self.failures = 0
        self._monitor = monitor
        self._synchronize = synchronize
        # Why the present window could not begin.
        self._problem: str | None = None

    @property
    def _name(self) -> str:
        """Another one after each failure: one that could not be ended may still be open."""
        return f"{_WINDOW}_{self.failures}" if self.failures else _WINDOW

    def open(self) -> None:
        """Begin to measure. It never raises: `close` tells what went wrong."""
        self._problem = None
        try:
            self._synchronize()
            if self._monitor is not None:
                self._monitor.begin_window(self._name)
        except Exception as error:
            self._problem = str(error) or type(error).__name__

    def close(self) -> tuple[Measurement | None, str | None]:
        """The measurement, if this rank measures, or the problem."""
        try:
            self._synchronize()
            measured = None if self._monitor is None else self._monitor.end_window(self._name)
        except Exception as error:
            return None, self._problem or str(error) or type(error).__name__
        return measured, self._problem


@dataclass(frozen=True)
class Part:
    """Steps under one limit, over all ranks: the longest time, and the summed energy."""

    steps: int
    time_s: float
    energy_j: float
    source: str | None = None

    @classmethod
    def of(cls, steps: int, ranks: Sequence[Measurement]) -> Part:
        """The measurements of the ranks in the same steps; one at least."""
        longest_s = max(each.time_s for each in ranks)
        return cls(steps, longest_s, sum(each.energy_j for each in ranks), ranks[0].source)

    def plus(self, other: Part | None) -> Part:
        """Both together."""
        if other is None:
            return self
        return Part(self.steps + other.steps, self.time_s + other.time_s, self.energy_j + other.energy_j, self.source)


@dataclass(frozen=True)
class LeastTimes:
    """The seconds that a limit gets at least, before and while it is measured.

    An energy counter moves every 20 to 100 ms: a window of a few steps may see no move of it, or one too many.
    """

    warmup_s: float
    profile_s: float

    def stretched(self, window: Window, part: Part) -> Window:
        """The window with as many more steps as these seconds take, at the pace of a part of it."""
        if part.time_s <= 0:
            return window
        pace_s = part.time_s / part.steps
        warmup_steps, profile_steps = window.warmup_steps, window.profile_steps
        if self.warmup_s:
            warmup_steps = max(warmup_steps, math.ceil(self.warmup_s / pace_s))
        if part.time_s < self.profile_s:
            profile_steps = max(profile_steps, math.ceil(_MARGIN * self.profile_s / pace_s))
        return Window(warmup_steps, profile_steps)
