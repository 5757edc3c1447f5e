"""Memory of policy `gp_voi`: one belief per batch size, and how the end of a trial changes it.

A belief has a constant size, however many trials it summarises. The end of a trial updates all beliefs of its job
together, because the expectation for one size depends on the observations of the other sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple, TypeAlias

from bso_server.core.gp_voi.gaussian_process import (
    Posterior,
    Seen,
    WeightedStatistics,
    epochs_posterior,
    expected_runs,
    mixed,
    moments_given_larger,
)
from bso_server.core.gp_voi.prior import CONSTANTS, Sizes, bounded_exp
from bso_server.core.gp_voi.run_costs import CostRun, CostRuns, change_of, comparable
from bso_server.core.model import OBSERVED, TrialRecord, is_cut_short
from zeus_plugins.protocol import CreatedJob, EndReason, LearnedEpochs, Origin, TrialState

# A pseudo-observation with a smaller weight is not stored.
_LEAST_PSEUDO_WEIGHT = 1e-4
_LEAST_VARIANCE = 1e-9
_LEAST_WEIGHT = 1e-6

# Largest number of runs to compute the expectations of at once; the arrays of more do not stay in the CPU's caches.
_MOST_TOGETHER = 8

# Largest number of sizes in a warm start, so that a registration stays small.
_MOST_LEARNED = 64


class Streak(NamedTuple):
    """Consecutive failures at one size, and the failure chance that was believed before the first of them."""

    length: int = 0
    chance: float = 0.0


class Surprises(NamedTuple):
    """Cumulative sums of deviations from expectation, in σ, upwards and downwards (CUSUM: Page, Biometrika 41, 1954).

    A sum grows while runs deviate in its direction by more than `cusum_step`, and falls to 0 otherwise. The
    sums thus distinguish a lasting change from a single deviating run, even if the change is smaller than the
    variation from run to run.
    """

    up: float = 0.0
    down: float = 0.0

    @property
    def most(self) -> float:
        """The larger of the two sums."""
        return max(self.up, self.down)

    def including(self, deviation: float) -> Surprises:
        """Add the deviation of a run, limited to `largest_surprise`."""
        limit, step = CONSTANTS.largest_surprise, CONSTANTS.cusum_step
        deviation = min(max(deviation, -limit), limit)
        return Surprises(max(0.0, self.up + deviation - step), max(0.0, self.down - deviation - step))


class Belief(NamedTuple):
    """Memory of one batch size.

    Attributes:
        observed: Log epochs to the target. A run that reached the target has weight 1, the pseudo-observation of a
            stopped run has less, and all weights fade with time.
        exact: Log epochs of the runs that reached the target, without pseudo-observations.
        failures: Number of runs that should have reached the target and did not; fades with time.
        costs: Evidence of the latest trials about the cost of an epoch, oldest first.
        are_costs_guessed: True if `costs` is only a guess: from first epochs, which may include a start-up, or from the
            time before a change of costs.
        epoch_step: Epochs between two validations of the latest trial, at most 1.
        converged: True if the size is known to reach the target.
        survived: Most epochs that a run had without reaching the target, since the job last changed.
        missed: Trials of this size that missed the target since a trial of any size last reached it.
        crashed: Crashes of this size, out of memory included, since a trial of it was last measured to its end.
        idle: Recurrences of the job since the latest trial of this size; 0 if the size has had no trial.
        surprises: Sums of the deviations of runs that reached the target from their expectations.
        streak: Current streak of failures.
        taken_over: The part of `observed` that another job has learned (warm start); its weight fades, too.
        since: Number of the first trial after the latest change of the job that trials of this size have shown, or 0.
    """

    observed: WeightedStatistics = WeightedStatistics()
    exact: WeightedStatistics = WeightedStatistics()
    failures: float = 0.0
    costs: CostRuns = ()
    are_costs_guessed: bool = True
    epoch_step: float = 1.0
    converged: bool = False
    survived: float = 0.0
    missed: int = 0
    crashed: int = 0
    idle: int = 0
    surprises: Surprises = Surprises()
    streak: Streak = Streak()
    taken_over: WeightedStatistics = WeightedStatistics()
    since: int = 0

    @property
    def own(self) -> WeightedStatistics:
        """The part of `observed` that the job's own runs have shown."""
        observed, taken = self.observed, self.taken_over
        weight = observed.weight - taken.weight
        if weight <= _LEAST_WEIGHT:
            return WeightedStatistics()
        return WeightedStatistics(weight, (observed.weight * observed.mean - taken.weight * taken.mean) / weight)

    @property
    def failure_chance(self) -> float:
        """Probability that a run with all the epochs it may need misses the target.

        ``(F + f) / (F + n + f + g)``: mean of a Beta(f, g) prior after F failures and runs of weight n.
        """
        failed = self.failures + CONSTANTS.failure_prior
        return failed / (failed + self.observed.weight + CONSTANTS.success_prior)

    @property
    def is_observed(self) -> bool:
        """True if runs have shown anything about the epochs to the target."""
        return self.observed.weight > _LEAST_WEIGHT

    @property
    def is_expected(self) -> bool:
        """True if a run is expected to reach the target, after known epochs."""
        return self.converged and self.is_observed

    @property
    def is_taken_over(self) -> bool:
        """True if only another job's runs say that the size reaches the target (`CreatedJob.warm_in_force`)."""
        return self.converged and not self.exact.weight

    @property
    def setbacks(self) -> int:
        """Number of trials that missed the target or crashed, as counted in `missed` and `crashed`."""
        return self.missed + self.crashed

    @property
    def may_be_tried(self) -> bool:
        """False while the size waits after a crash: one recurrence, times `crash_wait` for each further crash."""
        return not self.crashed or self.idle >= CONSTANTS.crash_wait ** (self.crashed - 1)

    @property
    def has_cost(self) -> bool:
        """True if the cost of an epoch is known, or at least guessed."""
        return bool(self.costs)

    def costing(self, run: CostRun) -> Belief:
        """Add the evidence of a run about the cost of an epoch; evidence replaces guesses."""
        costs = () if self.are_costs_guessed else self.costs
        return self._replace(costs=(*costs, run)[-CONSTANTS.most_cost_runs :], are_costs_guessed=False)

    def perhaps_costing(self, first: CostRun) -> Belief:
        """Add a guess from a trial with a single report, unless the cost of an epoch is known already."""
        if not self.are_costs_guessed:
            return self
        return self._replace(costs=(*self.costs, first)[-CONSTANTS.most_cost_runs :])

    def drifting(self, drift: float, since: int) -> Belief:
        """Keep the costs since trial `since`, at which the log costs of a size began to change by `drift`.

        Without such costs, keep the latest cost, as a guess.
        """
        if later := tuple(run for run in self.costs if run.number >= since):
            return self._replace(costs=later)
        costs = tuple(run._replace(drift=run.drift + drift) for run in self.costs[-1:])
        return self._replace(costs=costs, are_costs_guessed=True)

    def forgetting(self, factor: float) -> Belief:
        """Multiply the weight of every observation by `factor`."""
        if not self.observed.weight and not self.failures:
            return self
        return self._replace(
            observed=self.observed.scaled(factor),
            exact=self.exact.scaled(factor),
            taken_over=self.taken_over.scaled(factor),
            failures=self.failures * factor,
        )


