"""Queries that people ask and decisions do not need: pages of jobs and trials, what was reported, what happened.

None of them locks anything. Pages go by key, so that a page costs the same wherever it is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, func, select

from bso_server.core.model import TrialRecord
from bso_server.core.savings import Tally
from bso_server.storage.rows import (
    StoredDecision,
    StoredEpoch,
    StoredJob,
    StoredPowerProfile,
    TrialTotals,
    decision_from,
    job_from,
    power_profile_from,
    trial_from,
)
from bso_server.storage.tables import decisions, epochs, jobs, power_profiles, trials
from bso_server.storage.transaction import IS_THERE, Transaction
from zeus_plugins.protocol import ALIVE, Stage, TrialState

# What an integer column holds.
MAX_INTEGER = 2**31 - 1


def jobs_page(
    transaction: Transaction, *, prefix: str | None, stage: Stage | None, after: str | None, limit: int | None
) -> list[StoredJob]:
    """See `service.reading.list_jobs`; only jobs whose ids come `after` this one."""
    statement = select(jobs).where(IS_THERE).order_by(jobs.c.job_id).limit(limit)
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
    """See `service.reading.list_trials`; only trials whose numbers come `after` this one."""
    conditions = [trials.c.trial_number > after]
    if state is not None:
        conditions.append(trials.c.state == state)
    return _trials(transaction, job_id, conditions, order=trials.c.trial_number, limit=limit)


def latest_trials(transaction: Transaction, job_id: str, *, limit: int | None) -> list[TrialRecord]:
    """The trials that were dispatched last, at most so many of them (None: all), in order of dispatch."""
    return _trials(transaction, job_id, [], order=trials.c.trial_number.desc(), limit=limit)[::-1]


def latest_instants(transaction: Transaction, job_id: str, *, limit: int) -> list[datetime]:
    """The instants at which something was heard of these trials."""
    table = trials.c
    statement = select(table.started_at, table.reported_at, table.ended_at).where(table.job_id == job_id)
    rows = transaction.tuples(statement.order_by(table.trial_number.desc()).limit(limit))
    return [instant for row in rows for instant in row if instant is not None]


def tallies(transaction: Transaction, job_id: str, *, first: int = 1, last: int = MAX_INTEGER) -> list[Tally]:
    """Return counts and sums over the job's trials between these numbers, by size, state and origin."""
    table = trials.c
    energy, time = table.energy_j, table.time_s
    kinds = table.batch_size, table.state, table.origin
    # Null where none of them has reported.
    sums = [func.coalesce(func.sum(each), 0.0) for each in (energy, time, energy * energy, time * time, energy * time)]
    condition = table.job_id == job_id, table.trial_number.between(first, last)
    statement = select(*kinds, func.count(), *sums).where(*condition).group_by(*kinds)
    return [Tally(*row) for row in map(tuple, transaction.tuples(statement))]


def first_ended_after(transaction: Transaction, job_id: str, event: int) -> int | None:
    """Return the lowest number of the trials that have ended after this event of the job; None if none has."""
    statement = select(func.min(trials.c.trial_number)).where(trials.c.job_id == job_id, trials.c.ended_event > event)
    ((number,),) = transaction.tuples(statement)
    return None if number is None else int(number)


def trial(transaction: Transaction, job_id: str, trial_number: int) -> TrialRecord | None:
    """One trial, or None."""
    condition = trials.c.trial_number == trial_number
    return next(iter(_trials(transaction, job_id, [condition], order=trials.c.trial_number, limit=1)), None)


def job_versions(
    transaction: Transaction, *, containing: str | None, after: str | None, limit: int
) -> list[tuple[str, str]]:
    """The ids of such a page of jobs, each with a text that changes with all that a line about the job shows of it.

    Whole records would cost several times as much, and most who ask know all of them.
    """
    table = jobs.c
    columns = table.job_id, table.event_count, table.created_at, table.registration_id, table.owner, table.shared
    statement = select(*columns).where(IS_THERE).order_by(table.job_id).limit(limit)
    if containing:
        statement = statement.where(table.job_id.contains(containing, autoescape=True))
    if after is not None:
        statement = statement.where(table.job_id > after)
    rows = [tuple(row) for row in transaction.tuples(statement)]
    others = _changing_trials(transaction, [row[0] for row in rows])
    return [(row[0], repr((row, others.get(row[0])))) for row in rows]


def _changing_trials(transaction: Transaction, job_ids: Sequence[str]) -> dict[str, list[Any]]:
    """Return the trials of each of these jobs whose changes do not show in its event count."""
    table = trials.c
    columns = table.job_id, table.trial_number, table.state, table.report_count, table.lease_epoch
    changes = table.state.in_(sorted(ALIVE | {TrialState.WITHDRAWN})), table.job_id.in_(job_ids)
    statement = select(*columns).where(*changes).order_by(table.job_id, table.trial_number)
    found: dict[str, list[Any]] = {}
    for row in transaction.tuples(statement) if job_ids else ():
        found.setdefault(row[0], []).append(tuple(row))
    return found


