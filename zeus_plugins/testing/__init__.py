"""Tests of trainings without a GPU; docs/examples.md has examples.

`ReplayMonitor` is an energy monitor that returns listed measurements.
"""

from __future__ import annotations

from typing import Any

from zeus_plugins.energy import ReplayMonitor

__all__ = ["ReplayMonitor"]


def __getattr__(name: str) -> Any:
    if name == "check_policy":
        raise AttributeError("check_policy was removed: docs/policy-custom.md lists what to test of a policy")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