_UNSEEN = Belief()

Beliefs: TypeAlias = tuple[Belief, ...]
"""Beliefs about a job's batch sizes, in the order of the sizes."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a trial that was measured to its end.

    Attributes:
        index: Index of its batch size.
        epochs: Epochs that it ran.
        first: Evidence about the cost of an epoch until the first report; None if that cost was 0.
        cost: Evidence about the cost of an epoch since the first report; None if there was no later report.
        epoch_step: Epochs between two of its validations.
        reached: True if it reached the target.
        conclusive: True if it had all the epochs that it may have needed, so that missing the target is a failure.
            Otherwise a trial without the target was stopped early, and shows only that it needed more epochs.
    """

    index: int
    epochs: float
    first: CostRun | None
    cost: CostRun | None
    epoch_step: float
    reached: bool
    conclusive: bool


def begun(job: CreatedJob) -> Beliefs:
    """Return the beliefs of a new job: empty, or with the epochs of its warm start.

    A mean of standard error e, from runs of weight w, gets the weight ``w·e²/(e² + d²)``, with d = `warm_sd`.
    """
    warm = job.warm_in_force
    learned = {} if warm is None else {each.batch_size: each for each in warm.epochs}

    def belief(known: LearnedEpochs | None) -> Belief:
        if known is None:
            return Belief()
        weight = known.weight / (1 + (CONSTANTS.warm_sd / known.sd) ** 2)
        taken = WeightedStatistics(weight, known.log_epochs)
        return Belief(observed=taken, taken_over=taken, converged=known.reached)

    return tuple(belief(learned.get(size)) for size in job.batch_sizes)


