"""The memory of policy `gp_voi` of each batch size, and its change with a trial's end.

A belief is of constant size: what a thousand trials say of a size fits into a dozen numbers. Beliefs of all sizes move
together, for how surprising an outcome is depends on what the other sizes lead to expect.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from bso_server.core.gp_voi.gaussian_process import (
    Posterior,
    WeightedStatistics,
    epochs_posterior,
    moments_given_larger,
)
from bso_server.core.gp_voi.prior import CONSTANTS, Sizes, laws
from bso_server.core.gp_voi.run_costs import CostRun, CostRuns, change_of
from bso_server.core.model import OBSERVED, TrialRecord, log_costs_per_epoch
from zeus_plugins.protocol import CreatedJob, Origin, TrialState

# Less than this of a run is not worth remembering.
_LEAST_PSEUDO_WEIGHT = 1e-4
_LEAST_VARIANCE = 1e-9
_LEAST_WEIGHT = 1e-6


@dataclass(frozen=True, slots=True)
class Streak:
    """Runs in a row that failed at one size, and the chance of a failure as it was believed to be before them."""

    length: int = 0
    chance: float = 0.0


@dataclass(frozen=True, slots=True)
class Belief:
    """The memory of one batch size.

    Attributes:
        observed: Log epochs to the target, weighted by how much each run says: 1 if it reached the target, less for the
            pseudo-observation that stands for a run that was stopped; all fading with time.
        exact: The same of runs that reached the target alone.
        failures: Number of runs that should have reached the target and did not, fading with time.
        costs: The evidence of each of the latest trials about the cost of an epoch, in order.
        are_costs_guessed: Whether that is only what first epochs suggest, which hold the start-up, too.
        log_startup: Log of what the first epochs of its first trial cost more than later ones, as a factor; None if it
            had no later ones.
        epoch_step: Epochs between two validations of the latest trial, at most 1.
        converged: Whether it is known to reach the target.
        survived: The most epochs that a run of it had without reaching the target, since the job last changed.
        missed: Trials that missed the target since a trial of the job, of whatever size, last reached it.
        surprise: By how many σ the latest run that reached the target differed from what was expected.
        streak: Failures in a row until now.
    """

    observed: WeightedStatistics = field(default_factory=WeightedStatistics)
    exact: WeightedStatistics = field(default_factory=WeightedStatistics)
    failures: float = 0.0
    costs: CostRuns = ()
    are_costs_guessed: bool = True
    log_startup: float | None = None
    epoch_step: float = 1.0
    converged: bool = False
    survived: float = 0.0
    missed: int = 0
    surprise: float = 0.0
    streak: Streak = field(default_factory=Streak)

    @property
    def failure_chance(self) -> float:
        """Probability that a run which has all the epochs it may need misses the target.

        ``(F + f) / (F + n + f + g)``: mean of a Beta(f, g) prior after F failures and runs of weight n.
        """
        failed = self.failures + CONSTANTS.failure_prior
        return failed / (failed + self.observed.weight + CONSTANTS.success_prior)

    @property
    def is_observed(self) -> bool:
        """Whether anything is known of its epochs to the target."""
        return self.observed.weight > _LEAST_WEIGHT

    @property
    def has_cost(self) -> bool:
        """Whether anything is known of what its epochs cost."""
        return bool(self.costs)

    def costing(self, run: CostRun) -> Belief:
        """The same after a trial that has told this of the cost of an epoch; that replaces mere guesses."""
        costs = () if self.are_costs_guessed else self.costs
        return replace(self, costs=_latest((*costs, run)), are_costs_guessed=False)

    def supposing(self, log_cost: float) -> Belief:
        """The same if an epoch costs so much (log of joules), as surely as one run can tell."""
        return replace(self, costs=(CostRun(log_cost, math.inf),), are_costs_guessed=False)

    def perhaps_costing(self, log_first_cost: float, log_startup: float | None) -> Belief:
        """The same after a trial of which only the first epoch's cost is known (log of joules).

        Of that, `log_startup` was start-up; None if no size knows, and first epochs are all there is.
        """
        if not self.are_costs_guessed:
            return self
        doubt = 0.0 if log_startup is None else CONSTANTS.first_epoch_sd**2
        run = CostRun(log_first_cost - (log_startup or 0.0), 1.0, doubt=doubt)
        return replace(self, costs=_latest((*self.costs, run)))

    def drifting(self, drift: float) -> Belief:
        """The same once another size's log costs have changed by so much: its latest run is a guess to be replaced."""
        costs = tuple(run._replace(drift=run.drift + drift) for run in self.costs[-1:])
        return replace(self, costs=costs, are_costs_guessed=True)

    def forgetting(self, factor: float) -> Belief:
        """The same with every observation's weight multiplied by `factor`."""
        if not self.observed.weight and not self.failures:
            return self
        return replace(
            self,
            observed=self.observed.scaled(factor),
            exact=self.exact.scaled(factor),
            failures=self.failures * factor,
        )