def alive_trials(transaction: Transaction, job_id: str) -> list[TrialRecord]:
    """The trials of a job that run or may go on, in order of dispatch."""
    # Sorted here: told to sort, SQLite would walk through all of the job's trials in that order.
    found = _trials(transaction, job_id, [trials.c.state.in_(sorted(ALIVE))], order=None, limit=None)
    return sorted(found, key=lambda each: each.trial_number)


def silent_counts(transaction: Transaction, job_ids: Collection[str], now: datetime) -> dict[str, int]:
    """The number of trials alive whose leases have run out, of each of these jobs that has any."""
    table = trials.c
    statement = select(table.job_id, func.count().label("trials")).group_by(table.job_id)
    chosen = statement.where(table.state.in_(sorted(ALIVE)), table.job_id.in_(job_ids), table.lease_expires_at < now)
    return {row["job_id"]: row["trials"] for row in transaction.rows(chosen)} if job_ids else {}


def withdrawn_count(transaction: Transaction, job_id: str) -> int:
    """The number of a job's trials that were set aside; all other ends of trials show in the job's event count."""
    condition = trials.c.job_id == job_id, trials.c.state == TrialState.WITHDRAWN
    ((count,),) = transaction.tuples(select(func.count()).where(*condition))
    return int(count)


def trial_totals(transaction: Transaction, job_id: str, *, limit: int, before: int | None = None) -> list[TrialTotals]:
    """The trials that were dispatched last (before this one), at most so many, in order, without most of their facts.

    A page shows a thousand of them at once, where whole records would cost ten times as much.
    """
    statement = select(*(trials.c[field.name] for field in fields(TrialTotals))).where(trials.c.job_id == job_id)
    if before is not None:
        statement = statement.where(trials.c.trial_number < before)
    rows = transaction.tuples(statement.order_by(trials.c.trial_number.desc()).limit(limit))
    return [TrialTotals(*row) for row in reversed(rows)]


def consumption_between(
    transaction: Transaction, job_id: str, first: int, last: int
) -> list[tuple[int, TrialState, float | None, float | None]]:
    """The numbers, states, seconds and joules of these of a job's trials and all between them, in order."""
    table = trials.c
    statement = select(table.trial_number, table.state, table.time_s, table.energy_j).where(
        table.job_id == job_id, table.trial_number.between(first, last)
    )
    rows = transaction.tuples(statement.order_by(table.trial_number))
    return [tuple(row) for row in rows]


def dispatched_after(transaction: Transaction, job_id: str, event: int, limit: int) -> list[TrialRecord]:
    """Trials that began after this event of the job, in order of dispatch."""
    # A trial's number orders dispatches as its event does, and has an index.
    return _trials(transaction, job_id, [trials.c.started_event > event], order=trials.c.trial_number, limit=limit)


def ended_after(transaction: Transaction, job_id: str, event: int, limit: int) -> list[TrialRecord]:
    """Trials that ended after this event of the job, in order of their ends."""
    return _trials(transaction, job_id, [trials.c.ended_event > event], order=trials.c.ended_event, limit=limit)


def epochs_of(transaction: Transaction, job_id: str, trial_number: int) -> list[StoredEpoch]:
    """A trial's reports that did not end it, in order."""
    return epochs_between(transaction, job_id, trial_number, trial_number)


def epochs_between(transaction: Transaction, job_id: str, first: int, last: int) -> list[StoredEpoch]:
    """The same of the trials with these numbers and all between them, trial by trial."""
    condition = epochs.c.job_id == job_id, epochs.c.trial_number.between(first, last)
    statement = select(epochs).where(*condition).order_by(epochs.c.trial_number, epochs.c.report_number)
    return [StoredEpoch(**row) for row in transaction.rows(statement)]


def decisions_of(
    transaction: Transaction, job_id: str, first: int = 1, last: int | None = None
) -> list[StoredDecision]:
    """The decisions behind these of the job's trials that are kept, in order of dispatch."""
    table = decisions.c
    statement = select(decisions).where(table.job_id == job_id, table.trial_number >= first)
    if last is not None:
        statement = statement.where(table.trial_number <= last)
    return [decision_from(row) for row in transaction.rows(statement.order_by(table.trial_number))]


def power_profiles_of(
    transaction: Transaction, job_id: str, first: int = 1, last: int | None = None
) -> list[StoredPowerProfile]:
    """The power-limit profiles that these of the job's trials have left and that are kept, in order of dispatch."""
    table = power_profiles.c
    statement = select(power_profiles).where(table.job_id == job_id, table.trial_number >= first)
    if last is not None:
        statement = statement.where(table.trial_number <= last)
    return [power_profile_from(row) for row in transaction.rows(statement.order_by(table.trial_number))]


def _trials(
    transaction: Transaction,
    job_id: str,
    conditions: list[ColumnElement[bool]],
    order: ColumnElement[Any] | None,
    limit: int | None,
) -> list[TrialRecord]:
    statement = select(trials).where(trials.c.job_id == job_id, *conditions).order_by(order).limit(limit)
    return [trial_from(row) for row in transaction.rows(statement)]