def learned(beliefs: Beliefs, job: CreatedJob) -> tuple[LearnedEpochs, ...]:
    """Return the log epochs of the sizes with most runs, for a warm start; empty before a run reaches the target."""
    if not any(belief.exact.weight for belief in beliefs):
        return ()
    observed = [place for place, belief in enumerate(beliefs) if belief.is_observed]
    most = sorted(observed, key=lambda place: -beliefs[place].observed.weight)[:_MOST_LEARNED]
    # A posterior over these sizes alone is enough for the variance from run to run.
    few = Sizes(tuple(job.batch_sizes[place] for place in sorted(most)), 0)
    run_variance = posterior_of(few, tuple(beliefs[place] for place in sorted(most))).run_variance
    return tuple(
        LearnedEpochs(
            batch_size=job.batch_sizes[place],
            log_epochs=beliefs[place].observed.mean,
            sd=math.sqrt(run_variance / beliefs[place].observed.weight),
            weight=beliefs[place].observed.weight,
            reached=beliefs[place].converged,
        )
        for place in sorted(most)
    )


def _seen(beliefs: Beliefs) -> Seen:
    """Return the observations of log epochs; at least one belief has an observation."""
    step = min(belief.epoch_step for belief in beliefs if belief.is_observed)
    return Seen(tuple(belief.observed for belief in beliefs), tuple(belief.exact for belief in beliefs), step)


def posterior_of(sizes: Sizes, beliefs: Beliefs) -> Posterior:
    """Return the posterior of log epochs to the target; at least one belief has an observation.

    After a warm start, the result mixes two hypotheses: one uses all epochs; the other, with the prior chance
    `warm_wrong`, uses only the job's own runs. Own runs multiply the odds of the second hypothesis by their probability
    without the other job's epochs, p(own), over their probability given these epochs, p(own and other's) / p(other's).
    At a size with epochs from both jobs, whose means a and b have the variances s and t, ``p(a, b) = p(mean of both) ·
    N(a − b; 0, s + t)``.
    """
    seen = _seen(beliefs)
    both = epochs_posterior(sizes, seen)
    taken_over = tuple(belief.taken_over for belief in beliefs)
    if not any(each.weight for each in taken_over):
        return both
    own = tuple(belief.own for belief in beliefs)
    if not any(each.weight for each in own):
        return both
    alone = epochs_posterior(sizes, seen._replace(observed=own))
    none = (WeightedStatistics(),) * len(beliefs)
    others = epochs_posterior(sizes, Seen(taken_over, none, seen.epoch_step))
    log_odds = alone.log_evidence - both.log_evidence + others.log_evidence
    for one, other in zip(own, taken_over, strict=True):
        if one.weight and other.weight:
            variance = both.run_variance * (1 / one.weight + 1 / other.weight)
            log_odds += 0.5 * (one.mean - other.mean) ** 2 / variance + 0.5 * math.log(variance)
    odds = bounded_exp(log_odds)
    odds *= CONSTANTS.warm_wrong / (1 - CONSTANTS.warm_wrong)
    return mixed({both: 1 / (1 + odds), alone: odds / (1 + odds)})