Beliefs: TypeAlias = tuple[Belief, ...]
"""Beliefs about a job's batch sizes, in their order."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a trial of the batch size with this index that was measured to its end.

    Attributes:
        epochs: Epochs that it ran.
        log_first_cost: Log of what an epoch of it cost (J) until its first report; None if that was nothing.
        cost: Its evidence since then about the cost of an epoch; None if there was none.
        epoch_step: Epochs between two of its validations.
        conclusive: Whether it had all the epochs that it may have needed: a run that misses the target then has failed;
            else it was stopped, and what it would have needed is only known to be more.
    """

    index: int
    epochs: float
    log_first_cost: float | None
    cost: CostRun | None
    epoch_step: float
    reached: bool
    conclusive: bool


def posterior_of(sizes: Sizes, beliefs: Beliefs) -> Posterior:
    """Posterior of log epochs to the target; at least one belief has an observation."""
    return epochs_posterior(
        sizes,
        tuple(belief.observed for belief in beliefs),
        tuple(belief.exact for belief in beliefs),
        min(belief.epoch_step for belief in beliefs if belief.is_observed),
    )


def after_outcome(sizes: Sizes, beliefs: Beliefs, outcome: Outcome) -> Beliefs:
    """The beliefs after a trial has ended.

    A run that reached the target ends a recurrence of the job: all observations fade a little.
    """
    index, log_epochs, surprise = outcome.index, math.log(outcome.epochs), 0.0
    if beliefs[index].is_observed:
        # By how many σ it differs from what was expected.
        mean, variance = posterior_of(sizes, beliefs).of_run(index)
        surprise = abs((log_epochs - mean) / math.sqrt(variance))
    beliefs = _with_cost(sizes, beliefs, outcome)
    if outcome.reached:
        return _after_success(beliefs, index, log_epochs, surprise)
    if outcome.conclusive and any(belief.converged for belief in beliefs):
        beliefs = _after_failure(sizes, beliefs, index, log_epochs)
    else:
        beliefs = beliefs_with(beliefs, replace(beliefs[index], streak=Streak()), index)
        beliefs = _after_stop(sizes, beliefs, index, log_epochs)
    belief = beliefs[index]
    survived = max(belief.survived, outcome.epochs)
    return beliefs_with(beliefs, replace(belief, survived=survived, missed=belief.missed + 1), index)


def expected_startup(sizes: Sizes, beliefs: Beliefs, index: int) -> float | None:
    """Log of what the first epochs of a first trial cost more than later ones: that of the nearest size that knows."""
    octaves = laws(sizes).octaves[index]
    known = [number for number, belief in enumerate(beliefs) if belief.log_startup is not None]
    return beliefs[min(known, key=octaves.__getitem__)].log_startup if known else None


def _with_cost(sizes: Sizes, beliefs: Beliefs, outcome: Outcome) -> Beliefs:
    """The beliefs with the trial's cost of epochs; a trial that ended with its first report suggests one."""
    belief = replace(beliefs[outcome.index], epoch_step=min(outcome.epoch_step, 1.0))
    first, later = outcome.log_first_cost, outcome.cost
    if later is not None:
        if not belief.has_cost and first is not None:
            belief = replace(belief, log_startup=first - later.log_cost)
        belief = belief.costing(later)
        return _after_cost_change(beliefs_with(beliefs, belief, outcome.index), outcome.index)
    if first is not None:
        belief = belief.perhaps_costing(first, expected_startup(sizes, beliefs, outcome.index))
    return beliefs_with(beliefs, belief, outcome.index)


def _after_cost_change(beliefs: Beliefs, index: int) -> Beliefs:
    """The beliefs after a run at this size; if it shows that epochs cost something else now, they follow.

    What others have cost becomes a guess, of which `cost_posterior` thinks as if they had changed alike, or not.
    """
    change = change_of([belief.costs for belief in beliefs], index)
    if change is None:
        return beliefs
    belief = beliefs[index]
    drifting = tuple(each.drifting(change) for each in beliefs)
    return beliefs_with(drifting, replace(belief, costs=belief.costs[-2:]), index)


def after_crash(beliefs: Beliefs, index: int, run: CostRun) -> Beliefs:
    """The beliefs after a trial crashed that had reported: it tells what an epoch costs, if nothing else does."""
    belief = beliefs[index]
    return beliefs if belief.has_cost else beliefs_with(beliefs, belief.costing(run), index)


