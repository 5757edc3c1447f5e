"""The two questions that the service asks: which batch size next (`suggest`), and go on or stop (`judge`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bso_server.core.cost import cost, early_stop_bound
from bso_server.core.gp_voi import decisions as gp_voi
from bso_server.core.history import History, after_report
from bso_server.core.model import Job, Report, Suggestion, TrialRecord
from bso_server.core.zeus import bandit, pruning
from bso_server.errors import InvalidReportError, NoSurvivorError
from zeus_plugins.protocol import EndReason, Origin, PolicyName, StopRule, TrialState

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to tell a training after a report.

    Attributes:
        state: The state that the trial takes; RUNNING to go on.
        reason: Why.
        message: The same in words, with its numbers.
        rule: When a trial that goes on is going to be stopped, as far as is known by now.
    """

    state: TrialState
    reason: EndReason
    message: str
    rule: StopRule

    @property
    def stop(self) -> bool:
        """Whether the training should end."""
        return self.state is not TrialState.RUNNING

    @property
    def converged(self) -> bool:
        """Whether the target was reached within the cost bound."""
        return self.state is TrialState.COMPLETED


def suggest(history: History, rng: np.random.Generator) -> Suggestion:
    """Choose the next trial's batch size by the job's policy.

    Args:
        history: The job's trials.
        rng: The job's generator; advanced only by decisions of the bandit stage of policy `zeus`.

    Raises:
        NoSurvivorError: No batch size can run any more, or policy `zeus` has found none that reaches the target.
    """
    if history.job.policy is PolicyName.GP_VOI:
        return gp_voi.suggest(history)
    return _suggested_by_zeus(history, rng)


def _suggested_by_zeus(history: History, rng: np.random.Generator) -> Suggestion:
    if history.survivors is not None:
        return _drawn(history, history.survivors, rng)
    match pruning.explore(history):
        case pruning.Explore() as step:
            return _explored(step, history.job)
        case pruning.Wait(trial):
            return _concurrent(history, trial)
        case pruning.Survivors(batch_sizes):
            return _drawn(history, batch_sizes, rng)


def _explored(step: pruning.Explore, job: Job) -> Suggestion:
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
    reason = f"exploring: {where} [round {step.round_number} of {job.num_pruning_rounds}]"
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
        f"{waiting}: the cheapest so far [{cheapest.cost_j:.4g} J in trial {cheapest.trial_number}]",
    )


def _drawn(history: History, survivors: tuple[int, ...], rng: np.random.Generator) -> Suggestion:
    batch_sizes = [
        batch_size
        for batch_size in survivors
        if batch_size in history.fitting_sizes and history.arms[batch_size].infeasible is None
    ]
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
        merit = "best so far" if batch_size == best else f"tried {batch_size} again: could be cheaper than {best}"
        reason = (
            f"{merit} [Thompson draw {-draws[batch_size]:.4g} J, the lowest of {len(arms)} sizes; "
            f"expected {-arm.mean:.4g} ± {arm.std:.2g} J from {arm.observations} runs]"
        )
    return Suggestion(batch_size, Origin.BANDIT, reason, survivors)


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


def needs_bound(job: Job, trial: TrialRecord) -> bool:
    """Whether the trial's next report needs `bounded` first.

    Policy `gp_voi` decides once when to stop a trial: with the dispatch if it knows by then what an epoch costs, else
    after the first epochs.
    """
    return job.policy is PolicyName.GP_VOI and trial.bound is None


def bounded(history: History, trial: TrialRecord, report: Report) -> TrialRecord:
    """A trial that `needs_bound`, with the bound that its next report gives it, if that tells enough.

    Args:
        history: The job's trials.
        trial: The trial as of its report before this one.
        report: The report that is about to be judged.
    """
    return replace(trial, bound=gp_voi.bound_of(history, after_report(history.job, trial, report)))


def stop_rule(job: Job, trial: TrialRecord, min_cost_j: float | None) -> StopRule:
    """When a trial that has not reached the target is stopped.

    By policy `zeus` at ``β · min_cost``, by `gp_voi` at the trial's own bound, if it has one; by both at `max_epochs`.

    Args:
        job: The job.
        trial: The trial.
        min_cost_j: Lowest cost of a trial of the job that reached the target, joules, or None.
    """
    if job.policy is PolicyName.GP_VOI:
        return StopRule(max_epochs=job.max_epochs if trial.bound is None else trial.bound.epochs)
    bound = early_stop_bound(job.beta_knob, min_cost_j)
    return StopRule(max_cost_j=bound if math.isfinite(bound) else None, max_epochs=job.max_epochs)


