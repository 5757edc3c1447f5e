"""The comparison of what a database remembers of its jobs with a replay of their trials."""

from __future__ import annotations

from collections.abc import Iterator

from bso_server.core.registry import installed
from bso_server.core.replay import replay
from bso_server.service.loading import load_history
from bso_server.storage.rows import StoredJob
from bso_server.storage.transaction import Transaction


def differences(transaction: Transaction, job_id: str) -> list[str]:
    """The differences between what is remembered of a job and its trials, in words; a job that is gone has none.

    Raises:
        PolicyNotInstalledError: The job's policy, on which it depends what is remembered, is not here.
    """
    job = transaction.job(job_id)
    return [] if job is None else list(_differences(transaction, job))


def _differences(transaction: Transaction, job: StoredJob) -> Iterator[str]:
    job_id = job.job_id
    installed(job.registration.policy)
    trials = transaction.all_trials(job_id)
    replayed = replay(job.registration, trials, job.survivors)
    remembered, _ = load_history(transaction, job)
    for size in sorted({*remembered.arms, *replayed.arms}):
        if remembered.arms.get(size) != replayed.arms.get(size):
            yield f"arm {size} is {remembered.arms.get(size)}, by its trials {replayed.arms.get(size)}"
    if remembered.memory != replayed.memory:
        yield f"memory of policy {job.registration.policy} is {remembered.memory}, by its trials {replayed.memory}"
    events = max((max(trial.started_event, trial.ended_event or 0) for trial in trials), default=0)
    for name, kept, told in (
        ("cheapest trial", remembered.cheapest, replayed.cheapest),
        ("event of the bandit stage", remembered.bandit_entered_at, replayed.bandit_entered_at),
        ("number of trials", job.trial_count, len(trials)),
        # Trials that come back give the events of their ends back.
        ("event count", min(job.event_count, events), events),
    ):
        if kept != told:
            yield f"{name} is {kept}, by its trials {told}"
