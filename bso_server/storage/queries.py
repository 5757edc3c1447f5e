"""Queries without locks, for the dashboard, exports and the read API; decisions do not use them.

Each page of results continues after the last key of the page before, so that a late page costs no more than the first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields
from datetime import datetime
from typing import Any, NamedTuple

from pydantic import TypeAdapter
from sqlalchemy import ColumnElement, RowMapping, Table, Text, and_, case, false, func, not_, or_, select, type_coerce

from bso_server.core.model import TrialRecord
from bso_server.core.savings import JobVerdict, Tally, no_verdict, verdict_version
from bso_server.core.verdict import CompletedRun
from bso_server.storage.rows import (
    StoredDecision,
    StoredEpoch,
    StoredJob,
    TrialTotals,
    decision_from,
    job_from,
    trial_from,
)
from bso_server.storage.tables import decisions, epochs, jobs, trials, verdicts
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import ALIVE, CreatedJob, EndReason, Origin, Stage, TrialState

_VERDICT = TypeAdapter(JobVerdict)

# Largest value of an integer column.
MAX_INTEGER = 2**31 - 1


def jobs_page(
    transaction: Transaction, *, prefix: str | None, stage: Stage | None, after: str | None, limit: int | None
) -> list[StoredJob]:
    """Return a page of jobs; see `service.reading.list_jobs`. `after` is the last job_id of the page before."""
    statement = select(jobs).order_by(jobs.c.job_id).limit(limit)
    if prefix is not None:
        statement = statement.where(jobs.c.job_id_prefix == prefix)
    if stage is not None:
        entered = jobs.c.bandit_entered_event
        statement = statement.where(entered.is_(None) if stage is Stage.PRUNING else entered.is_not(None))
    if after is not None:
        statement = statement.where(jobs.c.job_id > after)
    return [job_from(row) for row in transaction.rows(statement)]


def trials_page(
    transaction: Transaction, job_id: str, *, state: TrialState | None, after: int, limit: int
) -> list[TrialRecord]:
    """Return a page of trials; see `service.reading.list_trials`. `after` is the last number of the page before."""
    conditions = [trials.c.trial_number > after]
    if state is not None:
        conditions.append(trials.c.state == state)
    return _trials(transaction, job_id, conditions, order=trials.c.trial_number, limit=limit)


def latest_trials(transaction: Transaction, job_id: str, *, limit: int | None) -> list[TrialRecord]:
    """Return the last `limit` trials, or all for None, in order of dispatch."""
    return _trials(transaction, job_id, [], order=trials.c.trial_number.desc(), limit=limit)[::-1]


def latest_instants(transaction: Transaction, job_id: str, *, limit: int) -> list[datetime]:
    """Return the times at which the last `limit` trials started, reported or ended."""
    table = trials.c
    statement = select(table.started_at, table.reported_at, table.ended_at).where(table.job_id == job_id)
    rows = transaction.tuples(statement.order_by(table.trial_number.desc()).limit(limit))
    return [instant for row in rows for instant in row if instant is not None]


def tallies(transaction: Transaction, job_id: str) -> list[Tally]:
    """Return counts and sums over the trials of a job, grouped by size, state, origin and `other_gpus`."""
    return _tallies(transaction, job_id, job_id, None).get(job_id, [])


def _tallies(transaction: Transaction, first: str, last: str, since: datetime | None) -> dict[str, list[Tally]]:
    """Return tallies of the jobs from id `first` to `last`, of all trials or those that ended after `since`."""
    table = trials.c
    kinds = table.batch_size, table.state, table.origin
    # The same condition as in `protocol.is_estimated`.
    estimated_j = case((table.energy_source.contains("estimate"), table.energy_j), else_=0.0)
    # A sum over trials without reports is null.
    sums = [func.coalesce(func.sum(each), 0.0) for each in (table.energy_j, table.time_s, estimated_j)]
    columns = table.job_id, *kinds, func.count(), *sums[:2], table.other_gpus, sums[2]
    statement = select(*columns).where(table.job_id.between(first, last))
    if since is not None:
        statement = statement.where(table.ended_at > since)
    found: dict[str, list[Tally]] = {}
    for row in map(tuple, transaction.tuples(statement.group_by(table.job_id, *kinds, table.other_gpus))):
        found.setdefault(row[0], []).append(Tally(*row[1:]))
    return found


class Judged(NamedTuple):
    """Row of a job with the stored verdict, and tallies of its trials; properties parse its texts, at each call."""

    job_id: str
    owner: str | None
    policy: str
    bandit_entered_event: int | None
    spec: str
    fingerprint: str | None
    version: str | None
    text: str | None
    tallies: Sequence[Tally]

    @property
    def job(self) -> CreatedJob:
        """The terms of the job, without a target that was set later and without the fingerprint."""
        return CreatedJob.model_validate_json(self.spec)

    @property
    def verdict(self) -> JobVerdict:
        """The verdict, which may lack the latest trials."""
        is_known = self.text is not None and self.version == verdict_version(self.policy)
        return _VERDICT.validate_json(self.text or "") if is_known else no_verdict(self.job)


def judged_jobs(transaction: Transaction, *, after: str, limit: int, since: datetime | None = None) -> list[Judged]:
    """Return a page of jobs, with all trials or those that ended after `since`; `after` is the last id before."""
    table, stored = jobs.c, verdicts.c
    columns = table.job_id, table.owner, table.policy, table.bandit_entered_event, table.spec, table.fingerprint
    statement = select(*columns, stored.version, type_coerce(stored.verdict, Text)).outerjoin_from(jobs, verdicts)
    rows = transaction.tuples(statement.where(table.job_id > after).order_by(table.job_id).limit(limit))
    tallies = _tallies(transaction, rows[0][0], rows[-1][0], since) if rows else {}
    return [Judged._make((*row, tallies.get(row[0], []))) for row in map(tuple, rows)]


def missed_metrics(transaction: Transaction, job: CreatedJob) -> dict[int, float | None]:
    """Return the best last metric of the runs that missed the target, by batch size; None if no metric is known.

    A run that used up its epochs does not count if the job allows more epochs now.
    """
    table = trials.c
    exhausted = and_(table.state == TrialState.EXHAUSTED, table.epoch >= job.max_epochs)
    ended = or_(exhausted, table.state == TrialState.EARLY_STOPPED, table.end_reason == EndReason.ENDED_EARLY)
    is_missed = and_(ended, table.origin != Origin.FINISH)
    best = (func.max if job.higher_is_better_metric else func.min)(table.metric)
    statement = select(table.batch_size, best).where(table.job_id == job.job_id, is_missed).group_by(table.batch_size)
    return dict(tuple(row) for row in transaction.tuples(statement))


def best_metric(transaction: Transaction, job: CreatedJob) -> float | None:
    """Return the best last metric of all trials of a job; None before the first report."""
    best = (func.max if job.higher_is_better_metric else func.min)(trials.c.metric)
    found: float | None = transaction.connection.scalar(select(best).where(trials.c.job_id == job.job_id))
    return found


def completed_runs(transaction: Transaction, job_id: str, *, since: int) -> list[CompletedRun]:
    """Return the whole runs on the job's GPUs that reached the target at event `since` or later, ordered by end."""
    table = trials.c
    chosen = (
        table.job_id == job_id,
        table.state == TrialState.COMPLETED,
        table.ended_event >= since,
        table.other_gpus.is_(False),
    )
    statement = select(*(table[field.name] for field in fields(CompletedRun))).where(*chosen)
    statement = statement.where(table.origin != Origin.FINISH)
    return [CompletedRun(*row) for row in map(tuple, transaction.tuples(statement.order_by(table.ended_event)))]


