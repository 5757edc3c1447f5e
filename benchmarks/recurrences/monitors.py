"""The energy monitor of the trainings."""

from __future__ import annotations

import time

from benchmarks.recurrences.tasks import GPU, Device
from zeus_plugins.energy import EnergyMonitor, EstimateMonitor, auto
from zeus_plugins.energy.auto import DEFAULT_ESTIMATED_POWER_W, stated_power_w


def monitor_for(device: Device) -> EnergyMonitor:
    """The best monitor that the machine offers; on a CPU without a counter, stated watts × the process's CPU time.

    The trainings on the CPU have one thread, so that on an idle machine CPU time and time are the same, and on one that
    others use, too, CPU time says better what a run would have taken alone.
    """
    if device == GPU:
        return auto()
    monitor = auto(device_indices=())
    if not isinstance(monitor, EstimateMonitor):
        return monitor
    stated_w = stated_power_w()
    power_w, basis = (DEFAULT_ESTIMATED_POWER_W, "assumed") if stated_w is None else (stated_w, "stated")
    return EstimateMonitor(power_w, basis=f"{basis} × CPU time", clock=time.process_time)
