"""Tests of trainings without a GPU; docs/testing.md has examples.

`ReplayMonitor` is an energy monitor that returns listed measurements.
"""

from __future__ import annotations

from zeus_plugins.energy import ReplayMonitor

__all__ = ["ReplayMonitor"]
