"""The savings of a job and its control runs, from the runs that the database holds.

A verdict follows from all runs of a job, and learning one takes 0.15 ms. Each process therefore keeps the evidence of a
job, and adds later runs to it. Before each use, it compares the evidence with the database.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime

import numpy as np

from bso_server.core import policy
from bso_server.core.model import Arm, History, Suggestion
from bso_server.core.savings import Amounts, Tally, completed_count, default_cost, learn, savings
from bso_server.core.verdict import CompletedRun, Evidence, Judge, with_control
from bso_server.service.cache import Cache
from bso_server.storage import queries
from bso_server.storage.rows import StoredJob
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import CreatedJob, SavingsView, SizeBelief

_JOBS = 2000
"""Number of jobs whose evidence is kept: about 10 kB and 500 bytes a run each."""


class Learned:
    """The evidence of a job by each measure."""

    def __init__(self, job: CreatedJob) -> None:
        self.lock = threading.Lock()
        self.by = {name: Evidence(job.default_batch_size, job.controls) for name in Amounts._fields}
        self.last: CompletedRun | None = None
        self._job = job
        self._count = 0

    def rest(self, found: Sequence[CompletedRun]) -> Sequence[CompletedRun]:
        """Return the runs that follow the last learned run, which may be later than all of them."""
        if self.last is None:
            return found
        return found[found.index(self.last) + 1 :] if self.last in found else ()

    def is_followed_by(self, found: Sequence[CompletedRun], completed: int) -> bool:
        """Return True if the evidence with the runs that follow the last learned run has `completed` runs."""
        is_known = self.last is None or self.last in found
        return is_known and self._count + len(self.rest(found)) == completed

    def learn(self, found: Sequence[CompletedRun]) -> None:
        """Add the runs that follow the last learned run."""
        new = self.rest(found)
        learn(self._job, self.by, new)
        self._count += len(new)
        self.last = new[-1] if new else self.last


# A new target and a revision change the costs of earlier runs.
_learned = Cache[tuple[str, str | None, datetime, float | None, int], Learned](_JOBS)


def read_evidence(
    transaction: Transaction, stored: StoredJob, completed: int
) -> tuple[Learned, Sequence[CompletedRun]]:
    """Return the evidence of a job, and runs with which it has this number of completed runs once it learns them."""
    job = stored.registration
    key = job.job_id, job.registration_id, stored.created_at, job.target_metric, stored.revised_event
    learned = _learned.get(key)
    if learned is not None:
        with learned.lock:
            since = 0 if learned.last is None else learned.last.ended_event
        found = queries.completed_runs(transaction, job.job_id, since=since)
        with learned.lock:
            if learned.is_followed_by(found, completed):
                return learned, found
    learned = Learned(job)
    _learned.put(key, learned)
    return learned, queries.completed_runs(transaction, job.job_id, since=0)


@contextmanager
def _evidence(transaction: Transaction, stored: StoredJob, completed: int) -> Iterator[Learned]:
    """Provide the evidence of a job with this number of completed runs; do not use the database in the context."""
    learned, found = read_evidence(transaction, stored, completed)
    with learned.lock:
        learned.learn(found)
        yield learned


def savings_of(transaction: Transaction, stored: StoredJob, tallies: Sequence[Tally], best: int | None) -> SavingsView:
    """Return the knowledge of a job's saving; `tallies` are the costs of all its trials, `best` its best size."""
    job = stored.registration
    with _evidence(transaction, stored, completed_count(tallies)) as learned:
        return savings(job, tallies, best, lambda name: learned.by[name].judge(best or job.default_batch_size))


def evidence_for(transaction: Transaction, stored: StoredJob, arms: Mapping[int, Arm]) -> Learned:
    """Return the evidence by which a job gets control runs; `arms` include all ends of trials.

    Other readers may add later runs to the evidence; then the job's row has changed, too.
    """
    with _evidence(transaction, stored, sum(arm.completed.count for arm in arms.values())) as learned:
        return learned


def suggestion_for(history: History, rng: np.random.Generator, evidence: Learned) -> Suggestion:
    """Return the next trial's batch size: the policy's, or a control run's.

    `evidence` is by `evidence_for`, and errors as in `policy.suggest`.
    """
    suggestion = policy.suggest(history, rng, explains=True)
    with evidence.lock:
        judge_of = evidence.by["cost_j"].judge
        return with_control(history, _with_default_cost(history.job, suggestion, judge_of), judge_of)


def _with_default_cost(job: CreatedJob, suggestion: Suggestion, judge_of: Callable[[int], Judge]) -> Suggestion:
    """Return the suggestion with the default's cost by `default_cost` among the numbers behind it."""
    decision, default = suggestion.decision, job.default_batch_size
    if decision is None or decision.incumbent is None:
        return suggestion
    sizes, now = {each.batch_size: each for each in decision.sizes}, judge_of(decision.incumbent).verdict().now
    best = sizes.get(decision.incumbent)
    if now is None or best is None or best.expected_cost_j is None or default not in sizes:
        return suggestion
    cost, chance = default_cost(best.expected_cost_j, now), sizes[default].chance_best
    low_j, high_j = cost.band_j or (None, None)
    sizes[default] = SizeBelief(
        batch_size=default, expected_cost_j=cost.mean_j, low_j=low_j, high_j=high_j, chance_best=chance
    )
    return replace(suggestion, decision=decision.model_copy(update={"sizes": tuple(sizes.values())}))
