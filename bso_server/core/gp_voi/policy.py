"""Policy `gp_voi`: play the batch size whose try is worth most, and end a try where that is worth most.

A run at size b costs ``c_b · T_b``, the cost of an epoch times the epochs to the target. `laws` says what is expected
of both before anything was seen, `gaussian_process` what is believed of them, `beliefs` how trials change that,
`forecast` what follows for the cost of runs, `value` what a try is worth, and `stopping` when it is given up. The
incumbent is the size with the lowest expected cost among those known to reach the target. docs/policy.md tells the
whole story.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bso_server.core.gp_voi.beliefs import Belief, Beliefs, after, begun, beliefs_with, expected_startup, trials_missed
from bso_server.core.gp_voi.forecast import Forecast, available_of, beliefs_of
from bso_server.core.gp_voi.prior import CONSTANTS, Sizes, bounded_exp, laws
from bso_server.core.gp_voi.run_costs import CostRun
from bso_server.core.gp_voi.value import Worth, bound, stop_shares, unbounded, worths
from bso_server.core.model import (
    EpochBound,
    Expectations,
    ExpectedCost,
    History,
    Suggestion,
    TrialRecord,
    log_costs_per_epoch,
)
from bso_server.core.phrases import BAND_SDS, chance_in_words, joules_in_words
from bso_server.core.policy import Memory, Policy
from bso_server.errors import NoSurvivorError
from zeus_plugins.protocol import MAX_CANDIDATES, CandidateWorth, Decision, Origin, SizeBelief, StopRule


@dataclass(frozen=True, slots=True)
class Weighed:
    """The basis of a suggestion: what was believed, and what tries were worth, by the index of their size."""

    forecast: Forecast
    worths: Mapping[int, Worth]


def suggest(history: History, rng: np.random.Generator) -> Suggestion:  # noqa: ARG001 - the signature is the interface's
    """Choose the next trial's batch size, and its bound if the cost of an epoch is known. It draws no number.

    Raises:
        NoSurvivorError: No batch size can run any more.
    """
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
    # A recurrence of the job pays for one try at most.
    weighs = forecast.incumbent_converges and not trials_missed(beliefs)
    weighed = Weighed(forecast, _worths(history, forecast) if weighs else {})
    index, origin, reason = _chosen(history, weighed)
    overdue = _overdue(history, forecast) if weighs and index == forecast.incumbent else None
    if overdue is not None:
        index, origin, reason = _check(history, weighed, overdue)
    is_bounded = not beliefs[index].are_costs_guessed
    found = bound(job, forecast, index, origin, weighed.worths.get(index)) if is_bounded else None
    return Suggestion(job.batch_sizes[index], origin, reason, bound=found, basis=weighed)


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
    belief, is_guess, run = beliefs[index], False, CostRun.of(job, trial)
    if run is not None:
        belief = belief.costing(run)
    elif belief.are_costs_guessed:
        if trial.report_count > 1:
            return unbounded(job.max_epochs)
        log_first_j, _ = log_costs_per_epoch(job, trial)
        startup = expected_startup(Sizes.of(job), beliefs, index)
        if startup is None or log_first_j is None:
            return None
        belief, is_guess = belief.supposing(log_first_j - startup - CONSTANTS.startup_sd), True
    forecast = Forecast.of(history, beliefs_with(beliefs, belief, index), others, trusted=index)
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
    sizes = Sizes.of(job)
    octaves = laws(sizes).octaves[sizes.default]
    index = min(available, key=lambda each: (beliefs[each].missed, octaves[each]))
    size, missed = job.batch_sizes[index], trials_missed(beliefs)
    is_first = not any(arm.trials for arm in history.arms.values())
    start = "first run" if is_first else "no run has reached the target yet"
    if size == job.default_batch_size:
        reason = f"{start}: your default size"
    else:
        reason = f"{start}: {size} is near your default, {job.default_batch_size}"
    if missed:
        reason += f"; {missed} missed it, those at {size} least often"
    return Suggestion(size, Origin.EXPLORATION, reason)


def _chosen(history: History, weighed: Weighed) -> tuple[int, Origin, str]:
    """Index of the size to play, the kind of decision, and its reason in words.

    A try that missed the target is followed by the incumbent until one of its runs has reached it.
    """
    forecast, values = weighed.forecast, weighed.worths
    incumbent = forecast.incumbent
    size = history.job.batch_sizes[incumbent]
    cost = joules_in_words(forecast.expected_cost_j(incumbent))
    if not forecast.incumbent_converges:
        reason = f"no size that can still run is known to reach the target: this one looks cheapest, at {cost}"
        return incumbent, Origin.EXPLORATION, reason
    missed = trials_missed(forecast.beliefs)
    if missed:
        runs = "a run" if missed == 1 else f"{missed} runs"
        reason = f"best so far, at {cost}; nothing new after {runs} that missed the target"
        return incumbent, Origin.INCUMBENT, reason
    if not values:
        return incumbent, Origin.INCUMBENT, f"best so far, at {cost}; {_no_rival(forecast)}"
    pays = {each: worth for each, worth in values.items() if _pays(forecast, each, worth)}
    index = max(pays or values, key=lambda each: values[each].index)
    worth, tried = values[index], history.job.batch_sizes[index]
    chance = chance_in_words(worth.chance)
    if not pays:
        reason = f"best so far, at {cost}; to try {tried}, with {chance} to beat it, would not pay"
        return incumbent, Origin.INCUMBENT, reason
    arm = history.arms[tried]
    if not arm.observed.count:
        again = ""
    elif not arm.completed.count:
        again = " again after it was stopped"
    else:
        again = " again"
    reason = f"tried {tried}{again}: {chance} to beat {size}, which is the best known at {cost}"
    return index, Origin.EXPLORATION, reason


def _overdue(history: History, forecast: Forecast) -> int | None:
    """Index of a size to check, the one that looks cheapest; None if none is due.

    In the long run no size stays in doubt, however little is expected of it: each that has never reached the target is
    once given as many epochs as a run of the incumbent costs. That takes a run of each such size, and then no more.
    """
    beta, incumbent = history.job.beta_knob, forecast.incumbent
    if beta is None or not forecast.is_long or forecast.tries_under_way:
        return None
    if history.recurrences % CONSTANTS.check_interval:
        return None
    limit = float(forecast.mean[incumbent]) + math.log(min(beta, 1.0) / CONSTANTS.further)
    doubtful = [
        index
        for index in forecast.available
        if index != incumbent
        and forecast.is_open[index]
        and math.log(forecast.beliefs[index].survived + 1) + forecast.epoch_costs.mean[index] < limit
    ]
    return min(doubtful, key=forecast.mean.__getitem__, default=None)


def _check(history: History, weighed: Weighed, index: int) -> tuple[int, Origin, str]:
    """A decision as by `_chosen`: to try a size that is `_overdue`."""
    forecast, sizes = weighed.forecast, history.job.batch_sizes
    best, cost = sizes[forecast.incumbent], joules_in_words(forecast.expected_cost_j(forecast.incumbent))
    again = " again" if history.arms[sizes[index]].observed.count else ""
    reason = (
        f"tried {sizes[index]}{again}: no run has shown yet that it costs more than {best}, the best known at {cost}"
    )
    return index, Origin.EXPLORATION, reason


def _pays(forecast: Forecast, index: int, worth: Worth) -> bool:
    """True if a size is tried where nothing is worth more.

    Sizes that have shown to be as good as equal are not compared for ever, however little that costs.
    """
    is_close = worth.value < CONSTANTS.least_saving * forecast.horizon and not forecast.is_open[index]
    return worth.index > CONSTANTS.least_worth and not is_close


def _no_rival(forecast: Forecast) -> str:
    if forecast.tries_under_way >= CONSTANTS.tries_at_once:
        return f"{forecast.tries_under_way} tries of others are under way"
    return "there is no other size to try" if len(forecast.available) < 2 else "no other size is likely to beat it"


def _worths(history: History, forecast: Forecast) -> dict[int, Worth]:
    """The worth of a try of each candidate, by the index of its size."""
    job = history.job
    return worths(forecast, _candidates(forecast), stop_shares(job.beta_knob), max_epochs=job.max_epochs)


def _candidates(forecast: Forecast) -> list[int]:
    """Indices of the sizes to weigh: the few that could be cheapest, and later the most promising that was never run.

    Those are cheapest when their cost is put a few σ below what is expected, and then below the incumbent's. What the
    samples say of many sizes at once is less sure than what they say of few, and first tries decide how much is paid
    for learning; later, the number of σ grows with the logarithm of the horizon, as the confidence bounds of bandits do
    (Auer, Cesa-Bianchi, Fischer, Machine Learning 47, 2002): no size stays out for ever. While enough tries are under
    way, what those are going to tell is awaited.
    """
    incumbent, unseen = forecast.incumbent, forecast.is_unseen
    if forecast.tries_under_way >= CONSTANTS.tries_at_once:
        return []
    surprise = np.where(forecast.is_open, CONSTANTS.break_chance * CONSTANTS.break_sd**2, 0.0)
    sd = np.sqrt(forecast.variance + forecast.variance[incumbent] + surprise)
    openness = forecast.horizon / CONSTANTS.open_horizon
    sds = math.sqrt(1 + 2 * math.log(max(openness, 1.0)))
    hope = forecast.mean - forecast.mean[incumbent] - sds * sd
    others = [index for index in forecast.available if index != incumbent]
    likely = sorted((index for index in others if hope[index] < 0), key=hope.__getitem__)[: CONSTANTS.candidates]
    rest = [index for index in others if unseen[index] and index not in likely and openness >= 1]
    return likely + sorted(rest, key=forecast.mean.__getitem__)[:1]


def explain(history: History, suggestion: Suggestion) -> Decision:
    """The beliefs about each size that may run, and the worth of a try of each candidate."""
    job, sizes = history.job, history.job.batch_sizes
    stop = None if suggestion.bound is None else StopRule(max_epochs=suggestion.bound.epochs)
    weighed = suggestion.basis
    if not isinstance(weighed, Weighed):
        unknown = tuple(SizeBelief(batch_size=sizes[index]) for index in available_of(history))
        return Decision(sizes=unknown, stop=stop)
    forecast, candidates = weighed.forecast, weighed.worths
    worthiest = sorted(candidates, key=lambda index: candidates[index].index, reverse=True)[:MAX_CANDIDATES]
    return Decision(
        sizes=_beliefs(forecast, sizes),
        candidates=tuple(
            CandidateWorth(
                batch_size=sizes[index],
                value=worth.value,
                loss=worth.loss,
                stop_epochs=None
                if forecast.beliefs[index].are_costs_guessed
                else bound(job, forecast, index, Origin.EXPLORATION, worth).epochs,
            )
            for index, worth in ((index, candidates[index]) for index in sorted(worthiest))
        ),
        incumbent=sizes[forecast.incumbent] if forecast.incumbent_converges else None,
        stop=stop,
    )


def _beliefs(forecast: Forecast, sizes: tuple[int, ...]) -> tuple[SizeBelief, ...]:
    available, samples = list(forecast.available), forecast.samples
    costs = samples.log_epochs + samples.log_costs + forecast.retries
    cheapest = np.where(samples.converges, costs, np.inf)[:, available].argmin(axis=1)
    chances = np.bincount(cheapest, minlength=len(available)) / len(cheapest)
    found = []
    for index, chance in zip(available, chances, strict=True):
        expected_j = forecast.expected_cost_j(index)
        sd = math.sqrt(float(forecast.variance[index]))
        # The expected cost is the mean over what is believed of it, which is log-normal.
        median_j = expected_j * bounded_exp(-sd * sd / 2)
        found.append(
            SizeBelief(
                batch_size=sizes[index],
                expected_cost_j=expected_j,
                low_j=median_j * bounded_exp(-BAND_SDS * sd),
                high_j=median_j * bounded_exp(BAND_SDS * sd),
                chance_best=float(chance),
            )
        )
    return tuple(found)


POLICY = Policy(
    version="2",
    suggest=suggest,
    explain=explain,
    expectations=expectations,
    bound=bound_of,
    memory=Memory(tuple[Belief, ...], begun, after),
)
