"""Calibration of a policy: how often its expectations hold in simulated jobs, whose true expected costs are known."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import TypeAlias

from bso_server.core import policy
from bso_server.core.model import Arm, History
from bso_server.simulate.play import Conditions

Tallies: TypeAlias = dict[str, tuple[int, int]]
"""By kind (a key of `BANDS`): the number of bands that contained the true cost, and the number of all bands."""

BANDS = {
    "best-1": "best known size, after 1–2 recurrences",
    "best-3": "best known size, after 3–9",
    "best-10": "best known size, after 10 and more",
    "never-run": "size that never ran, after 3–9",
    "stopped": "size whose runs all stopped before the target, after 3–9",
}
"""Kinds of 90 % bands for the expected cost of a size that can reach the target, and their names in tables."""

_FEW = range(3, 10)


def total(tallies: Iterable[Tallies]) -> Tallies:
    """Return the sums of tallies, by kind in the order of `BANDS`."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for each in tallies:
        for kind, (true, claims) in each.items():
            sums[kind][0] += true
            sums[kind][1] += claims
    return {kind: (sums[kind][0], sums[kind][1]) for kind in BANDS if kind in sums}


class Calibration:
    """Comparison of a policy's expectations with the truth in one simulated job."""

    def __init__(self, conditions: Conditions) -> None:
        self._conditions = conditions
        self._seen: set[int] = set()
        self._found: list[Tallies] = []

    def look(self, recurrence: int, history: History) -> None:
        """Compare the expectations before a decision with the truth; count bands only once per recurrence."""
        if recurrence in self._seen:
            return
        self._seen.add(recurrence)
        expected, sizes = policy.expectations(history), self._conditions.landscape_at(recurrence).profiles
        for size, cost in expected.costs.items():
            true_j = sizes[size].expected_cost_j
            kind = _kind(recurrence, history.arms[size], is_best=size == expected.best)
            if kind is not None and cost.band_j is not None and math.isfinite(true_j):
                low_j, high_j = cost.band_j
                self._found.append({kind: (int(low_j <= true_j <= high_j), 1)})

    def tallies(self) -> Tallies:
        """Return the tallies of the job."""
        return total(self._found)


def _kind(recurrence: int, arm: Arm, *, is_best: bool) -> str | None:
    """Return the kind (a key of `BANDS`) that counts a size after `recurrence` recurrences, or None."""
    if is_best and recurrence:
        return "best-1" if recurrence < _FEW.start else "best-3" if recurrence in _FEW else "best-10"
    if recurrence not in _FEW or arm.completed.count or (arm.trials and not arm.observed.count):
        return None
    return "stopped" if arm.trials else "never-run"
