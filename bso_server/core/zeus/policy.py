"""Policy `zeus` as the server asks it: the pruning stage, then the bandit stage, with reasons in words."""

from __future__ import annotations

import math

import numpy as np

from bso_server.core.chances import BAND_SDS, chances_lowest
from bso_server.core.history import History
from bso_server.core.model import Suggestion, TrialRecord
from bso_server.core.registry import Policy
from bso_server.core.words import joules_in_words
from bso_server.core.zeus import bandit, pruning
from bso_server.errors import InvalidJobError, NoSurvivorError
from zeus_plugins.protocol import Decision, JobRegistration, Origin, SizeBelief, StopRule


def suggest(history: History, rng: np.random.Generator) -> Suggestion:
    """Choose the next trial's batch size; only decisions of the bandit stage advance the generator.

    Raises:
        NoSurvivorError: No batch size can run any more, or none was found that reaches the target.
    """
    if history.survivors is not None:
        return _drawn(history, history.survivors, rng)
    match pruning.explore(history):
        case pruning.Explore() as step:
            return _explored(step, history.job)
        case pruning.Wait(trial):
            return _concurrent(history, trial)
        case pruning.Survivors(batch_sizes):
            return _drawn(history, batch_sizes, rng)


def stop_rule(job: JobRegistration, trial: TrialRecord, min_cost_j: float | None) -> StopRule:  # noqa: ARG001 - the signature is the interface's
    """A trial that has not reached the target is stopped at ``β · min_cost``, and at `max_epochs`."""
    return _stop_rule(job, min_cost_j)


def _stop_rule(job: JobRegistration, min_cost_j: float | None) -> StopRule:
    bound_j = math.inf if job.beta_knob is None or min_cost_j is None else job.beta_knob * min_cost_j
    return StopRule(max_cost_j=bound_j if math.isfinite(bound_j) else None, max_epochs=job.max_epochs)


def explain(history: History, suggestion: Suggestion) -> Decision:
    """The knowledge of each size that fits: the posterior of its mean cost, and in the bandit stage its chance.

    That is the chance of its Thompson draw to be the lowest, but for sizes that are yet to be measured so often.
    """
    known = bandit.expectations(history)
    sizes = suggestion.survivors or history.fitting_sizes
    chances: dict[int, float] = {}
    if suggestion.survivors is not None and known.costs:
        means = np.array([cost.mean_j for cost in known.costs.values()])
        chance = chances_lowest(means, np.diag([cost.std_j or 0.0 for cost in known.costs.values()]))
        chances = dict(zip(known.costs, chance.tolist(), strict=True))
    found = []
    for size in sizes:
        cost = known.costs.get(size)
        band_j = None if cost is None or cost.std_j is None else BAND_SDS * cost.std_j
        found.append(
            SizeBelief(
                batch_size=size,
                expected_cost_j=None if cost is None else cost.mean_j,
                low_j=None if cost is None or band_j is None else max(cost.mean_j - band_j, 0.0),
                high_j=None if cost is None or band_j is None else cost.mean_j + band_j,
                chance_best=chances.get(size),
            )
        )
    min_cost_j = None if history.cheapest is None else history.cheapest.cost_j
    return Decision(sizes=tuple(found), incumbent=known.best, stop=_stop_rule(history.job, min_cost_j))


def check(job: JobRegistration) -> None:
    """Raise `InvalidJobError` for a job whose window never holds the runs that its exploration asks for."""
    if _explores_in_vain(job):
        raise InvalidJobError(
            f"a window of {job.window_size} runs never holds the {job.mab_num_explorations} that mab_num_explorations "
            "asks for, so that sizes would be explored for ever: window_size must be at least "
            f"{job.mab_num_explorations}, or 0 for all",
            field="window_size",
        )


def amended(job: JobRegistration) -> JobRegistration:
    """The job with a window that holds its explorations."""
    return job.model_copy(update={"window_size": job.mab_num_explorations}) if _explores_in_vain(job) else job


def _explores_in_vain(job: JobRegistration) -> bool:
    """True if the runs that count are too few for the job ever to leave its exploration."""
    return 0 < job.window_size < job.mab_num_explorations


def _explored(step: pruning.Explore, job: JobRegistration) -> Suggestion:
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
            f"job {history.job.job_id!r}: none of the batch sizes {list(survivors)} can run any more; register the job "
            "anew with others"
        )
    arms = bandit.posteriors(history, batch_sizes)
    wanted = history.job.mab_num_explorations
    batch_size, draws = bandit.choose(arms, min_observations=wanted, rng=rng)
    arm = arms[batch_size]
    if draws is None:
        reason = f"each size is measured {_times(wanted)}; {batch_size} was measured {_times(arm.observations)}"
    elif arm.observations == 0:
        reason = "never measured before"
    else:
        best = max((size for size in arms if arms[size].observations), key=lambda size: arms[size].mean)
        cost = joules_in_words(-arms[best].mean)
        if batch_size == best:
            reason = f"best so far, at {cost}"
        else:
            reason = f"tried {batch_size} again: it may be cheaper than {best}, which is the best known at {cost}"
    return Suggestion(batch_size, Origin.BANDIT, reason, survivors)


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


POLICY = Policy(
    version="1",
    suggest=suggest,
    explain=explain,
    expectations=bandit.expectations,
    stop_rule=stop_rule,
    prunes=True,
    check=check,
    amended=amended,
)
