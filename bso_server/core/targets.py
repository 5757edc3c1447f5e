"""The target of a job that was registered without one: learned from its first runs, and applied to them afterwards.

The first runs train at the default size to the end that their script sets, and all reach the target that they set.
Then each of these runs, and each run under way that has reached the target, counts as ended at the evaluation that
reached it, according to the stored reports.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import sqrt
from statistics import NormalDist, median

from bso_server.core.model import OBSERVED, History, Report, Suggestion, TrialRecord, after_report, changed, cost_of
from bso_server.core.revisions import is_aside
from zeus_plugins.protocol import (
    FINAL,
    TARGET_RUNS,
    CreatedJob,
    EndReason,
    Origin,
    StopRule,
    TrialState,
    certain_direction,
)

NumberedReport = tuple[int, Report]
"""A report of a trial, with its number."""

_SHARE = 2 / 3  # share of its epochs in which a run that sets a target reaches it, so that later runs have time left
_LEAST_BENDS = 3  # fewer do not tell noise from the curve's own shape


def suggest_own_size(history: History) -> Suggestion | None:
    """Suggest the default, or the largest size that fits below it, while the job has no target; None: no size fits."""
    size = history.start_size
    if size is None:
        return None
    ended, confirm = history.recurrences, history.job.confirm
    number = ended + len(history.in_flight) + 1
    where = "" if size == history.job.default_batch_size else ", at the largest size that fits below your own"
    which = f"run {number} of {TARGET_RUNS} that set the target"
    if number > TARGET_RUNS:
        which = f"the {TARGET_RUNS} runs that set the target have not all ended"
    if ended >= TARGET_RUNS and confirm > 1:
        least = f"{TARGET_RUNS} with at least {confirm} evaluations each"
        which = f"{ended} runs have ended, and the target needs {least}"
    return Suggestion(size, Origin.EXPLORATION, f"{which}{where}")


def reached_value(job: CreatedJob, reports: Sequence[NumberedReport]) -> float | None:
    """Return the best target that a run with these reports would have reached; None if it has too few reports."""
    easiest_first = sorted({report.metric for _, report in reports}, reverse=not job.higher_is_better_metric)
    reached = bisect_left(easiest_first, True, key=lambda target: not _has_reached(job, target, reports))
    return easiest_first[reached - 1] if reached else None


def _has_reached(job: CreatedJob, target: float, reports: Sequence[NumberedReport]) -> bool:
    goal, rule = job.model_copy(update={"target_metric": target}), StopRule(max_epochs=job.max_epochs)
    for _, report in reports:
        rule = rule.counting(goal, metric=report.metric, epochs=report.epoch)
        if rule.confirmed >= job.confirm:
            return True
    return False


def is_unclear(job: CreatedJob, runs: Iterable[Sequence[NumberedReport]]) -> bool:
    """Return True if each run is best at its first evaluation, as if the metric had the other direction.

    A well-known name of the metric makes its direction certain.
    """
    if certain_direction(job.monitor) is job.higher_is_better_metric:
        return False
    best = max if job.higher_is_better_metric else min
    metrics = [[report.metric for _, report in reports] for reports in runs]
    return all(len(each) > 1 and best(each[1:]) != best(each) for each in metrics)


def learned_target(job: CreatedJob, runs: Sequence[Sequence[NumberedReport]]) -> float:
    """Return the target that runs with at least `confirm` evaluations set.

    It is the worst of the values that they reached in two thirds of their epochs, made easier by the noise of a curve:
    a target that every run reaches only in the end would be missed by every fourth later run.
    """
    worst, sign = (min, -1) if job.higher_is_better_metric else (max, 1)
    values = [reached_value(job, _first_part(job, reports)) for reports in runs]
    noise = median(_noise([report.metric for _, report in reports]) for reports in runs)
    return worst(value for value in values if value is not None) + sign * noise


def _first_part(job: CreatedJob, reports: Sequence[NumberedReport]) -> Sequence[NumberedReport]:
    """Return the reports of the first two thirds of a run's epochs, or more if a value would not be confirmed there."""
    end = _SHARE * reports[-1][1].epoch
    found = bisect_left(reports, True, key=lambda each: each[1].epoch > end)
    while reached_value(job, reports[:found]) is None:
        found += 1
    return reports[:found]


def _noise(metrics: Sequence[float]) -> float:
    """Return the standard deviation of evaluations around their curve, by its bends in the later half.

    A bend is the change between two successive differences. For independent noise of deviation s, it is normal with
    variance 6s²; the median ignores outliers. Return 0 if there are too few evaluations.
    """
    differences = [after - before for before, after in pairwise(metrics[len(metrics) // 2 :])]
    bends = [abs(after - before) for before, after in pairwise(differences)]
    return median(bends) / (NormalDist().inv_cdf(0.75) * sqrt(6)) if len(bends) >= _LEAST_BENDS else 0.0


def judged_again(job: CreatedJob, trial: TrialRecord, reports: Sequence[NumberedReport]) -> TrialRecord:
    """Return a trial as if it had had the job's present target; `reports` are all its stored reports, in order.

    An open or observed trial that has reached the target becomes completed at that evaluation; the caller gives the end
    of an open trial its event. An open trial that has not reached the target continues, with its number of latest
    evaluations at the target. An observed trial that never reached the target becomes exhausted if it trained to its
    own end; otherwise it becomes withdrawn, because it ended at another target.
    """
    if trial.state in FINAL - OBSERVED and not is_aside(trial):
        return trial
    rule = StopRule(max_epochs=job.max_epochs)
    before = changed(trial, time_s=0.0, energy_j=0.0, epoch=0.0, report_count=0, longest_gap_s=0.0, deviations=None)
    for number, report in reports:
        rule = rule.counting(job, metric=report.metric, epochs=report.epoch)
        before = changed(after_report(job, before, report), report_count=number, confirmed=rule.confirmed)
        if rule.confirmed >= job.confirm:
            if number == trial.report_count and trial.end_reason is EndReason.TARGET_REACHED:
                return trial
            message = (
                f"target reached: metric {report.metric:.4g} against a target of {job.target_metric:g}, which was set "
                f"later, after {report.epoch:g} epochs, {cost_of(job, before):.4g} J"
            )
            # Reports are stored without watched metrics: the watched metrics of the trial belong to its last report.
            watched = trial.watched if number == trial.report_count else None
            reason = EndReason.TARGET_REACHED
            return changed(before, state=TrialState.COMPLETED, end_reason=reason, message=message, watched=watched)
    if trial.state not in FINAL:
        return trial if trial.confirmed == rule.confirmed else changed(trial, confirmed=rule.confirmed)
    if trial.end_reason is EndReason.NO_TARGET:
        message = f"exhausted: trained to its own end without the target of {job.target_metric:g}, which was set later"
        reason = EndReason.MAX_EPOCHS_REACHED
        return changed(trial, state=TrialState.EXHAUSTED, end_reason=reason, message=message, confirmed=0)
    message = f"withdrawn: ended before the target of {job.target_metric:g}, which was set later; it was {trial.state}"
    return changed(trial, state=TrialState.WITHDRAWN, end_reason=EndReason.DISCARDED, message=message)
