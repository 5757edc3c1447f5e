"""A pretended machine whose GPUs train as a table of measurements says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zeus_plugins.energy.monitor import Measurement, OpenWindows
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.power_limit.devices import PowerLimitUnavailableError
from zeus_plugins.protocol import GpuConfig


@dataclass(frozen=True)
class ReplayPoint:
    """The speed and power of one GPU under one power limit.

    Attributes:
        time_per_step_s: Seconds of a step.
        average_power_w: Watts meanwhile.
    """

    time_per_step_s: float
    average_power_w: float


class ReplayDevice:
    """A `PowerLimitDevice` of a `ReplayMachine`.

    Args:
        table: For each limit that can be set, in watts, the speed and power of the GPU under it.
        index: Names it.
        limit_w: The limit in force at first. None: the highest.
    """

    outlives_process = False

    def __init__(self, table: Mapping[float, ReplayPoint], index: int = 0, limit_w: float | None = None) -> None:
        if not table:
            raise ZeusBSOConfigError("the table to replay is empty: give a ReplayPoint for each power limit")
        self._table = dict(table)
        self.index = index
        self._limit_w = max(self._table) if limit_w is None else limit_w

    def __str__(self) -> str:
        return f"replayed GPU {self.index}"

    @property
    def point(self) -> ReplayPoint:
        """Its speed and power under the limit in force."""
        return self._table[self._limit_w]

    def range_w(self) -> tuple[float, float]:
        """The lowest and highest limits of the table; see `PowerLimitDevice.range_w`."""
        return min(self._table), max(self._table)

    def limit_w(self) -> float:
        """The limit in force; see `PowerLimitDevice.limit_w`."""
        return self._limit_w

    def set_limit_w(self, limit_w: float) -> None:
        """Set one of the table's limits; see `PowerLimitDevice.set_limit_w`."""
        if limit_w not in self._table:
            raise PowerLimitUnavailableError(f"{self} has no limit of {limit_w:g} W: it has {sorted(self._table)}")
        self._limit_w = limit_w


class ReplayMachine:
    """GPUs that train together: each step lasts as long as that of the slowest.

    Args:
        table: For each power limit in watts, the speed and power of a GPU under it.
        number_of_gpus: Number of GPUs, all alike.
        gpu_model: Their model's name.

    Attributes:
        devices: The GPUs, for `PowerLimitProfiler(devices)` or a callback's `devices=`.
        monitor: Measures what `train` costs, for `energy_monitor=`.
        time_s: Seconds trained so far.
        energy_j: Joules used so far.
    """

    def __init__(
        self, table: Mapping[float, ReplayPoint], number_of_gpus: int = 1, gpu_model: str = "replayed GPU"
    ) -> None:
        self.devices = tuple(ReplayDevice(table, index) for index in range(number_of_gpus))
        self.monitor = _MachineMonitor(self, gpu_model)
        self.time_s = 0.0
        self.energy_j = 0.0

    def train(self, steps: int = 1) -> None:
        """Train so many steps under the limits in force."""
        time_s = steps * max(device.point.time_per_step_s for device in self.devices)
        self.time_s += time_s
        self.energy_j += time_s * sum(device.point.average_power_w for device in self.devices)


class _MachineMonitor:
    """The `EnergyMonitor` of a `ReplayMachine`: measures what its trainings cost."""

    source = "replay"
    measures_exactly = True  # however short a window is

    def __init__(self, machine: ReplayMachine, gpu_model: str) -> None:
        self._machine = machine
        self._gpu_model = gpu_model
        self._windows: OpenWindows[tuple[float, float]] = OpenWindows()

    def gpus(self) -> GpuConfig:
        """Describe the machine; its maximum power is the sum of the highest limits, watts."""
        devices = self._machine.devices
        return GpuConfig(
            max_power=sum(device.range_w()[1] for device in devices),
            number_of_gpus=len(devices),
            gpu_model=self._gpu_model,
        )

    def begin_window(self, name: str) -> None:
        """Start to measure; see `EnergyMonitor.begin_window`."""
        self._windows.open(name, (self._machine.time_s, self._machine.energy_j))

    def end_window(self, name: str) -> Measurement:
        """Return what the trainings since then have cost; see `EnergyMonitor.end_window`."""
        time_s, energy_j = self._windows.close(name)
        return Measurement(self._machine.time_s - time_s, self._machine.energy_j - energy_j, self.source)
