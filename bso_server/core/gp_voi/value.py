"""Is a batch size worth a try? What it may teach, against what it is expected to cost; costs are log-normal.

All amounts are in runs of the incumbent: R = cost of a run of the candidate / cost of a run of the incumbent, and
log R ~ N(d, v).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bso_server.core.gp_voi.constants import CONSTANTS
from bso_server.core.gp_voi.normal import cdf

_LEAST_VARIANCE = 1e-12
_LEAST_LEARNED = 1e-14
_LARGEST_LOG = 20.0


@dataclass(frozen=True, slots=True)
class Worth:
    """The value and the loss of a try.

    Attributes:
        log_ratio: d, mean of log R.
        chance: Probability that the candidate's expected cost is below the incumbent's.
        value: Value of information: what later runs are expected to save by knowing how one run of the candidate went.
        loss: Expected loss of that run.
    """

    log_ratio: float
    chance: float
    value: float
    loss: float

    @property
    def index(self) -> float:
        """The worth of the try: the value less the loss."""
        return self.value - self.loss


def expected_saving(log_mean: float, variance: float) -> float:
    """E[max(1 − R, 0)] for log R ~ N(d, v).

    ``Φ(−d/s) − exp(d + v/2) · Φ(−d/s − s)`` with s = √v: the price of a put option (Black, Scholes, J. Polit. Econ.
    81(3), 1973). Here v > 0.
    """
    sd = math.sqrt(variance)
    z = -log_mean / sd
    return cdf(z) - _mean_ratio(log_mean, variance) * cdf(z - sd)


def expected_loss(log_mean: float, variance: float) -> float:
    """E[max(R − 1, 0)], by put–call parity ``E[max(1 − R, 0)] + E[R] − 1``; at most `largest_loss`."""
    loss = expected_saving(log_mean, variance) + _mean_ratio(log_mean, variance) - 1
    return min(loss, CONSTANTS.largest_loss)


def _mean_ratio(log_mean: float, variance: float) -> float:
    """E[R], kept finite."""
    return math.exp(min(log_mean + variance / 2, _LARGEST_LOG))


def worth(log_ratio: float, variance: float, learned: float, horizon: float) -> Worth:
    """The worth of one run of a candidate.

    One run moves the candidate's expected log ratio by a normal amount of variance k, the part of v that it resolves;
    v − k stays uncertain. The expected ratio R̂ after it is then log-normal with log R̂ ~ N(d + (v − k)/2, k), and every
    later run saves E[max(1 − R̂, 0)] by it (the knowledge gradient: Frazier, Powell, Dayanik, INFORMS J. Comput. 21(4),
    2009).

    Args:
        log_ratio: d.
        variance: v.
        learned: k.
        horizon: How many later runs may profit.
    """
    variance = max(variance, _LEAST_VARIANCE)
    learned = max(min(learned, variance), _LEAST_LEARNED)
    return Worth(
        log_ratio=log_ratio,
        chance=cdf(-log_ratio / math.sqrt(variance)),
        value=horizon * expected_saving(log_ratio + (variance - learned) / 2, learned),
        loss=expected_loss(log_ratio, variance),
    )
