"""The use case of a revision: a locked job gets other terms, and the caches of its trials are computed again."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from bso_server.core import revisions
from bso_server.core.job import discard_trial, replay
from bso_server.core.model import OBSERVED, TrialRecord, changed
from bso_server.core.revisions import Changes
from bso_server.errors import JobConflictError
from bso_server.service.refusals import refuse_long_window, refuse_policy
from bso_server.storage.rows import StoredJob
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import ZEUS, Change, CreatedJob, Revision, changes_in_words


def revise(transaction: Transaction, job: StoredJob, changes: Changes, now: datetime) -> StoredJob:
    """Revise a locked job by changes that concern no fixed term; return the job.

    Running trials keep the terms under which they began (`terms_of`).

    Raises:
        InvalidJobError: The policy cannot serve the job under these terms.
        JobConflictError: The new policy cannot learn from the job's trials.
        PolicyNotInstalledError: The new policy is not installed.
    """
    before, trials, earlier = job.registration, transaction.all_trials(job.job_id), transaction.revisions(job.job_id)
    after = revisions.revised(before, changes)
    refuse_policy(after)
    if "window_size" in changes:
        refuse_long_window(after)
    if "policy" in changes:
        _refuse_history(after, trials)
    revision = Revision(
        revision=len(earlier) + 1,
        event=job.event_count + 1,
        trials=job.trial_count,
        revised_at=now,
        changes={name: Change(before=old, after=new) for name, (old, new) in changes.items()},
    )
    if revisions.has_other_gpus(before, after):
        trials = _on_gpus_of(transaction, after, trials, (*earlier, revision))
    if "scaling" in changes:
        trials = _without_other_sizes(transaction, after, trials)
    survivors = revisions.survivors_after(before, after, job.survivors)
    history = replay(after, trials, survivors)
    job = replace(
        job,
        registration=after,
        event_count=revision.event,
        folded_event=revision.event,
        revised_event=revision.event,
        cheapest=history.cheapest,
        bandit_entered_at=history.bandit_entered_at,
        survivors=survivors,
        rng_state=None if "mab_seed" in changes else job.rng_state,
    )
    transaction.revise_job(job, revision, history.arms.values())
    transaction.forget_memory(job.job_id)
    transaction.log("job %s revised: %s", job.job_id, changes_in_words(changes))
    return job


def _on_gpus_of(
    transaction: Transaction, job: CreatedJob, trials: list[TrialRecord], known: tuple[Revision, ...]
) -> list[TrialRecord]:
    """Set `other_gpus` of the trials, by the GPUs of the job at their start; return them."""
    # Between two revisions the GPUs are the same.
    is_other = [revisions.has_other_gpus(job, revisions.as_of(job, known, each.event - 1)) for each in known]
    found: list[TrialRecord] = []
    first = 0
    for revision, other in zip(known, is_other, strict=True):
        found += [changed(trial, other_gpus=other) for trial in trials[first : revision.trials]]
        first = revision.trials
    found += [changed(trial, other_gpus=False) for trial in trials[first:]]
    for value in (True, False):
        numbers = [
            new.trial_number
            for new, old in zip(found, trials, strict=True)
            if new.other_gpus is value and old.other_gpus is not value
        ]
        transaction.set_other_gpus(job.job_id, numbers, value=value)
    return found


def _without_other_sizes(transaction: Transaction, job: CreatedJob, trials: list[TrialRecord]) -> list[TrialRecord]:
    """Discard the observed trials at other sizes than the job's default, whose training was another; return all."""
    why = "its learning rate and steps followed the batch size in another way"
    found = [
        discard_trial(trial, why) if trial.state in OBSERVED and trial.batch_size != job.default_batch_size else trial
        for trial in trials
    ]
    transaction.update_trials([new for new, old in zip(found, trials, strict=True) if new is not old])
    return found


def _refuse_history(job: CreatedJob, trials: list[TrialRecord]) -> None:
    """Raise `JobConflictError` if the job's policy cannot learn from these trials."""
    without = next((trial for trial in trials if trial.state in OBSERVED and not trial.epoch), None)
    if without is not None and job.policy != ZEUS:
        raise JobConflictError(
            f"policy of job {job.job_id!r} cannot become {job.policy!r}, which learns from epochs: trial "
            f"{without.trial_number} has none, as Zeus does not keep them. Use another job_id",
            field="policy",
        )


def terms_of(transaction: Transaction, job: StoredJob, trial: TrialRecord) -> StoredJob:
    """Return the job with the terms that judge a trial (`core.revisions.terms_of`), and otherwise unchanged."""
    if trial.started_event > job.revised_event:
        return job
    own = revisions.terms_of(job.registration, transaction.revisions(job.job_id), trial)
    return job if own == job.registration else replace(job, registration=own)
