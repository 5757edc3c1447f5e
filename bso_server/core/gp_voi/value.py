"""Worth of a trial of a batch size: the value of what it may teach about all sizes, less its expected extra cost.

All amounts are in runs of the incumbent. Beliefs are represented by S joint samples of every size's log epochs and log
cost of an epoch. A trial has an outcome in each sample, and that outcome reweighs all samples. Every later run then
saves the difference between the incumbent and the size that is best under the new weights (knowledge gradient: Frazier,
Powell, Dayanik, INFORMS J. Comput. 21(4), 2009). A trial that is stopped teaches less and costs less, so the policy
chooses a trial together with the best point to stop it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bso_server.core.gp_voi.beliefs import Belief
from bso_server.core.gp_voi.forecast import Forecast
from bso_server.core.gp_voi.gaussian_process import Posterior
from bso_server.core.gp_voi.prior import CONSTANTS, Array, bounded_exp
from bso_server.core.model import EpochBound
from zeus_plugins.protocol import CreatedJob, Origin

_LARGEST_LOG = 60.0
_LEAST_WEIGHT = 1e-12

# If the variance of the log cost of an epoch is larger, a trial teaches something about this cost.
_UNKNOWN_COST_VARIANCE = 1e-3
_LEAST_COST_SD = 0.03

# Tolerance for rounding errors, so that a limit that whole epochs fill exactly is not crossed.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Worth:
    """Value and loss of a trial, and where it is stopped.

    Attributes:
        chance: Probability that the size's expected cost is below the incumbent's.
        value: Value of information: expected savings of later runs thanks to the trial's outcome.
        loss: Expected cost of the trial, and of the run of the incumbent that follows if the trial is stopped, less the
            cost of a run of the incumbent.
        stop_share: Cost at which the trial is stopped, in runs of the incumbent; infinite if it never is.
    """

    chance: float
    value: float
    loss: float
    stop_share: float

    @property
    def index(self) -> float:
        """Worth of the trial: value less loss."""
        return self.value - self.loss


def stop_shares(beta: float | None) -> tuple[float, ...]:
    """Return the costs at which a trial may be stopped, in runs of the incumbent; β is the largest of them."""
    if beta is None:
        return (math.inf,)
    return (*(share for share in CONSTANTS.stop_shares if share < beta), beta)


def worths(forecast: Forecast, candidates: Iterable[int], shares: Sequence[float]) -> dict[int, Worth]:
    """Return the worth of a trial of each candidate, by index, if the trial is stopped at the best of these shares.

    `shares` are costs in runs of the incumbent. A run of the incumbent itself is not stopped.
    """
    scale, unlimited = _Scale(forecast), np.array([math.inf])
    return {
        index: scale.worth(index, unlimited if index == forecast.incumbent else np.array(shares))
        for index in candidates
    }


def checks(forecast: Forecast, indices: Iterable[int], beta: float) -> dict[int, Worth]:
    """Return the worth of trials that may cost at least a run of the incumbent, without those that lose too much."""
    found = worths(forecast, indices, [share for share in stop_shares(beta) if share >= min(1.0, beta)])
    return {index: worth for index, worth in found.items() if worth.loss <= forecast.allowed_loss(index)}


class _Scale:
    """Samples of the beliefs, with costs in runs of the incumbent."""

    def __init__(self, forecast: Forecast) -> None:
        self._forecast, self._max_epochs = forecast, forecast.max_epochs
        self._incumbent = forecast.incumbent
        self._run_sd = math.sqrt(forecast.epochs.run_variance)
        samples = forecast.samples
        self._luck = self._run_sd * samples.luck
        # A size that never reaches the target behaves like a size that needs three times `max_epochs`.
        self._log_epochs = np.where(samples.converges, samples.log_epochs, math.log(3 * self._max_epochs))
        # Cost of a run of the incumbent, including the failures before it succeeds.
        log_incumbent = (
            float(np.mean(samples.log_epochs[:, self._incumbent] + samples.log_costs[:, self._incumbent]))
            + float(forecast.retries[self._incumbent])
            + forecast.epochs.run_variance / 2
        )
        self._log_epoch_costs = np.clip(samples.log_costs - log_incumbent, -_LARGEST_LOG, _LARGEST_LOG)
        log_runs = self._log_epochs + self._log_epoch_costs + forecast.retries + forecast.epochs.run_variance / 2
        costs = np.exp(np.clip(log_runs, -5.0, math.log(CONSTANTS.largest_cost)))
        self._costs = np.where(self._log_epochs > math.log(self._max_epochs + 0.5), CONSTANTS.largest_cost, costs)
        self._costs_and_ones = np.column_stack([self._costs, np.ones(len(costs))]).astype(np.float32)
        self._available = list(forecast.available)

    def worth(self, index: int, shares: Array) -> Worth:
        base = float(self._costs[:, self._incumbent].mean())
        log_epochs, log_cost = self._log_epochs[:, index], self._log_epoch_costs[:, index]
        outcomes = log_epochs + self._luck
        cost = np.exp(np.minimum(outcomes + log_cost, _LARGEST_LOG))
        epoch_cost = np.exp(log_cost)[:, None]
        # Trainings are stopped between epochs, after the first epoch at the earliest.
        limits = epoch_cost * np.clip(np.floor(shares / epoch_cost + _ROUNDING), 1, self._max_epochs)
        ends = cost[:, None] <= limits * (1 + _ROUNDING)
        full = self._saving(self._likelihoods(index, outcomes))
        stopped = self._saving(self._survivals(index, shares))
        gains = np.where(ends, full[:, None], stopped).mean(axis=0)
        losses = np.where(ends, cost[:, None], limits + base).mean(axis=0) - base
        worths = self._forecast.horizon * gains - losses
        belief = self._forecast.beliefs[index]
        if not belief.converged:
            # Stopping no later than an earlier trial would teach nothing.
            again = CONSTANTS.further * belief.survived * math.exp(float(log_cost.mean()))
            if self._forecast.allowance >= CONSTANTS.patient_from:
                again = max(again, 1.0)
            worths[:-1][shares[:-1] < again] = -np.inf
        best = int(np.argmax(worths))
        return Worth(
            chance=float((self._costs[:, index] < self._costs[:, self._incumbent]).mean()),
            value=self._forecast.horizon * float(gains[best]),
            loss=float(losses[best]),
            stop_share=float(shares[best]),
        )

    def _likelihoods(self, index: int, outcomes: Array) -> NDArray[np.float32]:
        """Return the likelihood of each outcome of a run under each sample, up to a factor per outcome: (S, S).

        Single precision is enough for weights, and twice as fast.
        """
        log_epochs, log_cost = self._log_epochs[:, index], self._log_epoch_costs[:, index]
        misfit = _squares(outcomes, log_epochs, self._run_sd)
        if self._forecast.epoch_costs.variance[index] > _UNKNOWN_COST_VARIANCE:
            sd = max(math.sqrt(self._forecast.epoch_costs.run_variance), _LEAST_COST_SD)
            misfit += _squares(log_cost, log_cost, sd)
        misfit -= misfit.min(axis=1, keepdims=True)
        return np.exp(np.negative(misfit, out=misfit), out=misfit)

    def _survivals(self, index: int, shares: Array) -> Array:
        """Return the probability under each sample that a run is stopped at each of these costs: (shares, S)."""
        log_runs = self._log_epochs[:, index] + self._log_epoch_costs[:, index]
        return _cdf((log_runs[None, :] - np.log(shares)[:, None]) / self._run_sd)

    def _saving(self, weights: NDArray[np.floating]) -> Array:
        """Return the saving of every later run, given the samples' weights after each outcome: (outcomes,)."""
        sums = weights @ self._costs_and_ones
        expected = sums[:, :-1] / np.maximum(sums[:, -1:], _LEAST_WEIGHT)
        saving: Array = expected[:, self._incumbent] - expected[:, self._available].min(axis=1)
        return saving


