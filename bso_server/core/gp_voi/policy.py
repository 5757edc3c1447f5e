"""Policy `gp_voi`: run the batch size whose trial has the highest worth, and stop the trial where its worth is highest.

A run at size b costs ``c_b · T_b``: the cost of an epoch times the epochs to the target. `prior` contains the
expectations before any run, `gaussian_process` the posterior, `beliefs` the memory that each trial updates, `forecast`
the resulting cost of runs, and `value` the worth of a trial and the point at which to stop it. The incumbent is the
size with the lowest expected cost among those known to reach the target. docs/policy.md describes the policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bso_server.core.gp_voi.beliefs import (
    Belief,
    Beliefs,
    after,
    after_all,
    begun,
    beliefs_with,
    has_crashed,
    learned,
    since_of,
    trials_missed,
)
from bso_server.core.gp_voi.forecast import Forecast, available_of, beliefs_of
from bso_server.core.gp_voi.prior import CONSTANTS, Sizes, laws
from bso_server.core.gp_voi.run_costs import CostRun
from bso_server.core.gp_voi.value import Worth, bound, checks, stop_shares, unbounded, worths
from bso_server.core.model import (
    EpochBound,
    Expectations,
    ExpectedCost,
    History,
    Suggestion,
    TrialRecord,
    advice_in_words,
)
from bso_server.core.policy import Memory, Policy
from bso_server.core.quality import left_out
from bso_server.errors import InvalidJobError, NoSurvivorError
from zeus_plugins.protocol import (
    GP_VOI,
    MAX_CANDIDATES,
    CandidateWorth,
    CreatedJob,
    Decision,
    Origin,
    SizeBelief,
    StopRule,
    joules_in_words,
)

MOST_SIZES = 64
"""Largest number of batch sizes of a new job."""

_Choice = tuple[int, Origin, str]
"""Index of the chosen size, the kind of decision, and its reason in words."""


class Weighed(NamedTuple):
    """Basis of a suggestion: the forecast, and the worth of trials by the index of their size."""

    forecast: Forecast
    worths: Mapping[int, Worth]


def suggest(history: History, rng: np.random.Generator) -> Suggestion:  # noqa: ARG001 - the signature is the interface's
    """Choose the next trial's batch size, and its bound if the cost of an epoch is known. Draw no random number.

    Raises:
        NoSurvivorError: No batch size can run any more.
    """
    job = history.job
    available = available_of(history)
    if not available:
        raise NoSurvivorError(
            f"job {job.job_id!r}: none of the batch sizes {list(job.batch_sizes)} can run any more"
            f"{_left_out(history)}; revise the job with smaller batch_sizes (bso-server jobs revise), or use larger "
            "GPUs"
        )
    beliefs = beliefs_of(history, history.in_flight)
    is_new_and_warm = not _has_own_run(beliefs) and any(belief.is_taken_over for belief in beliefs)
    if is_new_and_warm or not _is_known(beliefs):
        return _first(history, beliefs, available)
    forecast, values = Forecast.of(history, beliefs, history.in_flight), dict[int, Worth]()
    # Until a run reaches the target, at most `most_missed` trials of other sizes may miss it; none follows a crash.
    may_explore = forecast.incumbent_converges and _may_explore(beliefs)
    repeat = 0.0
    if may_explore and (candidates := _candidates(forecast)):
        values = worths(forecast, [*candidates, forecast.incumbent], stop_shares(job.beta_knob))
        repeat = values.pop(forecast.incumbent).value
    choice = _chosen(history, forecast, values, repeat)
    if may_explore and choice[0] == forecast.incumbent and (check := _check(history, forecast)) is not None:
        choice, worth = check
        values[choice[0]] = worth
    index, origin, reason = choice
    found = None if beliefs[index].are_costs_guessed else bound(job, forecast, index, origin, values.get(index))
    reason += _left_out(history)
    return Suggestion(job.batch_sizes[index], origin, reason, bound=found, basis=Weighed(forecast, values))


def bound_of(history: History, trial: TrialRecord) -> EpochBound | None:
    """Bound a running trial that was dispatched without a bound; None if it is too early to decide.

    The first report of a trial is too early if the start-up is unknown.
    """
    job = history.job
    others = [each for each in history.in_flight if each.trial_number != trial.trial_number]
    beliefs = beliefs_of(history, others)
    # Without a size that can run, or a run that reached the target, no cheaper run exists for a comparison.
    if not available_of(history) or not _has_own_run(beliefs):
        return unbounded(job.max_epochs)
    index = job.batch_sizes.index(trial.batch_size)
    belief, run = beliefs[index], CostRun.of(job, trial)
    if run is None and belief.are_costs_guessed:
        return unbounded(job.max_epochs) if trial.report_count > 1 else None
    if run is not None:
        beliefs = beliefs_with(beliefs, belief.costing(run), index)
    return bound(job, Forecast.of(history, beliefs, others, trusted=index), index, trial.origin)


def _is_known(beliefs: Beliefs) -> bool:
    """Return True if some size's epochs to the target are known, and some size's cost of an epoch on the job's GPUs.

    After a change of the job's GPUs, the epochs to the target are still known, but no cost is known until a run on the
    new GPUs.
    """
    return any(belief.is_observed for belief in beliefs) and any(belief.has_cost for belief in beliefs)


def _has_own_run(beliefs: Beliefs) -> bool:
    """Return True if a run of the job has reached the target; another job's runs do not count."""
    return any(belief.exact.weight for belief in beliefs)


