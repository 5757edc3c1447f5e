"""What a run costs, and when it has cost too much."""

from __future__ import annotations

import math


def cost(*, energy_j: float, time_s: float, max_power_w: float, eta: float) -> float:
    """Cost of a run in joules: ``η · energy + (1 − η) · max_power · time``.

    η trades energy against time, with time priced at the maximum power, so that both terms are joules
    (You, Chung, Chowdhury: Zeus, NSDI '23, equation 2).

    Args:
        energy_j: Energy over all GPUs, joules.
        time_s: Duration, seconds.
        max_power_w: Sum of the GPUs' maximum power limits, watts.
        eta: Weight of energy in [0, 1].
    """
    return eta * energy_j + (1 - eta) * max_power_w * time_s


def early_stop_bound(beta: float | None, min_cost_j: float | None) -> float:
    """Cost in joules above which a trial is stopped: ``β · min_cost``; infinite while either is unknown."""
    return math.inf if beta is None or min_cost_j is None else beta * min_cost_j
