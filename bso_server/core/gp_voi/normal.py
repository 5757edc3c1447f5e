"""The normal distribution, by the standard library alone."""

from __future__ import annotations

import math

_SQRT_HALF = math.sqrt(0.5)
# Far beyond all costs and epochs, and small enough that their products and ratios stay finite.
_LARGEST_LOG = 300.0

_LOG_SQRT_2_PI = 0.5 * math.log(2 * math.pi)

# Below this Φ itself comes close to what a double can hold.
_FAR_TAIL = -36.0


def bounded_exp(log: float) -> float:
    """``e^x``, finite and above 0 whatever absurd numbers were reported."""
    return math.exp(min(max(log, -_LARGEST_LOG), _LARGEST_LOG))


def cdf(z: float) -> float:
    """Φ(z): the probability that a standard normal variable is at most `z`."""
    return 0.5 * math.erfc(-z * _SQRT_HALF)


def log_cdf(z: float) -> float:
    """Log Φ(z), also where Φ(z) is smaller than any double: there ``φ(z)/(−z) · (1 − 1/z² + 3/z⁴)``, its asymptote.

    (Abramowitz, Stegun, Handbook of Mathematical Functions, 1964, 26.2.12.)
    """
    if z > _FAR_TAIL:
        return math.log(cdf(z))
    square = z * z
    return -0.5 * square - _LOG_SQRT_2_PI - math.log(-z) + math.log1p((3 / square - 1) / square)


def hazard(z: float) -> float:
    """φ(z) / (1 − Φ(z)): the mean of a standard normal variable that is known to be larger than `z`."""
    return math.exp(-0.5 * z * z - _LOG_SQRT_2_PI - log_cdf(-z))


def moments_given_larger(mean: float, variance: float, noise_variance: float, bound: float) -> tuple[float, float]:
    """Mean and variance of f once a noisy look at it is known to exceed a bound.

    With f ~ N(m, v), y = f + N(0, s²) and y > b; t² = v + s², a = (b − m)/t and the hazard λ(a)::

        E[f | y > b] = m + v/t · λ        Var[f | y > b] = v − v²/t² · λ·(λ − a)

    (Moments of a truncated normal: Johnson, Kotz, Balakrishnan, Continuous Univariate Distributions 1, 1994, §13.10.1;
    f given y is linear in y.) Here v > 0 and s² ≥ 0.
    """
    total = variance + noise_variance
    z = (bound - mean) / math.sqrt(total)
    rate = hazard(z)
    shifted = mean + variance / math.sqrt(total) * rate
    return shifted, variance - variance * variance / total * rate * (rate - z)
