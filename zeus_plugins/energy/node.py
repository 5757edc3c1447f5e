"""The energy of a whole node: its training devices, CPU packages and memory together."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from zeus_plugins.energy.counters import CounterMonitor
from zeus_plugins.energy.linux import POWERCAP, JetsonMonitor, RaplMonitor, probe_rapl
from zeus_plugins.energy.monitor import EnergyMonitor, EnergyUnavailableError, MonitorRequest, warn_once

EnergyScope = Literal["gpu", "node"]
"""The devices whose energy counts: those that train, or also the CPU packages and memory of their node."""


def whole_node(
    devices: EnergyMonitor, estimated_power_w: float | None = None, powercap: Path = POWERCAP
) -> EnergyMonitor:
    """Return a monitor of measured GPUs and of the CPU packages and memory (RAPL) beside them.

    If the packages cannot be read, warn and return `devices`. Other monitors are returned as they are: their devices
    are the packages, a whole module, or an estimate.
    """
    if not isinstance(devices, CounterMonitor) or isinstance(devices, RaplMonitor | JetsonMonitor):
        return devices
    try:
        choice = probe_rapl(MonitorRequest((), estimated_power_w), powercap)
    except EnergyUnavailableError as unavailable:
        warn_once(f"energy_scope='node' measures the training devices only: {unavailable.cause}")
        return devices
    if choice is None or not isinstance(choice.monitor, CounterMonitor):
        return devices
    if choice.warning is not None:
        warn_once(choice.warning)
    return devices.joined(choice.monitor)
