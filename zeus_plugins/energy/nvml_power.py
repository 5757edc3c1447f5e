"""NVIDIA GPUs without an energy counter (older than Volta): their power, read regularly and integrated over time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from zeus_plugins.energy.counters import MICRO, CounterMonitor
from zeus_plugins.energy.monitor import Measurement
from zeus_plugins.energy.nvml import Nvml, NvmlGpu, describe_gpus, open_gpus
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import GpuConfig

__all__ = ["SAMPLE_INTERVAL_S", "IntegratedPower", "NvmlPowerMonitor"]

SAMPLE_INTERVAL_S = 0.1

LATE_S = 1.0


class PowerMeter(Protocol):
    """A device that tells its power. `str()` names it for people."""

    @property
    def max_power_w(self) -> float:
        """The most that it draws, in watts."""
        ...

    def power_w(self) -> float:
        """The power that it draws now, watts."""
        ...


class IntegratedPower:
    """An `EnergyCounter` made of power readings: the area below the straight lines between them (trapezoidal rule).

    Args:
        meter: Tells the power.
        clock: Monotonic seconds.

    Attributes:
        late: How many readings came more than a second after the one before.
    """

    def __init__(self, meter: PowerMeter, clock: Callable[[], float]) -> None:
        self.late = 0
        self._meter = meter
        self._clock = clock
        self._energy_j = 0.0
        self._latest: tuple[float, float] | None = None

    def __str__(self) -> str:
        return str(self._meter)

    @property
    def max_power_w(self) -> float:
        """The most that the device draws, in watts."""
        return self._meter.max_power_w

    def energy_uj(self) -> int:
        """Microjoules since the first reading, up to now: each call reads the power and adds what was used since."""
        power_w = self._meter.power_w()
        now_s = self._clock()
        if self._latest is not None:
            then_s, power_then_w = self._latest
            self._energy_j += (now_s - then_s) * (power_w + power_then_w) / 2
            self.late += now_s - then_s > LATE_S
        self._latest = (now_s, power_w)
        return round(self._energy_j * MICRO)


_Devices = tuple[tuple[NvmlGpu, ...], list[IntegratedPower]]


class NvmlPowerMonitor(CounterMonitor[_Devices]):
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

    def gpus(self) -> GpuConfig:
        """Describe the GPUs as `NvmlMonitor.gpus` does."""
        (gpus, _), _ = self._open()
        return describe_gpus(gpus)

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
        (_, counters), _ = self._open()
        return sum(counter.late for counter in counters)

    def _find(self) -> tuple[_Devices, list[IntegratedPower]]:
        gpus = open_gpus(self._nvml, self._device_indices)
        for gpu in gpus:
            gpu.power_w()  # It tells its power, or this raises.
        counters = [IntegratedPower(gpu, self._clock) for gpu in gpus]
        return (gpus, counters), counters
