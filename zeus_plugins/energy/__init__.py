"""Time and energy of a training, measured, or estimated and labelled as an estimate.

Importing this package touches no driver and loads no deep-learning framework.
"""

from __future__ import annotations

from zeus_plugins.energy.auto import auto
from zeus_plugins.energy.cluster import ClusterMonitor
from zeus_plugins.energy.estimate import EstimateMonitor
from zeus_plugins.energy.meter import EpochMeter
from zeus_plugins.energy.monitor import DEFAULT_ESTIMATED_POWER_W, EnergyMonitor, EnergyUnavailableError, Measurement
from zeus_plugins.energy.nvml import NvmlMonitor, NvmlPowerMonitor
from zeus_plugins.energy.rapl import RaplMonitor
from zeus_plugins.energy.zeus_monitor import WindowMonitor, ZeusMonitorAdapter, as_energy_monitor

__all__ = [
    "DEFAULT_ESTIMATED_POWER_W",
    "ClusterMonitor",
    "EnergyMonitor",
    "EnergyUnavailableError",
    "EpochMeter",
    "EstimateMonitor",
    "Measurement",
    "NvmlMonitor",
    "NvmlPowerMonitor",
    "RaplMonitor",
    "WindowMonitor",
    "ZeusMonitorAdapter",
    "as_energy_monitor",
    "auto",
]
