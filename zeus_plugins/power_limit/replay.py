"""A simulated machine whose GPUs train according to a table of measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zeus_plugins.energy.monitor import Measurement, OpenWindows
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.power_limit.devices import PowerLimitUnavailableError
from zeus_plugins.protocol import GpuConfig


@dataclass(frozen=True)
class ReplayPoint:
    """The seconds of a step and the mean watts of one GPU under one power limit."""

    time_per_step_s: float
    average_power_w: float


class ReplayDevice:
    """A `PowerLimitDevice` whose `table` has its speed and power under each settable limit in watts.

    The initial limit is `limit_w`, by default the highest.
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
        """Speed and power under the limit in force."""
        return self._table[self._limit_w]

    def range_w(self) -> tuple[float, float]:
        """See `PowerLimitDevice.range_w`."""
        return min(self._table), max(self._table)

    def limit_w(self) -> float:
        """See `PowerLimitDevice.limit_w`."""
        return self._limit_w

    def set_limit_w(self, limit_w: float) -> None:
        """Set a limit of the table."""
        if limit_w not in self._table:
            raise PowerLimitUnavailableError(f"{self} has no limit of {limit_w:g} W: it has {sorted(self._table)}")
        self._limit_w = limit_w


class ReplayMachine:
    """GPUs that train together, each with the same `table`: a step takes the time of the slowest GPU.

    Attributes:
        devices: The GPUs, for `PowerLimitProfiler(devices)` or a callback's `devices=`.
        monitor: Measures the cost of `train`, for `energy_monitor=`.
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
        """Train `steps` under the limits in force."""
        time_s = steps * max(device.point.time_per_step_s for device in self.devices)
        self.time_s += time_s
        self.energy_j += time_s * sum(device.point.average_power_w for device in self.devices)


class _MachineMonitor:
    """The `EnergyMonitor` of a `ReplayMachine`."""

    source = "replay"
    measures_exactly = True

    def __init__(self, machine: ReplayMachine, gpu_model: str) -> None:
        self._machine = machine
        self._gpu_model = gpu_model
        self._windows: OpenWindows[tuple[float, float]] = OpenWindows()

    def gpus(self) -> GpuConfig:
        devices = self._machine.devices
        return GpuConfig(
            max_power=sum(device.range_w()[1] for device in devices),
            number_of_gpus=len(devices),
            gpu_model=self._gpu_model,
        )

    def begin_window(self, name: str) -> None:
        self._windows.open(name, lambda: (self._machine.time_s, self._machine.energy_j))

    def end_window(self, name: str) -> Measurement:
        time_s, energy_j = self._windows.close(name)
        return Measurement(self._machine.time_s - time_s, self._machine.energy_j - energy_j, self.source)
