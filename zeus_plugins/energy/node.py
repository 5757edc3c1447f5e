"""The energy of a whole node: its training devices, CPU packages and memory together."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from zeus_plugins.energy.counters import CounterMonitor
from zeus_plugins.energy.linux import POWERCAP, JetsonMonitor, RaplMonitor, probe_rapl
from zeus_plugins.energy.monitor import EnergyMonitor, EnergyUnavailableError, MonitorRequest, warn_once

EnergyScope = Literal["gpu", "node"]
"""The devices whose energy counts: the training's devices, or also the CPU packages and memory of the node."""


def whole_node(
    devices: EnergyMonitor, estimated_power_w: float | None = None, powercap: Path = POWERCAP
) -> EnergyMonitor:
    """Return a monitor of the measured GPUs together with their node's CPU packages and memory (RAPL).

    If the packages cannot be read, warn and return `devices`. If `devices` already measures the packages or a whole
    module, or is an estimate, return it unchanged.
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