def after_outcome(sizes: Sizes, beliefs: Beliefs, outcome: Outcome) -> Beliefs:
    """Return the beliefs after a trial has ended."""
    if outcome.reached:
        return after_successes(sizes, beliefs, [outcome])[0]
    index, log_epochs = outcome.index, math.log(outcome.epochs)
    beliefs = _with_cost(_tested(sizes, beliefs, outcome), outcome)
    if outcome.conclusive and any(belief.converged for belief in beliefs):
        beliefs = _after_failure(sizes, beliefs, index, log_epochs)
    else:
        beliefs = _after_stop(sizes, _changed(beliefs, index, streak=Streak()), index, log_epochs)
    belief = beliefs[index]
    survived = max(belief.survived, outcome.epochs)
    return _changed(beliefs, index, survived=survived, missed=belief.missed + 1, idle=0)


def after_successes(sizes: Sizes, beliefs: Beliefs, outcomes: Sequence[Outcome]) -> tuple[Beliefs, int]:
    """Return the beliefs after the first of these trials, which all have reached the target, and the number of trials.

    How far a success deviates from expectation matters only to `surprises`, until the job has changed. So the trials
    are learned first, up to a size that only another job has learned, and their expectations are computed together.
    """
    beliefs = _tested(sizes, beliefs, outcomes[0])
    before: list[Beliefs] = []
    for outcome in outcomes:
        if before and beliefs[outcome.index].is_taken_over:
            break
        before.append(beliefs)
        beliefs = _after_success(_with_cost(beliefs, outcome), outcome)
    sums: dict[int, Surprises] = {}
    for number, deviation in _deviations(sizes, before, outcomes):
        outcome, index = outcomes[number], outcomes[number].index
        sums[index] = sums.get(index, before[0][index].surprises).including(deviation)
        if sums[index].most > CONSTANTS.cusum_bound:
            return _after_success(_after_drift(_with_cost(before[number], outcome), index), outcome), number + 1
    for index, surprises in sums.items():
        beliefs = _changed(beliefs, index, surprises=surprises)
    return beliefs, len(before)


def _tested(sizes: Sizes, beliefs: Beliefs, outcome: Outcome) -> Beliefs:
    """Forget the epochs of a warm start if a run at a size without own successes deviates too much.

    Before an own run has reached the target, a run that misses it is enough.
    """
    if not beliefs[outcome.index].is_taken_over:
        return beliefs
    is_first = not any(belief.exact.weight for belief in beliefs)
    for _, deviation in _deviations(sizes, [beliefs], [outcome]):
        is_off = (abs(deviation) if outcome.reached else deviation) >= CONSTANTS.warm_surprise
        if is_off or (is_first and not outcome.reached):
            return _without_other_job(beliefs)
    return beliefs


def _deviations(sizes: Sizes, before: Sequence[Beliefs], outcomes: Sequence[Outcome]) -> list[tuple[int, float]]:
    """Return by how many σ the log epochs of trials deviate from the beliefs before each; with the trials' places.

    The list leaves out trials of sizes that were not known to reach the target.
    """
    known = [place for place, each in enumerate(before) if each[outcomes[place].index].is_expected]
    indices = [outcomes[place].index for place in known]
    if any(belief.taken_over.weight for belief in before[0]):
        runs = [posterior_of(sizes, before[place]).of_run(index) for place, index in zip(known, indices, strict=True)]
    else:
        runs = expected_runs(sizes, [_seen(before[place]) for place in known], indices)
    pairs = zip(known, runs, strict=True)
    return [
        (place, (math.log(outcomes[place].epochs) - mean) / math.sqrt(variance)) for place, (mean, variance) in pairs
    ]


def _with_cost(beliefs: Beliefs, outcome: Outcome) -> Beliefs:
    """Add the trial's cost of an epoch; a trial with a single report gives only a guess."""
    index = outcome.index
    belief = beliefs[index]._replace(epoch_step=min(outcome.epoch_step, 1.0), crashed=0)
    if outcome.cost is None:
        belief = belief if outcome.first is None else belief.perhaps_costing(outcome.first)
        return beliefs_with(beliefs, belief, index)
    beliefs = beliefs_with(beliefs, belief.costing(outcome.cost), index)
    change = change_of([belief.costs for belief in beliefs], index)
    if change is None:
        return beliefs
    # Costs from before the change become guesses: `cost_posterior` weighs whether all sizes have changed alike.
    costs = beliefs[index].costs
    first, _ = comparable(costs, costs[-1])[-2:]
    drifted = tuple(each.drifting(change, first.number) for each in beliefs)
    return _changed(drifted, index, since=first.number)


