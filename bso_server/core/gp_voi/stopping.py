"""The stop rule of policy `gp_voi` for a trial that has not reached its target."""

from __future__ import annotations

import math
from collections.abc import Iterator

from bso_server.core.gp_voi.beliefs import trials_missed
from bso_server.core.gp_voi.constants import CONSTANTS
from bso_server.core.gp_voi.forecast import Forecast
from bso_server.core.gp_voi.normal import bounded_exp, log_cdf
from bso_server.core.model import EpochBound
from zeus_plugins.protocol import JobRegistration, Origin

# Up to so many epochs a bound is set to the epoch; beyond, to a part in so many.
_EXACT_EPOCHS = 128

# Exactly twice three epochs are six: what rounding adds makes no seventh.
_ROUNDING = 1 - 1e-9


def unbounded(max_epochs: int) -> EpochBound:
    """The bound of a trial that is not stopped early."""
    return EpochBound(max_epochs, "all that max_epochs allows")


def bound(job: JobRegistration, forecast: Forecast, index: int, origin: Origin) -> EpochBound:
    """The bound of a trial at a size of which it is known, more or less, what an epoch costs.

    The incumbent is not meant to be stopped: its bound only ends runs that do not converge. A try is stopped as soon as
    going on is no more worth it. Without `beta_knob`, and until a size is known to reach the target, nothing is
    stopped early. `forecast` is made while all other trials are under way; `index` is that of the trial's size.
    """
    if job.beta_knob is None or not forecast.incumbent_converges:
        return unbounded(job.max_epochs)
    log_epochs, variance = forecast.epochs.of_run(index)
    epoch_costs = forecast.epoch_costs.expected
    if index == forecast.incumbent or origin is Origin.INCUMBENT:
        return _bound_of_incumbent(job, log_epochs, math.sqrt(variance), trials_missed(forecast.beliefs))
    return bound_of_try(
        log_epochs,
        math.sqrt(variance),
        epoch_j=bounded_exp(float(epoch_costs.mean[index])),
        epoch_j_sd=math.sqrt(max(epoch_costs.covariance[index, index], 0.0)),
        incumbent_j=forecast.expected_cost_j(forecast.incumbent),
        beta=job.beta_knob,
        max_epochs=job.max_epochs,
    )


def _bound_of_incumbent(job: JobRegistration, log_epochs: float, sd: float, missed: int) -> EpochBound:
    """``e^m · max(incumbent_allowance, e^(incumbent_sds · s))`` epochs, twice as many at each further retry."""
    spread = math.exp(min(CONSTANTS.incumbent_sds * sd, 20.0))
    times = max(CONSTANTS.incumbent_allowance, spread) * 2.0 ** min(max(missed - 1, 0), 32)
    allowed = bounded_exp(log_epochs) * times
    if allowed >= job.max_epochs:
        return unbounded(job.max_epochs)
    return EpochBound(
        math.ceil(allowed * _ROUNDING),
        f"{times:.3g} times the epochs that it should need [{bounded_exp(log_epochs):.4g}]",
    )


def bound_of_try(
    log_epochs: float,
    sd: float,
    *,
    epoch_j: float,
    epoch_j_sd: float,
    incumbent_j: float,
    beta: float,
    max_epochs: int,
) -> EpochBound:
    """The epoch k after which a try is given up: the first at which one of these holds.

    With log T ~ N(m, s²), epochs of cost c, and C the expected cost of a run of the incumbent:

    - ``c·(k + 1) > β·C``: the next epoch would make it cost more than β times the incumbent.
    - ``P(c·T < C | T > k) < least_chance``, so that it hardly beats the incumbent any more, and
      ``c·(E[T | T > k] − k) > C``: to finish costs more than to start over with the incumbent. What is given up is
      not looked at again for long, so this has to hold even if c is one σ lower than it seems.

    Both are those of a truncated log-normal distribution, with z_k = (m − log k)/s::

        P(c·T < C | T > k) = 1 − Φ(z_(C/c)) / Φ(z_k)        E[T | T > k] = e^(m + s²/2) · Φ(z_k + s) / Φ(z_k)

    (Johnson, Kotz, Balakrishnan, Continuous Univariate Distributions 1, 1994, §14.3.)

    Args:
        log_epochs: m.
        sd: s > 0.
        epoch_j: c, joules.
        epoch_j_sd: σ of what is believed of log c.
        incumbent_j: C, joules.
        beta: β.
        max_epochs: The bound is no larger than this.
    """
    least_j = epoch_j * bounded_exp(-epoch_j_sd)
    log_never_beats = log_cdf((log_epochs - math.log(incumbent_j / least_j)) / sd)
    for epochs in _epochs_until(max_epochs):
        if epoch_j * (epochs + 1) > beta * incumbent_j:
            return EpochBound(
                epochs, f"more would cost over {beta:g} times a run of the best size [{incumbent_j:.4g} J]"
            )
        z = (log_epochs - math.log(epochs)) / sd
        log_survival = log_cdf(z)
        hopeless = epochs * least_j >= incumbent_j
        chance = 0.0 if hopeless else 0.0 - math.expm1(min(log_never_beats - log_survival, 0.0))
        if chance < CONSTANTS.least_chance:
            remaining = bounded_exp(log_epochs + sd * sd / 2 + log_cdf(z + sd) - log_survival) - epochs
            if least_j * remaining > incumbent_j:
                return EpochBound(
                    epochs,
                    f"by then it is unlikely to be cheaper than the best size [chance {chance:.2g}; to finish would "
                    f"cost {least_j * remaining:.4g} J more, a run of the best size {incumbent_j:.4g} J]",
                )
    return unbounded(max_epochs)


def _epochs_until(last: int) -> Iterator[int]:
    """Every epoch from 1 on; where there are many, only so many that the bound is good to a part in 128."""
    epochs = 1
    while epochs <= last:
        yield epochs
        epochs += max(1, epochs // _EXACT_EPOCHS)