def expectations(history: History) -> Expectations:
    """Return the expected cost of each size, once one has reached the target."""
    beliefs = beliefs_of(history, history.in_flight)
    if not _is_known(beliefs):
        return Expectations({}, None)
    forecast, sizes = Forecast.of(history, beliefs, ()), history.job.batch_sizes
    costs = {
        sizes[index]: ExpectedCost(forecast.expected_cost_j(index), forecast.band_j(index))
        for index in forecast.available
    }
    best = sizes[forecast.incumbent] if forecast.incumbent_converges else None
    return Expectations(costs, best, since_of(beliefs))


def _may_explore(beliefs: Beliefs) -> bool:
    return trials_missed(beliefs) < CONSTANTS.most_missed and not has_crashed(beliefs)


def _first(history: History, beliefs: Beliefs, available: Sequence[int]) -> Suggestion:
    """Suggest the size with the fewest setbacks, on ties nearest to the default, while no cost to the target is known.

    A crash at the default does not count, because the script may crash at any size. Once every size has missed the
    target, suggest the size nearest to the default.
    """
    job = history.job
    sizes = Sizes.of(job)
    octaves = laws(sizes).octaves[sizes.default]

    def setbacks(index: int) -> int:
        return beliefs[index].missed if index == sizes.default else beliefs[index].setbacks

    is_stuck = all(beliefs[index].missed for index in available)
    index = min(available, key=lambda each: (0 if is_stuck else setbacks(each), octaves[each]))
    size, missed = job.batch_sizes[index], trials_missed(beliefs)
    if not any(arm.trials for arm in history.arms.values()):
        warm = job.warm_in_force
        reason = f"first run of job {job.job_id}" + (f"; {warm.in_words}" if warm else "")
    elif _has_own_run(beliefs):
        reason = f"first run on the job's new GPUs: {size}, near your own size"
    elif is_stuck:
        reason = f"every batch size has missed the target: {advice_in_words(job)}"
    else:
        start = "no run has reached the target yet"
        if missed:
            start = f"{'one run' if missed == 1 else f'{missed} runs'} missed the target"
        why = "is your own size" if index == sizes.default else "has the fewest misses and crashes"
        reason = f"{start}; {size} {why if history.arms[size].trials else 'has not been tried yet'}"
    return Suggestion(size, Origin.EXPLORATION, reason)


