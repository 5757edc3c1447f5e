"""Helpers of the tests of the power limit: a machine with GPUs that follow a made-up table."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from zeus_plugins.energy import EnergyUnavailableError, Measurement
from zeus_plugins.energy.monitor import OpenWindows
from zeus_plugins.files import state_directory
from zeus_plugins.placement import process_start
from zeus_plugins.power_limit import (
    OptimumSelector,
    PowerLimitProfile,
    PowerLimitProfiler,
    PowerLimitUnavailableError,
    ZeusCost,
)
from zeus_plugins.power_limit.guard import remember
from zeus_plugins.power_limit.plan import Done, Profiling, Ready, State, Warmup
from zeus_plugins.protocol import GpuConfig


class Device:
    """The base of simulated GPUs, whose limits are not restored by another process."""

    uuid: str | None = None

    def range_w(self) -> tuple[float, float]:
        return 100.0, 250.0

    def limit_w(self) -> float:
        raise NotImplementedError

    def enforced_limit_w(self) -> float:
        return self.limit_w()

    def default_limit_w(self) -> float | None:
        return None


@dataclass(frozen=True)
class ReplayPoint:
    """The seconds of a step and the mean watts of one GPU under one power limit."""

    time_per_step_s: float
    average_power_w: float


class ReplayDevice(Device):
    """A GPU: `table` has its speed and power under each settable limit in watts; it begins at the highest.

    Attributes:
        set_w: The limits that were set.
    """

    def __init__(self, table: Mapping[float, ReplayPoint], index: int = 0) -> None:
        self._table = dict(table)
        self.index = index
        self._limit_w = max(self._table)
        self.set_w: list[float] = []

    def __str__(self) -> str:
        return f"replayed GPU {self.index}"

    @property
    def point(self) -> ReplayPoint:
        """Speed and power under the limit in force."""
        return self._table[self._limit_w]

    def range_w(self) -> tuple[float, float]:
        return min(self._table), max(self._table)

    def limit_w(self) -> float:
        return self._limit_w

    def set_limit_w(self, limit_w: float) -> None:
        if limit_w not in self._table:
            raise PowerLimitUnavailableError(f"{self} has no limit of {limit_w:g} W: it has {sorted(self._table)}")
        self._limit_w = limit_w
        self.set_w.append(limit_w)


class ReplayMachine:
    """GPUs that train together, each with the same `table`, and their `monitor`; the slowest GPU sets the pace."""

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
    source = "replay"

    def __init__(self, machine: ReplayMachine, gpu_model: str) -> None:
        self._machine = machine
        self._gpu_model = gpu_model
        self._windows: OpenWindows[tuple[float, float]] = OpenWindows()

    def gpus(self) -> GpuConfig:
        devices = self._machine.devices
        max_power_w = sum(device.range_w()[1] for device in devices)
        return GpuConfig(max_power=max_power_w, number_of_gpus=len(devices), gpu_model=self._gpu_model)

    def begin_window(self, name: str) -> None:
        self._windows.open(name, lambda: (self._machine.time_s, self._machine.energy_j))

    def end_window(self, name: str) -> Measurement:
        time_s, energy_j = self._windows.close(name)
        return Measurement(self._machine.time_s - time_s, self._machine.energy_j - energy_j, self.source)


# Watts: seconds and watts of a step. Worked out by hand (maximum power 250 W):
#          energy   cost at η = 0.5
#   100 W  160 J    0.5 · 160 + 0.5 · 250 · 2.0 = 330.0
#   150 W  150 J    0.5 · 150 + 0.5 · 250 · 1.2 = 225.0
#   200 W  180 J    0.5 · 180 + 0.5 · 250 · 1.0 = 215.0
#   250 W  209 J    0.5 · 209 + 0.5 · 250 · 0.95 = 223.25
TABLE = {
    100.0: ReplayPoint(2.0, 80.0),
    150.0: ReplayPoint(1.2, 125.0),
    200.0: ReplayPoint(1.0, 180.0),
    250.0: ReplayPoint(0.95, 220.0),
}
LIMITS_W = (250.0, 200.0, 150.0, 100.0)
ANY_LENGTH = {"warmup_s": 0.0, "profile_s": 0.0}  # a replayed machine measures windows of any length
BEST_W = 200.0
FOUND_W = 250.0

# States that may follow each state of a profiler.
MOVES: Mapping[type[State], set[type[State]]] = {
    Ready: {Warmup, Profiling, Done},
    Warmup: {Profiling, Ready, Done},
    Profiling: {Warmup, Profiling, Ready, Done},
}


def machine(number_of_gpus: int = 1) -> ReplayMachine:
    return ReplayMachine(TABLE, number_of_gpus)


def profiler(where: ReplayMachine, selector: OptimumSelector | None = None, **options: Any) -> PowerLimitProfiler:
    """Return a profiler, by default with three steps per limit."""
    defaults: dict[str, Any] = {"warmup_steps": 1, "profile_steps": 2, "monitor": where.monitor, "limits_w": LIMITS_W}
    options = ANY_LENGTH | defaults | options
    return PowerLimitProfiler(options.pop("devices", where.devices), selector or ZeusCost(0.5), **options)


def train(where: ReplayMachine, zeus: PowerLimitProfiler, steps: int = 12, epochs: int = 1) -> list[float]:
    """Train and return the limit of each step."""
    limits_w: list[float] = []
    for _ in range(epochs):
        zeus.on_epoch_begin()
        for _ in range(steps):
            limits_w.append(where.devices[0].limit_w())
            where.train()
            zeus.on_step_end()
        zeus.on_epoch_end()
    return limits_w


def is_as_the_table(profile: PowerLimitProfile | None) -> bool:
    """Return True if only steps were measured."""
    assert profile is not None
    measured = {sample.limit_w: (sample.time_per_step_s, sample.energy_j / sample.time_s) for sample in profile.samples}
    expected = {limit: (point.time_per_step_s, point.average_power_w) for limit, point in TABLE.items()}
    return measured == {limit: pytest.approx(pair, abs=1e-9) for limit, pair in expected.items()}


def record_limit(pid: int | None = None, **fields: Any) -> None:
    """Write the record of a training that has set 400 W on a GPU that had 700 W.

    Without `pid`, the record is one of an older version, which names no process.
    """
    remember(fields.pop("uuid", "GPU-0"), 700.0, 400.0)
    (path,) = (state_directory() / "power-limits").glob("*.json")
    record = json.loads(path.read_text())
    named = {} if pid is None else {"pid": pid, "started": process_start(pid)}
    path.write_text(json.dumps({name: record[name] for name in ("original_w", "set_w", "boot_id")} | named | fields))


class Forbidden(Device):
    """A GPU with a readable, but not writable limit."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def __str__(self) -> str:
        return "GPU 0 (V100)"

    def limit_w(self) -> float:
        return 200.0

    def set_limit_w(self, limit_w: float) -> None:
        self.asked.append(limit_w)
        raise PowerLimitUnavailableError("Insufficient Permissions")


