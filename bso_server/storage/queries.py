"""Queries that people ask and decisions do not need: pages of jobs and trials, what was reported, what happened.

None of them locks anything. Pages go by key, so that a page costs the same wherever it is.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, func, select

from bso_server.core.model import TrialRecord
from bso_server.core.savings import Sums, Tally
from bso_server.storage.rows import (
    StoredEpoch,
    StoredJob,
    StoredPowerProfile,
    job_from,
    power_profile_from,
    trial_from,
)
from bso_server.storage.tables import epochs, jobs, power_profiles, trials
from bso_server.storage.transaction import IS_THERE, Transaction
from zeus_plugins.protocol import Stage, TrialState


def jobs_page(
    transaction: Transaction, *, prefix: str | None, stage: Stage | None, after: str | None, limit: int | None
) -> list[StoredJob]:
    """See `service.queries.list_jobs`; only jobs whose ids come `after` this one."""
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
    """See `service.queries.list_trials`; only trials whose numbers come `after` this one."""
    conditions = [trials.c.trial_number > after]
    if state is not None:
        conditions.append(trials.c.state == state)
    return _trials(transaction, job_id, conditions, order=trials.c.trial_number, limit=limit)


def latest_trials(transaction: Transaction, job_id: str, *, limit: int | None) -> list[TrialRecord]:
    """The trials that were dispatched last, at most so many of them (None: all), in order of dispatch."""
    return _trials(transaction, job_id, [], order=trials.c.trial_number.desc(), limit=limit)[::-1]


def tallies(transaction: Transaction, job_id: str) -> list[Tally]:
    """The job's trials, counted and summed up by batch size, state and origin."""
    kind = trials.c.batch_size, trials.c.state, trials.c.origin
    energy, time = trials.c.energy_j, trials.c.time_s
    sums = {
        "energy_j": energy,
        "time_s": time,
        "energy_squared": energy * energy,
        "time_squared": time * time,
        "energy_times_time": energy * time,
    }
    # Null where none of them has reported.
    columns = [func.coalesce(func.sum(each), 0.0).label(name) for name, each in sums.items()]
    statement = select(*kind, func.count().label("trials"), *columns).where(trials.c.job_id == job_id).group_by(*kind)
    return [
        Tally(row["batch_size"], row["state"], row["origin"], row["trials"], Sums(**{name: row[name] for name in sums}))
        for row in transaction.rows(statement)
    ]


def trial(transaction: Transaction, job_id: str, trial_number: int) -> TrialRecord | None:
    """One trial, or None."""
    condition = trials.c.trial_number == trial_number
    return next(iter(_trials(transaction, job_id, [condition], order=trials.c.trial_number, limit=1)), None)


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
    order: ColumnElement[Any],
    limit: int | None,
) -> list[TrialRecord]:
    statement = select(trials).where(trials.c.job_id == job_id, *conditions).order_by(order).limit(limit)
    return [trial_from(row) for row in transaction.rows(statement)]
