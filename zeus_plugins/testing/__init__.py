"""Pretended devices for tests of your own trainings: nothing is measured, and no GPU is needed.

`ReplayMonitor` is an energy monitor that gives out listed measurements. `ReplayMachine` is a machine whose GPUs have
power limits, and train as a table of measurements says. docs/testing.md has an example of each.
"""

from __future__ import annotations

from zeus_plugins.energy.replay import ReplayMonitor
from zeus_plugins.power_limit.replay import ReplayDevice, ReplayMachine, ReplayPoint

__all__ = ["ReplayDevice", "ReplayMachine", "ReplayMonitor", "ReplayPoint"]
