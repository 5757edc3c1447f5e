"""Revisions: a job keeps what it has learned when its terms change.

A trial ends under the terms with which it began. Its time, energy and epochs are facts, from which costs under the
present terms follow by a replay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bso_server.core.model import TrialRecord, changed
from zeus_plugins.protocol import CreatedJob, EndReason, Revision, TrialState

Changes = Mapping[str, tuple[Any, Any]]
"""Values of terms before and after, by name."""

# The terms that decide when a running trial ends, beside the fixed terms.
_OF_TRIALS = ("max_epochs", "beta_knob", "policy")

_STATES = {
    EndReason.TARGET_REACHED: TrialState.COMPLETED,
    EndReason.NO_TARGET: TrialState.COMPLETED,
    EndReason.COST_BOUND_CROSSED: TrialState.EARLY_STOPPED,
    EndReason.EPOCH_BOUND_REACHED: TrialState.EARLY_STOPPED,
    EndReason.MAX_EPOCHS_REACHED: TrialState.EXHAUSTED,
    EndReason.ENDED_EARLY: TrialState.FAILED,
    EndReason.CRASHED: TrialState.INFEASIBLE,
    EndReason.CRASHED_ALIKE: TrialState.INFEASIBLE,
}
"""States of trials whose results depend on learning rates and steps, by the reason of their end."""

# Defaults of callbacks and masters of versions that stated no rule.
_UNSTATED = ("rate none", "master linear")

_ASIDE = "not counted, as its learning rates and steps followed the batch size by another rule: "


def as_of(job: CreatedJob, revisions: Iterable[Revision], event: int) -> CreatedJob:
    """Return the job under its terms at an event, by undoing later revisions; `revisions` are in order."""
    before: dict[str, Any] = {}
    for revision in revisions:
        if revision.event > event:
            before = {name: change.before for name, change in revision.changes.items()} | before
    return CreatedJob.model_validate({**dict(job), **before}) if before else job


def terms_of(job: CreatedJob, revisions: Iterable[Revision], trial: TrialRecord) -> CreatedJob:
    """Return the job by which a running trial is judged: its costs by the present terms, its end by its first terms."""
    then = as_of(job, revisions, trial.started_event)
    return job.model_copy(update={name: getattr(then, name) for name in _OF_TRIALS})


def has_other_gpus(job: CreatedJob, then: CreatedJob) -> bool:
    """Return True if the costs of runs under the terms `then` do not hold on the job's GPUs.

    Another `max_power` of the same GPUs only changes how time counts.
    """
    return (job.gpu_model, job.number_of_gpus) != (then.gpu_model, then.number_of_gpus)


def has_other_rule(job: CreatedJob, then: CreatedJob) -> bool:
    """Return True if learning rates or steps followed the batch size by another rule under the terms `then`.

    A job without a rule is of an earlier version or another client, with the default of the time.
    """
    rules = {job.scaling, then.scaling}
    return len(rules) > 1 and not (None in rules and any(rule and rule.startswith(_UNSTATED) for rule in rules))


def is_aside(trial: TrialRecord) -> bool:
    """Return True if `as_counted` has withdrawn a trial."""
    return trial.state is TrialState.WITHDRAWN and trial.end_reason in _STATES


def as_counted(job: CreatedJob, then: CreatedJob, trial: TrialRecord) -> TrialRecord:
    """Return a trial that began under the terms `then` as it counts for the job: the same one if nothing changes.

    At another size than the default, now or then, a trial by another rule is withdrawn. It keeps the reason of its end,
    from which its state follows when the job returns to its rule.
    """
    if trial.other_gpus is not has_other_gpus(job, then):
        trial = changed(trial, other_gpus=not trial.other_gpus)
    state = None if trial.end_reason is None else _STATES.get(trial.end_reason)
    is_own = trial.batch_size == job.default_batch_size == then.default_batch_size
    is_other = not is_own and has_other_rule(job, then)
    if is_other and trial.state is state:
        return changed(trial, state=TrialState.WITHDRAWN, message=f"{_ASIDE}{trial.message}")
    if not is_other and state is not None and is_aside(trial):
        return changed(trial, state=state, message=(trial.message or "").removeprefix(_ASIDE))
    return trial


def survivors_after(before: CreatedJob, after: CreatedJob, survivors: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return the sizes of a job's bandit stage after a revision: added sizes join it, removed ones leave it."""
    if survivors is None:
        return None
    added = {*after.batch_sizes} - {*before.batch_sizes}
    return tuple(sorted(({*survivors} & {*after.batch_sizes}) | added)) or after.batch_sizes