class Breaks(Device):
    """Wrapper of a device that takes `takes` limits, refuses the next `refuses` limits, and then takes limits again."""

    def __init__(self, device: Any, takes: int, refuses: int = 1) -> None:
        self._device, self.takes, self._refuses = device, takes, refuses
        self.range_w, self.limit_w = device.range_w, device.limit_w  # type: ignore[method-assign]

    def __str__(self) -> str:
        return "GPU 0"

    def set_limit_w(self, limit_w: float) -> None:
        self.takes -= 1
        if -self._refuses <= self.takes < 0:
            raise PowerLimitUnavailableError("GPU is lost")
        self._device.set_limit_w(limit_w)


class Failing:
    """A monitor that fails at every call of one kind, or only at the `only`-th call."""

    source = "failing"

    def __init__(
        self, where: ReplayMachine, fails_at: str, only: int | None = None, measurement: Measurement | None = None
    ) -> None:
        self._monitor, self._fails_at, self._only, self._measurement = where.monitor, fails_at, only, measurement
        self._calls = 0

    def _fail(self, call: str) -> None:
        if call == self._fails_at:
            self._calls += 1
            if self._only in (None, self._calls):
                raise EnergyUnavailableError("the counter is gone")

    def gpus(self) -> GpuConfig:
        self._fail("gpus")
        return self._monitor.gpus()

    def begin_window(self, name: str) -> None:
        self._fail("begin")
        self._monitor.begin_window(name)

    def end_window(self, name: str) -> Measurement:
        self._fail("end")
        return self._measurement or self._monitor.end_window(name)


class FileDevice(Device):
    """A GPU with its limit in a file, so that other processes see the limit."""

    uuid = "GPU-file"

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return f"GPU 0 ({self.path.name})"

    def limit_w(self) -> float:
        return float(self.path.read_text())

    def set_limit_w(self, limit_w: float) -> None:
        unfinished = self.path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(str(limit_w))
        unfinished.replace(self.path)