def _chosen(history: History, forecast: Forecast, values: Mapping[int, Worth], repeat: float) -> _Choice:
    """Choose the size of the highest worth, if it exceeds `repeat` and the limits; otherwise choose the incumbent.

    `repeat` is the value of what another run of the incumbent teaches. After a crash, or after `most_missed` trials
    that missed the target, choose the incumbent until a run has reached the target.
    """
    incumbent = forecast.incumbent
    size = history.job.batch_sizes[incumbent]
    cost = _expected_cost(forecast)
    if not forecast.incumbent_converges:
        reason = f"no size that can still run is known to reach the target: this one looks cheapest, {cost}"
        return incumbent, Origin.EXPLORATION, reason
    if not _may_explore(forecast.beliefs):
        missed = trials_missed(forecast.beliefs)
        after = "a crash" if has_crashed(forecast.beliefs) else f"{missed} runs that missed the target"
        return incumbent, Origin.INCUMBENT, f"best so far, {cost}; nothing new after {after}"
    if not values:
        why = "no other size is likely to beat it" if len(forecast.available) > 1 else "there is no other size to try"
        if forecast.tries_under_way >= CONSTANTS.tries_at_once:
            why = f"{forecast.tries_under_way} trials of other sizes are under way"
        return incumbent, Origin.INCUMBENT, f"best so far, {cost}; {why}"
    # Nearly equal sizes are not compared for ever, however cheap that is.
    least_value = CONSTANTS.least_saving * forecast.horizon
    pays = [
        each
        for each, worth in values.items()
        if worth.index > max(CONSTANTS.least_worth, repeat) and (worth.value >= least_value or forecast.is_open[each])
    ]
    index = max(pays or values, key=lambda each: values[each].index)
    worth, tried = values[index], history.job.batch_sizes[index]
    chance = chance_in_words(worth.chance)
    if not pays:
        reason = (
            f"best so far, {cost}; a trial of {tried} ({chance} to beat it) would cost more than it is likely to save"
        )
        if CONSTANTS.least_worth < worth.index <= repeat:
            reason = (
                f"best so far, {cost}; another run of it is worth more than a trial of {tried} ({chance} to beat it)"
            )
        return incumbent, Origin.INCUMBENT, reason
    arm = history.arms[tried]
    if not arm.observed.count:
        trial = "a trial"
    elif not arm.completed.count:
        trial = "another trial after a stopped one,"
    else:
        trial = "another trial"
    reason = f"{trial} with {chance} to beat {size}, the best so far, {cost}"
    return index, Origin.EXPLORATION, reason


def _check(history: History, forecast: Forecast) -> tuple[_Choice, Worth] | None:
    """Choose a size that its own runs do not show to be dearer than the incumbent, if a trial of it is cheap; or None.

    The laws may be wrong about a job. So the policy measures such sizes one after another, as long as these trials cost
    at most the share `check_share` of the job's cost: the more a trial is expected to lose, the longer it waits. The
    sizes next to the incumbent wait for about twenty recurrences at most.
    """
    job, incumbent, sizes = history.job, forecast.incumbent, history.job.batch_sizes
    if job.beta_knob is None or forecast.tries_under_way or not forecast.allowance:
        return None
    others = [index for index in forecast.available if index != incumbent and forecast.beliefs[index].may_be_tried]
    nearest = sorted(others, key=lambda index: (index not in forecast.neighbours, forecast.mean[index]))
    cheap = checks(forecast, list(filter(forecast.is_in_doubt, nearest))[: CONSTANTS.candidates], job.beta_knob)
    if not cheap:
        return None
    index = max(cheap, key=lambda each: cheap[each].index)
    best, cost = sizes[incumbent], _expected_cost(forecast)
    trial = "another trial" if history.arms[sizes[index]].observed.count else "a trial"
    reason = f"{trial}: no run has shown yet that {sizes[index]} costs more than {best}, the best so far, {cost}"
    return (index, Origin.EXPLORATION, reason), cheap[index]


def _expected_cost(forecast: Forecast) -> str:
    """Return the expected cost of the incumbent in words."""
    return f"expected {joules_in_words(forecast.expected_cost_j(forecast.incumbent))}"


def _left_out(history: History) -> str:
    """Name the sizes that could run and that the job leaves out, with the reason for the first."""
    reasons = left_out(history.job, history.arms)
    sizes = [size for size in reasons if size in history.runnable_sizes]
    if not sizes:
        return ""
    text, also = f"; {sizes[0]} is left out: {reasons[sizes[0]]}", [str(size) for size in sizes[1:]]
    if also:
        text += (
            f"; so {'is' if len(also) == 1 else 'are'} {', '.join(also[:8])}{' and others' if len(also) > 8 else ''}"
        )
    return text


