"""The comparison of two ways to measure the same GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from zeus_plugins.energy.nvml import Nvml, NvmlMonitor
from zeus_plugins.energy.nvml_power import NvmlPowerMonitor

__all__ = ["AGREEMENT", "Comparison", "compare_nvml"]

AGREEMENT = 0.2
"""The difference that the two may have, as a part of the counter's value.

Generous: within a few seconds the ends of the window matter, since a counter moves every few tens of milliseconds and
newer GPUs tell the mean power of the last second. What this is to find is a counter in another unit, or of another GPU.
"""


@dataclass(frozen=True)
class Comparison:
    """The energy of one span of time, measured twice.

    Attributes:
        time_s: Its length in seconds.
        counter_j: By the energy counters, in joules.
        integrated_j: By power readings, integrated, in joules.
        problem: What one of the two could not measure; None where both could.
    """

    time_s: float
    counter_j: float
    integrated_j: float
    problem: str | None = None

    @property
    def difference(self) -> float:
        """The integral's distance from the counter, as a part of the latter."""
        return abs(self.integrated_j - self.counter_j) / self.counter_j

    @property
    def agrees(self) -> bool:
        """True when both measured, and about the same."""
        return self.problem is None and self.counter_j > 0 and self.difference <= AGREEMENT


def compare_nvml(
    meanwhile: Callable[[], None] = lambda: time.sleep(2.0),
    *,
    nvml: Nvml | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Comparison:
    """Measure all visible NVIDIA GPUs by their counters and by their power at the same time.

    Args:
        meanwhile: What happens in the time that is measured; two seconds of sleep will do.
        nvml: What to call instead of the installed `pynvml`.
        clock: Monotonic seconds.

    Raises:
        EnergyUnavailableError: They have not both.
        ZeusBSOConfigError: They cannot be measured together.
    """
    counted, integrated = NvmlMonitor(nvml=nvml, clock=clock), NvmlPowerMonitor(nvml=nvml, clock=clock)
    counted.begin_window("check")
    integrated.begin_window("check")
    try:
        meanwhile()
    finally:
        by_power = integrated.end_window("check")
        by_counter = counted.end_window("check")
    unusual = [each for each, usual in ((by_counter, counted), (by_power, integrated)) if each.source != usual.source]
    return Comparison(
        time_s=by_counter.time_s,
        counter_j=by_counter.energy_j,
        integrated_j=by_power.energy_j,
        problem="; ".join(each.source for each in unusual) or None,
    )
