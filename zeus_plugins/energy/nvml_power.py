"""NVIDIA GPUs without an energy counter (older than Volta): their power, read regularly and integrated over time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zeus_plugins.energy.integrated import SAMPLE_INTERVAL_S, IntegratedPower, IntegratedPowerMonitor
from zeus_plugins.energy.monitor import Measurement
from zeus_plugins.energy.nvml import NvmlMonitor
from zeus_plugins.energy.nvml_gpus import Nvml, describe_gpus, open_gpus, with_stated_power
from zeus_plugins.energy.nvml_notes import NvmlNotes
from zeus_plugins.protocol import GpuConfig


class NvmlPowerMonitor(IntegratedPowerMonitor):
    """An `EnergyMonitor` over the visible NVIDIA GPUs that reads their power every `interval_s` while a window is open.

    How wrong it may be: a step of the power by ΔP between two readings is off by at most ΔP × interval_s / 2, so a
    window by that much for each step in it; to this the sensor's own error adds, which NVIDIA states as ±5 % for Fermi
    and Kepler, and states not at all for others. GPUs of the Ampere generation (except GA100) and later answer with
    the mean of the last second, which smears a window's ends; but those have a counter, and `NvmlMonitor` is for them.
    Where readings came more than a second apart (something held the interpreter), the source says so.

    Args:
        device_indices: As in `NvmlMonitor`.
        interval_s: Seconds between two readings.
        max_power_w: As in `NvmlMonitor`.
        nvml: What to call instead of the installed `pynvml`.
        clock: Monotonic seconds.

    Raises:
        EnergyUnavailableError: On first use: no driver, no visible GPU, or a GPU that does not tell its own power.
        ZeusBSOConfigError: `interval_s` makes no sense; on first use, as `NvmlMonitor`.
    """

    def __init__(
        self,
        device_indices: Sequence[int | str] | None = None,
        *,
        interval_s: float = SAMPLE_INTERVAL_S,
        max_power_w: float | None = None,
        nvml: Nvml | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("nvml power", clock, interval_s)
        self._notes = NvmlNotes(())  # until the GPUs are found
        self._device_indices = None if device_indices is None else tuple(device_indices)
        self._max_power_w = max_power_w
        self._nvml = nvml

    def end_window(self, name: str) -> Measurement:
        """See `NvmlMonitor.end_window`."""
        return self._notes.on(super().end_window(name))

    def _find(self) -> tuple[Sequence[IntegratedPower], Callable[[], GpuConfig]]:
        gpus = with_stated_power(open_gpus(self._nvml, self._device_indices), self._max_power_w)
        self._notes = NvmlNotes(gpus)
        return self._integrated(gpus), lambda: describe_gpus(gpus)


AGREEMENT = 0.2
"""The difference that the two may have, as a part of the counter's value.

Generous: within a few seconds the ends of the window matter, since a counter moves every few tens of milliseconds and
newer GPUs tell the mean power of the last second. What this is to find is a counter in another unit, or of another GPU.
"""


@dataclass(frozen=True)
class Comparison:
    """The energy of one span of time, in joules: by the counters, and by power readings, integrated.

    The problem is what one of the two could not measure.
    """

    time_s: float
    counter_j: float
    integrated_j: float
    problem: str | None = None

    @property
    def agrees(self) -> bool:
        """True when both measured, and about the same."""
        difference_j = abs(self.integrated_j - self.counter_j)
        return self.problem is None and self.counter_j > 0 and difference_j <= AGREEMENT * self.counter_j


def compare_nvml(
    meanwhile: Callable[[], None] = lambda: time.sleep(2.0),
    *,
    nvml: Nvml | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Comparison:
    """Measure all visible NVIDIA GPUs by their counters and by their power at the same time.

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
    unusual = [each for each in (by_counter, by_power) if "estimate" in each.source or "gaps" in each.source]
    return Comparison(
        time_s=by_counter.time_s,
        counter_j=by_counter.energy_j,
        integrated_j=by_power.energy_j,
        problem="; ".join(each.source for each in unusual) or None,
    )
