"""The statements that requests are made of, each put together and compiled once (`Prepared`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import fields
from enum import StrEnum
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    Select,
    Table,
    and_,
    bindparam,
    func,
    insert,
    literal,
    or_,
    select,
    union_all,
    update,
)
from sqlalchemy.dialects import mysql

from bso_server.core.model import UNCOUNTED
from bso_server.storage.prepared import Prepared
from bso_server.storage.rows import TrialColumns, TrialTotals
from bso_server.storage.tables import arms, decisions, epochs, jobs, policy_memories, power_profiles, tokens, trials
from zeus_plugins.protocol import ALIVE, Origin, TrialState

IS_THERE = jobs.c.importing_at.is_(None)
"""The condition that a job is one, and not a part of one that is being imported."""


def _is_one_of(column: Column[Any], members: Collection[StrEnum]) -> ColumnElement[bool]:
    # Each a parameter of its own: a list would be written out anew for each execution.
    return column.in_([literal(member, column.type) for member in sorted(members)])


def _of_job(table: Table) -> ColumnElement[bool]:
    return table.c.job_id == bindparam("job_id")


_of_trials = select(trials).where(_of_job(trials))
_is_alive = _is_one_of(trials.c.state, ALIVE)
_is_expired = or_(trials.c.lease_expires_at < bindparam("now"), trials.c.lease_expires_at > bindparam("latest"))
_counts = trials.c.state.not_in([literal(state, trials.c.state.type) for state in sorted(UNCOUNTED)])

JOB = Prepared(select(jobs).where(_of_job(jobs), IS_THERE))
ARMS = Prepared(select(arms).where(_of_job(arms)).order_by(arms.c.batch_size))
MEMORY = Prepared(select(policy_memories).where(_of_job(policy_memories)))
TOKEN = Prepared(select(tokens).where(tokens.c.token_id == bindparam("token_id")))
TRIAL_WITH_KEY = Prepared(_of_trials.where(trials.c.idempotency_key == bindparam("idempotency_key")))
JOBS_WITH_EXPIRED_TRIALS = Prepared(
    select(trials.c.job_id).distinct().where(_is_alive, _is_expired).order_by(trials.c.job_id)
)
STATES_OF_SIZE = Prepared(
    select(trials.c.state, func.count().label("trials"))
    .where(_of_job(trials), trials.c.batch_size == bindparam("batch_size"))
    .group_by(trials.c.state)
)
INSERT_ARMS, INSERT_EPOCHS, INSERT_TRIALS = Prepared(insert(arms)), Prepared(insert(epochs)), Prepared(insert(trials))
INSERT_DECISIONS, INSERT_MEMORY = Prepared(insert(decisions)), Prepared(insert(policy_memories))

_of_profiles = select(power_profiles).where(_of_job(power_profiles))
NEWEST_POWER_PROFILE = Prepared(
    _of_profiles.where(power_profiles.c.batch_size == bindparam("batch_size"))
    .order_by(power_profiles.c.trial_number.desc())
    .limit(1)
)
POWER_PROFILE = Prepared(_of_profiles.where(power_profiles.c.trial_number == bindparam("trial_number")))
PROFILES = Prepared(_of_profiles.order_by(power_profiles.c.trial_number))

_newest_first = trials.c.trial_number.desc()
_limit = bindparam("limit", type_=trials.c.trial_number.type)
LATEST_TRIALS = Prepared(_of_trials.order_by(_newest_first).limit(_limit))
LATEST_INSTANTS = Prepared(
    select(trials.c.started_at, trials.c.reported_at, trials.c.ended_at)
    .where(_of_job(trials))
    .order_by(_newest_first)
    .limit(_limit)
)
_totals = select(*(trials.c[field.name] for field in fields(TrialTotals))).where(_of_job(trials))
LATEST_TOTALS = Prepared(_totals.order_by(_newest_first).limit(_limit))
LATEST_TOTALS_BEFORE = Prepared(
    _totals.where(trials.c.trial_number < bindparam("before")).order_by(_newest_first).limit(_limit)
)
_between = trials.c.trial_number.between(bindparam("first"), bindparam("last"))
CONSUMPTION_BETWEEN = Prepared(
    select(trials.c.trial_number, trials.c.state, trials.c.time_s, trials.c.energy_j)
    .where(_of_job(trials), _between)
    .order_by(trials.c.trial_number)
)
FIRST_ENDED_AFTER = Prepared(
    select(func.min(trials.c.trial_number).label("first")).where(
        _of_job(trials), trials.c.ended_event > bindparam("event")
    )
)
ALIVE_TRIALS = Prepared(_of_trials.where(_is_alive))
WITHDRAWN_TRIALS = Prepared(
    select(func.count().label("trials")).where(
        _of_job(trials), trials.c.state == literal(TrialState.WITHDRAWN, trials.c.state.type)
    )
)


_versions = select(
    jobs.c.job_id, jobs.c.event_count, jobs.c.created_at, jobs.c.registration_id, jobs.c.owner, jobs.c.shared
).where(IS_THERE)
JOB_VERSIONS = Prepared(_versions.order_by(jobs.c.job_id).limit(_limit))
JOB_VERSIONS_AFTER = Prepared(_versions.where(jobs.c.job_id > bindparam("after")).order_by(jobs.c.job_id).limit(_limit))


def job_versions_containing(part: str) -> Select[Any]:
    """The query of `JOB_VERSIONS` for jobs whose ids contain a text, without its order."""
    return _versions.where(jobs.c.job_id.contains(part, autoescape=True))


@lru_cache(maxsize=8)
def changing_trials_of(size: int) -> Prepared:
    """The trials alive or set aside of so many jobs, ``job_id_0`` and so on: their changes show in no event count."""
    of_jobs = trials.c.job_id.in_([bindparam(f"job_id_{n}", type_=trials.c.job_id.type) for n in range(size)])
    columns = trials.c.job_id, trials.c.trial_number, trials.c.state, trials.c.report_count, trials.c.lease_epoch
    changes = _is_one_of(trials.c.state, ALIVE | {TrialState.WITHDRAWN})
    return Prepared(select(*columns).where(changes, of_jobs).order_by(trials.c.job_id, trials.c.trial_number))


def _tallies() -> Prepared:
    """Counts and sums over the trials of a job between two numbers, by size, state and origin."""
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
    kinds = trials.c.batch_size, trials.c.state, trials.c.origin
    counted = select(*kinds, func.count().label("trials"), *columns).where(_of_job(trials), _between)
    return Prepared(counted.group_by(*kinds))


TALLIES = _tallies()


@lru_cache(maxsize=2)
def open_trials(*, with_explorations: bool) -> Prepared:
    """The trials of a job that a decision needs: alive, ended after `event`, and explorations that count, if asked for.

    A trial may come more than once. Each part is found by an index of its own, which no database is sure to see in a
    condition that is their disjunction.
    """
    parts = [_of_trials.where(_is_alive), _of_trials.where(trials.c.ended_event > bindparam("event"))]
    if with_explorations:
        parts.append(_of_trials.where(trials.c.origin == literal(Origin.EXPLORATION, trials.c.origin.type), _counts))
    return Prepared(union_all(*parts))


@lru_cache(maxsize=2)
def locked_expired_trials(*, skip: bool) -> Prepared:
    """A job's trials whose leases have run out by `now`, or end after `latest`; see `Transaction`."""
    return Prepared(_of_trials.where(_is_alive, _is_expired).with_for_update(skip_locked=skip))