def _after_success(beliefs: Beliefs, index: int, log_epochs: float, surprise: float) -> Beliefs:
    belief = beliefs[index]
    if belief.converged and belief.is_observed:
        limit = CONSTANTS.drift_sds
        if surprise > 2 * limit or (surprise > limit and belief.surprise > limit):
            beliefs = _after_drift(beliefs)
        else:
            beliefs = beliefs_with(beliefs, replace(belief, surprise=surprise), index)
    belief = beliefs[index]
    learned = replace(
        belief,
        observed=belief.observed.including(log_epochs),
        exact=belief.exact.including(log_epochs),
        converged=True,
        streak=Streak(),
    )
    beliefs = beliefs_with(beliefs, learned, index)
    faded = (each.forgetting(CONSTANTS.forgetting) for each in beliefs)
    return tuple(replace(each, missed=0) if each.missed else each for each in faded)


def _after_failure(sizes: Sizes, beliefs: Beliefs, index: int, log_epochs: float) -> Beliefs:
    """A run failed that should have reached the target: bad luck, or so many in a row that the job has changed.

    k failures in a row have the probability p^k, with p as it was believed to be before them.
    """
    belief = beliefs[index]
    chance = belief.streak.chance if belief.streak.length else belief.failure_chance
    streak = Streak(belief.streak.length + 1, chance)
    beliefs = beliefs_with(beliefs, replace(belief, failures=belief.failures + 1, streak=streak), index)
    if not belief.converged or chance**streak.length >= CONSTANTS.streak_chance:
        return beliefs
    beliefs = _after_drift(beliefs)
    beliefs = beliefs_with(beliefs, replace(beliefs[index], converged=False), index)
    return _after_stop(sizes, beliefs, index, log_epochs)


def _after_stop(sizes: Sizes, beliefs: Beliefs, index: int, log_epochs: float) -> Beliefs:
    """A run was stopped, so that its log epochs are only known to exceed these: a right-censored observation.

    The belief N(m, v) about the size's expected log epochs becomes that of `moments_given_larger`, of mean m' and
    variance v' ≤ v. What would have changed it so is an observation y* of a run with weight w (moment matching, as in
    assumed density filtering: Minka, 2001)::

        w = s² · (1/v' − 1/v)        y* = (m'/v' − m/v) / (1/v' − 1/v)

    It is remembered in the run's place, so that a stopped run takes no more room than another.
    """
    if not any(belief.is_observed for belief in beliefs):
        return beliefs
    posterior = posterior_of(sizes, beliefs)
    mean, variance = float(posterior.mean[index]), float(posterior.variance[index])
    matched_mean, matched_variance = moments_given_larger(mean, variance, posterior.run_variance, log_epochs)
    precision_gain = max(1 / max(matched_variance, _LEAST_VARIANCE) - 1 / variance, 0.0)
    weight = precision_gain * posterior.run_variance
    if weight <= _LEAST_PSEUDO_WEIGHT:
        return beliefs
    location = (matched_mean / max(matched_variance, _LEAST_VARIANCE) - mean / variance) / precision_gain
    belief = beliefs[index]
    return beliefs_with(beliefs, replace(belief, observed=belief.observed.including(location, weight)), index)


def _after_drift(beliefs: Beliefs) -> Beliefs:
    """The job has changed, as a run has shown: keep little of what was seen."""
    forgotten: list[Belief] = []
    for belief in beliefs:
        weight = belief.observed.weight
        kept = belief.forgetting(min(1.0, CONSTANTS.kept_weight / weight) if weight else 1.0)
        forgotten.append(replace(kept, costs=belief.costs[-1:], survived=0.0, surprise=0.0, streak=Streak()))
    return tuple(forgotten)


def _latest(costs: CostRuns) -> CostRuns:
    return costs[-CONSTANTS.most_cost_runs :]


def beliefs_with(beliefs: Beliefs, belief: Belief, index: int) -> Beliefs:
    """The beliefs with another about the size with this index."""
    return (*beliefs[:index], belief, *beliefs[index + 1 :])


def trials_missed(beliefs: Sequence[Belief]) -> int:
    """Trials that missed the target since one last reached it."""
    return sum(belief.missed for belief in beliefs)


def begun(job: CreatedJob) -> Beliefs:
    """The beliefs about a new job's batch sizes."""
    return (Belief(),) * len(job.batch_sizes)


def after(beliefs: Beliefs, job: CreatedJob, trial: TrialRecord) -> Beliefs:
    """The beliefs once this trial has ended."""
    index = job.batch_sizes.index(trial.batch_size)
    log_first_cost, _ = log_costs_per_epoch(job, trial)
    cost = CostRun.of(job, trial)
    if trial.state in OBSERVED:
        outcome = Outcome(
            index=index,
            epochs=trial.epoch,
            log_first_cost=log_first_cost,
            cost=cost,
            epoch_step=trial.epoch / trial.report_count,
            reached=trial.state is TrialState.COMPLETED,
            conclusive=trial.state is TrialState.EXHAUSTED or trial.origin is Origin.INCUMBENT,
        )
        return after_outcome(Sizes.of(job), beliefs, outcome)
    if trial.state is TrialState.FAILED and cost is not None:
        return after_crash(beliefs, index, cost)
    return beliefs