def met_at_once(transaction: Transaction, job: CreatedJob) -> int:
    """Return the number of runs whose first report met the target, before the end of the training."""
    table = trials.c
    is_first = (
        table.state == TrialState.COMPLETED,
        table.end_reason == EndReason.TARGET_REACHED,
        table.report_count == 1,
    )
    is_early = table.epoch < job.max_epochs
    statement = select(func.count()).where(table.job_id == job.job_id, *is_first, is_early)
    return int(transaction.connection.scalar(statement) or 0)


def trial(transaction: Transaction, job_id: str, trial_number: int) -> TrialRecord | None:
    """Return a trial, or None."""
    found = _trials(transaction, job_id, [trials.c.trial_number == trial_number], order=None, limit=1)
    return found[0] if found else None


def job_versions(
    transaction: Transaction, *, containing: str | None, after: str | None, limit: int
) -> list[tuple[str, str]]:
    """Return a page of the jobs: each job's place, and a text that changes whenever the job's line changes.

    A place is the digit `trouble` of the job's stored verdict with the id behind it; jobs are ordered by both. `after`
    is the last place of the page before. To read whole records would take several times as long, and most callers have
    cached them.
    """
    table, trouble = jobs.c, func.coalesce(verdicts.c.trouble, 4)
    columns = table.job_id, table.event_count, table.created_at, table.registration_id, table.owner, table.shared
    statement = select(trouble, *columns, table.target_metric, verdicts.c.event, verdicts.c.version)
    statement = statement.outerjoin_from(jobs, verdicts).order_by(trouble, table.job_id).limit(limit)
    if containing:
        statement = statement.where(table.job_id.contains(containing, autoescape=True))
    if after and after[0].isdecimal():
        last = int(after[0])
        statement = statement.where(or_(trouble > last, and_(trouble == last, table.job_id > after[1:])))
    found = [tuple(row) for row in transaction.tuples(statement)]
    changing = _changing_trials(transaction, [row[1] for row in found])
    return [(f"{row[0]}{row[1]}", repr((row, changing.get(row[1])))) for row in found]


