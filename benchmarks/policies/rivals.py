"""The rivals of the server's policies: strategies that know finished runs alone, and stop none.

Every strategy but `Default` has the power limits that the server's policies have, tried out in the same way.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from benchmarks.policies.cases import Case
from bso_server.core.statistics import Statistics


class Rival(ABC):
    """A strategy for one job.

    Attributes:
        full_power: All runs have the maximum power limit; else each size has its best.
    """

    full_power = False

    @abstractmethod
    def next_size(self) -> int:
        """The batch size of the next recurrence."""

    def learn(self, batch_size: int, cost_j: float) -> None:  # noqa: B027 - some learn nothing
        """Take note of a finished recurrence.

        Args:
            batch_size: The size with which it began.
            cost_j: What it cost, joules, with the runs of the default that had to follow if it missed the target.
        """


class Default(Rival):
    """The default for ever, at the maximum power limit: nobody has looked for anything better."""

    full_power = True

    def __init__(self, default: int) -> None:
        self._default = default

    def next_size(self) -> int:
        """The default."""
        return self._default


class Clairvoyant(Rival):
    """The default once, then what costs least on average at that recurrence: no policy can expect to cost less."""

    def __init__(self, case: Case) -> None:
        self._case, self._started = case, 0

    def next_size(self) -> int:
        """The default or the oracle's size."""
        recurrence, self._started = self._started, self._started + 1
        if recurrence == 0:
            return self._case.workload.default_batch_size
        return self._case.conditions.landscape_at(recurrence).oracle.batch_size


class Rounds(Rival):
    """Every size measured, then the cheapest for ever: a grid search; or halving the field before, again and again.

    The first round runs each size once, the default first. With `halving`, the cheaper half by mean cost is left after
    each round, and each of its sizes is run twice as often in the next, until one is left: successive halving for the
    best arm (Karnin, Koren and Somekh, 2013), with runs to the target for a budget.
    """

    def __init__(self, sizes: Sequence[int], default: int, *, halving: bool = False) -> None:
        self._field = sorted(sizes, key=lambda size: (size != default, size))
        self._halving, self._runs_each, self._runs_needed = halving, 1, 1
        self._costs_j = dict.fromkeys(self._field, Statistics())
        self._queue = list(self._field)

    def next_size(self) -> int:
        """The next of the round, or the best while the round's last runs are under way and after all rounds."""
        measured = all(self._costs_j[size].count >= self._runs_needed for size in self._field)
        if measured and len(self._field) > 1:
            self._close_round()
        return self._queue.pop(0) if self._queue else min(self._field, key=self._mean_j)

    def learn(self, batch_size: int, cost_j: float) -> None:
        """As in `Rival.learn`."""
        self._costs_j[batch_size] = self._costs_j[batch_size].including(cost_j)

    def _close_round(self) -> None:
        left = math.ceil(len(self._field) / 2) if self._halving else 1
        self._field = sorted(self._field, key=self._mean_j)[:left]
        self._runs_each *= 2
        self._runs_needed += self._runs_each
        if left > 1:
            self._queue = self._field * self._runs_each

    def _mean_j(self, size: int) -> float:
        # What was not measured yet stands last.
        return self._costs_j[size].mean if self._costs_j[size].count else math.inf


class Thompson(Rival):
    """Gaussian Thompson sampling over all sizes, each measured twice at first, the default before all others.

    An arm's draw is ``N(mean, variance / n)`` with the population's variance of its n costs, as policy `zeus` draws;
    there is no pruning, and no run is stopped.
    """

    def __init__(self, sizes: Sequence[int], default: int, seed: int) -> None:
        order = sorted(sizes, key=lambda size: (size != default, size))
        self._queue = order * 2
        self._costs_j = dict.fromkeys(order, Statistics())
        self._rng = np.random.default_rng(seed)

    def next_size(self) -> int:
        """The next to be measured, or the one with the lowest draw."""
        if self._queue:
            return self._queue.pop(0)
        return min(self._costs_j, key=lambda size: self._draw_j(self._costs_j[size]))

    def learn(self, batch_size: int, cost_j: float) -> None:
        """As in `Rival.learn`."""
        self._costs_j[batch_size] = self._costs_j[batch_size].including(cost_j)

    def _draw_j(self, costs_j: Statistics) -> float:
        # A size whose runs are never finished stands last, as does one whose first run is still under way.
        if not costs_j.count or not math.isfinite(costs_j.mean):
            return math.inf
        return float(self._rng.normal(costs_j.mean, math.sqrt(costs_j.variance / costs_j.count)))