def _after_success(beliefs: Beliefs, outcome: Outcome) -> Beliefs:
    """Return the beliefs after a run reached the target, without its deviation from expectation.

    The run ends a recurrence of the job, so all observations fade a little.
    """
    index, log_epochs = outcome.index, math.log(outcome.epochs)
    observed, exact = beliefs[index].observed.including(log_epochs), beliefs[index].exact.including(log_epochs)
    beliefs = _changed(beliefs, index, observed=observed, exact=exact, converged=True, streak=Streak())
    rested = (
        each if each == _UNSEEN else each.forgetting(CONSTANTS.forgetting)._replace(missed=0, idle=each.idle + 1)
        for each in beliefs
    )
    return _changed(tuple(rested), index, idle=0)


def _after_failure(sizes: Sizes, beliefs: Beliefs, index: int, log_epochs: float) -> Beliefs:
    """Return the beliefs after a failure: a run that should have reached the target missed it.

    If the size has never reached the target, the run is a right-censored observation like any other. Otherwise k
    failures in a row have the probability p^k, where p is the failure chance that was believed before the first of
    them. A streak with a probability below `streak_chance` means that the job has changed.
    """
    belief = beliefs[index]
    chance = belief.streak.chance if belief.streak.length else belief.failure_chance
    streak = Streak(belief.streak.length + 1, chance)
    beliefs = _changed(beliefs, index, failures=belief.failures + 1, streak=streak)
    if not belief.converged:
        return _after_stop(sizes, beliefs, index, log_epochs)
    if streak.length < CONSTANTS.least_streak or chance**streak.length >= CONSTANTS.streak_chance:
        return beliefs
    return _after_stop(sizes, _changed(_after_drift(beliefs, index), index, converged=False), index, log_epochs)


def _after_stop(sizes: Sizes, beliefs: Beliefs, index: int, log_epochs: float) -> Beliefs:
    """Return the beliefs after a run was stopped: a right-censored observation of its log epochs.

    `moments_given_larger` turns the belief N(m, v) about the size's expected log epochs into one of mean m' and
    variance v' ≤ v. An observation y* of weight w would have had the same effect (moment matching, as in assumed
    density filtering: Minka, 2001), and is stored in place of the run::

        w = s² · (1/v' − 1/v)        y* = (m'/v' − m/v) / (1/v' − 1/v)
    """
    if not any(belief.is_observed for belief in beliefs):
        return beliefs
    posterior = posterior_of(sizes, beliefs)
    mean, variance = float(posterior.mean[index]), float(posterior.variance[index])
    matched_mean, matched_variance = moments_given_larger(mean, variance, posterior.run_variance, log_epochs)
    matched_variance = max(matched_variance, _LEAST_VARIANCE)
    precision_gain = max(1 / matched_variance - 1 / variance, 0.0)
    weight = precision_gain * posterior.run_variance
    if weight <= _LEAST_PSEUDO_WEIGHT:
        return beliefs
    location = (matched_mean / matched_variance - mean / variance) / precision_gain
    return _changed(beliefs, index, observed=beliefs[index].observed.including(location, weight))


def _without_other_job(beliefs: Beliefs) -> Beliefs:
    """Forget the epochs of a warm start at all sizes at which no run of this job has reached the target."""
    unknown = WeightedStatistics()
    return tuple(
        each if each.exact.weight else each._replace(observed=unknown, taken_over=unknown, converged=False)
        for each in beliefs
    )


def _after_drift(beliefs: Beliefs, index: int) -> Beliefs:
    """Forget most observations, because the latest trial of the size with this index has shown a change of the job."""
    forgotten: list[Belief] = []
    for belief in beliefs:
        weight = belief.observed.weight
        kept = belief.forgetting(min(1.0, CONSTANTS.kept_weight / weight) if weight else 1.0)
        forgotten.append(kept._replace(costs=belief.costs[-1:], survived=0.0, surprises=Surprises(), streak=Streak()))
    since = max((run.number for run in beliefs[index].costs), default=0)
    return _changed(tuple(forgotten), index, since=since)


