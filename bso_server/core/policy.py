"""The two questions that the service asks: which batch size next (`suggest`), and go on or stop (`judge`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bso_server.core.history import History, after_report, cost_of
from bso_server.core.model import Expectations, Report, Suggestion, TrialRecord
from bso_server.core.registry import find
from bso_server.errors import InvalidReportError
from zeus_plugins.protocol import JobRegistration, StopRule, Verdict

LEAST_COST_J = 1e-6
"""The finest meters count tens of microjoules."""

LEAST_SHARE = 1e-5
"""The least part of the full power, or of another run's cost, that a run may have cost."""


def suggest(history: History, rng: np.random.Generator, *, explains: bool = False) -> Suggestion:
    """Choose the next trial's batch size by the job's policy, which may advance the job's generator, `rng`.

    Told that it `explains`, the suggestion has the numbers behind it, if the policy can tell them.

    Raises:
        NoSurvivorError: No batch size can run any more, or policy `zeus` has found none that reaches the target.
        PolicyNotInstalledError: The job's policy is not here.
        ValueError: The policy has suggested a size that the job does not have.
    """
    policy = find(history.job.policy)
    suggestion = policy.suggest(history, rng)
    if suggestion.batch_size not in history.arms:
        raise ValueError(
            f"policy {history.job.policy} suggests {suggestion.batch_size}, which is not one of the job's batch sizes "
            f"{list(history.job.batch_sizes)}: mend the policy"
        )
    if not explains or suggestion.decision is not None or policy.explain is None:
        return suggestion
    return replace(suggestion, decision=policy.explain(history, suggestion))


def expectations(history: History) -> Expectations:
    """The cost that the policy expects of each batch size, and the size that it holds to be the best."""
    return find(history.job.policy).expectations(history)


def needs_bound(job: JobRegistration, trial: TrialRecord) -> bool:
    """True if the trial's next report needs `bounded` first.

    Policy `gp_voi` decides once when to stop a trial: with the dispatch if it knows by then what an epoch costs, else
    after the first epochs.
    """
    return trial.epoch_bound is None and find(job.policy).bound is not None


def bounded(history: History, trial: TrialRecord, report: Report) -> TrialRecord:
    """A trial that `needs_bound`, with the bound that its next report gives it, if that tells enough."""
    bound = find(history.job.policy).bound
    return trial if bound is None else trial.bounded_by(bound(history, after_report(history.job, trial, report)))


def stop_rule(job: JobRegistration, trial: TrialRecord, min_cost_j: float | None) -> StopRule:
    """The rule by which a trial that has not reached the target is stopped.

    By policy `zeus` at ``β · min_cost``, by `gp_voi` at the trial's own bound, if it has one; by both at `max_epochs`.
    `min_cost_j` is the lowest cost of a trial of the job that reached the target, joules, or None.
    """
    return find(job.policy).stop_rule(job, trial, min_cost_j)


def judge(
    job: JobRegistration,
    trial: TrialRecord,
    report: Report,
    min_cost_j: float | None,
    *,
    judged_by: StopRule | None = None,
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
        min_cost_j: As in `stop_rule`.
        judged_by: The rule by which the training has judged the report already, while the server was away. What it
            then did cannot be undone: measured by today's bound, a run to the target might count as stopped before.

    Raises:
        InvalidReportError: The report contradicts those before it, or reached the target at no cost.
    """
    _check_against_earlier(trial, report)
    rule, spent_j = stop_rule(job, trial, min_cost_j), cost_of(job, report)
    because = trial.epoch_bound_reason
    if rule.max_cost_j is not None:
        because = f"{job.beta_knob:g} times the cheapest run"
    verdict = (judged_by or rule).judge(
        job,
        metric=report.metric,
        epochs=report.epoch,
        cost_j=spent_j,
        because=because if judged_by is None else None,
    )
    if verdict.converged and spent_j <= 0:
        raise InvalidReportError(
            "the target was reached at a cost of 0 J, which no later run could beat: with this job's eta_knob "
            f"({job.eta_knob:g}) time and energy must be measured",
            field="energy",
        )
    return verdict if verdict.rule is rule else replace(verdict, rule=rule)


def doubt(job: JobRegistration, report: Report, min_cost_j: float | None) -> str | None:
    """The reason for which a trial cannot have cost as little as it reports at its end; None if it can.

    A cost that no run has would stop every later run of policy `zeus` as too costly. What honest meters and estimates
    tell lies far above these limits: a chip at rest takes a hundredth of its power and more, and a size that suits a
    job better than another saves a part of its cost. `min_cost_j` as in `stop_rule`.
    """
    cost_j = cost_of(job, report)
    limits = [
        (LEAST_COST_J, "less than any meter counts"),
        (LEAST_SHARE * job.max_power * report.time_s, f"in {report.time_s:.4g} s on {job.max_power:g} W"),
        (0.0 if min_cost_j is None else LEAST_SHARE * min_cost_j, f"and the cheapest run {min_cost_j or 0:.4g} J"),
    ]
    told = next((why for least_j, why in limits if cost_j < least_j), None)
    if told is None:
        return None
    return f"a run cannot cost {cost_j:.4g} J, {told}: check how energy is measured, and that it is in joules"


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
    every_epoch_reported = trial.report_count > 0 and trial.epoch == trial.report_count
    if every_epoch_reported and report.epoch % 1:
        raise InvalidReportError(
            f"this trial has reported each of its {trial.report_count} epochs as a whole number, and {report.epoch:g} "
            "is none: count epochs from 1, or report the fraction at every validation from the first on",
            field="current_epoch",
        )
