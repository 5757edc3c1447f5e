"""The energy of a whole node: its training devices, CPU packages and memory together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from zeus_plugins.energy.estimate import MAX_MODEL_LENGTH, EstimateMonitor
from zeus_plugins.energy.linux import POWERCAP, JetsonMonitor, RaplMonitor, open_zones, probe_rapl
from zeus_plugins.energy.monitor import (
    MAX_SOURCE_LENGTH,
    EnergyMonitor,
    EnergyUnavailableError,
    Measurement,
    MonitorRequest,
    warn_once,
)
from zeus_plugins.protocol import GpuConfig

EnergyScope = Literal["gpu", "node"]
"""The devices whose energy counts: those that train, or also the CPU packages and memory of their node."""

_NAMES = {"cpu": "CPU", "dram": "DRAM"}


class NodeMonitor:
    """An `EnergyMonitor` that adds up several monitors of one node, the first of them that of the training devices.

    The model of its devices names the further parts, so that a job whose scope changes is a job on other hardware: the
    costs of its earlier trials no longer count.

    Args:
        monitors: Monitors of different devices.
        parts: Names of the further parts.
    """

    def __init__(self, monitors: Sequence[EnergyMonitor], parts: Collection[str]) -> None:
        self._monitors = monitors
        self._parts = parts

    def include(self, processes: Collection[int]) -> None:
        """Count the processes with these ids, such as other ranks, as part of the training."""
        for monitor in self._monitors:
            if hasattr(monitor, "include"):
                monitor.include(processes)

    @property
    def source(self) -> str:
        """The sources of the monitors."""
        return " and ".join(monitor.source for monitor in self._monitors)[:MAX_SOURCE_LENGTH]

    def gpus(self) -> GpuConfig:
        """Describe the training devices and the further parts, with the summed maximum power in watts."""
        devices, *others = [monitor.gpus() for monitor in self._monitors]
        further = f" with {' and '.join(self._parts)}"
        return GpuConfig(
            max_power=devices.max_power + sum(other.max_power for other in others),
            number_of_gpus=devices.number_of_gpus,
            gpu_model=devices.gpu_model[: MAX_MODEL_LENGTH - len(further)] + further,
        )

    def begin_window(self, name: str) -> None:
        """See `EnergyMonitor.begin_window`."""
        for monitor in self._monitors:
            monitor.begin_window(name)

    def end_window(self, name: str) -> Measurement:
        """Close a window and return the time of the training devices, and the energy of all parts."""
        measured = [monitor.end_window(name) for monitor in self._monitors]
        return Measurement(
            measured[0].time_s,
            sum(each.energy_j for each in measured),
            " and ".join(each.source for each in measured)[:MAX_SOURCE_LENGTH],
            {name: joules for each in measured for name, joules in each.parts_j.items()},
        )


def whole_node(
    devices: EnergyMonitor, estimated_power_w: float | None = None, powercap: Path = POWERCAP
) -> EnergyMonitor:
    """Return a monitor of the devices and of the CPU packages and memory (RAPL) beside them.

    Without readable packages, warn and return `devices`; also if these are the packages, a whole module, or an estimate
    of the whole machine.
    """
    if isinstance(devices, RaplMonitor | JetsonMonitor | EstimateMonitor):
        return devices
    try:
        choice = probe_rapl(MonitorRequest((), estimated_power_w), powercap)
        parts = {_NAMES[zone.part]: None for zone in open_zones(powercap, None)}
    except EnergyUnavailableError as unavailable:
        warn_once(f"energy_scope='node' measures the training devices only: {unavailable.cause}")
        return devices
    if choice is None:
        return devices
    if choice.warning is not None:
        warn_once(choice.warning)
    return NodeMonitor([devices, choice.monitor], parts)
