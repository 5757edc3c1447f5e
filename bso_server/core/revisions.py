"""Revisions: a job keeps what it has learned when its terms change.

A trial ends under the terms with which it began. Its time, energy and epochs are facts, from which costs under the
present terms follow by a replay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bso_server.core.model import TrialRecord
from zeus_plugins.protocol import FIXED_TERMS, CreatedJob, Revision

Changes = Mapping[str, tuple[Any, Any]]
"""Values of terms before and after, by name."""

# The terms that decide when a running trial ends, beside the fixed terms.
_OF_TRIALS = ("max_epochs", "beta_knob", "policy")


def fixed(changes: Iterable[str]) -> list[str]:
    """Return the names of those terms that no revision changes."""
    return [name for name in changes if name in FIXED_TERMS]


def revised(job: CreatedJob, changes: Changes) -> CreatedJob:
    """Return the job under its changed terms."""
    return job.model_copy(update={name: after for name, (_, after) in changes.items()})


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


def survivors_after(before: CreatedJob, after: CreatedJob, survivors: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return the sizes of a job's bandit stage after a revision: added sizes join it, removed ones leave it."""
    if survivors is None:
        return None
    added = {*after.batch_sizes} - {*before.batch_sizes}
    return tuple(sorted(({*survivors} & {*after.batch_sizes}) | added)) or after.batch_sizes