def _squares(ones: Array, others: Array, sd: float) -> NDArray[np.float32]:
    """Return ``½·((a − b)/s)²`` for each pair of values: shape (ones, others)."""
    # Values are centred, because single precision is finest near 0.
    center, scale = float(others.mean()), math.sqrt(0.5) / sd
    left, right = ((values - center) * scale for values in (ones, others))
    differences = np.subtract.outer(left.astype(np.float32), right.astype(np.float32))
    return np.multiply(differences, differences, out=differences)


def _cdf(z: Array) -> Array:
    """Return Φ(z) to 1e-5, which is enough for weights (Abramowitz, Stegun 1964, 26.2.16)."""
    t = 1 / (1 + 0.33267 * np.abs(z))
    density = np.exp(-0.5 * z * z) * 0.3989422804
    tail = density * t * (0.4361836 + t * (-0.1201676 + t * 0.9372980))
    return np.where(z > 0, 1 - tail, tail)


def unbounded(max_epochs: int) -> EpochBound:
    """Return the bound of a trial that is not stopped early."""
    return EpochBound(max_epochs, "all that max_epochs allows")


def bound(job: CreatedJob, forecast: Forecast, index: int, origin: Origin, worth: Worth | None = None) -> EpochBound:
    """Return the bound of a trial of `origin` at the size with this index, whose cost of an epoch is roughly known.

    The bound of the incumbent only ends runs that do not converge. A trial of another size is stopped where its worth
    (`worth`, if known) is highest, or as in `checks` if it has hardly any. Without `beta_knob`, or until a size is
    known to reach the target, no trial is stopped early. `forecast` includes all other trials under way.
    """
    if job.beta_knob is None or not forecast.incumbent_converges:
        return unbounded(job.max_epochs)
    if index == forecast.incumbent or origin is Origin.INCUMBENT:
        return bound_of_incumbent(job, forecast.epochs, forecast.beliefs[index], index)
    if worth is None:
        worth = worths(forecast, [index], stop_shares(job.beta_knob))[index]
        if worth.index <= CONSTANTS.least_worth:
            worth = checks(forecast, [index], job.beta_knob).get(index, worth)
    return bound_of_try(
        worth.stop_share,
        epoch_j=bounded_exp(float(forecast.epoch_costs.mean[index])),
        incumbent_j=bounded_exp(float(forecast.mean[forecast.incumbent]) + forecast.epochs.run_variance / 2),
        max_epochs=job.max_epochs,
    )


