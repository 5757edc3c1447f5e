"""Policy `zeus`: a pruning stage, then a bandit stage, with reasons in words.

The pruning stage tries every batch size in rounds and keeps the sizes that reach the target. A round starts at a start
size, goes downwards from it, and then upwards from the next larger size. A size that misses the target ends its
direction, because sizes beyond it rarely do better. The sizes that reached the target survive into the next round,
which starts at the cheapest of them. The first round starts at the default.

The bandit stage is Thompson sampling with a Gaussian posterior per batch size. The reward of a run is its negated cost.
The rewards of an arm are draws from a normal distribution, whose precision is the inverse of their own variance and
whose unknown mean has a conjugate normal prior.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from bso_server.core.model import (
    BAND_SDS,
    Expectations,
    ExpectedCost,
    History,
    Statistics,
    Suggestion,
    TrialRecord,
    cost_of,
)
from bso_server.core.policy import Policy
from bso_server.errors import InvalidJobError, NoSurvivorError
from zeus_plugins.protocol import (
    ALIVE,
    CreatedJob,
    Decision,
    Origin,
    SizeBelief,
    StopRule,
    TrialState,
    joules_in_words,
)


@dataclass(frozen=True, slots=True)
class Explore:
    """Next exploration: of `batch_size`, in a round that began at size `start`."""

    batch_size: int
    round_number: int
    start: int


def explore(history: History) -> Explore | TrialRecord | tuple[int, ...]:
    """Return the next exploration, or the running exploration to wait for, or the surviving sizes after all rounds.

    Crashed and abandoned trials do not count: their size is explored again, unless it is excluded (`History.excluded`),
    which ends its direction. Sizes that do not fit into memory are ignored. Survivors are ascending.

    Raises:
        NoSurvivorError: A round ended without any size that reached the target, or no size fits into memory.
    """
    job = history.job
    survivors, start = history.fitting_sizes, history.start_size
    if start is None:
        raise NoSurvivorError(
            f"job {job.job_id!r}: even batch size {min(job.batch_sizes)} ran out of memory; revise the job with "
            "smaller batch_sizes (bso-server jobs revise), or use larger GPUs"
        )
    explorations: dict[int, list[TrialRecord]] = {size: [] for size in job.batch_sizes}
    for trial in history.explorations:
        explorations[trial.batch_size].append(trial)
    for round_number in range(1, job.num_pruning_rounds + 1):
        reached: list[TrialRecord] = []
        downwards = [size for size in reversed(survivors) if size <= start]
        upwards = [size for size in survivors if size > start]
        for direction in (downwards, upwards):
            for batch_size in direction:
                if len(explorations[batch_size]) < round_number:
                    if batch_size not in history.runnable_sizes:
                        break
                    return Explore(batch_size, round_number, start)
                trial = explorations[batch_size][round_number - 1]
                if trial.state in ALIVE:
                    return trial
                if trial.state is not TrialState.COMPLETED:
                    break
                reached.append(trial)
        if not reached:
            raise NoSurvivorError(
                f"job {job.job_id!r}: no batch size reached the target metric {job.target_metric:g} in exploration "
                f"round {round_number} of {job.num_pruning_rounds}, starting from {start}; revise the job with "
                "other batch_sizes, more max_epochs or a larger beta_knob (bso-server jobs revise), or use another "
                "job_id for a target that it can reach"
            )
        survivors = tuple(sorted(trial.batch_size for trial in reached))
        start = min(reached, key=lambda trial: cost_of(job, trial)).batch_size
    return survivors


@dataclass(frozen=True, slots=True)
class Posterior:
    """Belief about the mean reward (−cost, joules) of one arm.

    The precision (1/joules²) is infinite if the mean is known exactly, and 0 if it is unknown.
    """

    mean: float
    precision: float
    observations: int

    @property
    def std(self) -> float:
        """Standard deviation in joules; infinite if the mean is unknown."""
        return math.inf if self.precision == 0 else 1 / math.sqrt(self.precision)

    def draw(self, rng: np.random.Generator) -> float:
        """Draw a mean reward (Thompson sampling); +∞ if it is unknown, so that the arm is tried."""
        return math.inf if self.precision == 0 else float(rng.normal(self.mean, self.std))


def fit(rewards: Statistics, *, prior_mean: float, prior_precision: float) -> Posterior:
    """Return the posterior of an arm's mean reward (conjugate prior; Murphy, Machine Learning, 2012, §4.4.1).

    With n rewards of population variance v, reward precision p = 1/v and prior N(m₀, 1/p₀)::

        precision = p₀ + n·p        mean = (p₀·m₀ + p·Σ rewards) / precision

    If the rewards do not vary (v = 0, so p = ∞), their mean is known exactly.
    """
    if rewards.count == 0:
        return Posterior(prior_mean, prior_precision, 0)
    if rewards.variance == 0:
        return Posterior(rewards.mean, math.inf, rewards.count)
    reward_precision = 1 / rewards.variance
    precision = prior_precision + rewards.count * reward_precision
    mean = (prior_precision * prior_mean + reward_precision * rewards.count * rewards.mean) / precision
    return Posterior(mean, precision, rewards.count)


def posteriors(history: History, batch_sizes: Iterable[int]) -> dict[int, Posterior]:
    """Return the posterior per batch size, in the given order, fitted on `Arm.learned_costs`."""
    job = history.job
    return {
        batch_size: fit(
            history.arms[batch_size].learned_costs.negated(),
            prior_mean=job.mab_prior_mean,
            prior_precision=job.mab_prior_precision,
        )
        for batch_size in batch_sizes
    }


def expectations(history: History) -> Expectations:
    """Return the expected costs of the surviving sizes that have reached the target.

    Posteriors do not yet include concurrent trials; a size that has only concurrent trials gets their mean cost.
    """
    survivors = history.survivors or history.job.batch_sizes
    reaching = [size for size in survivors if size in history.runnable_sizes and history.arms[size].completed.count]
    costs = {}
    for size, arm in posteriors(history, reaching).items():
        known = (
            arm if arm.observations else fit(history.arms[size].completed.negated(), prior_mean=0, prior_precision=0)
        )
        mean_j, reach_j = -known.mean, BAND_SDS * known.std
        band_j = (max(mean_j - reach_j, 0.0), mean_j + reach_j) if known.observations > 1 else None
        costs[size] = ExpectedCost(mean_j, band_j)
    return Expectations(costs, min(costs, key=lambda size: costs[size].mean_j, default=None))


def choose(
    arms: Mapping[int, Posterior], *, min_observations: int, rng: np.random.Generator
) -> tuple[int, dict[int, float] | None]:
    """Choose an arm; return its batch size, and the draws per batch size if the draws decided.

    Choose the first arm, in a random order, that has fewer than `min_observations` observations. If every arm has
    enough, draw each arm's mean reward from its posterior, in the order of `arms`, and choose the arm with the largest
    draw (the first on ties).
    """
    sizes = list(arms)
    for batch_size in rng.choice(sizes, len(sizes), replace=False).tolist():
        if arms[batch_size].observations < min_observations:
            return batch_size, None
    draws = {batch_size: posterior.draw(rng) for batch_size, posterior in arms.items()}
    return max(draws, key=draws.__getitem__), draws


def suggest(history: History, rng: np.random.Generator) -> Suggestion:
    """Choose the next trial's batch size; only the bandit stage uses the generator.

    Raises:
        NoSurvivorError: No batch size can run any more, or none was found that reaches the target.
    """
    if history.survivors is not None:
        return _drawn(history, history.survivors, rng)
    match explore(history):
        case Explore() as step:
            return _explored(step, history.job)
        case TrialRecord() as trial:
            return _concurrent(history, trial)
        case survivors:
            return _drawn(history, survivors, rng)


def stop_rule(job: CreatedJob, trial: TrialRecord | None, min_cost_j: float | None) -> StopRule:  # noqa: ARG001 - the signature is the interface's
    """Stop a trial that has not reached the target at ``β · min_cost``, and at `max_epochs`."""
    bound_j = math.inf if job.beta_knob is None or min_cost_j is None else job.beta_knob * min_cost_j
    return StopRule(max_cost_j=bound_j if math.isfinite(bound_j) else None, max_epochs=job.max_epochs)


def explain(history: History, suggestion: Suggestion) -> Decision:
    """Return the expected cost of each size that fits; in the bandit stage, of each survivor."""
    known = expectations(history)
    found = []
    for size in suggestion.survivors or history.fitting_sizes:
        numbers: dict[str, float] = {}
        if (cost := known.costs.get(size)) is not None:
            numbers = {"expected_cost_j": cost.mean_j}
            if cost.band_j is not None:
                numbers |= dict(zip(("low_j", "high_j"), cost.band_j, strict=True))
        found.append(SizeBelief(batch_size=size, **numbers))
    min_cost_j = None if history.cheapest is None else history.cheapest.cost_j
    return Decision(sizes=tuple(found), incumbent=known.best, stop=stop_rule(history.job, None, min_cost_j))


def check(job: CreatedJob) -> None:
    """Raise `InvalidJobError` for a window smaller than `mab_num_explorations`."""
    if _explores_in_vain(job):
        raise InvalidJobError(
            f"a window of {job.window_size} runs never holds the {job.mab_num_explorations} that mab_num_explorations "
            "asks for, so that sizes would be explored for ever: set mab_num_explorations to "
            f"{job.window_size} or less, or window_size to 0, which counts all runs",
            field="window_size",
        )


def amended(job: CreatedJob) -> CreatedJob:
    """Enlarge the job's window to `mab_num_explorations`, if necessary."""
    return job.model_copy(update={"window_size": job.mab_num_explorations}) if _explores_in_vain(job) else job


