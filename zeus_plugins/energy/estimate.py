"""Monitors without a device: stated watts × time, and listed measurements."""

from __future__ import annotations

import math
import platform
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from zeus_plugins.energy.monitor import Measurement, OpenWindows
from zeus_plugins.errors import ZeusBSOBadOperationError, ZeusBSOConfigError
from zeus_plugins.protocol import GpuConfig

MAX_MODEL_LENGTH = 255


class EstimateMonitor:
    """An `EnergyMonitor` that multiplies a stated power with the measured time, so costs rank batch sizes by time.

    Args:
        power_w: Power that the devices draw together while training, in watts.
        number_of_devices: Number of these devices.
        device_model: Their model. None: the name of this machine's CPU.
        basis: Origin of the watts in a word or two, for the source of each measurement.

    Raises:
        ZeusBSOConfigError: An argument is out of range.
    """

    measures_exactly = True

    def __init__(
        self,
        power_w: float,
        *,
        number_of_devices: int = 1,
        device_model: str | None = None,
        basis: str = "stated",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not (math.isfinite(power_w) and power_w > 0):
            raise ZeusBSOConfigError(
                f"power_w is {power_w!r}: state the watts that the devices draw while training, a finite number above 0"
            )
        if number_of_devices < 1:
            raise ZeusBSOConfigError(f"number_of_devices is {number_of_devices!r}: state how many train, 1 or more")
        if device_model is not None and not 1 <= len(device_model) <= MAX_MODEL_LENGTH:
            raise ZeusBSOConfigError(
                f"device_model has {len(device_model)} characters: give a name of 1 to {MAX_MODEL_LENGTH} characters,"
                " or None for the CPU's"
            )
        self._power_w = power_w
        self._number_of_devices = number_of_devices
        self._device_model = device_model
        self.source = f"estimate: {power_w:g} W {basis}"
        self._clock = clock
        self._windows: OpenWindows[float] = OpenWindows()

    def gpus(self) -> GpuConfig:
        """Describe the devices as stated, with the stated power as their maximum power."""
        return GpuConfig(
            max_power=self._power_w,
            number_of_gpus=self._number_of_devices,
            gpu_model=self._device_model or cpu_model_name(),
        )

    def begin_window(self, name: str) -> None:
        """See `EnergyMonitor.begin_window`."""
        self._windows.open(name, self._clock)

    def end_window(self, name: str) -> Measurement:
        """Return the time since the window began, and this time × the stated watts."""
        time_s = self._clock() - self._windows.close(name)
        return Measurement(time_s=time_s, energy_j=self._power_w * time_s, source=self.source)


class ReplayMonitor:
    """An `EnergyMonitor` that returns listed measurements in order.

    Args:
        measurements: One for each `end_window`, whatever the window's name. The iterable may be endless. The monitor
            can be pickled if the iterable's iterator can (a list's can, a generator's cannot).
        gpus: The devices of these measurements.
    """

    measures_exactly = True
    source = "replay"  # Each measurement keeps its listed source.

    def __init__(self, measurements: Iterable[Measurement], gpus: GpuConfig) -> None:
        self._remaining = iter(measurements)
        self._given_out = 0
        self._gpus = gpus
        self._windows: OpenWindows[None] = OpenWindows()

    def gpus(self) -> GpuConfig:
        """Return the given devices."""
        return self._gpus

    def begin_window(self, name: str) -> None:
        """See `EnergyMonitor.begin_window`."""
        self._windows.open(name, lambda: None)

    def end_window(self, name: str) -> Measurement:
        """Close a window and return the next listed measurement; raise `ZeusBSOBadOperationError` if none is left."""
        self._windows.close(name)
        measurement = next(self._remaining, None)
        if measurement is None:
            raise ZeusBSOBadOperationError(
                f"window {name!r} has no measurement left to replay: all {self._given_out} were given out;"
                " list one for each window that is ended"
            )
        self._given_out += 1
        return measurement


def cpu_model_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of this machine's CPU, in 1 to 255 characters.

    Without a model name in `cpuinfo` (not on Linux, or many Arm kernels), use the processor or machine type of
    `platform`.
    """
    try:
        model = re.search(r"^model name\s*:(.*\S)", cpuinfo.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        model = None
    name = (model[1].strip() if model else "") or platform.processor() or platform.machine() or "unknown CPU"
    return name[:MAX_MODEL_LENGTH]
