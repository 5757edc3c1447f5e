"""The database: transactions, and rows in and core dataclasses out. No decisions here."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter
from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    Select,
    Table,
    Update,
    and_,
    bindparam,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.exc import DBAPIError, IntegrityError

from bso_server import migrations
from bso_server.core.beliefs import Belief, Streak
from bso_server.core.history import Arm, Cheapest, bandit_entered_from_the_start
from bso_server.core.model import ALIVE, OBSERVED, UNCOUNTED, EpochBound, Job, TrialRecord
from bso_server.core.statistics import Statistics, WeightedStatistics
from bso_server.database import Database, NoConnectionError, SqliteDatabase, is_passing
from bso_server.errors import DatabaseNotReadyError, DatabaseUnavailableError
from bso_server.security import Scope, TokenRecord
from bso_server.tables import arms, epochs, jobs, power_profiles, tokens, trials
from zeus_plugins.protocol import EndReason, JobRegistration, Origin, PowerLimitSample, TrialState

# How often a transaction is tried that the database keeps breaking off, and the longest wait after the first time.
_ATTEMPTS = 8
_BACKOFF_S = 0.05

# The same where connections are lost: a database that starts anew needs seconds. Many clients wait for five at most.
_LOST_BACKOFF_S = 0.2
_PATIENCE_S = 3.0

T = TypeVar("T")

Row = RowMapping | Mapping[str, Any]
"""A table's row by the names of its columns."""

logger = logging.getLogger("bso_server")


class JobExistsError(Exception):
    """Another transaction inserted the same job_id first."""


@dataclass(frozen=True, slots=True)
class StoredJob:
    """A row of `jobs`.

    Attributes:
        registration: The job as registered.
        job: The part of it that decisions need.
        created_at: When it was registered (UTC).
        event_count: The job's logical clock.
        trial_count: Trials dispatched so far.
        cheapest: The cheapest trial that reached the target, or None.
        bandit_entered_at: Event at which the bandit stage began, or None.
        folded_event: Event up to which ends of trials are in the arms.
        rng_state: State of the job's generator as JSON, or None.
        survivors: Batch sizes with which the bandit stage was entered, ascending, or None.
    """

    registration: JobRegistration
    job: Job
    created_at: datetime
    event_count: int
    trial_count: int
    cheapest: Cheapest | None
    bandit_entered_at: int | None
    folded_event: int
    rng_state: str | None
    survivors: tuple[int, ...] | None


TrialKey = tuple[str, int]
"""A trial's job_id and number."""


@dataclass(frozen=True, slots=True)
class StoredTrial:
    """A row of `trials`: the record that decisions need, and what only people and leases need.

    Attributes:
        job_id: Its job.
        record: The record.
        reason: Why its batch size was chosen.
        energy_source: How its energy was measured, or None.
        started_at: When it was dispatched (UTC).
        reported_at: When its last report was taken (UTC), or None.
        ended_at: When it ended (UTC), or None.
        lease_expires_at: When it is abandoned if nothing more is heard of it (UTC); None for one that has ended.
        owner: Id of the token that dispatched it; None where the server asked for none.
        power_limit_w: The power limit of each GPU that its training chose, watts; None where it sets none.
        power_limits: How many limits its training knew the cost of; None where it looks for none.
    """

    job_id: str
    record: TrialRecord
    reason: str
    started_at: datetime
    lease_expires_at: datetime | None
    energy_source: str | None = None
    reported_at: datetime | None = None
    ended_at: datetime | None = None
    owner: str | None = None
    power_limit_w: float | None = None
    power_limits: int | None = None

    @property
    def key(self) -> TrialKey:
        """Its job_id and number."""
        return self.job_id, self.record.trial_number


@dataclass(frozen=True, slots=True)
class StoredEpoch:
    """A row of `epochs`: a report that did not end its trial; totals since the trial began.

    Attributes:
        job_id: The job.
        trial_number: Its trial.
        report_number: Counts from 1 within the trial.
        epoch: Epochs trained.
        time_s: Seconds.
        energy_j: Joules.
        metric: The validation metric.
        reported_at: When it was taken (UTC).
    """

    job_id: str
    trial_number: int
    report_number: int
    epoch: float
    time_s: float
    energy_j: float
    metric: float
    reported_at: datetime