def _explores_in_vain(job: CreatedJob) -> bool:
    """Return True if the window is too small for the job ever to end its exploration."""
    return 0 < job.window_size < job.mab_num_explorations


def _explored(step: Explore, job: CreatedJob) -> Suggestion:
    if step.round_number > 1:
        start = "the cheapest of the round before"
    elif step.start == job.default_batch_size:
        start = "your default size"
    else:
        start = "the largest size that fits"
    if step.batch_size == step.start:
        where = start
    else:
        where = f"{'smaller' if step.batch_size < step.start else 'larger'} than {start}, {step.start}"
    reason = f"exploring: {where} (round {step.round_number} of {job.num_pruning_rounds})"
    return Suggestion(step.batch_size, Origin.EXPLORATION, reason)


def _concurrent(history: History, running: TrialRecord) -> Suggestion:
    waiting = f"while trial {running.trial_number} explores {running.batch_size}"
    cheapest = history.cheapest
    if cheapest is None or cheapest.batch_size not in history.fitting_sizes:
        start = history.start_size or running.batch_size
        return Suggestion(start, Origin.CONCURRENT, f"{waiting}: {start}, as nothing better is known")
    return Suggestion(
        cheapest.batch_size,
        Origin.CONCURRENT,
        f"{waiting}: the cheapest so far, {joules_in_words(cheapest.cost_j)} in trial {cheapest.trial_number}",
    )