def judge(
    job: Job, trial: TrialRecord, report: Report, min_cost_j: float | None, *, judged_by: StopRule | None = None
) -> Verdict:
    """Decide whether a running trial goes on.

    Policy `zeus`, with ``bound = β · min_cost``: within the bound, below `max_epochs` and not at the target, the
    training goes on. Otherwise it stops; reaching the target counts only within the bound. Policy `gp_voi`: the same
    with the trial's own bound on its epochs; to reach the target counts always.

    Totals never shrink, and a trial that has reported each epoch once, as a whole number, goes on with whole numbers:
    a fraction is then taken for a mistake. A training that validates within its epochs shows that by its first report.

    Args:
        job: The job.
        trial: The trial as of its report before this one, `bounded` if it needed to be.
        report: The report to judge.
        min_cost_j: Lowest cost of a trial of the job that reached the target, joules, or None.
        judged_by: The rule by which the training has judged the report already, while the server was away. What it
            then did cannot be undone: measured by today's bound, a run to the target might count as stopped before.

    Raises:
        InvalidReportError: The report contradicts those before it, or reached the target at no cost.
    """
    _check_against_earlier(trial, report)
    rule = stop_rule(job, trial, min_cost_j)
    applied = rule if judged_by is None else judged_by
    spent = cost(energy_j=report.energy_j, time_s=report.time_s, max_power_w=job.max_power, eta=job.eta_knob)
    reached = report.metric >= job.target_metric if job.higher_is_better_metric else report.metric <= job.target_metric
    reason = applied.applied(cost_j=spent, epochs=report.epoch, reached=reached)
    if reason is EndReason.KEEP_TRAINING and report.epoch >= job.max_epochs:
        reason = EndReason.MAX_EPOCHS_REACHED
    if reason is EndReason.MAX_EPOCHS_REACHED and report.epoch < job.max_epochs:
        reason = EndReason.EPOCH_BOUND_REACHED
    measured = f"metric {report.metric:.4g} against a target of {job.target_metric:g}"
    match reason:
        case EndReason.COST_BOUND_CROSSED:
            bound = f"{applied.max_cost_j:.4g} J"
            if judged_by is None:
                bound = f"{job.beta_knob:g} times the cheapest run, {bound}"
            state, message = TrialState.EARLY_STOPPED, f"stopped: {spent:.4g} J spent, more than {bound}"
        case EndReason.TARGET_REACHED:
            _require_cost(spent, job)
            state = TrialState.COMPLETED
            message = f"target reached: {measured} after {report.epoch:g} epochs, {spent:.4g} J"
        case EndReason.EPOCH_BOUND_REACHED:
            state, message = TrialState.EARLY_STOPPED, f"stopped: {measured} after {report.epoch:g} epochs"
            if judged_by is None and trial.bound is not None:
                message += f"; {trial.bound.reason}"
        case EndReason.MAX_EPOCHS_REACHED:
            state = TrialState.EXHAUSTED
            message = f"stopped: {measured} after {report.epoch:g} epochs, all that max_epochs allows"
        case _:
            state, message = TrialState.RUNNING, f"go on: {measured}, {spent:.4g} J spent"
            if trial.bound is not None:
                message += f"; it has {trial.bound.epochs} epochs ({trial.bound.reason})"
    return Verdict(state, reason, message, rule)


def _require_cost(spent_j: float, job: Job) -> None:
    if spent_j <= 0:
        raise InvalidReportError(
            "the target was reached at a cost of 0 J, which no later run could beat: with this job's eta_knob "
            f"({job.eta_knob:g}) time and energy must be measured",
            field="energy",
        )


def _check_against_earlier(trial: TrialRecord, report: Report) -> None:
    for field, now, before, unit in (
        ("time", report.time_s, trial.time_s, "s"),
        ("energy", report.energy_j, trial.energy_j, "J"),
        ("current_epoch", report.epoch, trial.epoch, "epochs"),
    ):
        if now < before:
            raise InvalidReportError(
                f"{field} is a total since the trial began and cannot shrink: {now:g} {unit} after {before:g} {unit}",
                field=field,
            )
    every_epoch_reported = trial.reports > 0 and trial.epoch == trial.reports
    if every_epoch_reported and report.epoch % 1:
        raise InvalidReportError(
            f"this trial has reported each of its {trial.reports} epochs as a whole number, and {report.epoch:g} is "
            "none: count epochs from 1, or report the fraction at every validation from the first on",
            field="current_epoch",
        )


def outcome_of_crash(*, crashes: int, observed: bool, retries: int) -> tuple[TrialState, EndReason]:
    """What a trial becomes that crashed: FAILED, to be tried again, or INFEASIBLE when that was tried often enough.

    A size that was ever measured to the end can run; its crashes have other causes and never exclude it.

    Args:
        crashes: Crashes of trials of the size, this one included.
        observed: Whether a trial of the size was ever measured to its end.
        retries: Crashes after which a size counts as infeasible.
    """
    hopeless = crashes >= retries and not observed
    return (TrialState.INFEASIBLE if hopeless else TrialState.FAILED), EndReason.CRASHED