@dataclass(frozen=True, slots=True)
class StoredPowerProfile:
    """A row of `power_profiles`.

    Attributes:
        job_id: The job, on whose GPUs it was measured.
        trial_number: The trial that left it.
        batch_size: That trial's.
        samples: What steps cost under each power limit, ascending by limit.
        stored_at: When it was stored (UTC).
    """

    job_id: str
    trial_number: int
    batch_size: int
    samples: tuple[PowerLimitSample, ...]
    stored_at: datetime


class Transaction:
    """One transaction. Made by `Store` alone; dead once it has ended.

    Methods named ``locked_…`` make other writers of the same rows wait until the transaction ends (on SQLite the whole
    transaction does). Rows of one table are locked in the order of their keys. What ends a trial locks it before its
    job; what begins one or abandons it locks the job first, and of its trials only those whose leases have run out.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def rows(self, statement: Select[Any]) -> Sequence[RowMapping]:
        """What a query that only reads finds; `store_reads` holds those that no decision needs."""
        return self._connection.execute(statement).mappings().all()

    def job(self, job_id: str) -> StoredJob | None:
        """The job, or None."""
        return self._one_job(select(jobs).where(jobs.c.job_id == job_id))

    def locked_job(self, job_id: str) -> StoredJob | None:
        """The job, or None; other writers wait."""
        return self._one_job(select(jobs).where(jobs.c.job_id == job_id).with_for_update())

    def locked_jobs(self, job_ids: Collection[str]) -> dict[str, StoredJob]:
        """Those of these jobs that exist; other writers wait."""
        statement = select(jobs).where(jobs.c.job_id.in_(sorted(job_ids))).order_by(jobs.c.job_id).with_for_update()
        return {row["job_id"]: job_from(row) for row in self._connection.execute(statement).mappings()}

    def locked_trials(self, keys: Collection[TrialKey]) -> dict[TrialKey, tuple[StoredJob, StoredTrial]]:
        """Those of these trials that exist, each with its job, in one statement; other writers of the trials wait.

        The jobs are locked, too, if `locks_jobs_with_trials`. A trial that goes on changes nothing of its job, so that
        reports on different trials of one job need not wait for each other.
        """
        found: dict[TrialKey, tuple[StoredJob, StoredTrial]] = {}
        jobs_found: dict[str, StoredJob] = {}
        for row in self._connection.execute(*_locked_trials(sorted(keys))):
            trial = trial_from(dict(zip(_TRIAL_COLUMNS, row, strict=False)))
            if trial.job_id not in jobs_found:
                jobs_found[trial.job_id] = job_from(dict(zip(_JOB_COLUMNS, row[len(_TRIAL_COLUMNS) :], strict=True)))
            found[trial.key] = jobs_found[trial.job_id], trial
        return found

    @property
    def locks_jobs_with_trials(self) -> bool:
        """Whether the database cannot lock one table of a join alone: SQLite and MariaDB cannot."""
        dialect = self._connection.dialect
        return not (dialect.name == "postgresql" or getattr(dialect, "supports_for_update_of", False))

    def all_trials(self, job_id: str) -> list[StoredTrial]:
        """Every trial of the job, in order of dispatch."""
        return self._trials(trials.c.job_id == job_id)

    def counted_explorations(self, job_id: str) -> list[TrialRecord]:
        """The job's exploration trials that count, in order of dispatch."""
        found = self._trials(
            trials.c.job_id == job_id,
            trials.c.origin == Origin.EXPLORATION.value,
            trials.c.state.not_in([state.value for state in UNCOUNTED]),
        )
        return [trial.record for trial in found]

    def in_flight(self, job_id: str) -> list[TrialRecord]:
        """The job's trials that are running or may go on, in order of dispatch."""
        found = self._trials(trials.c.job_id == job_id, trials.c.state.in_([state.value for state in ALIVE]))
        return [trial.record for trial in found]

    def ended_after(self, job_id: str, event: int) -> list[TrialRecord]:
        """Trials that ended after this event of the job, in order of their ends."""
        found = self._trials(trials.c.job_id == job_id, trials.c.ended_event > event)
        return sorted((trial.record for trial in found), key=lambda record: record.ended_event or 0)

    def locked_expired_trials(self, job_id: str, now: datetime) -> list[StoredTrial]:
        """The job's trials whose leases have run out, in order of dispatch; other writers wait.

        A trial whose report is just being taken has a new lease by the time that its row can be had.
        """
        return self._trials(trials.c.job_id == job_id, *_expired(now), lock=True)

    def jobs_with_expired_trials(self, now: datetime) -> list[str]:
        """Ids of jobs that have such trials, in order."""
        statement = select(trials.c.job_id).distinct().where(*_expired(now)).order_by(trials.c.job_id)
        return list((self._connection.execute(statement)).scalars())

    def trial_with_key(self, job_id: str, idempotency_key: str) -> StoredTrial | None:
        """The trial that a request with this key started, or None."""
        found = self._trials(trials.c.job_id == job_id, trials.c.idempotency_key == idempotency_key)
        return found[0] if found else None

    def crashes(self, job_id: str, batch_size: int) -> tuple[int, bool]:
        """How many trials of the size crashed, and whether one was ever measured to its end."""
        statement = (
            select(trials.c.state, func.count())
            .where(trials.c.job_id == job_id, trials.c.batch_size == batch_size)
            .group_by(trials.c.state)
        )
        counts = {TrialState(state): count for state, count in self._connection.execute(statement)}
        return counts.get(TrialState.FAILED, 0), any(state in OBSERVED for state in counts)

    def arms(self, job_id: str) -> dict[int, Arm]:
        """What is remembered of each batch size, ascending."""
        statement = select(arms).where(arms.c.job_id == job_id).order_by(arms.c.batch_size)
        rows = self._connection.execute(statement)
        return {row["batch_size"]: _arm_from(row) for row in rows.mappings()}

    def insert_job(self, registration: JobRegistration, created_at: datetime) -> None:
        """Add a job with its arms.

        Raises:
            JobExistsError: Another one has its id; the transaction is of no more use.
        """
        row = {
            "job_id": registration.job_id,
            "job_id_prefix": registration.job_id_prefix,
            "policy": registration.policy.value,
            "spec": registration.model_dump_json(),
            "created_at": created_at,
            "event_count": 0,
            "trial_count": 0,
            "folded_event": 0,
            "bandit_entered_event": bandit_entered_from_the_start(job_of(registration)),
        }
        try:
            self._connection.execute(insert(jobs).values(row))
        except IntegrityError as error:
            raise JobExistsError(registration.job_id) from error
        rows = [{"job_id": registration.job_id, **_arm_row(Arm(size))} for size in registration.batch_sizes]
        self._connection.execute(insert(arms), rows)

    def update_jobs(self, changed: Iterable[StoredJob]) -> None:
        """Save what may change of jobs whose rows this transaction has locked."""
        self._update_many(jobs, [_job_row(job) for job in changed], key=("job_id",))

    def update_arms(self, job_id: str, changed: Iterable[Arm]) -> None:
        """Replace what is remembered of these batch sizes of a locked job."""
        rows = [{"job_id": job_id, **_arm_row(arm)} for arm in changed]
        self._update_many(arms, rows, key=("job_id", "batch_size"))

    def delete_job(self, job_id: str) -> bool:
        """Remove a job with all its trials; False if there was none."""
        result = self._connection.execute(delete(jobs).where(jobs.c.job_id == job_id))
        return bool(result.rowcount)

    def insert_trial(self, trial: StoredTrial, *, idempotency_key: str | None = None) -> None:
        """Add a trial that was just dispatched."""
        row = {**_whole_trial_row(trial), "idempotency_key": idempotency_key}
        self._connection.execute(insert(trials).values(row))

    def insert_trials(self, added: Sequence[StoredTrial]) -> None:
        """Add trials that another database has seen."""
        if added:
            self._connection.execute(insert(trials), [_whole_trial_row(trial) for trial in added])

    def update_trials(self, changed: Iterable[StoredTrial]) -> None:
        """Save what may change of trials whose rows this transaction has locked."""
        self._update_many(trials, [_trial_row(trial) for trial in changed], key=("job_id", "trial_number"))

    def update_progress(self, changed: Iterable[StoredTrial]) -> None:
        """Save what a report changes of locked trials that were running and still are.

        The columns that are left out stand in indexes, which a database would write anew for the same values.
        """
        self._update_many(trials, [_progress_row(trial) for trial in changed], key=("job_id", "trial_number"))

    def insert_epochs(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add reports to the epochs of their trials."""
        if rows:
            self._connection.execute(_INSERT_EPOCHS, rows)

    def delete_epochs_before(self, instant: datetime, *, limit: int) -> int:
        """Remove reports that were taken before then, at most `limit` of them, oldest first; how many were there."""
        return self._delete_some(epochs, epochs.c.reported_at, instant, limit=limit)

    def update_power_limit(self, trial: StoredTrial) -> None:
        """Save the power limit of a locked trial."""
        row = {
            "job_id": trial.job_id,
            "trial_number": trial.record.trial_number,
            "power_limit_w": trial.power_limit_w,
            "power_limits": trial.power_limits,
        }
        self._update_many(trials, [row], key=("job_id", "trial_number"))

    def newest_power_profile(self, job_id: str, batch_size: int) -> StoredPowerProfile | None:
        """That of the latest trial of this size which has left one, or None."""
        table = power_profiles.c
        found = self.rows(
            select(power_profiles)
            .where(table.job_id == job_id, table.batch_size == batch_size)
            .order_by(table.trial_number.desc())
            .limit(1)
        )
        return power_profile_from(found[0]) if found else None

    def power_profile(self, key: TrialKey) -> StoredPowerProfile | None:
        """The profile that this trial has left, or None."""
        table = power_profiles.c
        found = self.rows(select(power_profiles).where(table.job_id == key[0], table.trial_number == key[1]))
        return power_profile_from(found[0]) if found else None

    def insert_power_profiles(self, added: Iterable[StoredPowerProfile]) -> None:
        """Add the profiles of trials that have left none."""
        rows = [_power_profile_row(profile) for profile in added]
        if rows:
            self._connection.execute(insert(power_profiles), rows)

    def update_power_profile(self, changed: StoredPowerProfile) -> None:
        """Replace the profile that a locked trial has left."""
        self._update_many(power_profiles, [_power_profile_row(changed)], key=("job_id", "trial_number"))

    def delete_power_profiles_before(self, instant: datetime, *, limit: int) -> int:
        """Remove profiles that were stored before then, but for the newest of each size; as `delete_epochs_before`."""
        newer = power_profiles.alias("newer")
        has_newer = (
            select(newer.c.trial_number)
            .where(
                newer.c.job_id == power_profiles.c.job_id,
                newer.c.batch_size == power_profiles.c.batch_size,
                newer.c.trial_number > power_profiles.c.trial_number,
            )
            .exists()
        )
        return self._delete_some(power_profiles, power_profiles.c.stored_at, instant, has_newer, limit=limit)

    def insert_token(self, token: TokenRecord) -> None:
        """Add a token."""
        row = {
            "token_id": token.token_id,
            "name": token.name,
            "scopes": " ".join(sorted(token.scopes)),
            "token_hash": token.token_hash,
            "created_at": token.created_at,
        }
        self._connection.execute(insert(tokens).values(row))

    def token(self, token_id: str) -> TokenRecord | None:
        """The token, even if it was revoked, or None."""
        found = self._tokens(select(tokens).where(tokens.c.token_id == token_id))
        return found[0] if found else None

    def all_tokens(self) -> list[TokenRecord]:
        """Every token, oldest first."""
        return self._tokens(select(tokens).order_by(tokens.c.created_at, tokens.c.token_id))

    def any_valid_token(self) -> bool:
        """Whether there is a token that was not revoked."""
        statement = select(tokens.c.token_id).where(tokens.c.revoked_at.is_(None)).limit(1)
        return (self._connection.execute(statement)).first() is not None

    def revoke_token(self, token_id: str, now: datetime) -> None:
        """Note that a token is good no more; one that was revoked before keeps its date."""
        statement = update(tokens).where(tokens.c.token_id == token_id, tokens.c.revoked_at.is_(None))
        self._connection.execute(statement.values(revoked_at=now))

    def _delete_some(
        self, table: Table, dated: ColumnElement[datetime], instant: datetime, *conditions: Any, limit: int
    ) -> int:
        key = [column.name for column in table.primary_key]
        statement = select(*table.primary_key).where(dated < instant, *conditions)
        rows = self.rows(statement.order_by(dated).limit(limit))
        if rows:
            # By key and one by one: a condition on the time would lock rows that are being inserted on MySQL.
            condition = (table.c[name] == bindparam(f"key_{name}") for name in key)
            values = [{f"key_{name}": row[name] for name in key} for row in rows]
            self._connection.execute(delete(table).where(*condition), values)
        return len(rows)

    def _tokens(self, statement: Select[Any]) -> list[TokenRecord]:
        return [_token_from(row) for row in (self._connection.execute(statement)).mappings()]

    def _one_job(self, statement: Select[Any]) -> StoredJob | None:
        row = (self._connection.execute(statement)).mappings().one_or_none()
        return None if row is None else job_from(row)

    def _trials(self, *conditions: ColumnElement[bool], lock: bool = False) -> list[StoredTrial]:
        statement = select(trials).where(*conditions)
        rows = self._connection.execute(statement.with_for_update() if lock else statement).mappings()
        # Sorted here: told to sort, SQLite would walk through all of the job's trials in that order.
        found = (trial_from(row) for row in rows)
        return sorted(found, key=lambda trial: trial.record.trial_number)

    def _update_many(self, table: Table, rows: Sequence[Mapping[str, Any]], key: tuple[str, ...]) -> None:
        if not rows:
            return
        values = [{f"key_{name}" if name in key else name: value for name, value in row.items()} for row in rows]
        self._connection.execute(_update_of(table, key, tuple(rows[0])), values)


@lru_cache(maxsize=64)
def _update_of(table: Table, key: tuple[str, ...], names: tuple[str, ...]) -> Update:
    """The update of these columns in the row with this key. Putting it together costs more than running it."""
    # A bound value may not have the name of a column that is set.
    condition = (table.c[name] == bindparam(f"key_{name}") for name in key)
    return update(table).where(*condition).values({name: bindparam(name) for name in names if name not in key})


def _expired(now: datetime) -> tuple[ColumnElement[bool], ...]:
    alive = [state.value for state in ALIVE]
    return trials.c.state.in_(alive), trials.c.lease_expires_at < now


_INSERT_EPOCHS = insert(epochs)
_JOB_COLUMNS = [column.name for column in jobs.c]
_TRIAL_COLUMNS = [column.name for column in trials.c]


def _locked_trials(keys: Sequence[TrialKey]) -> tuple[Select[Any], dict[str, Any]]:
    """The query for the trials with these keys, each with its job, and its parameters."""
    # A few sizes of the query are enough: to ask for a key twice does no harm.
    size = 1 << (len(keys) - 1).bit_length()
    padded = [*keys, *[keys[-1]] * (size - len(keys))]
    parameters: dict[str, Any] = {}
    for n, (job_id, trial_number) in enumerate(padded):
        parameters |= {f"job_id_{n}": job_id, f"trial_number_{n}": trial_number}
    return _locked_trials_of(size), parameters


@lru_cache(maxsize=64)
def _locked_trials_of(size: int) -> Select[Any]:
    """The query for so many keys. For ``(job_id, trial_number) IN (…)`` SQLite would read the whole table."""
    condition = or_(
        *(
            and_(trials.c.job_id == bindparam(f"job_id_{n}"), trials.c.trial_number == bindparam(f"trial_number_{n}"))
            for n in range(size)
        )
    )
    query = select(trials, jobs).join_from(trials, jobs).where(condition)
    return query.order_by(trials.c.job_id, trials.c.trial_number).with_for_update(of=trials)


class Store:
    """The project's data in a database. Commit happens in one place: when the work given to `write` has returned."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @property
    def is_sqlite(self) -> bool:
        """Whether the database is a SQLite file."""
        return self._dialect == "sqlite"

    @property
    def file(self) -> Path | None:
        """The SQLite file, or None for a database of another kind."""
        return Path(self._database.url.database or "") if self.is_sqlite else None

    @property
    def description(self) -> str:
        """The database's URL as a user would write it, without its password."""
        url = self._database.url
        # Drivers take it there, too.
        query = {name: "***" if "pass" in name.lower() else value for name, value in url.query.items()}
        return url.set(drivername=self._dialect, query=query).render_as_string(hide_password=True)

    @property
    def _dialect(self) -> str:
        return self._database.url.get_backend_name()

    async def write(self, work: Callable[[Transaction], T]) -> T:
        """Do `work` in a transaction, and again from the start when the database broke it off or went away.

        Databases end one of two transactions that wait for each other; the other one's rows are then free.

        Args:
            work: Does nothing but read and write through the transaction, so that it can be repeated. When the
                connection was lost at the commit, it is repeated though it may be in force already.

        Raises:
            DatabaseUnavailableError: The database stays away. `work` may be in force.
        """
        return await self._repeated(work, read_only=False)

    async def read(self, work: Callable[[Transaction], T]) -> T:
        """Do `work`, which only reads, in a transaction that makes nobody wait; again as in `write`.

        Raises:
            DatabaseUnavailableError: The database stays away.
        """
        return await self._repeated(work, read_only=True)

    async def _repeated(self, work: Callable[[Transaction], T], *, read_only: bool) -> T:
        end, attempt, lost = time.monotonic() + _PATIENCE_S, 0, False
        while True:
            attempt += 1
            try:
                done = await self._run(lambda connection: work(Transaction(connection)), read_only=read_only)
            except DBAPIError as error:
                if not is_passing(error) or attempt == _ATTEMPTS:
                    raise
                logger.info("transaction broken off by the database, attempt %d: %s", attempt, error.orig)
                backoff_s = _BACKOFF_S
            except DatabaseUnavailableError as error:
                if attempt == _ATTEMPTS or time.monotonic() > end:
                    logger.warning("gave up after %d attempts: %s", attempt, error.detail)
                    raise
                lost, backoff_s = True, _LOST_BACKOFF_S
            else:
                if lost:
                    logger.info("lost the connection to the database, and found it again at attempt %d", attempt)
                return done
            # Not all at once again; randomness is what parts them.
            await asyncio.sleep(backoff_s * attempt * random.random())  # noqa: S311 - no secret

    async def _run(self, work: Callable[[Connection], T], *, read_only: bool = False) -> T:
        try:
            return await self._database.run(work, read_only=read_only)
        except NoConnectionError as error:
            raise DatabaseUnavailableError(f"no connection to the database {self.description}: {error}") from error

    async def migrate(self) -> None:
        """Bring the database to this version's schema. A SQLite file is copied first, if there is anything to lose.

        Raises:
            DatabaseNotReadyError: It was made by a newer version.
            DatabaseUnavailableError: It cannot be reached.
        """
        database, found = self._database, await self.current_revision()
        self._refuse_newer(found)
        if isinstance(database, SqliteDatabase) and found not in (None, migrations.head()):
            copy = await asyncio.to_thread(database.back_up)
            logger.info("the database was copied to %s before its schema is upgraded", copy)
        await self._run(migrations.upgrade)

    def migration_sql(self) -> str:
        """The SQL that makes this version's schema in an empty database of this kind."""
        return migrations.upgrade_sql(self._dialect)

    @property
    def needed_revision(self) -> str:
        """The revision of the schema that this version needs."""
        return migrations.head()

    async def current_revision(self) -> str | None:
        """The revision of the database's schema, or None for an empty database.

        Raises:
            DatabaseUnavailableError: It cannot be reached.
        """
        return await self._run(migrations.current, read_only=True)

    async def check_schema(self) -> None:
        """Make sure that the database has this version's schema.

        Raises:
            DatabaseNotReadyError: It has another one, or none.
            DatabaseUnavailableError: It cannot be reached.
        """
        found = await self.current_revision()
        self._refuse_newer(found)
        if found != migrations.head():
            raise DatabaseNotReadyError(
                f"the database {self.description} is at schema {found or 'none'}, this version needs "
                f"{migrations.head()}; run: bso-server db upgrade --database-url '{self.description}'"
            )

    def _refuse_newer(self, found: str | None) -> None:
        if found is not None and not migrations.is_known(found):
            raise DatabaseNotReadyError(
                f"the database {self.description} is at schema {found}, which this version does not know: it was made "
                f"by a newer version of zeus-plugins. Install that one, or restore the backup (this one needs schema "
                f"{migrations.head()})"
            )

    async def close(self) -> None:
        """Close every connection."""
        await self._database.close()


_JOB_FIELDS = [field.name for field in fields(Job)]


@lru_cache(maxsize=1024)
def _specification(spec: str) -> tuple[JobRegistration, Job]:
    """A job's immutable part. Parsing it for each report would cost more than the report."""
    registration = JobRegistration.model_validate_json(spec)
    return registration, job_of(registration)


def job_of(registration: JobRegistration) -> Job:
    """The part of a job that decisions need."""
    return Job(**{name: getattr(registration, name) for name in _JOB_FIELDS})


def job_from(row: Row) -> StoredJob:
    """A job from its row."""
    registration, job = _specification(row["spec"])
    cheapest = None
    if row["min_cost_j"] is not None:
        cheapest = Cheapest(row["min_cost_trial_number"], row["min_cost_batch_size"], row["min_cost_j"])
    return StoredJob(
        registration=registration,
        job=job,
        created_at=row["created_at"],
        event_count=row["event_count"],
        trial_count=row["trial_count"],
        cheapest=cheapest,
        bandit_entered_at=row["bandit_entered_event"],
        folded_event=row["folded_event"],
        rng_state=row["rng_state"],
        survivors=None if row["survivors"] is None else tuple(json.loads(row["survivors"])),
    )


def _job_row(stored: StoredJob) -> dict[str, Any]:
    """The columns that may change, with the key."""
    cheapest = stored.cheapest
    return {
        "job_id": stored.job.job_id,
        "event_count": stored.event_count,
        "trial_count": stored.trial_count,
        "min_cost_j": None if cheapest is None else cheapest.cost_j,
        "min_cost_batch_size": None if cheapest is None else cheapest.batch_size,
        "min_cost_trial_number": None if cheapest is None else cheapest.trial_number,
        "bandit_entered_event": stored.bandit_entered_at,
        "folded_event": stored.folded_event,
        "rng_state": stored.rng_state,
        "survivors": None if stored.survivors is None else json.dumps(stored.survivors),
    }


def _trial_row(trial: StoredTrial) -> dict[str, Any]:
    """The columns that may change, with the key. A trial without reports has no totals, rather than zeros."""
    record = trial.record
    return {
        **_progress_row(trial),
        "state": record.state.value,
        "end_reason": None if record.end_reason is None else record.end_reason.value,
        "ended_at": trial.ended_at,
        "ended_event": record.ended_event,
        "heartbeats": record.heartbeats,
        "epoch_bound": None if record.bound is None else record.bound.epochs,
        "epoch_bound_reason": None if record.bound is None else record.bound.reason,
    }


def _whole_trial_row(trial: StoredTrial) -> dict[str, Any]:
    record = trial.record
    return {
        **_trial_row(trial),
        "batch_size": record.batch_size,
        "origin": record.origin.value,
        "reason": trial.reason,
        "started_at": trial.started_at,
        "started_event": record.started_event,
        "owner": trial.owner,
        "power_limit_w": trial.power_limit_w,
        "power_limits": trial.power_limits,
    }


def _progress_row(trial: StoredTrial) -> dict[str, Any]:
    record = trial.record
    reported = record.metric is not None
    return {
        "job_id": trial.job_id,
        "trial_number": record.trial_number,
        "message": record.message,
        "reported_at": trial.reported_at,
        "time_s": record.time_s if reported else None,
        "energy_j": record.energy_j if reported else None,
        "energy_source": trial.energy_source,
        "epoch": record.epoch if reported else None,
        "metric": record.metric,
        "report_count": record.reports,
        "first_epoch": record.first_epoch if reported else None,
        "first_cost_j": record.first_cost_j if reported else None,
        "longest_gap_s": record.longest_gap_s,
        "lease_expires_at": trial.lease_expires_at,
    }


def trial_from(row: Row) -> StoredTrial:
    """A trial from its row."""
    end_reason = row["end_reason"]
    return StoredTrial(
        job_id=row["job_id"],
        record=TrialRecord(
            trial_number=row["trial_number"],
            batch_size=row["batch_size"],
            state=TrialState(row["state"]),
            origin=Origin(row["origin"]),
            started_event=row["started_event"],
            ended_event=row["ended_event"],
            time_s=row["time_s"] or 0.0,
            energy_j=row["energy_j"] or 0.0,
            epoch=row["epoch"] or 0.0,
            metric=row["metric"],
            message=row["message"],
            end_reason=None if end_reason is None else EndReason(end_reason),
            reports=row["report_count"],
            longest_gap_s=row["longest_gap_s"],
            heartbeats=row["heartbeats"],
            first_epoch=row["first_epoch"] or 0.0,
            first_cost_j=row["first_cost_j"] or 0.0,
            bound=None if row["epoch_bound"] is None else EpochBound(row["epoch_bound"], row["epoch_bound_reason"]),
        ),
        reason=row["reason"],
        energy_source=row["energy_source"],
        started_at=row["started_at"],
        reported_at=row["reported_at"],
        ended_at=row["ended_at"],
        lease_expires_at=row["lease_expires_at"],
        owner=row["owner"],
        power_limit_w=row["power_limit_w"],
        power_limits=row["power_limits"],
    )


_SAMPLES = TypeAdapter(tuple[PowerLimitSample, ...])


def power_profile_from(row: Row) -> StoredPowerProfile:
    """A power-limit profile from its row."""
    return StoredPowerProfile(**{**row, "samples": _SAMPLES.validate_json(row["samples"])})


def _power_profile_row(profile: StoredPowerProfile) -> dict[str, Any]:
    row = {field.name: getattr(profile, field.name) for field in fields(profile)}
    return row | {"samples": _SAMPLES.dump_json(profile.samples).decode()}


def _token_from(row: RowMapping) -> TokenRecord:
    return TokenRecord(
        token_id=row["token_id"],
        name=row["name"],
        scopes=frozenset(map(Scope, row["scopes"].split())),
        token_hash=row["token_hash"],
        created_at=row["created_at"],
        revoked_at=row["revoked_at"],
    )


_STATISTICS = ("explored", "observed", "completed")
_STATISTICS_FIELDS = [field.name for field in fields(Statistics)]


def _arm_from(row: RowMapping) -> Arm:
    infeasible, latest = row["infeasible"], json.loads(row["latest"])
    return Arm(
        batch_size=row["batch_size"],
        trials=row["trials"],
        infeasible=None if infeasible is None else EndReason(infeasible),
        refitted=row["refitted"],
        window=tuple((trial_number, cost_j) for trial_number, cost_j in json.loads(row["window"])),
        latest=None if latest is None else (latest[0], latest[1]),
        belief=_belief_from(row["belief"]),
        **{name: Statistics(*(row[f"{name}_{field}"] for field in _STATISTICS_FIELDS)) for name in _STATISTICS},
    )


def _belief_from(text: str | None) -> Belief:
    if text is None:
        return Belief()
    values = json.loads(text)
    nested = {
        "observed": WeightedStatistics(**values["observed"]),
        "exact": WeightedStatistics(**values["exact"]),
        "costs": WeightedStatistics(**values["costs"]),
        "streak": Streak(**values["streak"]),
    }
    return Belief(**{**values, **nested})


def _arm_row(arm: Arm) -> dict[str, Any]:
    row = {
        "batch_size": arm.batch_size,
        "trials": arm.trials,
        "infeasible": None if arm.infeasible is None else arm.infeasible.value,
        "refitted": arm.refitted,
        "window": json.dumps(arm.window),
        "latest": json.dumps(arm.latest),
        "belief": None if arm.belief == Belief() else json.dumps(asdict(arm.belief)),
    }
    for name in _STATISTICS:
        statistics = getattr(arm, name)
        row |= {f"{name}_{field}": getattr(statistics, field) for field in _STATISTICS_FIELDS}
    return row
