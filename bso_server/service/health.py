"""The state of a server, for its operators: whether it is well, totals for monitoring, a check of what it remembers."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from bso_server.core.job import replay
from bso_server.core.policy import installed
from bso_server.core.savings import savings
from bso_server.errors import BsoError, DatabaseNotReadyError
from bso_server.service.commands import utc_now
from bso_server.service.loading import load_history
from bso_server.service.pages import Found, digest
from bso_server.service.reading import JobReader, job_summary, version_view
from bso_server.service.views import HealthPage
from bso_server.storage import queries
from bso_server.storage.rows import StoredJob
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import Stage, TrialState

# Jobs of which one transaction reads the totals: some milliseconds of work, after which others have their turn.
_JOBS_AT_ONCE = 50


class Health:
    """Looks at the state of this process and its database.

    Args:
        store: The database.
        reader: Says whether it is ready.
        clock: The present instant, aware.
    """

    def __init__(self, store: Store, reader: JobReader, clock: Callable[[], datetime] = utc_now) -> None:
        self._store = store
        self._reader = reader
        self._started_at = clock()

    async def look(self, known: str | None = None) -> Found[HealthPage]:
        """The page, unless its reader knows this version, of which the time that the database took is no part."""
        trouble, answer_s, revision = None, None, None
        try:
            await self._reader.check_ready()
        except DatabaseNotReadyError as error:
            trouble = error.message
        try:
            revision = await self._store.current_revision()
            begin = time.perf_counter()
            await self._store.read(Transaction.any_token)
            answer_s = time.perf_counter() - begin
        except BsoError as error:
            trouble = trouble or error.message
        running = version_view()
        page = HealthPage(
            version=running.version,
            process=os.getpid(),
            started_at=self._started_at,
            database=self._store.kind,
            schema_needed=running.schema_revision,
            schema_found=revision,
            trouble=trouble,
            answer_s=answer_s,
        )
        version = digest([page.model_copy(update={"answer_s": None})])
        return version, None if version == known else page


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
        return None  # deleted meanwhile
    tallies = queries.tallies(transaction, job_id)
    trials: Counter[TrialState] = Counter()
    for tally in tallies:
        trials[tally.state] += tally.trials
    saved = savings(stored.registration, tallies, best_cost_j=None)
    summary = job_summary(stored)
    return JobTotals(
        policy=summary.policy,
        stage=summary.stage,
        trials=dict(trials),
        energy_j=sum(tally.energy_j for tally in tallies),
        saved_energy_j=None if saved is None else saved.energy_j.saved,
        saved_time_s=None if saved is None else saved.time_s.saved,
        saved_cost_j=None if saved is None else saved.cost_j.saved,
    )


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
