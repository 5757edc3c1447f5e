"""Tests of trainings without a GPU, and of policies; docs/testing.md has examples.

`ReplayMonitor` is an energy monitor that returns listed measurements. `check_policy` (docs/policy-custom.md) needs the
extra ``server``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from zeus_plugins.energy import ReplayMonitor

if TYPE_CHECKING:
    import bso_server.core.policy

__all__ = ["ReplayMonitor", "check_policy"]


def check_policy(
    policy: str | bso_server.core.policy.Policy,
    *,
    seeds: Iterable[int] = range(6),
    trials: int = 40,
    limit_s: float = 10.0,
) -> None:
    """Check that a policy satisfies the server's requirements; see docs/policy-custom.md.

    Each seed is a job with concurrent trials, which reach the target, are stopped, crash, run out of memory, are
    preempted, lose contact and return, or begin without the server.

    Args:
        policy: A `bso_server.policies.Policy`, or the name of an installed policy.
        seeds: A job for each.
        trials: Number of trials of each job.
        limit_s: Seconds that one call may take.

    Raises:
        AssertionError: The policy violates a requirement, which the text names with the job.
        PolicyNotInstalledError: No policy of this name is installed.
    """
    from zeus_plugins.testing.policies import check

    check(policy, seeds, trials, limit_s)
