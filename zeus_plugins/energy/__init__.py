"""Time and energy of a training, measured or honestly estimated.

Importing this package touches no driver and loads no deep-learning framework.
"""

from __future__ import annotations

from zeus_plugins.energy.auto import DEFAULT_ESTIMATED_POWER_W, auto
from zeus_plugins.energy.estimate import EstimateMonitor
from zeus_plugins.energy.meter import EpochMeter
from zeus_plugins.energy.monitor import EnergyMonitor, EnergyUnavailableError, Measurement
from zeus_plugins.energy.nvml import NvmlMonitor
from zeus_plugins.energy.replay import ReplayMonitor

__all__ = [
    "DEFAULT_ESTIMATED_POWER_W",
    "EnergyMonitor",
    "EnergyUnavailableError",
    "EpochMeter",
    "EstimateMonitor",
    "Measurement",
    "NvmlMonitor",
    "ReplayMonitor",
    "auto",
]
