"""Chances of normal quantities: to be the lowest of several, and to lie within a band."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]

_PAIRS = 512


BAND_SDS = 1.645
"""A normal variable lies within so many σ of its mean with a probability of 90 %: 5 % are beyond on either side."""


def chances_lowest(mean: Array, root: Array) -> Array:
    """The probability of each of n jointly normal quantities to be the lowest, to about 0.02, by antithetic draws.

    Args:
        mean: Their means, shape (n,).
        root: L of their covariance L·Lᵀ, shape (n, n).
    """
    # Without BLAS, whose threads wait for each other on busy machines longer than the sums take.
    around = np.einsum("dj,ij->di", _standard_normal(len(mean)), root)
    lowest = np.concatenate([(mean + around).argmin(axis=1), (mean - around).argmin(axis=1)])
    counts: npt.NDArray[Any] = np.bincount(lowest, minlength=len(mean))
    return counts / len(lowest)


@lru_cache(maxsize=16)
def _standard_normal(size: int) -> Array:
    """Draws of the standard normal distribution, always the same, shape (_PAIRS, size): nobody's generator moves."""
    return np.random.default_rng(0).standard_normal((_PAIRS, size))
