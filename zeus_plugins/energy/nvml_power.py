"""NVIDIA GPUs without an energy counter (older than Volta): their power, read regularly and integrated over time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from zeus_plugins.energy.counters import MICRO, CounterWindows
from zeus_plugins.energy.monitor import Measurement
from zeus_plugins.energy.nvml import Nvml, NvmlGpu, describe_gpus, open_gpus
from zeus_plugins.energy.sampling import Sampler
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

    def sample(self) -> None:
        """Read the power, and add what was used since the reading before."""
        power_w = self._meter.power_w()
        now_s = self._clock()
        if self._latest is not None:
            then_s, power_then_w = self._latest
            self._energy_j += (now_s - then_s) * (power_w + power_then_w) / 2
            self.late += now_s - then_s > LATE_S
        self._latest = (now_s, power_w)

    def energy_uj(self) -> int:
        """Microjoules since the first reading, up to now: a window begins and ends with a reading of its own."""
        self.sample()
        return round(self._energy_j * MICRO)


class NvmlPowerMonitor:
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
        self._device_indices = None if device_indices is None else tuple(device_indices)
        self._interval_s = interval_s
        self._nvml = nvml
        self._clock = clock
        self._opened: _Opened | None = None
        self._late: dict[str, int] = {}

    @property
    def source(self) -> str:
        """That it is integrated power, and how often that is read."""
        return f"nvml power, integrated every {self._interval_s:g} s"

    def gpus(self) -> GpuConfig:
        """Describe the GPUs as `NvmlMonitor.gpus` does."""
        return describe_gpus(self._open().gpus)

    def begin_window(self, name: str) -> None:
        """Start to measure; see `EnergyMonitor.begin_window`."""
        opened = self._open()
        opened.windows.begin(name)
        self._late[name] = opened.late

    def end_window(self, name: str) -> Measurement:
        """Return the time since the window began and the GPUs' integrated power, summed over the GPUs."""
        opened = self._open()
        measured = opened.windows.end(name)
        if opened.late == self._late.pop(name):
            return measured
        return Measurement(measured.time_s, measured.energy_j, f"{measured.source}, with gaps above {LATE_S:g} s")

    def _open(self) -> _Opened:
        if self._opened is None:
            gpus = open_gpus(self._nvml, self._device_indices)
            for gpu in gpus:
                gpu.power_w()  # It tells its power, or this raises.
            self._opened = _Opened(gpus, self.source, self._clock, self._interval_s)
        return self._opened


class _Opened:
    """The GPUs in use, their integrals and their windows."""

    def __init__(self, gpus: tuple[NvmlGpu, ...], source: str, clock: Callable[[], float], interval_s: float) -> None:
        self.gpus = gpus
        self._counters = [IntegratedPower(gpu, clock) for gpu in gpus]
        sampler = Sampler(self._sample, interval_s)
        self.windows = CounterWindows(self._counters, source=source, clock=clock, sampler=sampler)

    @property
    def late(self) -> int:
        return sum(counter.late for counter in self._counters)

    def _sample(self) -> None:
        for counter in self._counters:
            counter.sample()
