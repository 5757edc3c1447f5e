"""Reads and writes within one transaction."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from enum import Enum, auto
from functools import lru_cache
from itertools import islice
from operator import attrgetter
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.sql.base import Executable

from bso_server.core.access import TokenRecord
from bso_server.core.job import CRASH_REASONS, Crash, Crashes
from bso_server.core.model import OBSERVED, UNCOUNTED, Arm, TrialKey, TrialRecord
from bso_server.core.occurrences import Listener, Occurrence, nobody
from bso_server.core.policy import Policy, bandit_entered_from_the_start
from bso_server.core.savings import JobVerdict, verdict_version
from bso_server.storage.faults import JobExistsError
from bso_server.storage.rows import (
    TRIAL_AT_TRANSITION,
    StoredDecision,
    StoredEpoch,
    StoredJob,
    StoredMemory,
    decision_row,
    job_from,
    job_row,
    memory_from,
    memory_row,
    record_row,
    token_from,
    token_row,
    trial_from,
    trial_row,
)
from bso_server.storage.tables import (
    arms,
    decisions,
    epochs,
    jobs,
    policy_memories,
    revisions,
    tokens,
    trials,
    verdicts,
    write_probes,
)
from zeus_plugins.protocol import ALIVE, CreatedJob, Fingerprint, Origin, Revision, TrialState

logger = logging.getLogger("bso_server")

# Several pages in every kind of database, because reports need new pages too.
_PROBE_BYTES = 16384

# Rows that one statement inserts: an import has hundreds of thousands.
_ROWS_AT_ONCE = 500

_JOB_COLUMNS, _TRIAL_COLUMNS = jobs.c.keys(), trials.c.keys()


def _states(states: Collection[TrialState]) -> list[sa.ColumnElement[TrialState]]:
    # One parameter per state, because SQLAlchemy renders the parameters of a list again at each execution.
    return [sa.literal(state, trials.c.state.type) for state in sorted(states)]


# Statements of requests are built once: building one takes longer than SQLite needs to execute it.
_is_alive = trials.c.state.in_(_states(ALIVE))
_is_expired = sa.or_(
    trials.c.lease_expires_at < sa.bindparam("now"), trials.c.lease_expires_at > sa.bindparam("latest")
)
_trials_of_job = sa.select(trials).where(trials.c.job_id == sa.bindparam("job_id"))
_ended_after = _trials_of_job.where(trials.c.ended_event > sa.bindparam("event"))
_explorations = _trials_of_job.where(trials.c.origin == Origin.EXPLORATION, trials.c.state.not_in(_states(UNCOUNTED)))
# A union, because not every database would use the index of each part if the conditions were joined by OR.
_OPEN_TRIALS = sa.union_all(_trials_of_job.where(_is_alive), _ended_after)
_OPEN_TRIALS_AND_EXPLORATIONS = sa.union_all(_trials_of_job.where(_is_alive), _ended_after, _explorations)
_EXPIRED_TRIALS = _trials_of_job.where(_is_alive, _is_expired).with_for_update()
_EXPIRED_TRIALS_OF_NOBODY = _trials_of_job.where(_is_alive, _is_expired).with_for_update(skip_locked=True)
_TRIAL_WITH_KEY = _trials_of_job.where(trials.c.idempotency_key == sa.bindparam("idempotency_key"))
_MEASURED_SIZES = (
    sa.select(trials.c.batch_size, trials.c.state, sa.func.max(trials.c.started_event))
    .where(
        trials.c.job_id == sa.bindparam("job_id"),
        trials.c.state.in_(_states(OBSERVED)),
        trials.c.origin != Origin.FINISH,
    )
    .group_by(trials.c.batch_size, trials.c.state)
)
# Limits the crashes that are read: a size that can run may crash any number of times.
_MOST_CRASHES = 200
_LATEST_CRASHES = (
    sa.select(trials.c.batch_size, sa.func.coalesce(trials.c.message, ""), trials.c.ended_event)
    .where(
        trials.c.job_id == sa.bindparam("job_id"),
        trials.c.end_reason.in_(sorted(CRASH_REASONS)),
        trials.c.origin != Origin.FINISH,
    )
    .order_by(trials.c.trial_number.desc())
    .limit(_MOST_CRASHES)
)
_JOB = sa.select(jobs).where(jobs.c.job_id == sa.bindparam("job_id"))
_LOCKED_JOB, _LOCKED_JOB_OR_NONE = _JOB.with_for_update(), _JOB.with_for_update(skip_locked=True)
_ARMS = sa.select(arms).where(arms.c.job_id == sa.bindparam("job_id")).order_by(arms.c.batch_size)
_MEMORY = sa.select(policy_memories).where(policy_memories.c.job_id == sa.bindparam("job_id"))
_VERDICT = sa.select(verdicts.c.event, verdicts.c.verdict).where(
    verdicts.c.job_id == sa.bindparam("job_id"), verdicts.c.version == sa.bindparam("version")
)
_REVISIONS = sa.select(revisions).where(revisions.c.job_id == sa.bindparam("job_id")).order_by(revisions.c.revision)
_TOKEN = sa.select(tokens).where(tokens.c.token_id == sa.bindparam("token_id"))
_INSERT_TRIALS, _INSERT_EPOCHS, _INSERT_DECISIONS = sa.insert(trials), sa.insert(epochs), sa.insert(decisions)


@lru_cache(maxsize=64)
def _locked_trials_of(size: int, *, skip: bool) -> sa.Select[Any]:
    """Return the query for `size` trials with their jobs; its parameters are ``job_id_0`` and so on."""
    # For ``(job_id, trial_number) IN (…)`` SQLite would read the whole table.
    keys = [
        sa.and_(
            trials.c.job_id == sa.bindparam(f"job_id_{n}"), trials.c.trial_number == sa.bindparam(f"trial_number_{n}")
        )
        for n in range(size)
    ]
    query: sa.Select[Any] = sa.select(trials, jobs).join_from(trials, jobs).where(sa.or_(*keys))
    query = query.order_by(trials.c.job_id, trials.c.trial_number)
    return query.with_for_update(of=trials, skip_locked=skip)


@lru_cache(maxsize=64)
def _update_of(table: sa.Table, names: tuple[str, ...]) -> tuple[tuple[str, ...], sa.Update]:
    """Return the parameter names of an update of one row, and the statement; `names` are its columns with the key."""
    key = table.primary_key.columns.keys()
    changed: dict[str, Any] = {name: sa.bindparam(name) for name in names if name not in key}
    statement = sa.update(table).where(*_has_key(table)).values(changed)
    return tuple(f"key_{name}" if name in key else name for name in names), statement


def _has_key(table: sa.Table) -> Iterator[sa.ColumnElement[bool]]:
    # SQLAlchemy refuses parameters with the names of updated columns, hence the prefix.
    return (column == sa.bindparam(f"key_{column.name}") for column in table.primary_key)


class RowLocked(Enum):
    """Outcome of work that must not wait for locks and needs a row that another transaction has locked."""

    ROW_LOCKED = auto()


class Transaction:
    """One transaction; the stores create it and discard it after its end.

    Methods named ``locked_…`` make other writers of the same rows wait until the transaction ends; on SQLite, the
    transaction locks the whole file.

    Lock order: rows of one table in the order of their keys. Ending a trial locks the trial, then its job. Dispatching
    or abandoning locks the job, then only its expired trials. Setting a target locks the job, then its open trials. A
    revision locks the job, then its trials if it changes the GPUs.
    """

    def __init__(self, connection: sa.Connection) -> None:
        self.connection = connection
        self._log: list[tuple[object, ...]] = []
        self._occurrences: list[Occurrence] = []

    def log(self, message: str, *arguments: object) -> None:
        """Log a line after the commit."""
        self._log.append((message, *arguments))

    def tell(self, occurrence: Occurrence) -> None:
        """Send an occurrence to the listener after the commit."""
        self._occurrences.append(occurrence)

    def publish(self, listener: Listener = nobody) -> None:
        """Log the lines and send the occurrences of this transaction, which has been committed."""
        for message, *arguments in self._log:
            logger.info(message, *arguments)
        for occurrence in self._occurrences:
            listener(occurrence)

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Undo the changes of the block if it raises."""
        self.connection.exec_driver_sql("SAVEPOINT work")
        try:
            yield
        except Exception:
            self.connection.exec_driver_sql("ROLLBACK TO SAVEPOINT work")
            raise
        finally:
            self.connection.exec_driver_sql("RELEASE SAVEPOINT work")

    def rows(self, statement: Executable, **parameters: object) -> Sequence[sa.RowMapping]:
        """Return the rows of a query as mappings by column name."""
        return self.connection.execute(statement, parameters).mappings().all()

    def tuples(self, statement: Executable, **parameters: object) -> Sequence[sa.Row[Any]]:
        """Return the rows of a query as tuples."""
        return self.connection.execute(statement, parameters).all()

    def job(self, job_id: str) -> StoredJob | None:
        """Return the job, or None."""
        return next(map(job_from, self.rows(_JOB, job_id=job_id)), None)

    def jobs_with_parameters(self, policy: str, parameters: str, *, limit: int) -> list[StoredJob]:
        """Return the newest jobs of a policy that have reached their target, with this hash of their parameters."""
        statement = sa.select(jobs).where(jobs.c.policy == policy, jobs.c.min_cost_j.is_not(None))
        text = Fingerprint(parameters=parameters).model_dump_json(include={"parameters"}).strip("{}")
        statement = statement.where(jobs.c.fingerprint.contains(text, autoescape=True))
        return [job_from(row) for row in self.rows(statement.order_by(jobs.c.created_at.desc()).limit(limit))]

    @property
    def can_skip(self) -> bool:
        """True if queries can skip locked rows; False on SQLite, which locks files."""
        return self.connection.dialect.name != "sqlite"

    def locked_job(self, job_id: str, *, skip: bool = False) -> StoredJob | None:
        """Lock and return the job; None if it does not exist, or with `skip`, if another transaction has locked it."""
        statement = _LOCKED_JOB_OR_NONE if skip and self.can_skip else _LOCKED_JOB
        return next(map(job_from, self.rows(statement, job_id=job_id)), None)

    def locked_trials(
        self, keys: Collection[TrialKey], *, skip: bool = False
    ) -> dict[TrialKey, tuple[StoredJob, TrialRecord]]:
        """Lock the trials with these keys that exist, in one statement, and return each with its job.

        With `skip`, leave out trials that another transaction has locked, instead of waiting. The jobs are locked too
        if `locks_jobs_with_trials`; otherwise reports on different trials of one job do not wait for each other.
        """
        found: dict[TrialKey, tuple[StoredJob, TrialRecord]] = {}
        jobs_found: dict[str, StoredJob] = {}
        wanted, parameters = sorted(keys), dict[str, Any]()
        # The query has a power of two of keys, so that few such queries exist; the last key fills the remaining places.
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
        """True if the database cannot lock only one table of a join: SQLite and MariaDB."""
        dialect = self.connection.dialect
        return not (dialect.name == "postgresql" or getattr(dialect, "supports_for_update_of", False))

    def all_trials(self, job_id: str) -> list[TrialRecord]:
        """Return every trial of the job, in order of dispatch."""
        return self._trials(_trials_of_job, job_id=job_id)

    def open_trials(self, job_id: str, event: int, *, with_explorations: bool) -> list[TrialRecord]:
        """Return the trials that a decision needs individually, in order of dispatch.

        These are the job's trials that are alive, the trials that ended after `event`, and, with `with_explorations`,
        the explorations that count.
        """
        statement = _OPEN_TRIALS_AND_EXPLORATIONS if with_explorations else _OPEN_TRIALS
        found = self._trials(statement, job_id=job_id, event=event)
        return list({trial.trial_number: trial for trial in found}.values())

    def locked_expired_trials(self, job_id: str, now: datetime, latest: datetime) -> list[TrialRecord]:
        """Lock and return the job's alive trials whose leases end before `now` or after `latest`, in order of dispatch.

        Trials that another transaction has locked are left out, because a report may be renewing their leases.
        """
        statement = _EXPIRED_TRIALS_OF_NOBODY if self.can_skip else _EXPIRED_TRIALS
        return self._trials(statement, job_id=job_id, now=now, latest=latest)

    def jobs_with_expired_trials(self, now: datetime, latest: datetime) -> list[str]:
        """Return the ids of jobs with trials as in `locked_expired_trials`, in order."""
        statement = sa.select(trials.c.job_id).distinct().where(_is_alive, _is_expired).order_by(trials.c.job_id)
        return [job_id for (job_id,) in self.tuples(statement, now=now, latest=latest)]

    def trial_with_key(self, job_id: str, idempotency_key: str) -> TrialRecord | None:
        """Return the trial that a request with this key started, or None."""
        return next(iter(self._trials(_TRIAL_WITH_KEY, job_id=job_id, idempotency_key=idempotency_key)), None)

    def crashes(self, job_id: str) -> Crashes:
        """Return the latest crashes of the job, and the sizes of which a trial was measured to its end."""
        measured = [tuple(row) for row in self.tuples(_MEASURED_SIZES, job_id=job_id)]
        return Crashes(
            tuple(Crash._make(tuple(row)) for row in self.tuples(_LATEST_CRASHES, job_id=job_id)),
            frozenset(size for size, _, _ in measured),
            frozenset(size for size, state, _ in measured if state is TrialState.COMPLETED),
            max((event for _, _, event in measured), default=0),
        )

    def arms(self, job_id: str) -> dict[int, Arm]:
        """Return the arms of the job by batch size, ascending."""
        return {row["batch_size"]: row["arm"] for row in self.rows(_ARMS, job_id=job_id)}

    def memory(self, job_id: str, policy: Policy) -> StoredMemory | None:
        """Return the memory of this version of the job's policy, or None."""
        found = self.rows(_MEMORY, job_id=job_id)
        return memory_from(found[0], policy) if found else None

    def save_memory(self, stored: StoredMemory, policy: Policy) -> None:
        """Replace the policy's memory of a locked job."""
        row = memory_row(stored, policy)
        if not self._update(policy_memories, [row]):
            self.connection.execute(sa.insert(policy_memories), row)

    def forget_memory(self, job_id: str) -> None:
        """Delete the policy's memory and the verdict of a locked job; they are computed again when they are needed."""
        for table in (policy_memories, verdicts):
            self.connection.execute(sa.delete(table).where(table.c.job_id == job_id))

    def verdict(self, job: StoredJob) -> tuple[int, JobVerdict] | None:
        """Return the stored verdict on a job, and the event up to which it includes the ends of trials, or None."""
        found = self.rows(_VERDICT, job_id=job.job_id, version=verdict_version(job.registration.policy))
        return (found[0]["event"], found[0]["verdict"]) if found else None

    def save_verdict(self, job: StoredJob, verdict: JobVerdict) -> None:
        """Replace the verdict on a locked job, which includes the ends of its trials up to the job's event count."""
        self.connection.execute(sa.delete(verdicts).where(verdicts.c.job_id == job.job_id))
        row = {"version": verdict_version(job.registration.policy), "event": job.event_count, "verdict": verdict}
        self.connection.execute(sa.insert(verdicts).values(job_id=job.job_id, trouble=verdict.trouble, **row))

    def insert_job(
        self,
        registration: CreatedJob,
        created_at: datetime,
        *,
        owner: str | None = None,
        shared: bool = False,
    ) -> None:
        """Insert a job with its arms.

        Raises:
            JobExistsError: Another job has its id; the transaction must end.
        """
        entered_at = bandit_entered_from_the_start(registration)
        new = StoredJob(
            registration=registration,
            created_at=created_at,
            bandit_entered_at=entered_at,
            rng_state=None,
            shared=shared,
        )
        row = (
            job_row(new)
            | _terms_of(registration)
            | {
                "job_id_prefix": registration.job_id_prefix,
                "registration_id": registration.registration_id,
                "created_at": created_at,
                "owner": owner,
            }
        )
        try:
            self.connection.execute(sa.insert(jobs).values(row))
        except IntegrityError as error:
            raise JobExistsError(registration.job_id) from error
        self.connection.execute(sa.insert(arms), _arm_rows(registration.job_id, map(Arm, registration.batch_sizes)))

    def update_jobs(self, changed: Iterable[StoredJob]) -> None:
        """Save the changeable columns of locked jobs."""
        self._update(jobs, [job_row(job) for job in changed])

    def revise_job(self, revised: StoredJob, revision: Revision) -> None:
        """Save a locked job after a revision, with the revision."""
        values = _terms_of(revised.registration) | job_row(revised)
        self.connection.execute(sa.update(jobs).where(jobs.c.job_id == revised.job_id).values(values))
        self.insert_revisions(revised.job_id, [revision])

    def insert_revisions(self, job_id: str, added: Iterable[Revision]) -> None:
        """Insert revisions."""
        self._insert(sa.insert(revisions), ({"job_id": job_id, **dict(each)} for each in added))

    def revisions(self, job_id: str) -> tuple[Revision, ...]:
        """Return the revisions of a job, in order."""
        return tuple(Revision(**row) for row in self.rows(_REVISIONS, job_id=job_id))

    def replace_arms(self, job_id: str, arms_after: Iterable[Arm]) -> None:
        """Save all arms of a locked job, some of which may be new."""
        self.connection.execute(sa.delete(arms).where(arms.c.job_id == job_id))
        self.connection.execute(sa.insert(arms), _arm_rows(job_id, arms_after))

    def update_arms(self, job_id: str, changed: Iterable[Arm]) -> None:
        """Save arms of a locked job."""
        self._update(arms, _arm_rows(job_id, changed))

    def delete_job(self, job_id: str) -> bool:
        """Delete a job with all its trials; return False if it did not exist."""
        return bool(self.connection.execute(sa.delete(jobs).where(jobs.c.job_id == job_id)).rowcount)

    def insert_trials(self, added: Sequence[TrialRecord]) -> None:
        """Insert trials."""
        self._insert(_INSERT_TRIALS, (trial_row(trial) for trial in added))

    def update_trials(self, changed: Sequence[TrialRecord], columns: tuple[str, ...] = TRIAL_AT_TRANSITION) -> None:
        """Save these columns of locked trials; by default, every column that a report or a new state may change.

        `TRIAL_AT_REPORT` leaves out indexed columns. A report on a running trial does not change them, but databases
        would write their indexes again.
        """
        self._update(trials, [trial_row(trial, columns) for trial in changed])

    def insert_epochs(self, added: Sequence[StoredEpoch]) -> None:
        """Insert reports."""
        self._insert(_INSERT_EPOCHS, (record_row(epoch) for epoch in added))

    def delete_reports_from(self, key: TrialKey, report_number: int) -> None:
        """Delete the reports of a locked trial from this number on."""
        of_trial = epochs.c.job_id == key[0], epochs.c.trial_number == key[1]
        self.connection.execute(sa.delete(epochs).where(*of_trial, epochs.c.report_number >= report_number))

    def delete_epochs_before(self, instant: datetime, *, limit: int) -> int:
        """Delete up to `limit` reports received before `instant`, oldest first; return their number."""
        reported_at = epochs.c.reported_at
        old = sa.select(*epochs.primary_key).where(reported_at < instant).order_by(reported_at).limit(limit)
        keys = self.rows(old)
        if keys:
            # By key, because on MySQL a condition on the time would lock rows that others are inserting.
            values = [{f"key_{name}": value for name, value in key.items()} for key in keys]
            self.connection.execute(sa.delete(epochs).where(*_has_key(epochs)), values)
        return len(keys)

    def insert_decisions(self, added: Iterable[StoredDecision]) -> None:
        """Insert decisions."""
        self._insert(_INSERT_DECISIONS, (decision_row(decision) for decision in added))

    def write_probe(self, probe_id: str) -> None:
        """Insert and delete a row of several pages, which fails if the database is read-only or full."""
        ballast = secrets.token_hex(_PROBE_BYTES // 2)
        self.connection.execute(sa.insert(write_probes).values(probe_id=probe_id, ballast=ballast))
        self.connection.execute(sa.delete(write_probes).where(write_probes.c.probe_id == probe_id))

    def insert_token(self, token: TokenRecord) -> None:
        """Insert a token."""
        self.connection.execute(sa.insert(tokens).values(token_row(token)))

    def token(self, token_id: str) -> TokenRecord | None:
        """Return the token, even if it was revoked, or None."""
        return next(map(token_from, self.rows(_TOKEN, token_id=token_id)), None)

    def all_tokens(self) -> list[TokenRecord]:
        """Return every token, oldest first."""
        return list(map(token_from, self.rows(sa.select(tokens).order_by(tokens.c.created_at, tokens.c.token_id))))

    def any_token(self) -> bool:
        """Return whether a token exists, valid or revoked."""
        return self.connection.execute(sa.select(tokens.c.token_id).limit(1)).first() is not None

    def update_token(self, changed: TokenRecord) -> None:
        """Save a locked token."""
        self._update(tokens, [token_row(changed)])

    def locked_token(self, token_id: str) -> TokenRecord | None:
        """Lock the token, and return it like `token`."""
        return next(map(token_from, self.rows(_TOKEN.with_for_update(), token_id=token_id)), None)

    def _trials(self, statement: Executable, **parameters: object) -> list[TrialRecord]:
        # Sorted here, because for ORDER BY SQLite would read all trials of the job.
        return sorted(map(trial_from, self.rows(statement, **parameters)), key=attrgetter("trial_number"))

    def _insert(self, statement: sa.Insert, rows: Iterable[Mapping[str, Any]]) -> None:
        left = iter(rows)
        while some := list(islice(left, _ROWS_AT_ONCE)):
            self.connection.execute(statement, some)

    def _update(self, table: sa.Table, rows: Sequence[Mapping[str, Any]]) -> int:
        """Update rows; each includes its key, and all have the same columns in the same order.

        Return the number of rows that exist, which most drivers know only for a single row.
        """
        if not rows:
            return 0
        names, statement = _update_of(table, tuple(rows[0]))
        values = [dict(zip(names, row.values(), strict=True)) for row in rows]
        return self.connection.execute(statement, values).rowcount


def _terms_of(registration: CreatedJob) -> dict[str, Any]:
    """Return the columns of a job that only revisions change."""
    spec = registration.model_dump_json(exclude={"fingerprint", "registration_id"})
    return {"policy": registration.policy, "spec": spec}


def _arm_rows(job_id: str, changed: Iterable[Arm]) -> list[dict[str, Any]]:
    return [{"job_id": job_id, "batch_size": arm.batch_size, "arm": arm} for arm in changed]
