"""The use case of a revision: a locked job gets other terms, and the caches of its trials are computed again."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from bso_server.core import revisions
from bso_server.core.model import OBSERVED, TrialRecord
from bso_server.core.revisions import Changes
from bso_server.errors import JobConflictError
from bso_server.service.loading import recomputed
from bso_server.service.refusals import refuse_long_window, refuse_policy
from bso_server.storage.rows import StoredJob
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import FINAL, ZEUS, Change, CreatedJob, Revision, changes_in_words


def revise(transaction: Transaction, job: StoredJob, changes: Changes, now: datetime) -> StoredJob:
    """Revise a locked job by changes that concern no fixed term; return the job.

    Running trials keep the terms under which they began (`terms_of`). Errors are those of `Commands.register`.
    """
    before, trials, earlier = job.registration, transaction.all_trials(job.job_id), transaction.revisions(job.job_id)
    after = before.model_copy(update={name: new for name, (_, new) in changes.items()})
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
    trials = _as_counted(transaction, after, trials, (*earlier, revision))
    survivors = revisions.survivors_after(before, after, job.survivors)
    job = replace(
        job,
        registration=after,
        event_count=revision.event,
        revised_event=revision.event,
        survivors=survivors,
        rng_state=None if "mab_seed" in changes else job.rng_state,
    )
    job = recomputed(transaction, job, trials)
    transaction.revise_job(job, revision)
    transaction.log("job %s revised: %s", job.job_id, changes_in_words(changes))
    return job


def _as_counted(
    transaction: Transaction, job: CreatedJob, trials: list[TrialRecord], known: tuple[Revision, ...]
) -> list[TrialRecord]:
    """Let the trials count by the GPUs and the scaling of the job at their starts; return them."""
    terms: list[CreatedJob] = []
    for revision in known:  # between two revisions the terms are the same
        terms += [revisions.as_of(job, known, revision.event - 1)] * (revision.trials - len(terms))
    terms += [job] * (len(trials) - len(terms))
    found = [revisions.as_counted(job, then, trial) for trial, then in zip(trials, terms, strict=True)]
    pairs = [*zip(found, trials, strict=True)]
    moved = [new for new, old in pairs if new.other_gpus is not old.other_gpus]
    transaction.update_trials(moved, ("job_id", "trial_number", "other_gpus"))
    transaction.update_trials([new for new, old in pairs if new.state is not old.state])
    return found


def counted(
    transaction: Transaction, before: StoredJob, after: StoredJob, trial: TrialRecord
) -> tuple[StoredJob, TrialRecord]:
    """Return a job and its trial after an event, which may have ended the trial, as the trial counts by its rule."""
    if trial.state not in FINAL or trial.started_event > before.revised_event:
        return after, trial
    then = revisions.as_of(before.registration, transaction.revisions(before.job_id), trial.started_event)
    found = revisions.as_counted(before.registration, then, trial)
    return (after, trial) if found is trial else (replace(after, cheapest=before.cheapest), found)


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
