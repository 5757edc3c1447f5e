"""The state of the jobs, for the operators of a server: totals for monitoring, and a check of derived data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from bso_server.core.job import replay
from bso_server.core.policy import installed
from bso_server.core.revisions import as_counted, as_of
from bso_server.service.commands import utc_now
from bso_server.service.loading import best_size, load_history
from bso_server.service.pages import troubles
from bso_server.service.reading import job_summary, trial_states
from bso_server.service.savings import savings_of
from bso_server.storage import queries
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import SavingsWord, Stage, TrialState

# A transaction reads the totals of this many jobs in a few milliseconds; other requests get their turn in between.
_JOBS_AT_ONCE = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTotals:
    """The totals of one job; savings over the default batch size are None until exploration is paid back."""

    policy: str
    stage: Stage
    trials: Mapping[TrialState, int]
    silent: int = 0  # number of trials with expired leases that are not abandoned yet
    energy_j: float
    verdict: SavingsWord = SavingsWord.NOT_SHOWN
    saved_energy_j: float | None = None
    saved_time_s: float | None = None
    saved_cost_j: float | None = None
    is_stuck: bool = False  # True if every batch size has missed the target
    drift: float | None = None  # as in `JobLine`


class TotalsReader:
    """Reader of the totals of all jobs, with a cache of unchanged jobs: a few hundred bytes for each job."""

    def __init__(self, store: Store, clock: Callable[[], datetime] = utc_now) -> None:
        self._store = store
        self._clock = clock
        self._known: dict[str, tuple[str, JobTotals]] = {}

    async def read(self) -> dict[str, JobTotals]:
        """Return the totals of each job by its id, in order; raise the errors of `Store.read`.

        Several transactions read the jobs, so that totals of different jobs may be from different moments.
        """
        read: dict[str, tuple[str, JobTotals]] = {}
        after, found = await self._store.read(self._page, None)
        while after is not None:
            read |= found
            # If this reading fails, the next one continues from here.
            self._known |= found
            after, found = await self._store.read(self._page, after)
        self._known = read
        return {job_id: totals for job_id, (_, totals) in read.items()}

    def _page(self, transaction: Transaction, after: str | None) -> tuple[str | None, dict[str, tuple[str, JobTotals]]]:
        """Return the id of the last job on a page, or None after the last page, and its jobs' versions and totals."""
        versions = queries.job_versions(transaction, containing=None, after=after, limit=_JOBS_AT_ONCE)
        silent = queries.silent_counts(transaction, [job_id for job_id, _ in versions], self._clock())
        found = {}
        for job_id, version in versions:
            known_version, totals = self._known.get(job_id, (None, None))
            if totals is None or known_version != version:
                totals = _totals_of(transaction, job_id)
            if totals is not None:
                found[job_id] = version, replace(totals, silent=silent.get(job_id, 0))
        return (versions[-1][0] if versions else None), found


def _totals_of(transaction: Transaction, job_id: str) -> JobTotals | None:
    stored = transaction.job(job_id)
    if stored is None:
        return None  # Another request has deleted the job.
    tallies = queries.tallies(transaction, job_id)
    saved = savings_of(transaction, stored, tallies, best_size(transaction, stored))
    summary = job_summary(stored)
    stuck, drift = troubles(transaction, stored)
    return JobTotals(
        policy=summary.policy,
        stage=summary.stage,
        trials=trial_states(tallies),
        energy_j=sum(tally.energy_j for tally in tallies),
        verdict=saved.word,
        saved_energy_j=saved.energy_j.saved,
        saved_time_s=saved.time_s.saved,
        saved_cost_j=saved.cost_j.saved,
        is_stuck=stuck is not None,
        drift=drift,
    )


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
    compared = [
        *((f"arm {size}", derived.arms.get(size), arm) for size, arm in replayed.arms.items()),
        (f"memory of policy {policy}", derived.memory, replayed.memory),
        ("cheapest trial", derived.cheapest, replayed.cheapest),
        ("event of the bandit stage", derived.bandit_entered_at, replayed.bandit_entered_at),
        ("trials that count by the wrong terms", miscounted, []),
        ("event of the latest revision", job.revised_event, known[-1].event if known else 0),
        ("number of trials", job.trial_count, len(trials)),
        # A revived trial loses the event of its end, so that the count may be higher.
        ("event count", min(job.event_count, events), events),
    ]
    return [f"{name} is {kept}, by its trials {told}" for name, kept, told in compared if kept != told]
