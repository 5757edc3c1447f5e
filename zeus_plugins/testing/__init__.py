"""Pretended devices for tests of your own trainings, where nothing is measured and no GPU needed; tests of policies.

`ReplayMonitor` is an energy monitor that gives out listed measurements. `ReplayMachine` is a machine whose GPUs have
power limits, and train as a table of measurements says. docs/testing.md has an example of each. `check_policy` checks a
policy of your own (docs/policy.md); it needs the extra ``server``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from zeus_plugins.energy import ReplayMonitor
from zeus_plugins.power_limit.replay import ReplayDevice, ReplayMachine, ReplayPoint

if TYPE_CHECKING:
    import bso_server.core.policy

__all__ = ["ReplayDevice", "ReplayMachine", "ReplayMonitor", "ReplayPoint", "check_policy"]


def check_policy(
    policy: str | bso_server.core.policy.Policy,
    *,
    seeds: Iterable[int] = range(6),
    trials: int = 40,
    limit_s: float = 10.0,
) -> None:
    """Check that a policy keeps to what the server expects of one; see docs/policy.md.

    Each seed is a job that lives through trials that reach the target, are stopped, crash, run out of memory, are
    preempted, fall silent and come back, or began without the server, several at the same time.

    Args:
        policy: A `bso_server.policies.Policy`, or the name of one that is installed.
        seeds: A job for each.
        trials: Number of trials of each job.
        limit_s: Seconds that one call may take.

    Raises:
        AssertionError: It does not; the text says in what, and in which job.
        PolicyNotInstalledError: There is no policy of this name.
    """
    from zeus_plugins.testing.policies import check

    check(policy, seeds, trials, limit_s)
