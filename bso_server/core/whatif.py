"""The best batch size under another η, by what its runs have taken on average; pure.

A run of mean energy E and time t costs ``η·E + (1 − η)·P·t``, P the maximum power: a line over η, of which the lowest
at each η is sought.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """The mean cost of a batch size, joules: all of it for time (η = 0), and all of it for energy (η = 1)."""

    batch_size: int
    at_time_j: float
    at_energy_j: float

    def at(self, eta: float) -> float:
        """The cost at this η."""
        return (1 - eta) * self.at_time_j + eta * self.at_energy_j


@dataclass(frozen=True, slots=True)
class Span:
    """The values of η, from `low` to `high`, at which a batch size costs least."""

    low: float
    high: float
    batch_size: int


def best_by_eta(lines: Sequence[Line]) -> list[Span]:
    """The sizes that cost least, as η goes from 0 to 1; of equal ones the smaller. Exact, without a grid."""
    spans: list[Span] = []
    low, left = 0.0, list(lines)
    while left:
        # Where two costs are equal, the one that falls faster is the lower one from there on.
        best = min(left, key=lambda line: (line.at(low), line.at_energy_j - line.at_time_j, line.batch_size))
        left = [line for line in left if _slope(line) < _slope(best)]
        high = min([1.0, *(_crossing(best, line) for line in left)])
        spans.append(Span(low, high, best.batch_size))
        if high >= 1:
            break
        low = high
    return spans


def _slope(line: Line) -> float:
    return line.at_energy_j - line.at_time_j


def _crossing(one: Line, other: Line) -> float:
    """The η at which both cost the same; their slopes differ."""
    return (other.at_time_j - one.at_time_j) / (_slope(one) - _slope(other))
