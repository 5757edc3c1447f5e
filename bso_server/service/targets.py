"""Setting the target of a job that was registered without one: learned from its first runs, or given by its user.

Either way, its runs are judged again by the new target, and the caches of the job are computed again. A run under way
that has reached the target ends there, and its next report is answered by the end.
"""

from __future__ import annotations

from dataclasses import replace

from bso_server.core.job import Moment, end_trial
from bso_server.core.model import Report, TrialRecord, changed
from bso_server.core.occurrences import TrialEnded
from bso_server.core.targets import NumberedReport, is_unclear, judged_again, learned_target, reached_value
from bso_server.errors import JobConflictError
from bso_server.service.loading import recomputed
from bso_server.service.revisions import counted
from bso_server.storage import queries
from bso_server.storage.rows import StoredJob
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import FINAL, TARGET_RUNS, CreatedJob, EndReason, TrialState


def asks_for_other_target(known: CreatedJob, asked: CreatedJob) -> bool:
    """Return True if a registration replaces the target of a job that was registered without one."""
    # Our client repeats a target that the server has learned, with the numbers of its runs.
    said = asked.target_metric is not None and asked.target_runs is None
    return said and known.target_runs is not None and asked.target_metric != known.target_metric


def learn_target(transaction: Transaction, job: StoredJob, moment: Moment) -> StoredJob:
    """Set the target of a locked job without one, once enough of its runs have completed; return the job."""
    if job.registration.target_runs is None or job.registration.target_metric is not None:
        return job
    trials = transaction.all_trials(job.job_id)
    ended = _runs_that_set_it(transaction, trials)
    usable = [number for number, reports in ended.items() if reached_value(job.registration, reports) is not None]
    if len(usable) < TARGET_RUNS or is_unclear(job.registration, ended.values()):
        return job
    runs = usable[:TARGET_RUNS]
    target = learned_target(job.registration, [ended[number] for number in runs])
    return _set(transaction, job, target, tuple(sorted(runs)), trials, moment)


def refuse_unclear(transaction: Transaction, job: StoredJob) -> None:
    """Raise `JobConflictError` if no target can be learned, because the direction of the metric may be wrong."""
    known = job.registration
    if known.target_runs is None or known.target_metric is not None:
        return
    runs = _runs_that_set_it(transaction, transaction.all_trials(job.job_id))
    if len(runs) >= TARGET_RUNS and is_unclear(known, runs.values()):
        higher = known.higher_is_better_metric
        raise JobConflictError(
            f"each of the {len(runs)} runs that set the target of job {job.job_id!r} was best at its first evaluation: "
            f"if {'lower' if higher else 'higher'} {known.monitor} is better, say mode={'min' if higher else 'max'!r} "
            f"(in a job= higher_is_better_metric={not higher}), otherwise set a target",
            field="higher_is_better_metric",
        )


def _runs_that_set_it(transaction: Transaction, trials: list[TrialRecord]) -> dict[int, list[NumberedReport]]:
    """Return the reports of the runs that have trained to their end without a target, by trial, in order of ends."""
    ended = [each for each in trials if each.state is TrialState.COMPLETED and each.end_reason is EndReason.NO_TARGET]
    ended.sort(key=lambda trial: trial.ended_event or 0)
    return {each.trial_number: _reports(transaction, each) for each in ended}


def replace_target(transaction: Transaction, job: StoredJob, target: float | None, moment: Moment) -> StoredJob:
    """Set the target that the user gives for a locked job that was registered without one; return the job."""
    return _set(transaction, job, target, (), transaction.all_trials(job.job_id), moment)


def _set(
    transaction: Transaction,
    job: StoredJob,
    target: float | None,
    runs: tuple[int, ...],
    trials: list[TrialRecord],
    moment: Moment,
) -> StoredJob:
    registration = job.registration.model_copy(update={"target_metric": target, "target_runs": runs})
    trials = _with_open_ones_locked(transaction, trials)
    after: list[TrialRecord] = []
    for trial in trials:
        again = judged_again(registration, trial, _reports(transaction, trial))
        if again.state in FINAL and trial.state not in FINAL:
            running = changed(again, state=TrialState.RUNNING)
            job, again = end_trial(job, running, again.state, EndReason.TARGET_REACHED, again.message, moment)
            transaction.tell(TrialEnded(again.state))
            transaction.log("job %s trial %d: %s", *again.key, again.message)
        after.append(counted(transaction, job, job, again)[1])
    moved = [new for new, old in zip(after, trials, strict=True) if new is not old]
    transaction.update_trials(moved)
    for trial in moved:
        # The last report that counts is in the trial's own row; later ones are not part of the trial any more.
        if trial.end_reason is EndReason.TARGET_REACHED:
            transaction.delete_reports_from(trial.key, trial.report_count)
    job = recomputed(transaction, replace(job, registration=registration), after)
    transaction.update_jobs([job])
    source = f"learned from runs {runs[0]} to {runs[-1]}" if runs else "given by its user"
    transaction.log("job %s: the target is %g, %s", job.job_id, target, source)
    return job


def _with_open_ones_locked(transaction: Transaction, trials: list[TrialRecord]) -> list[TrialRecord]:
    """Lock the open trials, because reports change them without the job's lock; return all trials as they are now.

    A report may hold a trial's lock while it waits for the job's lock. The database then aborts one of the two
    transactions, and the store retries it.
    """
    keys = [trial.key for trial in trials if trial.state not in FINAL]
    locked = transaction.locked_trials(keys) if keys else {}
    return [locked[trial.key][1] if trial.key in locked else trial for trial in trials]


def _reports(transaction: Transaction, trial: TrialRecord) -> list[NumberedReport]:
    """Return the stored reports of a trial with their numbers, in order."""
    found = [
        (row.report_number, Report(time_s=row.time_s, energy_j=row.energy_j, epoch=row.epoch, metric=row.metric))
        for row in queries.epochs_between(transaction, trial.job_id, trial.trial_number, trial.trial_number)
    ]
    last = trial.last_report
    if last is not None and (not found or found[-1][0] < trial.report_count):
        found.append((trial.report_count, last))
    return found
