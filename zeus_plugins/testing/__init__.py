"""Pretended devices for tests of your own trainings, where nothing is measured and no GPU needed; tests of policies.

`ReplayMonitor` is an energy monitor that gives out listed measurements. `ReplayMachine` is a machine whose GPUs have
power limits, and train as a table of measurements says. docs/testing.md has an example of each. `check_policy` checks a
policy of your own (docs/policy.md); it needs the extra ``server``.
"""

from __future__ import annotations

from zeus_plugins.energy.replay import ReplayMonitor
from zeus_plugins.power_limit.replay import ReplayDevice, ReplayMachine, ReplayPoint
from zeus_plugins.testing.policies import check_policy

__all__ = ["ReplayDevice", "ReplayMachine", "ReplayMonitor", "ReplayPoint", "check_policy"]
