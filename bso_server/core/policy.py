"""The two questions that the service asks: which batch size next (`suggest`), and go on or stop (`judge`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bso_server.core import bandit, pruning
from bso_server.core.cost import cost, early_stop_bound
from bso_server.core.history import History
from bso_server.core.model import Job, Report, Suggestion, TrialRecord
from bso_server.errors import InvalidReportError, NoSurvivorError
from zeus_plugins.protocol import EndReason, Origin, TrialState

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to tell a training after a report.

    Attributes:
        state: The state that the trial takes; RUNNING to go on.
        reason: Why.
        message: The same in words, with its numbers.
    """

    state: TrialState
    reason: EndReason
    message: str

    @property
    def stop(self) -> bool:
        """Whether the training should end."""
        return self.state is not TrialState.RUNNING

    @property
    def converged(self) -> bool:
        """Whether the target was reached within the cost bound."""
        return self.state is TrialState.COMPLETED


def suggest(history: History, rng: np.random.Generator) -> Suggestion:
    """Choose the next trial's batch size by policy `zeus`.

    Args:
        history: The job's trials.
        rng: The job's generator; advanced only by decisions of the bandit stage.

    Raises:
        NoSurvivorError: No batch size reached the target in a whole exploration round.
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


def _explored(step: pruning.Explore, job: Job) -> Suggestion:
    start = "the default" if step.round_number == 1 else "the cheapest of the round before"
    if step.batch_size == step.start:
        where = start
    else:
        where = f"{'smaller' if step.batch_size < step.start else 'larger'} than {start}, {step.start}"
    reason = f"exploring, round {step.round_number} of {job.num_pruning_rounds}: {where}"
    return Suggestion(step.batch_size, Origin.EXPLORATION, reason)


def _concurrent(history: History, running: TrialRecord) -> Suggestion:
    waiting = f"trial {running.trial_number} is still exploring {running.batch_size}"
    cheapest = history.cheapest
    if cheapest is None or cheapest.batch_size not in history.fitting_sizes:
        start = history.start_size or running.batch_size
        return Suggestion(start, Origin.CONCURRENT, f"{waiting}; meanwhile {start}, nothing better being known")
    return Suggestion(
        cheapest.batch_size,
        Origin.CONCURRENT,
        f"{waiting}; meanwhile the cheapest so far, {cheapest.cost_j:.4g} J in trial {cheapest.trial_number}",
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
        reason = f"seen {arm.observations} of the {wanted} times that every surviving size is tried before merit counts"
    elif arm.observations == 0:
        reason = "never seen"
    else:
        reason = (
            f"Thompson draw {-draws[batch_size]:.4g} J, the lowest of {len(arms)} sizes; "
            f"expected {-arm.mean:.4g} ± {arm.std:.2g} J from {arm.observations} runs"
        )
    return Suggestion(batch_size, Origin.BANDIT, reason, survivors)


def judge(job: Job, trial: TrialRecord, report: Report, min_cost_j: float | None) -> Verdict:
    """Decide whether a running trial goes on.

    With ``bound = β · min_cost``: within the bound, below `max_epochs` and not at the target, the training goes on.
    Otherwise it stops; reaching the target counts only within the bound.

    Totals never shrink, and a trial that has reported each epoch once, as a whole number, goes on with whole numbers:
    a fraction is then taken for a mistake. A training that validates within its epochs shows that by its first report.

    Args:
        job: The job.
        trial: The trial as of its report before this one.
        report: The report to judge.
        min_cost_j: Lowest cost of a trial of the job that reached the target, joules, or None.

    Raises:
        InvalidReportError: The report contradicts those before it, or reached the target at no cost.
    """
    _check_against_earlier(trial, report)
    spent = cost(energy_j=report.energy_j, time_s=report.time_s, max_power_w=job.max_power, eta=job.eta_knob)
    bound = early_stop_bound(job.beta_knob, min_cost_j)
    if spent > bound:
        return Verdict(
            TrialState.EARLY_STOPPED,
            EndReason.COST_BOUND_CROSSED,
            f"stopped: {spent:.4g} J spent, more than {job.beta_knob:g} times the cheapest run, {bound:.4g} J",
        )
    reached = report.metric >= job.target_metric if job.higher_is_better_metric else report.metric <= job.target_metric
    measured = f"metric {report.metric:.4g} against a target of {job.target_metric:g}"
    if reached:
        if spent <= 0:
            raise InvalidReportError(
                "the target was reached at a cost of 0 J, which no later run could beat: with this job's eta_knob "
                f"({job.eta_knob:g}) time and energy must be measured",
                field="energy",
            )
        return Verdict(
            TrialState.COMPLETED,
            EndReason.TARGET_REACHED,
            f"target reached: {measured} after {report.epoch:g} epochs, {spent:.4g} J",
        )
    if report.epoch >= job.max_epochs:
        return Verdict(
            TrialState.EXHAUSTED,
            EndReason.MAX_EPOCHS_REACHED,
            f"stopped: {measured} after {report.epoch:g} epochs, all that max_epochs allows",
        )
    return Verdict(TrialState.RUNNING, EndReason.KEEP_TRAINING, f"go on: {measured}, {spent:.4g} J spent")


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