def outdated_verdicts(transaction: Transaction) -> list[tuple[str, int]]:
    """Return the jobs whose verdict is missing, of another version, or lacks ended trials, with their trial counts."""
    table, stored = jobs.c, verdicts.c
    policies = [policy for (policy,) in transaction.tuples(select(table.policy).distinct())]
    versions = [and_(table.policy == policy, stored.version == verdict_version(policy)) for policy in policies]
    later = select(trials.c.trial_number).where(trials.c.job_id == table.job_id, trials.c.ended_event > stored.event)
    is_outdated = or_(
        stored.job_id.is_(None), not_(or_(false(), *versions)), and_(table.event_count > stored.event, later.exists())
    )
    found = select(table.job_id, table.trial_count).outerjoin_from(jobs, verdicts).where(is_outdated)
    return [(job_id, count) for job_id, count in map(tuple, transaction.tuples(found))]


def _changing_trials(transaction: Transaction, job_ids: Sequence[str]) -> dict[str, list[Any]]:
    """Return the alive trials by job: they may change although the job's event count stays the same."""
    table = trials.c
    columns = table.job_id, table.trial_number, table.state, table.report_count, table.lease_epoch
    changes = table.state.in_(sorted(ALIVE)), table.job_id.in_(job_ids)
    statement = select(*columns).where(*changes).order_by(table.job_id, table.trial_number)
    found: dict[str, list[Any]] = {}
    for row in transaction.tuples(statement) if job_ids else ():
        found.setdefault(row[0], []).append(tuple(row))
    return found


def alive_trials(transaction: Transaction, job_id: str) -> list[TrialRecord]:
    """Return the trials of a job that are alive, in order of dispatch."""
    # Sorted here, because for ORDER BY SQLite would read all trials of the job.
    found = _trials(transaction, job_id, [trials.c.state.in_(sorted(ALIVE))], order=None, limit=None)
    return sorted(found, key=lambda each: each.trial_number)


def silent_counts(
    transaction: Transaction, job_ids: Collection[str], now: datetime, states: Collection[TrialState] = ALIVE
) -> dict[str, int]:
    """Return the number of trials in these states with expired leases by job, without jobs that have none."""
    table = trials.c
    expired = table.state.in_(sorted(states)), table.job_id.in_(job_ids), table.lease_expires_at < now
    statement = select(table.job_id, func.count()).where(*expired).group_by(table.job_id)
    return dict(map(tuple, transaction.tuples(statement))) if job_ids else {}


def trial_totals(transaction: Transaction, job_id: str, *, limit: int, before: int | None = None) -> list[TrialTotals]:
    """Return the totals of the last `limit` trials (before number `before`), in order of dispatch.

    A page shows up to a thousand trials; to read whole records would take ten times as long.
    """
    statement = select(*(trials.c[field.name] for field in fields(TrialTotals))).where(trials.c.job_id == job_id)
    if before is not None:
        statement = statement.where(trials.c.trial_number < before)
    rows = transaction.tuples(statement.order_by(trials.c.trial_number.desc()).limit(limit))
    return [TrialTotals(*row) for row in reversed(rows)]


def epochs_between(transaction: Transaction, job_id: str, first: int, last: int) -> list[StoredEpoch]:
    """Return the reports of trials `first` to `last`, ordered by trial, without the reports that ended a trial."""
    condition = epochs.c.job_id == job_id, epochs.c.trial_number.between(first, last)
    statement = select(epochs).where(*condition).order_by(epochs.c.trial_number, epochs.c.report_number)
    return [StoredEpoch(**row) for row in transaction.rows(statement)]


def decisions_of(
    transaction: Transaction, job_id: str, first: int = 1, last: int = MAX_INTEGER
) -> list[StoredDecision]:
    """Return the stored decisions behind the trials `first` to `last`, in order of dispatch."""
    return list(map(decision_from, _by_trial(transaction, decisions, job_id, first, last)))


def _by_trial(transaction: Transaction, table: Table, job_id: str, first: int, last: int) -> Sequence[RowMapping]:
    condition = table.c.job_id == job_id, table.c.trial_number.between(first, last)
    return transaction.rows(select(table).where(*condition).order_by(table.c.trial_number))


def _trials(
    transaction: Transaction,
    job_id: str,
    conditions: list[ColumnElement[bool]],
    order: ColumnElement[Any] | None,
    limit: int | None,
) -> list[TrialRecord]:
    statement = select(trials).where(trials.c.job_id == job_id, *conditions).order_by(order).limit(limit)
    return [trial_from(row) for row in transaction.rows(statement)]
