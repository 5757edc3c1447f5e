"""The effect of the batch size on the cost of a run, estimated so that it may be looked at after every run.

The log of a run's cost is the log of its epochs plus the log of its cost per epoch. A machine's load changes the second
and not the first, so that each part has a model of its own (a local level, Harvey 1989):

    y = level + a · (δ - ½ σ² (k² - 1)) + noise,    level ← level + walk

where ``a`` is 1 for a run at the default batch size and 0 for one at the best size, σ is the spread of a run at the
best size, kσ that of a run at the default, and τ the spread of the walk from run to run. The correction ½ σ² (k² - 1)
makes δ the log ratio of *mean* costs when the spreads differ. σ, τ and k are not known: a Kalman filter runs for each
combination of a grid, weighted by how well it predicted each run (a Student t density, so that one odd run does not
decide). The model of the cost per epoch also has excursions upwards, as a neighbour's load causes them, and an unknown
offset of the runs that are marked as runs on a busy machine: they are compared with each other, and weigh less.

The effect δ of the whole cost is the sum of both parts. Its interval keeps each δ with prior(δ) / posterior(δ) below
1 / (2 α): the method of mixtures (Robbins 1970; Howard, Ramdas, McAuliffe and Sekhon 2021). If the model holds, the
interval excludes the true δ on either side at any look with a probability of at most α.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_PART_SD = 0.35
"""Spread of the effect on each part (log) before any run."""
PRIOR_SD = _PART_SD * math.sqrt(2)
"""Spread of the effect on the whole cost (log) before any run."""
_FREEDOM = 4.0
"""Degrees of freedom of the Student t density that weights the filters."""
_REACH = 2.5
"""Surprises beyond so many spreads move the estimate no further."""
_EXCURSION_SD = 1.2
"""Spread of excursions of the cost per epoch (log)."""
_BUSY, _BUSY_SD, _BUSY_NOISE = 0.5, 0.5, 0.3
"""Offset of the cost per epoch on a busy machine (log) before any run, its spread, and that of a run beside σ."""
_SPREADS = np.array([0.5, 1.0, 2.0, 3.0])
_SPREADS_PRIOR = np.array([0.1, 0.7, 0.15, 0.05])
_GRID = np.sinh(np.linspace(-4.2, 4.2, 169)) / 12.0
"""Values of the effect at which densities are compared, dense near 0, from -2.8 to 2.8."""
_NEGLIGIBLE = 1e-7


@dataclass(frozen=True, slots=True)
class Effect:
    """Log ratio of the mean cost of a run at the default to one at the best size; infinite ends exclude nothing yet."""

    low: float
    middle: float
    high: float


class _Part:
    """Kalman filters of one part of the log cost, one for each combination of σ, τ, k and probability of excursions."""

    def __init__(self, sigma: list[float], tau: list[float], excursions: dict[float, float]) -> None:
        grid = np.meshgrid(_SPREADS, sigma, tau, list(excursions), indexing="ij")
        k, s, t, self._excursion = (each.reshape(len(_SPREADS), -1) for each in grid)
        self._noise, self._noise_default, self._walk = s**2, (k * s) ** 2, t**2
        self._correction = 0.5 * s**2 * (k**2 - 1)
        self.level, self.delta = np.zeros_like(k), np.zeros_like(k)
        self._p_level = np.full_like(k, 25.0)
        self._p_both = np.zeros_like(k)
        self.p_delta = np.full_like(k, _PART_SD**2)
        self._offset, self._p_offset = np.full_like(k, _BUSY), np.full_like(k, _BUSY_SD**2)
        self._p_level_offset, self._p_delta_offset = np.zeros_like(k), np.zeros_like(k)
        share = np.array(list(excursions.values()))
        self.log_weight = np.zeros_like(k) + np.log(
            np.tile(share, k.shape[1] // len(share)) / (k.shape[1] // len(share))
        )
        self._first: float | None = None

    def skip(self) -> None:
        """Let one run pass that says nothing: the level may have walked."""
        self._p_level += self._walk

    def add(self, y: float, is_default: bool, is_busy: bool = False) -> None:
        """Learn one log value."""
        self.skip()
        self._first = y if self._first is None else self._first
        a, b = float(is_default), float(is_busy)
        surprise = y - self._first - self.level - a * (self.delta - self._correction) - b * self._offset
        to_level = self._p_level + a * self._p_both + b * self._p_level_offset
        to_delta = self._p_both + a * self.p_delta + b * self._p_delta_offset
        to_offset = self._p_level_offset + a * self._p_delta_offset + b * self._p_offset
        noise = (self._noise_default if is_default else self._noise) + b * _BUSY_NOISE**2
        variance = to_level + a * to_delta + b * to_offset + noise
        scaled = surprise / np.sqrt(variance)
        usual = (
            np.log1p(-self._excursion) - 0.5 * (_FREEDOM + 1) * np.log1p(scaled**2 / _FREEDOM) - 0.5 * np.log(variance)
        )
        wide = variance + _EXCURSION_SD**2
        with np.errstate(divide="ignore"):
            odd = np.where(
                surprise > 0, np.log(2 * self._excursion) - 0.5 * surprise**2 / wide - 0.5 * np.log(wide), -np.inf
            )
        both = np.logaddexp(usual, odd)
        self.log_weight += both
        trust = np.exp(usual - both) * np.minimum(1.0, _REACH / np.maximum(np.abs(scaled), 1e-9)) / variance
        self.level += trust * to_level * surprise
        self.delta += trust * to_delta * surprise
        self._p_level -= trust * to_level**2
        self._p_both -= trust * to_level * to_delta
        self.p_delta -= trust * to_delta**2
        self._offset += trust * to_offset * surprise
        self._p_offset -= trust * to_offset**2
        self._p_level_offset -= trust * to_level * to_offset
        self._p_delta_offset -= trust * to_delta * to_offset

    def spreads(self) -> tuple[float, float]:
        """Return the spread of a run at the best size and that of the walk (log), as far as the runs show them."""
        weight = self._weight()
        return math.sqrt(float((weight * self._noise).sum())), math.sqrt(float((weight * self._walk).sum()))

    def unknown(self) -> float:
        """Return which share of the variance that the effect had before any run is left."""
        return float((self._weight() * self.p_delta).sum()) / _PART_SD**2

    def _weight(self) -> Floats:
        log_weight = np.log(_SPREADS_PRIOR)[:, None] + self.log_weight
        weight = np.exp(log_weight - log_weight.max())
        return np.asarray(weight / weight.sum())


class EffectModel:
    """Learns the effect from runs at the default and at the best size, in the order in which they ended."""

    def __init__(self) -> None:
        self._epochs = _Part([0.03, 0.06, 0.12, 0.25, 0.45, 0.8], [0.0, 0.1], {0.0: 1.0})
        self._rate = _Part([0.03, 0.06, 0.12, 0.25, 0.45], [0.01, 0.05, 0.2, 0.6], {0.02: 0.7, 0.4: 0.3})

    def skip(self) -> None:
        """Let one run pass that is no evidence."""
        self._epochs.skip()
        self._rate.skip()

    def add(self, epochs: float, cost: float, *, is_default: bool, is_busy: bool = False) -> None:
        """Learn the epochs and the cost (J) of one run."""
        self._epochs.add(math.log(epochs), is_default)
        self._rate.add(math.log(cost) - math.log(epochs), is_default, is_busy)

    def add_epochs(self, epochs: float, *, is_default: bool) -> None:
        """Learn the epochs of a run whose pace is no evidence: the first on a cold machine."""
        self._epochs.add(math.log(epochs), is_default)
        self._rate.skip()

    def effect(self, alpha: float = 0.05) -> Effect:
        """Return the effect with its interval at error probability `alpha` on each side, over all looks."""
        posterior = self._log_posterior()
        middle = int(np.argmax(posterior))
        log_ratio = -0.5 * (_GRID / PRIOR_SD) ** 2 - math.log(PRIOR_SD) - posterior
        kept = np.flatnonzero(log_ratio < -math.log(2 * alpha))
        # A density between two points of the grid, or beyond its ends, is high at none of them.
        low, high = (kept[0], kept[-1]) if len(kept) else (max(middle - 1, 0), min(middle + 1, len(_GRID) - 1))
        return Effect(
            low=-math.inf if low == 0 else float(_GRID[low]),
            middle=float(_GRID[middle]),
            high=math.inf if high == len(_GRID) - 1 else float(_GRID[high]),
        )

    def spreads(self) -> tuple[float, float]:
        """Return the spreads from run to run (log) of the epochs and of the cost per epoch at the best size."""
        return self._epochs.spreads()[0], self._rate.spreads()[0]

    def drift(self) -> float:
        """Return by how much (log) the cost per epoch drifts from run to run."""
        return self._rate.spreads()[1]

    def unknown_pace(self) -> float:
        """Return the share from 0 to 1 of what was unknown of the effect on the cost per epoch that still is."""
        return self._rate.unknown()

    def _log_posterior(self) -> Floats:
        """Return the log density of the sum of both effects on the grid, without the term ½ log 2π."""
        epochs, rate = self._epochs, self._rate
        log_weight = (
            np.log(_SPREADS_PRIOR)[:, None, None] + epochs.log_weight[:, :, None] + rate.log_weight[:, None, :]
        ).ravel()
        weight = np.exp(log_weight - log_weight.max())
        weight /= weight.sum()
        used = weight > _NEGLIGIBLE
        mean = (epochs.delta[:, :, None] + rate.delta[:, None, :]).ravel()[used]
        variance = (epochs.p_delta[:, :, None] + rate.p_delta[:, None, :]).ravel()[used]
        terms = -0.5 * (_GRID[:, None] - mean) ** 2 / variance + np.log(weight[used]) - 0.5 * np.log(variance)
        # The largest term of each sum is taken out: far from the means, each alone is too small for a float.
        largest = terms.max(axis=1)
        return np.asarray(largest + np.log(np.exp(terms - largest[:, None]).sum(axis=1)))
