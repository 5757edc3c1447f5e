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


@dataclass(frozen=True, slots=True)
class WeightedStatistics:
    """Running weight, mean and weighted sum of squared deviations of a sequence (West, CACM 22(9), 1979).

    Weights may be fractions, and all of them may be scaled: that forgets without moving the mean.
    """

    weight: float = 0.0
    mean: float = 0.0
    squared_deviations: float = 0.0

    def including(self, value: float, weight: float = 1.0) -> WeightedStatistics:
        """These statistics with one more value of this weight (> 0)."""
        total = self.weight + weight
        mean = self.mean + (value - self.mean) * weight / total
        squared_deviations = self.squared_deviations + weight * (value - self.mean) * (value - mean)
        return WeightedStatistics(total, mean, squared_deviations)

    def scaled(self, factor: float) -> WeightedStatistics:
        """The same with every weight multiplied by `factor` (≥ 0)."""
        return WeightedStatistics(self.weight * factor, self.mean, self.squared_deviations * factor)
