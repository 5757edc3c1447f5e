"""One transaction: what is read and written in it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from enum import Enum, auto
from functools import lru_cache
from operator import attrgetter
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Delete,
    Row,
    RowMapping,
    Select,
    Table,
    Update,
    and_,
    bindparam,
    delete,
    func,
    insert,
    literal,
    or_,
    select,
    union_all,
    update,
)
from sqlalchemy.exc import IntegrityError
from sqlalchemy.sql.base import Executable

from bso_server.core.access import TokenRecord
from bso_server.core.model import OBSERVED, UNCOUNTED, Arm, TrialKey, TrialRecord
from bso_server.core.occurrences import Listener, Occurrence, nobody
from bso_server.core.policy import Policy, bandit_entered_from_the_start
from bso_server.storage.faults import JobExistsError
from bso_server.storage.rows import (
    TRIAL,
    TRIAL_AT_TRANSITION,
    StoredDecision,
    StoredEpoch,
    StoredJob,
    StoredMemory,
    StoredPowerProfile,
    TrialColumns,
    arm_from,
    arm_row,
    decision_row,
    epoch_row,
    job_from,
    job_row,
    memory_from,
    memory_row,
    power_profile_from,
    power_profile_row,
    token_from,
    token_row,
    trial_from,
)
from bso_server.storage.tables import (
    arms,
    decisions,
    epochs,
    jobs,
    policy_memories,
    power_profiles,
    tokens,
    trials,
    write_probes,
)
from zeus_plugins.protocol import ALIVE, CreatedJob, Origin, TrialState

logger = logging.getLogger("bso_server")

# Some pages of each kind of database: a report, too, needs a new one now and then.
_PROBE_BYTES = 16384

_JOB_COLUMNS, _TRIAL_COLUMNS = jobs.c.keys(), trials.c.keys()


IS_THERE = jobs.c.importing_at.is_(None)
"""The condition that a job is one, and not a part of one that is being imported."""


def _states(states: Collection[TrialState]) -> list[ColumnElement[TrialState]]:
    # Each a parameter of its own: a list would be written out anew for each execution.
    return [literal(state, trials.c.state.type) for state in sorted(states)]


# The statements of each request are put together once: that costs more than SQLite needs to run them.
_is_alive = trials.c.state.in_(_states(ALIVE))
_is_expired = or_(trials.c.lease_expires_at < bindparam("now"), trials.c.lease_expires_at > bindparam("latest"))
_trials_of_job = select(trials).where(trials.c.job_id == bindparam("job_id"))
_ended_after = _trials_of_job.where(trials.c.ended_event > bindparam("event"))
_explorations = _trials_of_job.where(trials.c.origin == Origin.EXPLORATION, trials.c.state.not_in(_states(UNCOUNTED)))
# Each part is found by an index of its own, which no database is sure to see in a condition that is their disjunction.
_OPEN_TRIALS = union_all(_trials_of_job.where(_is_alive), _ended_after)
_OPEN_TRIALS_AND_EXPLORATIONS = union_all(_trials_of_job.where(_is_alive), _ended_after, _explorations)
_EXPIRED_TRIALS = _trials_of_job.where(_is_alive, _is_expired).with_for_update()
_EXPIRED_TRIALS_OF_NOBODY = _trials_of_job.where(_is_alive, _is_expired).with_for_update(skip_locked=True)
_TRIAL_WITH_KEY = _trials_of_job.where(trials.c.idempotency_key == bindparam("idempotency_key"))
_STATES_OF_SIZE = (
    select(trials.c.state, func.count())
    .where(trials.c.job_id == bindparam("job_id"), trials.c.batch_size == bindparam("batch_size"))
    .group_by(trials.c.state)
)
_JOB = select(jobs).where(jobs.c.job_id == bindparam("job_id"), IS_THERE)
_LOCKED_JOB, _LOCKED_JOB_OR_NONE = _JOB.with_for_update(), _JOB.with_for_update(skip_locked=True)
_ARMS = select(arms).where(arms.c.job_id == bindparam("job_id")).order_by(arms.c.batch_size)
_MEMORY = select(policy_memories).where(policy_memories.c.job_id == bindparam("job_id"))
_TOKEN = select(tokens).where(tokens.c.token_id == bindparam("token_id"))
_NEWEST_POWER_PROFILE = (
    select(power_profiles)
    .where(power_profiles.c.job_id == bindparam("job_id"), power_profiles.c.batch_size == bindparam("batch_size"))
    .order_by(power_profiles.c.trial_number.desc())
    .limit(1)
)


_INSERT_TRIALS, _INSERT_EPOCHS, _INSERT_DECISIONS = insert(trials), insert(epochs), insert(decisions)


@lru_cache(maxsize=64)
def _locked_trials_of(size: int, *, skip: bool) -> Select[Any]:
    """Return the query for so many keys, ``job_id_0``, ``trial_number_0`` and so on; each trial with its job, in order.

    For ``(job_id, trial_number) IN (…)`` SQLite would read the whole table.
    """
    keys = [
        and_(trials.c.job_id == bindparam(f"job_id_{n}"), trials.c.trial_number == bindparam(f"trial_number_{n}"))
        for n in range(size)
    ]
    query: Select[Any] = select(trials, jobs).join_from(trials, jobs).where(or_(*keys), IS_THERE)
    query = query.order_by(trials.c.job_id, trials.c.trial_number)
    return query.with_for_update(of=trials, skip_locked=skip)


@lru_cache(maxsize=64)
def _update_of(table: Table, names: tuple[str, ...]) -> tuple[tuple[str, ...], Update]:
    """Return an update of these columns, of which those of the key say which row, and the names of its parameters."""
    key = table.primary_key.columns.keys()
    changed: dict[str, Any] = {name: bindparam(name) for name in names if name not in key}
    statement = update(table).where(*_has_key(table)).values(changed)
    return tuple(f"key_{name}" if name in key else name for name in names), statement


def _has_key(table: Table) -> Iterator[ColumnElement[bool]]:
    """Return the condition that a row has a key, given as ``key_…``: a parameter may not be named as a set column."""
    return (column == bindparam(f"key_{column.name}") for column in table.primary_key)


class RowLocked(Enum):
    """The outcome of work that needs a row which others have locked, and for which it was not to wait."""

    ROW_LOCKED = auto()


class Transaction:
    """One transaction. Made by `Store` alone; dead once it has ended.

    Methods named ``locked_…`` make other writers of the same rows wait until the transaction ends (on SQLite the whole
    transaction does). Rows of one table are locked in the order of their keys. What ends a trial locks it before its
    job; what begins one or abandons it locks the job first, and of its trials only those whose leases have run out.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._log: list[tuple[object, ...]] = []
        self._occurrences: list[Occurrence] = []

    def log(self, message: str, *arguments: object) -> None:
        """Have a line logged once the transaction is in force."""
        self._log.append((message, *arguments))

    def tell(self, occurrence: Occurrence) -> None:
        """Have those who watch told once the transaction is in force."""
        self._occurrences.append(occurrence)

    def publish(self, listener: Listener = nobody) -> None:
        """Log and tell what there is to say of this transaction, which has been committed."""
        for message, *arguments in self._log:
            logger.info(message, *arguments)
        for occurrence in self._occurrences:
            listener(occurrence)

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Undo what the block has done if it raises."""
        self.connection.exec_driver_sql("SAVEPOINT work")
        try:
            yield
        except Exception:
            self.connection.exec_driver_sql("ROLLBACK TO SAVEPOINT work")
            raise
        finally:
            self.connection.exec_driver_sql("RELEASE SAVEPOINT work")

    def rows(self, statement: Executable, **parameters: object) -> Sequence[RowMapping]:
        """Return the rows of a query, by the names of its columns."""
        return self.connection.execute(statement, parameters).mappings().all()

    def tuples(self, statement: Executable, **parameters: object) -> Sequence[Row[Any]]:
        """Return the rows of a query, each in the order of its columns."""
        return self.connection.execute(statement, parameters).all()

    def change(self, statement: Update | Delete) -> int:
        """Change rows that no decision rests on, of a job that is being imported; return their number."""
        return self.connection.execute(statement).rowcount

    def job(self, job_id: str) -> StoredJob | None:
        """Return the job, or None."""
        return next(map(job_from, self.rows(_JOB, job_id=job_id)), None)

    @property
    def can_skip(self) -> bool:
        """True if the database can leave out rows that others have locked: all can but SQLite, and old versions.

        On SQLite there are none, as the transaction has locked the file.
        """
        dialect = self.connection.dialect
        if dialect.name in {"sqlite", "postgresql"}:
            return dialect.name == "postgresql"
        least = (10, 6) if getattr(dialect, "is_mariadb", False) else (8, 0, 1)
        return (dialect.server_version_info or least) >= least

    def locked_job(self, job_id: str, *, skip: bool = False) -> StoredJob | None:
        """Return the job, or None if there is none or, told to `skip`, others have locked it; other writers wait."""
        statement = _LOCKED_JOB_OR_NONE if skip and self.can_skip else _LOCKED_JOB
        return next(map(job_from, self.rows(statement, job_id=job_id)), None)

    def locked_trials(
        self, keys: Collection[TrialKey], *, skip: bool = False
    ) -> dict[TrialKey, tuple[StoredJob, TrialRecord]]:
        """Return those of these trials that exist, each with its job, in one statement; other writers of them wait.

        Told to `skip`, it leaves out those that another transaction has locked, instead of waiting for that. The
        jobs are locked, too, if `locks_jobs_with_trials`. A trial that goes on changes nothing of its job, so that
        reports on different trials of one job need not wait for each other.
        """
        found: dict[TrialKey, tuple[StoredJob, TrialRecord]] = {}
        jobs_found: dict[str, StoredJob] = {}
        wanted, parameters = sorted(keys), dict[str, Any]()
        # A few sizes of the query are enough: the last key stands in it more than once.
        size = 1 << (len(wanted) - 1).bit_length()
        for n in range(size):
            parameters[f"job_id_{n}"], parameters[f"trial_number_{n}"] = wanted[min(n, len(wanted) - 1)]
        for row in self.tuples(_locked_trials_of(size, skip=skip and self.can_skip), **parameters):
            trial = trial_from(dict(zip(_TRIAL_COLUMNS, row, strict=False)))
            if trial.job_id not in jobs_found:
                jobs_found[trial.job_id] = job_from(dict(zip(_JOB_COLUMNS, row[len(_TRIAL_COLUMNS) :], strict=True)))
            found[trial.key] = jobs_found[trial.job_id], trial
        return found

    @property
    def locks_jobs_with_trials(self) -> bool:
        """Whether the database cannot lock one table of a join alone: SQLite and MariaDB cannot."""
        dialect = self.connection.dialect
        return not (dialect.name == "postgresql" or getattr(dialect, "supports_for_update_of", False))

    def all_trials(self, job_id: str) -> list[TrialRecord]:
        """Every trial of the job, in order of dispatch."""
        rows = self.rows(select(trials).where(trials.c.job_id == job_id))
        # Sorted here: told to sort, SQLite would walk through all of the job's trials in that order.
        return _in_order(map(trial_from, rows))

    def open_trials(self, job_id: str, event: int, *, with_explorations: bool) -> list[TrialRecord]:
        """The trials that a decision needs one by one, in order of dispatch.

        These are the job's trials that are running or may go on, those that ended after this event of the job, and, if
        asked for, its explorations that count.
        """
        statement = _OPEN_TRIALS_AND_EXPLORATIONS if with_explorations else _OPEN_TRIALS
        found = self._trials(statement, job_id=job_id, event=event)
        return list({trial.trial_number: trial for trial in found}.values())

    def locked_expired_trials(self, job_id: str, now: datetime, latest: datetime) -> list[TrialRecord]:
        """The job's trials whose leases have run out, or end after `latest`, in order of dispatch; other writers wait.

        Those that another transaction has locked are left out: it may be the report that renews the lease.
        """
        statement = _EXPIRED_TRIALS_OF_NOBODY if self.can_skip else _EXPIRED_TRIALS
        return self._trials(statement, job_id=job_id, now=now, latest=latest)

    def jobs_with_expired_trials(self, now: datetime, latest: datetime) -> list[str]:
        """Ids of jobs that have such trials, in order."""
        statement = select(trials.c.job_id).distinct().where(_is_alive, _is_expired).order_by(trials.c.job_id)
        return [job_id for (job_id,) in self.tuples(statement, now=now, latest=latest)]

    def trial_with_key(self, job_id: str, idempotency_key: str) -> TrialRecord | None:
        """The trial that a request with this key started, or None."""
        return next(iter(self._trials(_TRIAL_WITH_KEY, job_id=job_id, idempotency_key=idempotency_key)), None)

    def crashes(self, job_id: str, batch_size: int) -> tuple[int, bool]:
        """The number of the size's trials that crashed, and whether one was ever measured to its end."""
        found = self.tuples(_STATES_OF_SIZE, job_id=job_id, batch_size=batch_size)
        counts: dict[TrialState, int] = dict(tuple(row) for row in found)
        return counts.get(TrialState.FAILED, 0), any(state in OBSERVED for state in counts)

    def arms(self, job_id: str) -> dict[int, Arm]:
        """The arms of the job by batch size, ascending."""
        return {row["batch_size"]: arm_from(row) for row in self.rows(_ARMS, job_id=job_id)}

    def memory(self, job_id: str, policy: Policy) -> StoredMemory | None:
        """The memory of this version of the job's policy; None where it has none."""
        found = self.rows(_MEMORY, job_id=job_id)
        return memory_from(found[0], policy) if found else None

    def save_memory(self, stored: StoredMemory, policy: Policy) -> None:
        """Replace what the policy of a locked job remembers of it."""
        row = memory_row(stored, policy)
        if not self._update(policy_memories, [row]):
            self.connection.execute(insert(policy_memories), row)

    def forget_memory(self, job_id: str) -> None:
        """Remove what the policy of a locked job remembers of it: the next decision makes it anew."""
        self.connection.execute(delete(policy_memories).where(policy_memories.c.job_id == job_id))

    def insert_job(
        self,
        registration: CreatedJob,
        created_at: datetime,
        *,
        owner: str | None = None,
        shared: bool = False,
        importing_at: datetime | None = None,
    ) -> None:
        """Add a job with its arms; fields as of `StoredJob`, and the mark of its import (`storage.imports`).

        Raises:
            JobExistsError: Another one has its id; the transaction is of no more use.
        """
        entered_at = bandit_entered_from_the_start(registration)
        new = StoredJob(registration=registration, created_at=created_at, bandit_entered_at=entered_at, rng_state=None)
        row = job_row(new) | {
            "job_id_prefix": registration.job_id_prefix,
            "policy": registration.policy,
            "spec": registration.model_dump_json(exclude={"fingerprint", "registration_id"}),
            "registration_id": registration.registration_id,
            "created_at": created_at,
            "owner": owner,
            "shared": shared,
            "importing_at": importing_at,
        }
        try:
            self.connection.execute(insert(jobs).values(row))
        except IntegrityError as error:
            raise JobExistsError(registration.job_id) from error
        rows = [arm_row(registration.job_id, Arm(size)) for size in registration.batch_sizes]
        self.connection.execute(insert(arms), rows)

    def update_jobs(self, changed: Iterable[StoredJob]) -> None:
        """Save what may change of jobs whose rows this transaction has locked."""
        self._update(jobs, [job_row(job) for job in changed])

    def share_job(self, job_id: str, *, shared: bool) -> None:
        """Say whether other tokens than its owner may use a locked job."""
        self.connection.execute(update(jobs).where(jobs.c.job_id == job_id).values(shared=shared))

    def update_arms(self, job_id: str, changed: Iterable[Arm]) -> None:
        """Replace what is remembered of these batch sizes of a locked job."""
        self._update(arms, [arm_row(job_id, arm) for arm in changed])

    def delete_job(self, job_id: str) -> bool:
        """Remove a job with all its trials; False if there was none."""
        return bool(self.connection.execute(delete(jobs).where(jobs.c.job_id == job_id, IS_THERE)).rowcount)

    def insert_trials(self, added: Sequence[TrialRecord]) -> None:
        """Add trials that were just dispatched, or that another database has seen."""
        if added:
            self.connection.execute(_INSERT_TRIALS, [TRIAL.of(trial) for trial in added])

    def update_trials(self, changed: Sequence[TrialRecord], columns: TrialColumns = TRIAL_AT_TRANSITION) -> None:
        """Save what may change of trials whose rows this transaction has locked, or only these columns.

        `TRIAL_AT_REPORT` has those that a report changes of a trial that was running and still is: the others stand in
        indexes, which a database would write anew for the same values.
        """
        self._update(trials, [columns.of(trial) for trial in changed])

    def insert_epochs(self, added: Sequence[StoredEpoch]) -> None:
        """Add reports to the epochs of their trials."""
        if added:
            self.connection.execute(_INSERT_EPOCHS, [epoch_row(epoch) for epoch in added])

    def delete_epochs_before(self, instant: datetime, *, limit: int) -> int:
        """Remove reports that were taken before then, at most `limit` of them, oldest first; how many were there."""
        return self._delete_some(epochs, epochs.c.reported_at, instant, limit=limit)

    def newest_power_profile(self, job_id: str, batch_size: int) -> StoredPowerProfile | None:
        """That of the latest trial of this size which has left one, or None."""
        found = self.rows(_NEWEST_POWER_PROFILE, job_id=job_id, batch_size=batch_size)
        return next(map(power_profile_from, found), None)

    def power_profile(self, key: TrialKey) -> StoredPowerProfile | None:
        """The profile that this trial has left, or None."""
        table = power_profiles.c
        statement = select(power_profiles).where(table.job_id == key[0], table.trial_number == key[1])
        return next(map(power_profile_from, self.rows(statement)), None)

    def insert_power_profiles(self, added: Iterable[StoredPowerProfile]) -> None:
        """Add the profiles of trials that have left none."""
        rows = [power_profile_row(profile) for profile in added]
        if rows:
            self.connection.execute(insert(power_profiles), rows)

    def update_power_profile(self, changed: StoredPowerProfile) -> None:
        """Replace the profile that a locked trial has left."""
        self._update(power_profiles, [power_profile_row(changed)])

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

    def insert_decisions(self, added: Iterable[StoredDecision]) -> None:
        """Add the numbers behind the choice of trials' batch sizes."""
        rows = [decision_row(decision) for decision in added]
        if rows:
            self.connection.execute(_INSERT_DECISIONS, rows)

    def write_probe(self, probe_id: str) -> None:
        """Write a row that is gone at the commit: the database must have leave to write, and room for some pages."""
        ballast = secrets.token_hex(_PROBE_BYTES // 2)
        self.connection.execute(insert(write_probes).values(probe_id=probe_id, ballast=ballast))
        self.connection.execute(delete(write_probes).where(write_probes.c.probe_id == probe_id))

    def insert_token(self, token: TokenRecord) -> None:
        """Add a token."""
        self.connection.execute(insert(tokens).values(token_row(token)))

    def token(self, token_id: str) -> TokenRecord | None:
        """The token, even if it was revoked, or None."""
        return next(map(token_from, self.rows(_TOKEN, token_id=token_id)), None)

    def all_tokens(self) -> list[TokenRecord]:
        """Every token, oldest first."""
        return self._tokens(select(tokens).order_by(tokens.c.created_at, tokens.c.token_id))

    def any_token(self, *, valid: bool = False) -> bool:
        """True if there is a token, perhaps one that was not revoked."""
        statement = select(tokens.c.token_id).limit(1)
        if valid:
            statement = statement.where(tokens.c.revoked_at.is_(None))
        return self.connection.execute(statement).first() is not None

    def update_token(self, changed: TokenRecord) -> None:
        """Save a locked token."""
        self._update(tokens, [token_row(changed)])

    def locked_token(self, token_id: str) -> TokenRecord | None:
        """The token as `token` gives it; other writers wait."""
        return next(iter(self._tokens(select(tokens).where(tokens.c.token_id == token_id).with_for_update())), None)

    def jobs_per_owner(self) -> dict[str, int]:
        """The number of jobs of each token that has any, by its id."""
        statement = select(jobs.c.owner, func.count()).where(jobs.c.owner.is_not(None), IS_THERE).group_by(jobs.c.owner)
        return {row[0]: row[1] for row in self.connection.execute(statement)}

    def alive_trials_of(self, owner: str) -> int:
        """The number of this token's trials that run or may go on."""
        statement = select(func.count()).where(trials.c.owner == owner, trials.c.state.in_(ALIVE))
        return self.connection.execute(statement).scalar_one()

    def hand_over_jobs(self, owner: str, successor: str, *, limit: int) -> list[tuple[Any, ...]]:
        """Give a token's jobs, at most so many of them, to another token; their keys."""
        return self._hand_over(jobs, owner, successor, limit)

    def hand_over_trials(self, owner: str, successor: str, *, limit: int) -> list[tuple[Any, ...]]:
        """The same with its trials."""
        return self._hand_over(trials, owner, successor, limit)

    def _hand_over(self, table: Table, owner: str, successor: str, limit: int) -> list[tuple[Any, ...]]:
        rows = self.rows(select(*table.primary_key).where(table.c.owner == owner).limit(limit))
        keys = sorted(tuple(row.values()) for row in rows)
        # By key, in order: a condition on the owner would lock every row that MySQL looks at.
        names = table.primary_key.columns.keys()
        self._update(table, [{**dict(zip(names, key, strict=True)), "owner": successor} for key in keys])
        return keys

    def _delete_some(
        self, table: Table, dated: ColumnElement[datetime], instant: datetime, *conditions: Any, limit: int
    ) -> int:
        statement = select(*table.primary_key).where(dated < instant, *conditions)
        return self._delete(table, self.rows(statement.order_by(dated).limit(limit)))

    def delete_some_of(self, table: Table, job_id: str, *, limit: int) -> int:
        """Remove rows of this job from a table, at most so many; how many were there."""
        return self._delete(table, self.rows(select(*table.primary_key).where(table.c.job_id == job_id).limit(limit)))

    def _delete(self, table: Table, rows: Sequence[RowMapping]) -> int:
        if rows:
            # By key and one by one: a condition on the time would lock rows that are being inserted on MySQL.
            values = [{f"key_{name}": value for name, value in row.items()} for row in rows]
            self.connection.execute(delete(table).where(*_has_key(table)), values)
        return len(rows)

    def _tokens(self, statement: Select[Any]) -> list[TokenRecord]:
        return [token_from(row) for row in self.rows(statement)]

    def _trials(self, statement: Executable, **parameters: object) -> list[TrialRecord]:
        return _in_order(map(trial_from, self.rows(statement, **parameters)))

    def _update(self, table: Table, rows: Sequence[Mapping[str, Any]]) -> int:
        """Save rows, each with its key, that all name the same columns in the same order.

        How many were there; unknown, with most drivers, if several were to be saved.
        """
        if not rows:
            return 0
        names, statement = _update_of(table, tuple(rows[0]))
        values = [dict(zip(names, row.values(), strict=True)) for row in rows]
        return self.connection.execute(statement, values).rowcount


def _in_order(found: Iterable[TrialRecord]) -> list[TrialRecord]:
    return sorted(found, key=attrgetter("trial_number"))