def _drawn(history: History, survivors: tuple[int, ...], rng: np.random.Generator) -> Suggestion:
    batch_sizes = [size for size in survivors if size in history.runnable_sizes]
    if not batch_sizes:
        raise NoSurvivorError(
            f"job {history.job.job_id!r}: none of the batch sizes {list(survivors)} can run any more; revise the job "
            "with others (bso-server jobs revise)"
        )
    arms = posteriors(history, batch_sizes)
    wanted = history.job.mab_num_explorations
    batch_size, draws = choose(arms, min_observations=wanted, rng=rng)
    arm = arms[batch_size]
    if draws is None:
        reason = f"each size is measured {_times(wanted)}; {batch_size} was measured {_times(arm.observations)}"
    elif arm.observations == 0:
        reason = "never measured before"
    else:
        best = max((size for size in arms if arms[size].observations), key=lambda size: arms[size].mean)
        cost = f"expected {joules_in_words(-arms[best].mean)}"
        if batch_size == best:
            reason = f"best so far, {cost}"
        else:
            reason = f"another trial: {batch_size} may be cheaper than {best}, the best so far, {cost}"
    return Suggestion(batch_size, Origin.BANDIT, reason, survivors)


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


POLICY = Policy(
    version="1",
    suggest=suggest,
    explain=explain,
    expectations=expectations,
    stop_rule=stop_rule,
    prunes=True,
    check=check,
    amended=amended,
)