@lru_cache(maxsize=64)
def locked_jobs_of(size: int, *, skip: bool) -> Prepared:
    """The jobs with these ids, named ``job_id_0`` and so on, in order."""
    wanted = jobs.c.job_id.in_([bindparam(f"job_id_{n}", type_=jobs.c.job_id.type) for n in range(size)])
    return Prepared(select(jobs).where(wanted, IS_THERE).order_by(jobs.c.job_id).with_for_update(skip_locked=skip))


@lru_cache(maxsize=64)
def locked_trials_of(size: int, *, skip: bool) -> Prepared:
    """The query for so many keys, ``job_id_0``, ``trial_number_0`` and so on; each trial with its job, in order.

    For ``(job_id, trial_number) IN (…)`` SQLite would read the whole table.
    """
    condition = or_(
        *(
            and_(trials.c.job_id == bindparam(f"job_id_{n}"), trials.c.trial_number == bindparam(f"trial_number_{n}"))
            for n in range(size)
        )
    )
    query: Select[Any] = select(trials, jobs).join_from(trials, jobs).where(condition, IS_THERE)
    query = query.order_by(trials.c.job_id, trials.c.trial_number)
    return Prepared(query.with_for_update(of=trials, skip_locked=skip))


@lru_cache(maxsize=64)
def update_of(table: Table, names: tuple[str, ...]) -> tuple[tuple[str, ...], Prepared]:
    """The update of these columns, of which those of the key say which row; with the names of its parameters."""
    key = table.primary_key.columns.keys()
    changed: dict[str, Any] = {name: bindparam(name) for name in names if name not in key}
    statement = update(table).where(*has_key(table)).values(changed)
    return tuple(f"key_{name}" if name in key else name for name in names), Prepared(statement)


@lru_cache(maxsize=8)
def replacement_of(columns: TrialColumns) -> tuple[TrialColumns, Prepared]:
    """The update of these columns in trials that are there, for MySQL and MariaDB, with the columns that it is given.

    Their driver updates each row with a round trip of its own and sends many at once only as an insertion, which must
    name all columns that cannot be null.
    """
    needed = [column.name for column in trials.c if column.name in columns.names or not column.nullable]
    statement = mysql.insert(trials)
    changed = {name: statement.inserted[name] for name in columns.names if name not in trials.primary_key.columns}
    return TrialColumns(needed), Prepared(statement.on_duplicate_key_update(changed), inserts=needed)


def has_key(table: Table) -> Iterator[ColumnElement[bool]]:
    """The condition that a row has this key, given as ``key_…``: a parameter may not have the name of a set column."""
    return (column == bindparam(f"key_{column.name}") for column in table.primary_key)
