"""Calibration of a policy: how often its expectations hold in simulated jobs, whose true expected costs are known."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import TypeAlias

from bso_server.core import policy
from bso_server.core.gp_voi.policy import chance_in_words
from bso_server.core.model import Arm, History
from bso_server.simulate.play import Conditions, PlayedTrial

Tallies: TypeAlias = dict[str, tuple[int, int]]
"""By kind (a key of `BANDS` or one of `CHANCES`): the number of true claims, and the number of all claims."""

BANDS = {
    "best-1": "best known size, after 1–2 recurrences",
    "best-3": "best known size, after 3–9",
    "best-10": "best known size, after 10 and more",
    "never-run": "size that never ran, after 3–9",
    "stopped": "size whose runs all stopped before the target, after 3–9",
    "any-never-run": "size that never ran, after 3–9; also if it never reaches the target",
    "any-stopped": "size whose runs all stopped before the target, after 3–9; also if it never reaches the target",
}
"""Kinds of 90 % bands for a size's expected cost, and their names in tables.

A claim is true if the band contains the true cost. If a size never reaches the target, its cost is infinite and outside
every band; only the last two kinds count such sizes.
"""

_FEW = range(3, 10)

CHANCES = tuple(dict.fromkeys(chance_in_words(percent / 100) for percent in range(101)))
"""Names of the chance that a size that is tried is cheaper than the best known size, ascending."""

# Longer names come first, so that no name matches a part of a longer one.
_CHANCE = re.compile("|".join(map(re.escape, sorted(CHANCES, key=len, reverse=True))))


def total(tallies: Iterable[Tallies]) -> Tallies:
    """Return the sums of tallies, by kind in the order of `BANDS` and `CHANCES`."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for each in tallies:
        for kind, (true, claims) in each.items():
            sums[kind][0] += true
            sums[kind][1] += claims
    return {kind: (sums[kind][0], sums[kind][1]) for kind in (*BANDS, *CHANCES) if kind in sums}


class Calibration:
    """Comparison of a policy's expectations with the truth in one simulated job."""

    def __init__(self, conditions: Conditions) -> None:
        self._conditions = conditions
        self._seen: set[int] = set()
        self._tallies: list[Tallies] = []
        # The best known size at each decision, by the number of the trial that the decision starts.
        self._best: dict[int, int] = {}

    def look(self, recurrence: int, history: History) -> None:
        """Compare the expectations before a decision with the truth; count bands only once per recurrence."""
        expected = policy.expectations(history)
        if expected.best is not None:
            self._best[1 + sum(arm.trials for arm in history.arms.values())] = expected.best
        if recurrence in self._seen:
            return
        self._seen.add(recurrence)
        for size, cost in expected.costs.items():
            true_j = self._true_cost_j(recurrence, size)
            kinds = _kinds(recurrence, history.arms[size], is_best=size == expected.best, reaches=math.isfinite(true_j))
            if cost.band_j is not None:
                low_j, high_j = cost.band_j
                self._tallies += [{kind: (int(low_j <= true_j <= high_j), 1)} for kind in kinds]

    def tallies(self, trials: Iterable[PlayedTrial]) -> Tallies:
        """Return the tallies of the job, including the chances that the reasons of its trials state."""
        return total([*self._tallies, *map(self._of_trial, trials)])

    def _of_trial(self, trial: PlayedTrial) -> Tallies:
        """Return whether the tried size was cheaper, by the stated chance; empty if the trial's reason states none."""
        size, best = trial.record.batch_size, self._best.get(trial.record.trial_number)
        stated = _CHANCE.search(trial.record.reason)
        if stated is None or best is None or size == best:
            return {}
        tried_j, best_j = (self._true_cost_j(trial.recurrence, each) for each in (size, best))
        return {stated[0]: (int(tried_j < best_j), 1)}

    def _true_cost_j(self, recurrence: int, size: int) -> float:
        return self._conditions.landscape_at(recurrence).profiles[size].expected_cost_j


def _kinds(recurrence: int, arm: Arm, *, is_best: bool, reaches: bool) -> list[str]:
    """Return the kinds (keys of `BANDS`) that count a size after `recurrence` recurrences.

    `is_best`: it is the best known size. `reaches`: it can reach the target.
    """
    if is_best and recurrence:
        return ["best-1" if recurrence < _FEW.start else "best-3" if recurrence in _FEW else "best-10"]
    if recurrence not in _FEW or arm.completed.count or (arm.trials and not arm.observed.count):
        return []
    kind = "stopped" if arm.trials else "never-run"
    return [kind, f"any-{kind}"] if reaches else [f"any-{kind}"]
