"""NVIDIA GPUs without an energy counter (older than Volta): their power, read regularly and integrated over time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from zeus_plugins.energy.counters import MICRO, CounterMonitor
from zeus_plugins.energy.monitor import Measurement
from zeus_plugins.energy.nvml import Nvml, NvmlGpu, NvmlMonitor, describe_gpus, open_gpus
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import GpuConfig

SAMPLE_INTERVAL_S = 0.1

LATE_S = 1.0


class IntegratedPower:
    """An `EnergyCounter` made of power readings: the area below the straight lines between them (trapezoidal rule).

    `late` counts the readings that came more than a second after the one before.
    """

    def __init__(self, gpu: NvmlGpu, clock: Callable[[], float]) -> None:
        self.late = 0
        self._gpu = gpu
        self._clock = clock
        self._energy_j = 0.0
        self._latest: tuple[float, float] | None = None

    def __str__(self) -> str:
        return str(self._gpu)

    @property
    def max_power_w(self) -> float:
        """The most that the device draws, in watts."""
        return self._gpu.max_power_w

    def energy_uj(self) -> int:
        """Microjoules since the first reading, up to now: each call reads the power and adds what was used since."""
        power_w = self._gpu.power_w()
        now_s = self._clock()
        if self._latest is not None:
            then_s, power_then_w = self._latest
            self._energy_j += (now_s - then_s) * (power_w + power_then_w) / 2
            self.late += now_s - then_s > LATE_S
        self._latest = (now_s, power_w)
        return round(self._energy_j * MICRO)


class NvmlPowerMonitor(CounterMonitor):
    """An `EnergyMonitor` over the visible NVIDIA GPUs that reads their power every `interval_s` while a window is open.

    How wrong it may be: a step of the power by ΔP between two readings is off by at most ΔP × interval_s / 2, so a
    window by that much for each step in it; to this the sensor's own error adds, which NVIDIA states as ±5 % for Fermi
    and Kepler, and states not at all for others. GPUs of the Ampere generation (except GA100) and later answer with
    the mean of the last second, which smears a window's ends; but those have a counter, and `NvmlMonitor` is for them.
    Where readings came more than a second apart (something held the interpreter), the source says so.

    Args:
        device_indices: As in `NvmlMonitor`.
        interval_s: Seconds between two readings.
        nvml: What to call instead of the installed `pynvml`.
        clock: Monotonic seconds.

    Raises:
        EnergyUnavailableError: On first use: no driver, no visible GPU, or a GPU that does not tell its own power.
        ZeusBSOConfigError: `interval_s` makes no sense; on first use, as `NvmlMonitor`.
    """

    def __init__(
        self,
        device_indices: Sequence[int] | None = None,
        *,
        interval_s: float = SAMPLE_INTERVAL_S,
        nvml: Nvml | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < interval_s <= LATE_S:
            raise ZeusBSOConfigError(f"interval_s is {interval_s!r}: choose seconds above 0, {LATE_S:g} at most")
        super().__init__(f"nvml power, integrated every {interval_s:g} s", clock, interval_s)
        self._device_indices = None if device_indices is None else tuple(device_indices)
        self._nvml = nvml
        self._late: dict[str, int] = {}
        self._counters: list[IntegratedPower] = []

    def begin_window(self, name: str) -> None:
        """See `EnergyMonitor.begin_window`."""
        super().begin_window(name)
        self._late[name] = self._late_readings()

    def end_window(self, name: str) -> Measurement:
        """See `EnergyMonitor.end_window`; the energy is the GPUs' integrated power, summed over the GPUs."""
        measured = super().end_window(name)
        if self._late_readings() == self._late.pop(name):
            return measured
        return replace(measured, source=f"{measured.source}, with gaps above {LATE_S:g} s")

    def _late_readings(self) -> int:
        return sum(counter.late for counter in self._counters)

    def _find(self) -> tuple[Sequence[IntegratedPower], Callable[[], GpuConfig]]:
        gpus = open_gpus(self._nvml, self._device_indices)
        for gpu in gpus:
            gpu.power_w()  # It tells its power, or this raises.
        self._counters = [IntegratedPower(gpu, self._clock) for gpu in gpus]
        return self._counters, lambda: describe_gpus(gpus)


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
    unusual = [each for each, usual in ((by_counter, counted), (by_power, integrated)) if each.source != usual.source]
    return Comparison(
        time_s=by_counter.time_s,
        counter_j=by_counter.energy_j,
        integrated_j=by_power.energy_j,
        problem="; ".join(each.source for each in unusual) or None,
    )
