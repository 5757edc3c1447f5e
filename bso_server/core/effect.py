"""The batch size's effect on the cost of a run, with an interval that remains valid if it is read after every run.

The log of a run's cost is the log of its epochs plus the log of its cost per epoch. A machine's load changes the cost
per epoch, but not the epochs. So each part has its own model (a local level model, Harvey 1989):

    y = level + a · (δ - ½ σ² (k² - 1)) + noise,    level ← level + walk

where ``a`` is 1 for a run at the default batch size and 0 for a run at the best size. Spreads are standard deviations:
σ of a run at the best size, kσ of a run at the default, and τ of the walk from run to run. The correction ½ σ² (k² - 1)
makes δ the log ratio of *mean* costs when the spreads differ. σ, τ and k are not known. So a Kalman filter runs for
each combination on a grid, weighted by how well it predicted the runs (by a Student t density, so that one outlier does
not decide). The model of the cost per epoch also allows for excursions: upward outliers, such as other programs on the
machine cause. All runs that are marked as busy share one unknown offset and more noise, so busy runs are mainly
compared with each other, and count less.

The effect δ of the whole cost is the sum of both parts. Its interval contains each δ for which the ratio prior(δ) /
posterior(δ) is below 1 / (2 α): the method of mixtures (Robbins 1970; Howard, Ramdas, McAuliffe and Sekhon 2021). If
the model holds, the probability that the interval is ever above the true δ is at most α, and so is the probability that
it is ever below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_PART_SD = 0.35
"""Prior spread of the effect on each part (log)."""
PRIOR_SD = _PART_SD * math.sqrt(2)
"""Prior spread of the effect on the whole cost (log)."""
_FREEDOM = 4.0
"""Degrees of freedom of the Student t density that weights the filters."""
_REACH = 2.5
"""Prediction errors beyond this number of spreads move the estimate no further."""
_EXCURSION_SD = 1.2
"""Spread of excursions of the cost per epoch (log)."""
_BUSY, _BUSY_SD, _BUSY_NOISE = 0.5, 0.5, 0.3
"""Offset of the cost per epoch on a busy machine (log): prior mean, prior spread, and further noise of a busy run."""
_SPREADS = np.array([0.5, 1.0, 2.0, 3.0])
_SPREADS_PRIOR = np.array([0.1, 0.7, 0.15, 0.05])
_GRID = np.sinh(np.linspace(-4.2, 4.2, 169)) / 12.0
"""Values of the effect at which densities are compared, dense near 0, from -2.8 to 2.8."""
_NEGLIGIBLE = 1e-7


@dataclass(frozen=True, slots=True)
class Effect:
    """Log of the ratio of mean costs of a run: default over best size. An infinite end is no bound on its side."""

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
        """Pass over a run without evidence; the level may have walked during it."""
        self._p_level += self._walk

    def add(self, y: float, is_default: bool, is_busy: bool = False) -> None:
        """Learn the log value of one run."""
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
        """Return the estimated spreads (log) of a run at the best size, and of the walk."""
        weight = self._weight()
        return math.sqrt(float((weight * self._noise).sum())), math.sqrt(float((weight * self._walk).sum()))

    def unknown(self) -> float:
        """Return the present variance of the effect as a share of its prior variance."""
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
        """Pass over a run that is no evidence."""
        self._epochs.skip()
        self._rate.skip()

    def add(self, epochs: float, log_pace: float, *, is_default: bool, is_busy: bool = False) -> None:
        """Learn the epochs of one run, and the log of its cost of an epoch (J)."""
        self._epochs.add(math.log(epochs), is_default)
        self._rate.add(log_pace, is_default, is_busy)

    def effect(self, alpha: float = 0.05) -> Effect:
        """Return the effect with its interval, which errs on each side, over all looks, with probability `alpha`."""
        posterior = self._log_posterior()
        middle = int(np.argmax(posterior))
        log_ratio = -0.5 * (_GRID / PRIOR_SD) ** 2 - math.log(PRIOR_SD) - posterior
        kept = np.flatnonzero(log_ratio < -math.log(2 * alpha))
        # If the density peaks between two points of the grid, or beyond its ends, no point may be kept.
        low, high = (kept[0], kept[-1]) if len(kept) else (max(middle - 1, 0), min(middle + 1, len(_GRID) - 1))
        return Effect(
            low=-math.inf if low == 0 else float(_GRID[low]),
            middle=float(_GRID[middle]),
            high=math.inf if high == len(_GRID) - 1 else float(_GRID[high]),
        )

    def expected_loss(self) -> float:
        """Return the mean of max(exp(δ) - 1, 0): by which share of its cost a run at the best size is cheaper."""
        density = np.exp(self._log_posterior()) * np.gradient(_GRID)
        return float(density @ np.maximum(np.expm1(_GRID), 0.0) / density.sum())

    def spreads(self) -> tuple[float, float]:
        """Return the spreads from run to run (log) of the epochs and of the cost per epoch at the best size."""
        return self._epochs.spreads()[0], self._rate.spreads()[0]

    def drift(self) -> float:
        """Return the spread (log) of the drift of the cost per epoch from run to run."""
        return self._rate.spreads()[1]

    def unknown_pace(self) -> float:
        """Return the variance of the effect on the cost per epoch as a share (0 to 1) of its prior variance."""
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
        # The largest term is factored out of each sum, because far from the means every term would underflow.
        largest = terms.max(axis=1)
        return np.asarray(largest + np.log(np.exp(terms - largest[:, None]).sum(axis=1)))
