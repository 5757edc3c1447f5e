"""One transaction: what is read and written in it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Delete,
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
from sqlalchemy.exc import IntegrityError

from bso_server.core.access import TokenRecord
from bso_server.core.history import Arm, bandit_entered_from_the_start
from bso_server.core.model import OBSERVED, UNCOUNTED, TrialKey, TrialRecord
from bso_server.storage.rows import (
    TRIAL,
    TRIAL_AT_TRANSITION,
    StoredEpoch,
    StoredJob,
    StoredPowerProfile,
    TrialColumns,
    arm_from,
    arm_row,
    epoch_row,
    job_from,
    job_row,
    power_profile_from,
    power_profile_row,
    token_from,
    token_row,
    trial_from,
)
from bso_server.storage.tables import arms, epochs, jobs, power_profiles, tokens, trials, write_probes
from zeus_plugins.protocol import ALIVE, JobRegistration, Origin, TrialState

logger = logging.getLogger("bso_server")

# Some pages of each kind of database: a report, too, needs a new one now and then.
_PROBE_BYTES = 16384

IS_THERE = jobs.c.importing_at.is_(None)
"""The condition that a job is one, and not a part of one that is being imported."""


class JobExistsError(Exception):
    """Another transaction inserted the same job_id first."""


class RowLockedError(Exception):
    """Another transaction has locked a row that this one was not to wait for."""


class Transaction:
    """One transaction. Made by `Store` alone; dead once it has ended.

    Methods named ``locked_…`` make other writers of the same rows wait until the transaction ends (on SQLite the whole
    transaction does). Rows of one table are locked in the order of their keys. What ends a trial locks it before its
    job; what begins one or abandons it locks the job first, and of its trials only those whose leases have run out.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._log: list[tuple[object, ...]] = []

    def log(self, message: str, *arguments: object) -> None:
        """Have a line logged once the transaction is in force."""
        self._log.append((message, *arguments))

    def write_log(self) -> None:
        """Log what there is to say of this transaction, which has been committed."""
        for message, *arguments in self._log:
            logger.info(message, *arguments)

    def rows(self, statement: Select[Any]) -> Sequence[RowMapping]:
        """The rows of a query that only reads; `queries` holds those that no decision needs."""
        return self._connection.execute(statement).mappings().all()

    def change(self, statement: Update | Delete) -> int:
        """Change rows that no decision rests on, of a job that is being imported; their number."""
        return self._connection.execute(statement).rowcount

    def job(self, job_id: str) -> StoredJob | None:
        """The job, or None."""
        return self._jobs(select(jobs).where(jobs.c.job_id == job_id)).get(job_id)

    @property
    def can_skip(self) -> bool:
        """True if the database can leave out rows that others have locked: all can but SQLite, and old versions.

        On SQLite there are none, as the transaction has locked the file.
        """
        dialect = self._connection.dialect
        if dialect.name == "sqlite":
            return False
        least = (
            (0,) if dialect.name == "postgresql" else (10, 6) if getattr(dialect, "is_mariadb", False) else (8, 0, 1)
        )
        return (dialect.server_version_info or least) >= least

    def locked_job(self, job_id: str, *, skip: bool = False) -> StoredJob | None:
        """The job, or None; other writers wait."""
        return self.locked_jobs([job_id], skip=skip).get(job_id)

    def locked_jobs(self, job_ids: Collection[str], *, skip: bool = False) -> dict[str, StoredJob]:
        """Those of these jobs that exist, and that nobody has locked if they are to `skip`; other writers wait."""
        statement = select(jobs).where(jobs.c.job_id.in_(sorted(job_ids))).order_by(jobs.c.job_id)
        return self._jobs(statement.with_for_update(skip_locked=skip and self.can_skip))

    def locked_trials(
        self, keys: Collection[TrialKey], *, skip: bool = False
    ) -> dict[TrialKey, tuple[StoredJob, TrialRecord]]:
        """Those of these trials that exist, each with its job, in one statement; other writers of the trials wait.

        Told to `skip`, it leaves out those that another transaction has locked, instead of waiting for that. The
        jobs are locked, too, if `locks_jobs_with_trials`. A trial that goes on changes nothing of its job, so that
        reports on different trials of one job need not wait for each other.
        """
        found: dict[TrialKey, tuple[StoredJob, TrialRecord]] = {}
        jobs_found: dict[str, StoredJob] = {}
        for row in self._connection.execute(*_locked_trials(sorted(keys), skip=skip and self.can_skip)):
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

    def all_trials(self, job_id: str) -> list[TrialRecord]:
        """Every trial of the job, in order of dispatch."""
        return self._trials(trials.c.job_id == job_id)

    def counted_explorations(self, job_id: str) -> list[TrialRecord]:
        """The job's exploration trials that count, in order of dispatch."""
        return self._trials(
            trials.c.job_id == job_id, trials.c.origin == Origin.EXPLORATION, trials.c.state.not_in(UNCOUNTED)
        )

    def in_flight(self, job_id: str) -> list[TrialRecord]:
        """The job's trials that are running or may go on, in order of dispatch."""
        return self._trials(trials.c.job_id == job_id, trials.c.state.in_(ALIVE))

    def ended_after(self, job_id: str, event: int) -> list[TrialRecord]:
        """Trials that ended after this event of the job, in order of their ends."""
        found = self._trials(trials.c.job_id == job_id, trials.c.ended_event > event)
        return sorted(found, key=lambda trial: trial.ended_event or 0)

    def locked_expired_trials(self, job_id: str, now: datetime, latest: datetime) -> list[TrialRecord]:
        """The job's trials whose leases have run out, or end after `latest`, in order of dispatch; other writers wait.

        Those that another transaction has locked are left out: it may be the report that renews the lease.
        """
        return self._trials(trials.c.job_id == job_id, *_expired(now, latest), lock=True)

    def jobs_with_expired_trials(self, now: datetime, latest: datetime) -> list[str]:
        """Ids of jobs that have such trials, in order."""
        statement = select(trials.c.job_id).distinct().where(*_expired(now, latest)).order_by(trials.c.job_id)
        return list(self._connection.execute(statement).scalars())

    def trial_with_key(self, job_id: str, idempotency_key: str) -> TrialRecord | None:
        """The trial that a request with this key started, or None."""
        return next(iter(self._trials(trials.c.job_id == job_id, trials.c.idempotency_key == idempotency_key)), None)

    def crashes(self, job_id: str, batch_size: int) -> tuple[int, bool]:
        """The number of the size's trials that crashed, and whether one was ever measured to its end."""
        statement = (
            select(trials.c.state, func.count())
            .where(trials.c.job_id == job_id, trials.c.batch_size == batch_size)
            .group_by(trials.c.state)
        )
        counts: dict[TrialState, int] = {row[0]: row[1] for row in self._connection.execute(statement)}
        return counts.get(TrialState.FAILED, 0), any(state in OBSERVED for state in counts)

    def arms(self, job_id: str) -> dict[int, Arm]:
        """The arms of the job by batch size, ascending."""
        statement = select(arms).where(arms.c.job_id == job_id).order_by(arms.c.batch_size)
        return {row["batch_size"]: arm_from(row) for row in self.rows(statement)}

    def insert_job(
        self,
        registration: JobRegistration,
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
            "policy": registration.policy.value,
            "spec": registration.model_dump_json(exclude={"fingerprint", "registration_id"}),
            "registration_id": registration.registration_id,
            "created_at": created_at,
            "owner": owner,
            "shared": shared,
            "importing_at": importing_at,
        }
        try:
            self._connection.execute(insert(jobs).values(row))
        except IntegrityError as error:
            raise JobExistsError(registration.job_id) from error
        rows = [{"job_id": registration.job_id, **arm_row(Arm(size))} for size in registration.batch_sizes]
        self._connection.execute(insert(arms), rows)

    def update_jobs(self, changed: Iterable[StoredJob]) -> None:
        """Save what may change of jobs whose rows this transaction has locked."""
        self._update(jobs, [job_row(job) for job in changed])

    def share_job(self, job_id: str, *, shared: bool) -> None:
        """Say whether other tokens than its owner may use a locked job."""
        self._connection.execute(update(jobs).where(jobs.c.job_id == job_id).values(shared=shared))

    def update_arms(self, job_id: str, changed: Iterable[Arm]) -> None:
        """Replace what is remembered of these batch sizes of a locked job."""
        self._update(arms, [{"job_id": job_id, **arm_row(arm)} for arm in changed])

    def delete_job(self, job_id: str) -> bool:
        """Remove a job with all its trials; False if there was none."""
        return bool(self._connection.execute(delete(jobs).where(jobs.c.job_id == job_id, IS_THERE)).rowcount)

    def insert_trials(self, added: Sequence[TrialRecord]) -> None:
        """Add trials that were just dispatched, or that another database has seen."""
        if added:
            self._connection.execute(_INSERT_TRIALS, [TRIAL.of(trial) for trial in added])

    def update_trials(self, changed: Iterable[TrialRecord], columns: TrialColumns = TRIAL_AT_TRANSITION) -> None:
        """Save what may change of trials whose rows this transaction has locked, or only these columns.

        `TRIAL_AT_REPORT` has those that a report changes of a trial that was running and still is: the others stand in
        indexes, which a database would write anew for the same values.
        """
        self._update(trials, [columns.of(trial) for trial in changed])

    def insert_epochs(self, added: Sequence[StoredEpoch]) -> None:
        """Add reports to the epochs of their trials."""
        if added:
            self._connection.execute(_INSERT_EPOCHS, [epoch_row(epoch) for epoch in added])

    def delete_epochs_before(self, instant: datetime, *, limit: int) -> int:
        """Remove reports that were taken before then, at most `limit` of them, oldest first; how many were there."""
        return self._delete_some(epochs, epochs.c.reported_at, instant, limit=limit)

    def newest_power_profile(self, job_id: str, batch_size: int) -> StoredPowerProfile | None:
        """That of the latest trial of this size which has left one, or None."""
        return self._power_profile(power_profiles.c.job_id == job_id, power_profiles.c.batch_size == batch_size)

    def power_profile(self, key: TrialKey) -> StoredPowerProfile | None:
        """The profile that this trial has left, or None."""
        return self._power_profile(power_profiles.c.job_id == key[0], power_profiles.c.trial_number == key[1])

    def insert_power_profiles(self, added: Iterable[StoredPowerProfile]) -> None:
        """Add the profiles of trials that have left none."""
        rows = [power_profile_row(profile) for profile in added]
        if rows:
            self._connection.execute(insert(power_profiles), rows)

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

    def write_probe(self, probe_id: str) -> None:
        """Write a row that is gone at the commit: the database must have leave to write, and room for some pages."""
        ballast = secrets.token_hex(_PROBE_BYTES // 2)
        self._connection.execute(insert(write_probes).values(probe_id=probe_id, ballast=ballast))
        self._connection.execute(delete(write_probes).where(write_probes.c.probe_id == probe_id))

    def insert_token(self, token: TokenRecord) -> None:
        """Add a token."""
        self._connection.execute(insert(tokens).values(token_row(token)))

    def token(self, token_id: str) -> TokenRecord | None:
        """The token, even if it was revoked, or None."""
        return next(iter(self._tokens(select(tokens).where(tokens.c.token_id == token_id))), None)

    def all_tokens(self) -> list[TokenRecord]:
        """Every token, oldest first."""
        return self._tokens(select(tokens).order_by(tokens.c.created_at, tokens.c.token_id))

    def any_token(self, *, valid: bool = False) -> bool:
        """True if there is a token, perhaps one that was not revoked."""
        statement = select(tokens.c.token_id).where(*[tokens.c.revoked_at.is_(None)] * valid).limit(1)
        return self._connection.execute(statement).first() is not None

    def update_token(self, changed: TokenRecord) -> None:
        """Save a locked token."""
        self._update(tokens, [token_row(changed)])

    def locked_token(self, token_id: str) -> TokenRecord | None:
        """The token as `token` gives it; other writers wait."""
        return next(iter(self._tokens(select(tokens).where(tokens.c.token_id == token_id).with_for_update())), None)

    def jobs_per_owner(self) -> dict[str, int]:
        """The number of jobs of each token that has any, by its id."""
        statement = select(jobs.c.owner, func.count()).where(jobs.c.owner.is_not(None), IS_THERE).group_by(jobs.c.owner)
        return {row[0]: row[1] for row in self._connection.execute(statement)}

    def alive_trials_of(self, owner: str) -> int:
        """The number of this token's trials that run or may go on."""
        statement = select(func.count()).where(trials.c.owner == owner, trials.c.state.in_(ALIVE))
        return self._connection.execute(statement).scalar_one()

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
            self._connection.execute(delete(table).where(*_has_key(table)), values)
        return len(rows)

    def _tokens(self, statement: Select[Any]) -> list[TokenRecord]:
        return [token_from(row) for row in self.rows(statement)]

    def _jobs(self, statement: Select[Any]) -> dict[str, StoredJob]:
        return {row["job_id"]: job_from(row) for row in self.rows(statement.where(IS_THERE))}

    def _power_profile(self, *conditions: ColumnElement[bool]) -> StoredPowerProfile | None:
        """The one of the latest trial."""
        statement = select(power_profiles).where(*conditions).order_by(power_profiles.c.trial_number.desc()).limit(1)
        return next(map(power_profile_from, self.rows(statement)), None)

    def _trials(self, *conditions: ColumnElement[bool], lock: bool = False) -> list[TrialRecord]:
        statement = select(trials).where(*conditions)
        rows = self.rows(statement.with_for_update(skip_locked=self.can_skip) if lock else statement)
        # Sorted here: told to sort, SQLite would walk through all of the job's trials in that order.
        return sorted(map(trial_from, rows), key=lambda trial: trial.trial_number)

    def _update(self, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows:
            return
        key = table.primary_key.columns
        values = [{f"key_{name}" if name in key else name: value for name, value in row.items()} for row in rows]
        self._connection.execute(_update_of(table, tuple(rows[0])), values)


@lru_cache(maxsize=64)
def _update_of(table: Table, names: tuple[str, ...]) -> Update:
    """The update of these columns in the row with this key. Putting it together costs more than running it."""
    key = table.primary_key.columns
    changed: dict[str, Any] = {name: bindparam(name) for name in names if name not in key}
    return update(table).where(*_has_key(table)).values(changed)


def _has_key(table: Table) -> Iterator[ColumnElement[bool]]:
    # A bound value may not have the name of a column that is set.
    return (column == bindparam(f"key_{column.name}") for column in table.primary_key)


def _expired(now: datetime, latest: datetime) -> tuple[ColumnElement[bool], ...]:
    return trials.c.state.in_(ALIVE), or_(trials.c.lease_expires_at < now, trials.c.lease_expires_at > latest)


_INSERT_EPOCHS = insert(epochs)
_INSERT_TRIALS = insert(trials)
_JOB_COLUMNS = jobs.c.keys()
_TRIAL_COLUMNS = trials.c.keys()


def _locked_trials(keys: Sequence[TrialKey], *, skip: bool) -> tuple[Select[Any], dict[str, Any]]:
    """The query for the trials with these keys, each with its job, and its parameters."""
    # A few sizes of the query are enough: to ask for a key twice does no harm.
    size = 1 << (len(keys) - 1).bit_length()
    padded = [*keys, *[keys[-1]] * (size - len(keys))]
    parameters: dict[str, Any] = {}
    for n, (job_id, trial_number) in enumerate(padded):
        parameters |= {f"job_id_{n}": job_id, f"trial_number_{n}": trial_number}
    return _locked_trials_of(size, skip=skip), parameters


@lru_cache(maxsize=64)
def _locked_trials_of(size: int, *, skip: bool) -> Select[Any]:
    """The query for so many keys. For ``(job_id, trial_number) IN (…)`` SQLite would read the whole table."""
    condition = or_(
        *(
            and_(trials.c.job_id == bindparam(f"job_id_{n}"), trials.c.trial_number == bindparam(f"trial_number_{n}"))
            for n in range(size)
        )
    )
    query = select(trials, jobs).join_from(trials, jobs).where(condition, IS_THERE)
    return query.order_by(trials.c.job_id, trials.c.trial_number).with_for_update(of=trials, skip_locked=skip)
