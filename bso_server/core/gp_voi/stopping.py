"""The stop rule of policy `gp_voi` for a trial that has not reached its target."""

from __future__ import annotations

import math

from bso_server.core.gp_voi.beliefs import trials_missed
from bso_server.core.gp_voi.constants import CONSTANTS
from bso_server.core.gp_voi.forecast import Forecast
from bso_server.core.gp_voi.normal import bounded_exp
from bso_server.core.gp_voi.value import Worth, stop_shares, worths
from bso_server.core.model import EpochBound
from bso_server.core.words import joules_in_words
from zeus_plugins.protocol import JobRegistration, Origin

# Exactly twice three epochs are six: what rounding adds makes no seventh.
_ROUNDING = 1e-9


def unbounded(max_epochs: int) -> EpochBound:
    """The bound of a trial that is not stopped early."""
    return EpochBound(max_epochs, "all that max_epochs allows")


def bound(
    job: JobRegistration, forecast: Forecast, index: int, origin: Origin, worth: Worth | None = None
) -> EpochBound:
    """The bound of a trial at a size of which it is known, more or less, what an epoch costs.

    The incumbent is not meant to be stopped: its bound only ends runs that do not converge. A try is stopped where its
    worth is greatest. Without `beta_knob`, and until a size is known to reach the target, nothing is stopped early.

    Args:
        job: The job.
        forecast: Made while all other trials are under way.
        index: That of the trial's size.
        origin: That of the trial.
        worth: What a try of the size is worth, if that is known already.
    """
    if job.beta_knob is None or not forecast.incumbent_converges:
        return unbounded(job.max_epochs)
    if index == forecast.incumbent or origin is Origin.INCUMBENT:
        return _bound_of_incumbent(job, forecast, index)
    if worth is None:
        worth = worths(forecast, [index], stop_shares(job.beta_knob), max_epochs=job.max_epochs)[index]
    return bound_of_try(
        worth.stop_share,
        epoch_j=bounded_exp(float(forecast.epoch_costs.mean[index])),
        incumbent_j=bounded_exp(float(forecast.mean[forecast.incumbent]) + forecast.epochs.run_variance / 2),
        max_epochs=job.max_epochs,
    )


def _bound_of_incumbent(job: JobRegistration, forecast: Forecast, index: int) -> EpochBound:
    """``e^m · max(incumbent_allowance, e^(incumbent_sds · s))`` epochs, twice as many at each further retry.

    Log epochs of a run have the mean m and the standard deviation s.
    """
    mean, variance = forecast.epochs.of_run(index)
    spread = math.exp(min(CONSTANTS.incumbent_sds * math.sqrt(variance), 20.0))
    missed = trials_missed(forecast.beliefs)
    times = max(CONSTANTS.incumbent_allowance, spread) * 2.0 ** min(max(missed - 1, 0), 32)
    allowed = bounded_exp(mean) * times
    if allowed >= job.max_epochs:
        return unbounded(job.max_epochs)
    return EpochBound(
        math.ceil(allowed * (1 - _ROUNDING)),
        f"{times:.3g} times the epochs that it should need, {bounded_exp(mean):.3g}",
    )


def bound_of_try(share: float, *, epoch_j: float, incumbent_j: float, max_epochs: int) -> EpochBound:
    """The last epoch by which a try costs no more than this share of a run of the incumbent; the first at the soonest.

    Args:
        share: The share, which may be infinite.
        epoch_j: Cost of an epoch of the try, joules.
        incumbent_j: Cost of a run of the incumbent, joules.
        max_epochs: The bound is no larger than this.
    """
    epochs = share * incumbent_j / epoch_j + _ROUNDING
    if epochs >= max_epochs:
        return unbounded(max_epochs)
    words = f"more would cost over {share:.3g} times a run of the best size, which is {joules_in_words(incumbent_j)}"
    return EpochBound(max(int(epochs), 1), words)
