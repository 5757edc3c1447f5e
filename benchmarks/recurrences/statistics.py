"""Savings, break-even, regret and overhead of what was measured, with intervals. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000
_TAILS = (2.5, 97.5)

Numbers = npt.NDArray[np.float64]


class Interval(NamedTuple):
    """A value and the interval that holds it in 95 % of bootstrap samples."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class SizeFigure:
    """The cost of one size in hindsight.

    Attributes:
        batch_size: The size.
        runs: Runs that were measured.
        reached: Those of them that reached the target.
        cost_j: Of a run, and of the runs that have to be repeated because they miss the target; None if all do.
    """

    batch_size: int
    runs: int
    reached: int
    cost_j: float | None


def bootstrap(
    samples: Sequence[Sequence[float]], statistic: Callable[[Numbers], float], *, resamples: int = RESAMPLES
) -> Interval:
    """A statistic of samples, with the 2.5th and 97.5th percentile of it when the samples are drawn with replacement.

    Args:
        samples: Shape (samples, values): what was measured together stays together.
        statistic: Of such samples.
        resamples: Number of draws, the same draws at each call.

    Raises:
        ValueError: There is no sample.
    """
    values = np.asarray(samples, dtype=np.float64)
    if not len(values):
        raise ValueError("there are no samples")
    rng = np.random.default_rng(0)
    drawn = [statistic(values[rng.integers(0, len(values), len(values))]) for _ in range(resamples)]
    low, high = np.percentile(drawn, _TAILS)
    return Interval(statistic(values), float(low), float(high))


def share_saved(pairs: Numbers) -> float:
    """The share of the second column's sum that the first column's is less."""
    return float(1 - pairs[:, 0].sum() / pairs[:, 1].sum())


def median_ratio(pairs: Numbers) -> float:
    """The median of the first column over the second."""
    return float(np.median(pairs[:, 0] / pairs[:, 1]))


def break_even(costs_j: Sequence[float], default_j: Sequence[float]) -> int | None:
    """The recurrence, from 1, from which on the total never again exceeds the default's; None if it does in the end.

    Args:
        costs_j: Of each recurrence.
        default_j: Of the same recurrences at the default size.
    """
    behind = [
        number
        for number, (spent_j, needed_j) in enumerate(
            zip(accumulate(costs_j), accumulate(default_j), strict=True), start=1
        )
        if spent_j > needed_j
    ]
    last = behind[-1] if behind else 0
    return last + 1 if last < len(costs_j) else None


def hindsight(runs: Mapping[int, Sequence[tuple[float, bool]]]) -> list[SizeFigure]:
    """The cost of each size, ascending.

    Args:
        runs: Of each size the cost of each run, joules, and whether it reached the target.
    """
    figures = []
    for size, of_size in sorted(runs.items()):
        reached = sum(is_reached for _, is_reached in of_size)
        cost_j = sum(cost_j for cost_j, _ in of_size) / reached if reached else None
        figures.append(SizeFigure(size, len(of_size), reached, cost_j))
    return figures


def best_size(figures: Sequence[SizeFigure]) -> SizeFigure | None:
    """The cheapest size in hindsight; None if none has reached the target."""
    known = [(figure.cost_j, figure) for figure in figures if figure.cost_j is not None]
    return min(known, key=lambda pair: pair[0])[1] if known else None


def regret(costs_j: Sequence[float], best_j: Sequence[float]) -> float:
    """The cost of recurrences above that of the same at the best size, as a share of the latter."""
    return sum(costs_j) / sum(best_j) - 1