def bound_of_incumbent(job: CreatedJob, epochs: Posterior, belief: Belief, index: int) -> EpochBound:
    """Return a bound of ``e^m · max(incumbent_allowance, e^(incumbent_sds · s))`` epochs, for log epochs N(m, s²).

    The bound doubles with each miss of this size after the first. A run at the incumbent is stopped once its epochs
    refute those of another job, at `warm_surprise` σ, if only that job has learned the size.
    """
    mean, variance = epochs.of_run(index)
    sds, least = CONSTANTS.incumbent_sds, CONSTANTS.incumbent_allowance
    if belief.is_taken_over:
        sds, least = CONSTANTS.warm_surprise, 1.0
    spread = math.exp(min(sds * math.sqrt(variance), 20.0))
    missed = belief.missed
    times = max(least, spread) * 2.0 ** min(max(missed - 1, 0), 32)
    allowed = bounded_exp(mean) * times
    if allowed >= job.max_epochs:
        return unbounded(job.max_epochs)
    return EpochBound(
        math.ceil(allowed * (1 - _ROUNDING)),
        f"{times:.3g} times its expected epochs, {bounded_exp(mean):.3g}",
    )


def bound_of_try(share: float, *, epoch_j: float, incumbent_j: float, max_epochs: int) -> EpochBound:
    """Bound a trial to `share` (may be infinite) of the cost of a run of the incumbent, and to at least one epoch.

    `epoch_j` is the cost of an epoch of the trial, `incumbent_j` the cost of a run of the incumbent, in joules.
    """
    epochs = share * incumbent_j / epoch_j + _ROUNDING
    if epochs >= max_epochs:
        return unbounded(max_epochs)
    words = f"more would cost over {share:.3g} times what a run of the best size is expected to cost"
    return EpochBound(max(int(epochs), 1), words)
