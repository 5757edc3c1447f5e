"""The state of the jobs, for the operators of a server: totals for monitoring, and a check of derived data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from bso_server.core.job import replay
from bso_server.core.policy import installed
from bso_server.core.revisions import as_counted, as_of
from bso_server.core.savings import JobVerdict
from bso_server.service.commands import utc_now
from bso_server.service.loading import load_history
from bso_server.service.reading import trial_states
from bso_server.service.verdicts import compared, judged_jobs, update
from bso_server.storage import queries
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import Stage, TrialState


@dataclass(frozen=True, slots=True)
class JobTotals:
    """The totals of one job; `silent` trials have expired leases and are not abandoned yet."""

    policy: str
    stage: Stage
    trials: Mapping[TrialState, int]
    silent: int
    energy_j: float
    verdict: JobVerdict


class TotalsReader:
    """Reader of the totals of all jobs."""

    def __init__(self, store: Store, clock: Callable[[], datetime] = utc_now) -> None:
        self._store = store
        self._clock = clock

    async def read(self) -> dict[str, JobTotals]:
        """Return the totals of each job by its id, in order; raise the errors of `Store.read`.

        Several transactions read the jobs, so that totals of different jobs may be from different moments.
        """
        await update(self._store)
        totals = dict[str, JobTotals]()
        async for page in judged_jobs(self._store):
            silent = await self._store.read(queries.silent_counts, [each.job_id for each in page], self._clock())
            for each in page:
                totals[each.job_id] = JobTotals(
                    policy=each.policy,
                    stage=Stage.PRUNING if each.bandit_entered_event is None else Stage.BANDIT,
                    trials=trial_states(each.tallies),
                    silent=silent.get(each.job_id, 0),
                    energy_j=sum(tally.energy_j for tally in each.tallies),
                    verdict=each.verdict,
                )
        return totals


def differences(transaction: Transaction, job_id: str) -> list[str]:
    """Compare the stored caches of a job's trials with a replay; return the differences in words.

    Raises:
        PolicyNotInstalledError: The job's policy is not installed.
    """
    job = transaction.job(job_id)
    if job is None:
        return []
    policy = job.registration.policy
    installed(policy)
    trials = transaction.all_trials(job_id)
    derived = load_history(transaction, job)
    replayed = replay(job.registration, trials, job.survivors)
    events = max((max(trial.started_event, trial.ended_event or 0) for trial in trials), default=0)
    known = transaction.revisions(job_id)
    terms = ((trial, as_of(job.registration, known, trial.started_event)) for trial in trials)
    miscounted = [it.trial_number for it, then in terms if as_counted(job.registration, then, it) is not it]
    checked = [
        *((f"arm {size}", derived.arms.get(size), arm) for size, arm in replayed.arms.items()),
        (f"memory of policy {policy}", derived.memory, replayed.memory),
        ("cheapest trial", derived.cheapest, replayed.cheapest),
        ("event of the bandit stage", derived.bandit_entered_at, replayed.bandit_entered_at),
        ("trials that count by the wrong terms", miscounted, []),
        ("event of the latest revision", job.revised_event, known[-1].event if known else 0),
        ("number of trials", job.trial_count, len(trials)),
        # A revived trial loses the event of its end, so that the count may be higher.
        ("event count", min(job.event_count, events), events),
        *compared(transaction, job, trials),
    ]
    return [f"{name} is {kept}, by its trials {told}" for name, kept, told in checked if kept != told]