def beliefs_with(beliefs: Beliefs, belief: Belief, index: int) -> Beliefs:
    """Replace the belief about the size with this index."""
    return (*beliefs[:index], belief, *beliefs[index + 1 :])


def _changed(beliefs: Beliefs, index: int, **fields: Any) -> Beliefs:
    """Replace fields of the belief about the size with this index."""
    return beliefs_with(beliefs, beliefs[index]._replace(**fields), index)


def since_of(beliefs: Sequence[Belief]) -> int:
    """Return the number of the first trial after the latest change of the job, or 0."""
    return max(belief.since for belief in beliefs)


def trials_missed(beliefs: Sequence[Belief]) -> int:
    """Count the trials that missed the target since a trial last reached it."""
    return sum(belief.missed for belief in beliefs)


def has_crashed(beliefs: Sequence[Belief]) -> bool:
    """Return True if a trial has crashed, and no trial has reached the target since."""
    return any(belief.crashed and not belief.idle for belief in beliefs)


def after(beliefs: Beliefs, job: CreatedJob, trial: TrialRecord) -> Beliefs:
    """Return the beliefs once this trial has ended."""
    return after_all(beliefs, job, [trial])


def after_all(beliefs: Beliefs, job: CreatedJob, trials: Sequence[TrialRecord]) -> Beliefs:
    """Return the beliefs once these trials have ended, in this order."""
    sizes, learned = Sizes.of(job), 0
    while learned < len(trials):
        next_ones = trials[learned : learned + _MOST_TOGETHER]
        reached = takewhile(lambda trial: trial.state is TrialState.COMPLETED, next_ones)
        successes = [_outcome_of(job, each) for each in reached]
        if successes:
            beliefs, count = after_successes(sizes, beliefs, successes)
        else:
            beliefs, count = _after_setback(beliefs, job, next_ones[0]), 1
        learned += count
    return beliefs


def _outcome_of(job: CreatedJob, trial: TrialRecord, *, conclusive: bool = True) -> Outcome:
    """Return the result of a trial that was measured to its end."""
    return Outcome(
        index=job.batch_sizes.index(trial.batch_size),
        epochs=trial.epoch,
        first=None if trial.other_gpus else CostRun.until_first(job, trial),
        cost=None if trial.other_gpus else CostRun.of(job, trial),
        epoch_step=trial.epoch / trial.report_count,
        reached=trial.state is TrialState.COMPLETED,
        conclusive=conclusive,
    )


def _after_setback(beliefs: Beliefs, job: CreatedJob, trial: TrialRecord) -> Beliefs:
    """Return the beliefs once a trial has ended without the target."""
    index = job.batch_sizes.index(trial.batch_size)
    if trial.state in OBSERVED:
        is_exhausted = trial.state is TrialState.EXHAUSTED
        is_cut = is_exhausted and is_cut_short(job, trial, None)
        conclusive = not is_cut and (is_exhausted or trial.origin is Origin.INCUMBENT)
        ended = after_outcome(Sizes.of(job), beliefs, _outcome_of(job, trial, conclusive=conclusive))
        # A trial with fewer epochs than the job allows now has not missed the target.
        return _changed(ended, index, missed=beliefs[index].missed) if is_cut else ended
    if trial.state not in (TrialState.FAILED, TrialState.INFEASIBLE):
        return beliefs
    belief = beliefs[index]
    if trial.end_reason is EndReason.ENDED_EARLY:
        belief = belief._replace(missed=belief.missed + 1)
    else:
        belief = belief._replace(crashed=belief.crashed + 1, idle=0)
    # The reports before a crash give the cost of an epoch, if no other trial does.
    cost = None if trial.other_gpus else CostRun.of(job, trial)
    if trial.state is TrialState.FAILED and cost is not None and not belief.has_cost:
        belief = belief.costing(cost)
    return beliefs_with(beliefs, belief, index)
