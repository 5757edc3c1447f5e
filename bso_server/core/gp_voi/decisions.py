"""Policy `gp_voi`: play the batch size whose try is worth most, and end a try when it is worth no more.

A run at size b costs ``c_b · T_b``, the cost of an epoch times the epochs to the target. `gaussian_process` says what
is believed of both, `beliefs` how trials change that, `forecast` what follows for the cost of runs, `value` what a try
is worth, and `stopping` when it is given up. The incumbent is the size with the lowest expected cost among those known
to reach the target. docs/policy.md tells the whole story.
"""

from __future__ import annotations

from collections.abc import Sequence

from bso_server.core.gp_voi.beliefs import Beliefs, beliefs_with, expected_startup, trials_missed
from bso_server.core.gp_voi.constants import CONSTANTS
from bso_server.core.gp_voi.forecast import Forecast, available_of, beliefs_of
from bso_server.core.gp_voi.gaussian_process import Posterior, prior
from bso_server.core.gp_voi.stopping import bound, unbounded
from bso_server.core.gp_voi.value import Worth, worth
from bso_server.core.history import History, log_costs_per_epoch
from bso_server.core.model import EpochBound, Expectations, ExpectedCost, Suggestion, TrialRecord
from bso_server.errors import NoSurvivorError
from zeus_plugins.protocol import Origin


def suggest(history: History) -> Suggestion:
    """Choose the next trial's batch size, and its bound where it is known what an epoch costs."""
    job = history.job
    available = available_of(history)
    if not available:
        raise NoSurvivorError(
            f"job {job.job_id!r}: none of the batch sizes {list(job.batch_sizes)} can run any more; register the job "
            "anew with smaller batch_sizes or larger GPUs"
        )
    beliefs = beliefs_of(history, history.in_flight)
    if not any(belief.is_observed for belief in beliefs):
        return _first(history, beliefs, available)
    forecast = Forecast.of(history, beliefs, history.in_flight)
    index, origin, reason = _chosen(history, forecast)
    is_bounded = not beliefs[index].are_costs_guessed
    found = bound(job, forecast, index, origin) if is_bounded else None
    return Suggestion(job.batch_sizes[index], origin, reason, bound=found)


def bound_of(history: History, trial: TrialRecord) -> EpochBound | None:
    """The bound of a running trial that was dispatched without one; None if it is too early to tell.

    The first report holds what it cost to start up and to try power limits, too. What epochs cost without that is
    guessed from other sizes' first runs, and the guess is good enough only if even less would end the trial at once.
    """
    job = history.job
    others = [each for each in history.in_flight if each.trial_number != trial.trial_number]
    beliefs = beliefs_of(history, others)
    if not any(belief.is_observed for belief in beliefs):
        return unbounded(job.max_epochs)
    index = job.batch_sizes.index(trial.batch_size)
    log_first_j, log_later_j = log_costs_per_epoch(job, trial)
    belief, is_guess = beliefs[index], False
    if log_later_j is not None:
        belief = belief.costing(log_later_j, trial.report_count - 1)
    elif belief.are_costs_guessed:
        if trial.report_count > 1:
            return unbounded(job.max_epochs)
        startup = expected_startup(job.batch_sizes, beliefs, index)
        if startup is None or log_first_j is None:
            return None
        belief, is_guess = belief.supposing(log_first_j - startup - CONSTANTS.startup_sd), True
    forecast = Forecast.of(history, beliefs_with(beliefs, belief, index), others)
    found = bound(job, forecast, index, trial.origin)
    return None if is_guess and found.epochs > trial.epoch else found


def expectations(history: History) -> Expectations:
    """The expected cost of each size, once one has reached the target."""
    beliefs = beliefs_of(history, history.in_flight)
    if not any(belief.is_observed for belief in beliefs):
        return Expectations({}, None)
    forecast, sizes = Forecast.of(history, beliefs, ()), history.job.batch_sizes
    costs = {
        sizes[index]: ExpectedCost(forecast.expected_cost_j(index), forecast.expected_cost_std_j(index))
        for index in forecast.available
    }
    return Expectations(costs, sizes[forecast.incumbent] if forecast.incumbent_converges else None)


def _first(history: History, beliefs: Beliefs, available: Sequence[int]) -> Suggestion:
    """Nothing has reached the target yet: the default, then what is nearest to it, over and over."""
    job = history.job
    octaves = prior(job.batch_sizes).octaves[job.batch_sizes.index(job.default_batch_size)]
    index = min(available, key=lambda each: (beliefs[each].missed, octaves[each]))
    size, missed = job.batch_sizes[index], trials_missed(beliefs)
    is_first = not any(arm.trials for arm in history.arms.values())
    start = "first run" if is_first else "no run has reached the target yet"
    if size == job.default_batch_size:
        reason = f"{start}: your default size"
    else:
        reason = f"{start}: {size} is near your default, {job.default_batch_size}"
    if missed:
        reason += f" [{missed} trials missed it, those at {size} least often]"
    return Suggestion(size, Origin.EXPLORATION, reason)