def _candidates(forecast: Forecast) -> list[int]:
    """Return the indices of the few sizes that could be cheapest, and later of the best-looking size that never ran.

    A size could be cheapest if its expected cost, less a few σ, is below the incumbent's expected cost. The list is
    short, because samples are less reliable about many sizes at once, and because the first trials decide how much
    learning costs. From the horizon `open_horizon` on, the number of σ grows with the logarithm of the horizon, as the
    confidence bounds of bandits do (Auer, Cesa-Bianchi, Fischer, Machine Learning 47, 2002), so no size stays out for
    ever. There are no candidates while enough trials of other sizes are under way.
    """
    incumbent = forecast.incumbent
    if forecast.tries_under_way >= CONSTANTS.tries_at_once:
        return []
    surprise = np.where(forecast.is_open, CONSTANTS.break_chance * CONSTANTS.break_sd**2, 0.0)
    sd = np.sqrt(forecast.variance + forecast.variance[incumbent] + surprise)
    openness = forecast.horizon / CONSTANTS.open_horizon
    sds = math.sqrt(1 + 2 * math.log(max(openness, 1.0)))
    hope = forecast.mean - forecast.mean[incumbent] - sds * sd
    others = [index for index in forecast.available if index != incumbent and forecast.beliefs[index].may_be_tried]
    likely = sorted((index for index in others if hope[index] < 0), key=hope.__getitem__)[: CONSTANTS.candidates]
    unseen = [index for index in others if not forecast.beliefs[index].has_cost and index not in likely]
    return likely + (sorted(unseen, key=forecast.mean.__getitem__)[:1] if openness >= 1 else [])


def explain(history: History, suggestion: Suggestion) -> Decision:
    """Return the beliefs about each size that may run, and the worth of a trial of each candidate."""
    job, sizes = history.job, history.job.batch_sizes
    stop = None if suggestion.bound is None else StopRule(max_epochs=suggestion.bound.epochs)
    if not isinstance(suggestion.basis, Weighed):
        unknown = tuple(SizeBelief(batch_size=sizes[index]) for index in available_of(history))
        return Decision(sizes=unknown, stop=stop)
    forecast, values = suggestion.basis
    worthiest = sorted(values, key=lambda index: values[index].index, reverse=True)[:MAX_CANDIDATES]
    return Decision(
        sizes=_beliefs(forecast, sizes),
        candidates=tuple(
            CandidateWorth(
                batch_size=sizes[index],
                value=values[index].value,
                loss=values[index].loss,
                stop_epochs=None
                if forecast.beliefs[index].are_costs_guessed
                else bound(job, forecast, index, Origin.EXPLORATION, values[index]).epochs,
            )
            for index in sorted(worthiest)
        ),
        incumbent=sizes[forecast.incumbent] if forecast.incumbent_converges else None,
        stop=stop,
    )


# Upper limit of a probability, and its name.
_CHANCES = (
    (0.02, "hardly any chance"),
    (0.07, "about a one-in-twenty chance"),
    (0.14, "about a one-in-ten chance"),
    (0.22, "about a one-in-five chance"),
    (0.29, "about a quarter chance"),
    (0.41, "about a third chance"),
    (0.59, "about an even chance"),
    (0.71, "about a two-in-three chance"),
    (0.85, "about a three-in-four chance"),
    (0.97, "a good chance"),
)


def chance_in_words(chance: float) -> str:
    """Describe a probability, for example as ``about a third chance``."""
    return next((words for least, words in _CHANCES if chance < least), "almost every chance")


def _beliefs(forecast: Forecast, sizes: tuple[int, ...]) -> tuple[SizeBelief, ...]:
    available, samples = list(forecast.available), forecast.samples
    costs = samples.log_epochs + samples.log_costs + forecast.retries
    cheapest = np.where(samples.converges, costs, np.inf)[:, available].argmin(axis=1)
    chances = np.bincount(cheapest, minlength=len(available)) / len(cheapest)
    found = []
    for index, chance in zip(available, chances, strict=True):
        low_j, high_j = forecast.band_j(index) or (None, None)
        found.append(
            SizeBelief(
                batch_size=sizes[index],
                expected_cost_j=forecast.expected_cost_j(index),
                low_j=low_j,
                high_j=high_j,
                chance_best=float(chance),
            )
        )
    return tuple(found)


def check(job: CreatedJob) -> None:
    """Raise `InvalidJobError` for a job with more sizes than a decision, which takes O(B³) steps, can consider."""
    if len(job.batch_sizes) > MOST_SIZES:
        raise InvalidJobError(
            f"policy {GP_VOI} chooses among at most {MOST_SIZES} batch sizes, and the job has {len(job.batch_sizes)}: "
            "name fewer, such as the halvings and doublings of your own size",
            field="batch_sizes",
        )


POLICY = Policy(
    version="11",
    suggest=suggest,
    explain=explain,
    expectations=expectations,
    bound=bound_of,
    check=check,
    controls=True,
    leaves_out=True,
    memory=Memory(tuple[Belief, ...], begun, after, learned, after_all),
)
