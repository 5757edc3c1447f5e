"""The totals over all jobs, for monitoring: read in small steps, and of jobs alone that have changed meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from bso_server.core.savings import savings
from bso_server.service import views
from bso_server.service.commands import utc_now
from bso_server.storage import queries as stored_views
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import Stage, TrialState

# Jobs that one transaction looks at: some milliseconds of work, after which others have their turn.
_JOBS_AT_ONCE = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTotals:
    """The totals of one job.

    Attributes:
        policy: Its policy.
        stage: Its stage.
        trials: Its trials by state.
        silent: Trials whose leases have run out and that nobody has abandoned.
        energy_j: Joules that all of its trials have taken, as far as they have reported.
        saved_energy_j: Joules that it has saved over its default batch size, if that is known; see `core.savings`.
        saved_time_s: Seconds, likewise.
        saved_cost_j: Cost in joules, likewise.
    """

    policy: str
    stage: Stage
    trials: Mapping[TrialState, int]
    silent: int = 0
    energy_j: float
    saved_energy_j: float | None = None
    saved_time_s: float | None = None
    saved_cost_j: float | None = None


class TotalsReader:
    """Reads the totals of all jobs, again and again; those of jobs without a change are remembered.

    What it remembers is some hundred bytes a job, of the jobs that there are.
    """

    def __init__(self, store: Store, clock: Callable[[], datetime] = utc_now) -> None:
        self._store = store
        self._clock = clock
        self._known: dict[str, tuple[str, JobTotals]] = {}

    async def read(self) -> dict[str, JobTotals]:
        """The totals of each job by its id, in the order of the ids. Errors as of `Store.read`.

        They are of several moments, as each few jobs are read in a transaction of their own.
        """
        read: dict[str, tuple[str, JobTotals]] = {}
        after, found = await self._store.read(self._page, None)
        while after is not None:
            read |= found
            # What is broken off is gone on with.
            self._known |= found
            after, found = await self._store.read(self._page, after)
        self._known = read
        return {job_id: totals for job_id, (_, totals) in read.items()}

    def _page(self, transaction: Transaction, after: str | None) -> tuple[str | None, dict[str, tuple[str, JobTotals]]]:
        """A few jobs after this one with their versions, and the last of them, or None where there is none left."""
        versions = stored_views.job_versions(transaction, containing=None, after=after, limit=_JOBS_AT_ONCE)
        silent = stored_views.silent_counts(transaction, [job_id for job_id, _ in versions], self._clock())
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
        return None  # deleted meanwhile
    tallies = stored_views.tallies(transaction, job_id)
    trials: Counter[TrialState] = Counter()
    for tally in tallies:
        trials[tally.state] += tally.trials
    saved = savings(stored.registration, tallies, best_cost_j=None)
    summary = views.summary(stored)
    return JobTotals(
        policy=summary.policy,
        stage=summary.stage,
        trials=dict(trials),
        energy_j=sum(tally.sums.energy_j for tally in tallies),
        saved_energy_j=None if saved is None else saved.energy_j.saved,
        saved_time_s=None if saved is None else saved.time_s.saved,
        saved_cost_j=None if saved is None else saved.cost_j.saved,
    )