def _chosen(history: History, forecast: Forecast) -> tuple[int, Origin, str]:
    """Index of the size to play, the kind of decision, and its reason in words.

    A try that missed the target is followed by the incumbent until one of its runs has reached it: a recurrence of the
    job pays for one try at most.
    """
    incumbent = forecast.incumbent
    cost = f"expected cost {forecast.expected_cost_j(incumbent):.4g} J"
    if not forecast.incumbent_converges:
        reason = (
            "no size that can still run is known to reach the target: this one looks cheapest "
            f"[{cost}, the lowest of those that missed it least often]"
        )
        return incumbent, Origin.EXPLORATION, reason
    missed = trials_missed(forecast.beliefs)
    if missed:
        reason = f"best so far, after a run that missed the target [{cost}; {missed} missed it in a row]"
        return incumbent, Origin.INCUMBENT, reason
    best = _best_try(history, forecast)
    if best is None:
        return incumbent, Origin.INCUMBENT, f"best so far; there is no other size to try [{cost}]"
    index, value = best
    size, best_size = history.job.batch_sizes[index], history.job.batch_sizes[incumbent]
    numbers = (
        f"expected cost {forecast.expected_cost_j(index):.4g} J at {size}, {forecast.expected_cost_j(incumbent):.4g} J "
        f"at {best_size}; chance to cost less {value.chance:.2g}, value of information {value.value:.3g} against an "
        f"expected loss of {value.loss:.3g} (in runs of {best_size})"
    )
    if value.index <= 0:
        return incumbent, Origin.INCUMBENT, f"best so far; a try of {size} would not pay [{numbers}]"
    arm = history.arms[size]
    if not arm.observed.count:
        tried = f"tried {size}"
    elif not arm.completed.count:
        tried = f"tried {size} again after it was stopped"
    else:
        tried = f"tried {size} again"
    hope = f"could be cheaper than {best_size} (chance {_percent(value.chance)})"
    return index, Origin.EXPLORATION, f"{tried}: {hope} [{numbers}]"


def _percent(chance: float) -> str:
    return "under 1 %" if chance < 0.01 else f"{min(chance, 0.99):.0%}".replace("%", " %")


def _best_try(history: History, forecast: Forecast) -> tuple[int, Worth] | None:
    """The index of the size that is most worth a try and what that is worth; None if there is nothing to try.

    Only sizes that were tried are candidates, those next to one that reaches the target, and those a step further on
    the way from the default on which costs have fallen: far from all observations the belief is so wide that it would
    promise anything.
    """
    candidates = _candidates(history, forecast)
    if not candidates:
        return None
    horizon = CONSTANTS.first_horizon + CONSTANTS.horizon_growth * history.recurrences
    values = {index: _worth(forecast, index, horizon) for index in candidates}
    best = max(values, key=lambda index: values[index].index)
    return best, values[best]


def _candidates(history: History, forecast: Forecast) -> list[int]:
    octaves, incumbent = prior(history.job.batch_sizes).octaves, forecast.incumbent
    place = {index: number for number, index in enumerate(forecast.available)}
    converged = [index for index, belief in enumerate(forecast.beliefs) if belief.converged]
    mean, default = forecast.costs.mean, history.job.batch_sizes.index(history.job.default_batch_size)
    has_trend = default in converged and mean[default] > mean[incumbent] + CONSTANTS.trend_log_cost

    def is_near(index: int, other: int) -> bool:
        beside = other in place and abs(place[index] - place[other]) <= 1
        return bool(beside or octaves[index, other] <= CONSTANTS.near_octaves)

    def follows_trend(index: int) -> bool:
        is_beyond = (index < incumbent) == (incumbent < default)
        return bool(has_trend and is_beyond and octaves[index, incumbent] <= CONSTANTS.trend_octaves)

    def is_candidate(index: int) -> bool:
        known = forecast.beliefs[index].tried or follows_trend(index)
        return index != incumbent and (known or any(is_near(index, other) for other in converged))

    return [index for index in forecast.available if is_candidate(index)]


def _worth(forecast: Forecast, index: int, horizon: float) -> Worth:
    """The worth of a try of the size with this index.

    With V the covariance of the expected log costs, b the size and i the incumbent: the log ratio of their costs has
    the variance ``V_bb + V_ii − 2 V_bi``. A run of b resolves part of that, of epochs and of their cost each.
    """
    incumbent = forecast.incumbent
    mean, costs = forecast.costs.mean, forecast.costs.covariance
    variance = float(costs[index, index] + costs[incumbent, incumbent] - 2 * costs[incumbent, index])
    learned = _resolved(forecast.epochs, index, incumbent) + _resolved(forecast.epoch_costs, index, incumbent)
    return worth(float(mean[index] - mean[incumbent]), variance, learned, horizon)


def _resolved(belief: Posterior, index: int, incumbent: int) -> float:
    """The variance between b and i that a run of b resolves: ``(Y_bb − Y_bi)² / (Y_bb + s²)``, Y the covariance."""
    covariance = belief.expected.covariance
    own = float(covariance[index, index])
    return (own - float(covariance[incumbent, index])) ** 2 / (own + belief.run_variance)
