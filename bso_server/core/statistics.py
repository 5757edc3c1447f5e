"""Running statistics of a sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Statistics:
    """Running count, mean and sum of squared deviations of a sequence (Welford, Technometrics 4(3), 1962).

    Constant in size whatever the length of the sequence, and exact (variance 0) for equal values.
    """

    count: int = 0
    mean: float = 0.0
    squared_deviations: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Statistics:
        """Statistics of `values`."""
        statistics = cls()
        for value in values:
            statistics = statistics.including(value)
        return statistics

    def including(self, value: float) -> Statistics:
        """These statistics with one more value."""
        count = self.count + 1
        mean = self.mean + (value - self.mean) / count
        return Statistics(count, mean, self.squared_deviations + (value - self.mean) * (value - mean))

    def negated(self) -> Statistics:
        """Statistics of the values' negatives."""
        return Statistics(self.count, -self.mean, self.squared_deviations)

    @property
    def variance(self) -> float:
        """Population variance; 0 for fewer than two values."""
        return self.squared_deviations / self.count if self.count else 0.0
