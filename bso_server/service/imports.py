"""Imports: an export (`service.exports`) becomes a job, which no query finds before it is complete.

Small transactions write the rows, so that other writers get their turn. Parsing and validation run in a thread, so that
the event loop stays free.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from itertools import chain
from typing import Any, Self, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError, ValidationInfo, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from bso_server.core.model import OBSERVED, Arm, Cheapest, TrialRecord, arms_after, cost_of
from bso_server.core.policy import bandit_entered_from_the_start, find, installed, memory_after
from bso_server.core.revisions import as_of
from bso_server.errors import InvalidImportError, JobConflictError
from bso_server.service import reading
from bso_server.service.exports import JobExport, TrialExport, TrialRows, line_of
from bso_server.service.loading import Unsaved
from bso_server.service.refusals import refuse_folder_name
from bso_server.storage import queries
from bso_server.storage.rows import (
    TRIAL,
    StoredDecision,
    StoredEpoch,
    StoredJob,
    StoredMemory,
    StoredPowerProfile,
    trial_from,
)
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import ALIVE, ZEUS, CreatedJob, JobSummary, Origin, TrialState

# Size of a job with hundreds of thousands of reports. The command line imports larger jobs, without HTTP.
MAX_IMPORT_BYTES = 256 * 1024 * 1024

# Size of a trial with about 100,000 reports.
LONGEST_LINE_BYTES = 32 * 1024 * 1024

# Largest number of rows that one transaction writes or removes.
_ROWS_AT_ONCE = 500

# Bytes of lines, and number of ended trials, that are processed at a time, within a few milliseconds.
_BYTES_AT_ONCE = 64 * 1024
_TRIALS_AT_ONCE = 100

# An import that has written nothing for this time was interrupted, and its job is removed.
SILENCE = timedelta(minutes=10)
_REFRESH = SILENCE / 10

# Fields that follow from a trial's epochs, which Zeus does not keep.
_OF_EPOCHS = ("epoch", "first_epoch")

Message = TypeVar("Message", bound=BaseModel)

logger = logging.getLogger("bso_server")


def _contradiction(field: str, message: str) -> ValidationError:
    """Return an error that names a field; in a validator of the whole message, pydantic names none."""
    error = PydanticCustomError("contradiction", "{message}", {"message": message})
    return ValidationError.from_exception_data("export", [InitErrorDetails(type=error, loc=(field,), input=None)])


def _check_revisions(export: JobExport) -> None:
    """Check that revisions are numbered from 1 without gaps, and that the terms before each form a valid job."""
    order = [(revision.revision, revision.event) for revision in export.revisions]
    if [number for number, _ in order] != list(range(1, len(order) + 1)) or order != sorted(
        order, key=lambda pair: pair[1]
    ):
        raise _contradiction("revisions", "revisions are numbered 1, 2, 3, …, with ascending events")
    for number, revision in enumerate(export.revisions):
        try:
            as_of(export.job, export.revisions, revision.event - 1)
        except ValidationError as error:
            raise _contradiction(
                f"revisions.{number}.changes", f"no terms of a job: {error.errors()[0]['msg']}"
            ) from error


class ImportedJob(JobExport):
    """The first line of an export, with consistent fields."""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        _check_revisions(self)
        survivors = self.survivors or ()
        if list(survivors) != sorted(set(survivors) & set(self.job.batch_sizes)):
            raise _contradiction("survivors", "survivors are some of the job's batch_sizes, ascending")
        if self.rng_state is not None:
            try:
                np.random.default_rng(0).bit_generator.state = json.loads(self.rng_state)
            except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
                raise _contradiction("rng_state", f"not the state of a random generator: {error}") from error
        return self


class ImportedTrial(TrialExport):
    """A trial in an export, with consistent fields.

    The context of the validation contains the registration as ``job``, and all batch sizes that the job ever had as
    ``sizes``.
    """

    def record_of(self, job_id: str) -> TrialRecord:
        """Return the trial's row in this job."""
        values = {name: value for name, value in self if name in TRIAL}
        return trial_from({"job_id": job_id, **values, **self._first_totals()})

    def _first_totals(self) -> dict[str, float]:
        """Return the totals at the first report if the export, of version 0.1, has its cost instead."""
        if self.first_time_s is not None or self.first_epoch is None or not self.epoch:
            return {}
        for each in self.epochs[:1]:
            if each.report_number == 1:
                return {"first_time_s": each.time_s, "first_energy_j": each.energy_j}
        # The first report was pruned: estimate its totals by its share of the epochs.
        share = self.first_epoch / self.epoch
        return {"first_time_s": share * (self.time_s or 0.0), "first_energy_j": share * (self.energy_j or 0.0)}

    @model_validator(mode="after")
    def _goes_together(self, info: ValidationInfo) -> Self:
        job: CreatedJob = (info.context or {})["job"]
        sizes: frozenset[int] = (info.context or {})["sizes"]
        for field, message in chain(self._contradictions(job, sizes), self._contradictions_of_reports(job)):
            raise _contradiction(field, message)
        return self

    def _contradictions(self, job: CreatedJob, sizes: frozenset[int]) -> Iterator[tuple[str, str]]:
        """Yield a field and a message for each contradiction in the trial's life and batch size."""
        for field in self.not_finite:
            yield field, "was NaN or infinite in the database that wrote this line: give it a number"
        is_alive = self.state in ALIVE
        for name in ("ended_event", "ended_at"):
            if (getattr(self, name) is None) is not is_alive:
                yield name, f"goes with having ended, and the trial is {self.state}"
        if self.ended_event is not None and self.ended_event < self.started_event:
            yield "ended_event", "lies before started_event"
        if (self.lease_expires_at is None) is is_alive:
            yield "lease_expires_at", f"goes with being alive, and the trial is {self.state}"
        if self.batch_size not in sizes:
            yield "batch_size", f"{self.batch_size} is not one of the job's batch_sizes {list(job.batch_sizes)}"
        if (self.epoch_bound is None) is not (self.epoch_bound_reason is None):
            yield "epoch_bound_reason", "goes with epoch_bound: both or neither"
        for name in ("power_limit_w", "power_profile"):
            if getattr(self, name) is not None and self.power_limits is None:
                yield "power_limits", f"goes with {name}"

    def _contradictions_of_reports(self, job: CreatedJob) -> Iterator[tuple[str, str]]:
        """Yield a field and a message for each contradiction in the trial's reports."""
        has_reported = self.report_count > 0
        is_untold = has_reported and not self.epochs and all(getattr(self, name) is None for name in _OF_EPOCHS)
        # Zeus's policy does not need the epochs of a trial that has ended.
        is_of_zeus = is_untold and self.state not in ALIVE and job.policy == ZEUS
        measured = ["time_s", "energy_j", "reported_at"]
        for name in measured if is_of_zeus else [*measured, "metric", *_OF_EPOCHS]:
            if (getattr(self, name) is None) is has_reported:
                yield name, f"goes with having reported, and report_count is {self.report_count}"
        if self.deviations is not None and not has_reported:
            yield "deviations", "goes with having reported, and report_count is 0"
        if self.state in OBSERVED and not has_reported:
            yield "report_count", f"a trial becomes {self.state} by a report"
        if self.state is TrialState.COMPLETED and cost_of(job, self.record_of("")) <= 0:
            yield "energy_j", "the target was reached at a cost of 0 J, which no later run could beat"
        # The report that ended a trial is in the trial's own fields only.
        kept = self.report_count - (self.state in OBSERVED)
        numbers = [epoch.report_number for epoch in self.epochs]
        if numbers != sorted(set(numbers)) or numbers[-1:] > [kept]:
            yield "epochs", f"there are {kept} at most, each with its own report_number, ascending"
        if self.first_epoch is not None and self.epoch is not None:
            is_beyond = self.first_epoch > self.epoch
            if is_beyond or (self.report_count == 1 and self.first_epoch != self.epoch):
                yield "first_epoch", f"does not go with epoch {self.epoch:g} after {self.report_count} reports"


def read(kind: type[Message], given: bytes | Mapping[str, Any], place: str, **context: object) -> Message:
    """Return the message in a line of JSON, or with these fields.

    Raises:
        InvalidImportError: The line is no JSON, or the message is invalid; the error names the place and the field.
    """
    try:
        if isinstance(given, bytes):
            return kind.model_validate_json(given, context=context)
        return kind.model_validate(given, context=context)
    except ValidationError as error:
        raise refusal(error, place) from error


def renamed(line: bytes, place: str, job_id: str) -> bytes:
    """Return the first line of an export with the job's id replaced; raise as `read` does."""
    export = read(JobExport, line, place)
    job = export.job.model_dump() | {"job_id": job_id}
    return line_of(read(JobExport, export.model_dump() | {"job": job}, place))


def refusal(error: ValidationError, place: str = "") -> InvalidImportError:
    """Convert an error of pydantic into an import error, with the first problem and its place."""
    first, *others = error.errors(include_url=False, include_context=False, include_input=False)
    # The parser counts each line of the file as line 1.
    said = first["msg"].removeprefix("Value error, ").replace(" at line 1 column ", " at column ")
    more = f"; and {len(others)} more" if others else ""
    return _invalid(place, ".".join(map(str, first["loc"])), f"{said}{more}")


def _invalid(place: str, field: str, message: str) -> InvalidImportError:
    where = ", ".join(filter(None, (place, field)))
    return InvalidImportError(f"{where}: {message}", field=where)


class JobInImport:
    """A job during its import: `add` takes each trial, `close` checks the job, and `fold` derives its arms.

    Args:
        place: The place of the job in the export, for errors.
        given: The job's line or fields.
        mark: The mark of the import's latest transaction (`Transaction.import_mark`).

    Raises:
        InvalidImportError: The line is no job, or its fields contradict each other.
    """

    def __init__(self, place: str, given: bytes | Mapping[str, Any], mark: datetime) -> None:
        self.export = export = read(ImportedJob, given, place)
        self.mark, self._place = mark, place
        self.job_id = export.job.job_id
        self._trial_count = self._started_event = 0
        # Events at which trials began or ended.
        self._events: set[int] = set()
        self._bandit_entered_at = bandit_entered_from_the_start(export.job)
        self._has_bandit = False
        self.sizes = frozenset(export.job.batch_sizes)
        for revision in export.revisions:
            self._events.add(revision.event)
            self.sizes |= frozenset(as_of(export.job, export.revisions, revision.event - 1).batch_sizes)
        self._arms = {size: Arm(size) for size in export.job.batch_sizes}
        self._cheapest: Cheapest | None = None
        self._memory = find(export.job.policy).begun_memory(export.job)

    def add(self, trial: ImportedTrial, place: str) -> TrialRows:
        """Add the next trial and return its rows.

        Raises:
            InvalidImportError: The trial contradicts an earlier one.
        """
        self._check_order(trial, place)
        self._trial_count += 1
        if trial.origin is not Origin.FINISH:
            self._arms[trial.batch_size] = self._arms.get(trial.batch_size, Arm(trial.batch_size)).after_dispatch()
        if trial.origin is Origin.BANDIT:
            self._has_bandit = True
            if self._bandit_entered_at is None:
                self._bandit_entered_at = trial.started_event
        key = self.job_id, trial.trial_number
        profile = trial.power_profile
        return TrialRows(
            trial.record_of(self.job_id),
            tuple(StoredEpoch(*key, **dict(epoch)) for epoch in trial.epochs),
            None if profile is None else StoredPowerProfile(*key, trial.batch_size, **dict(profile)),
            None if trial.decision is None else StoredDecision(*key, trial.decision),
        )

    def _check_order(self, trial: ImportedTrial, place: str) -> None:
        """Check that trials are numbered from 1 without gaps, begin at ascending events, and share no event."""
        number = self._trial_count + 1
        if trial.trial_number != number:
            message = f"trials are numbered 1, 2, 3, …: number {number} is missing or out of order"
            raise _invalid(place, "trial_number", message)
        if trial.started_event <= self._started_event:
            message = f"trial {number} begins after trial {number - 1}, at a larger event"
            raise _invalid(place, "started_event", message)
        self._started_event = trial.started_event
        for field in ("started_event", "ended_event"):
            event = getattr(trial, field)
            if event in self._events:
                raise _invalid(place, field, f"event {event} is taken already")
            if event is not None:
                self._events.add(event)

    def close(self) -> None:
        """Check the job after its last trial.

        Raises:
            InvalidImportError: Trials or survivors are missing.
        """
        if self._trial_count != self.export.trials:
            message = f"{self.export.trials} trials should follow, and there are {self._trial_count}"
            raise _invalid(self._place, "trials", message)
        if (self.export.survivors is not None) is not self._has_bandit:
            message = "survivors go with trials of origin bandit: both or neither"
            raise _invalid(self._place, "survivors", message)

    def fold(self, ended: Iterable[TrialRecord]) -> None:
        """Add the next trials, in order of their ends, to the arms and the policy's memory."""
        job, ended = self.export.job, list(ended)
        for trial in ended:
            self._cheapest = Cheapest.of_both(self._cheapest, job, trial)
        self._arms |= arms_after(job, self._arms, ended, bandit_entered_at=self._bandit_entered_at)
        self._memory = memory_after(job, self._memory, ended)

    def save(self, transaction: Transaction) -> None:
        """Save the job, its arms and the policy's memory after `fold` of all ended trials."""
        job, event = self.export.job, max(self._events, default=0)
        stored = StoredJob(
            registration=job,
            created_at=self.export.created_at,
            rng_state=self.export.rng_state,
            owner=self.export.owner,
            shared=self.export.shared,
            event_count=event,
            trial_count=self._trial_count,
            cheapest=self._cheapest,
            bandit_entered_at=self._bandit_entered_at,
            folded_event=event,
            survivors=self.export.survivors,
            revised_event=self.export.revisions[-1].event if self.export.revisions else 0,
        )
        transaction.update_jobs([stored])
        transaction.insert_revisions(self.job_id, self.export.revisions)
        transaction.insert_arms(self.job_id, self._arms.keys() - frozenset(job.batch_sizes))
        policy = find(job.policy)
        keeps = policy.memory is not None
        memory = StoredMemory(self.job_id, policy.version, event, self._memory) if keeps else None
        Unsaved(self._arms, memory).save(transaction, stored)
        transaction.log("job %s imported with %d trials", self.job_id, self._trial_count)


class Imports:
    """Imports into one database; `clock` returns the present instant, aware."""

    def __init__(self, store: Store, clock: Callable[[], datetime]) -> None:
        self._store = store
        self._clock = clock

    async def import_job(self, pieces: AsyncIterable[bytes], *, first_line: int = 1) -> JobSummary:
        """Create a job with all its trials from an export, or nothing.

        Args:
            pieces: The text of the export, a few kilobytes at a time.
            first_line: Number of its first line, for errors.

        Raises:
            InvalidImportError: The text is no export, or its fields contradict each other.
            JobConflictError: A job with this id exists, or is being imported.
            InvalidJobError: The job's id cannot be part of a URL.
            PolicyNotInstalledError: The job's policy is not installed.
        """
        begun: JobInImport | None = None
        try:
            async for lines in _lines_in(pieces, first_line):
                job = begun or JobInImport(*lines.pop(0), _mark(self._clock()))
                trials = await asyncio.to_thread(_rows_of, job, lines)
                if begun is None:
                    await self.remove_broken()
                    await self._store.write(_begin, job)
                    begun = job
                await self._write(job, trials)
            if begun is None:
                raise _invalid(f"line {first_line}", "", "there is no export, the text is empty")
            return await self._finish(begun)
        except Exception:
            # If this process ends before, another process removes the rows (`remove_broken`).
            if begun is not None:
                await self._remove(begun.job_id, begun.mark)
            raise

    async def remove_broken(self) -> None:
        """Remove the rows of interrupted imports, for example after a crash of their process."""
        for job_id, mark in (await self._store.read(Transaction.silent_imports, self._clock() - SILENCE)).items():
            if await self._remove(job_id, mark):
                logger.warning("job %s: removed the rows of an interrupted import", job_id)

    async def _write(self, job: JobInImport, trials: list[TrialRows]) -> None:
        epochs = [epoch for each in trials for epoch in each.epochs]
        await self._write_rows(job, trials, epochs[:_ROWS_AT_ONCE])
        for first in range(_ROWS_AT_ONCE, len(epochs), _ROWS_AT_ONCE):
            await self._write_rows(job, [], epochs[first : first + _ROWS_AT_ONCE])

    async def _write_rows(self, job: JobInImport, trials: list[TrialRows], epochs: list[StoredEpoch]) -> None:
        mark = _mark(self._clock())
        await self._store.write(_add, job, trials, epochs, mark)
        job.mark = mark

    async def _finish(self, job: JobInImport) -> JobSummary:
        """Write the job's arms and the policy's memory, and make the job visible."""
        job.close()
        event = 0
        while ended := await self._store.read(queries.ended_after, job.job_id, event, _TRIALS_AT_ONCE):
            await asyncio.to_thread(job.fold, ended)
            event = ended[-1].ended_event or 0
            if self._clock() - job.mark > _REFRESH:
                await self._write_rows(job, [], [])
        return await self._store.write(_finish, job)

    async def _remove(self, job_id: str, mark: datetime) -> bool:
        """Remove an incomplete job, unless its import has written since this mark; return True if it is removed."""
        while True:
            after = _mark(self._clock())
            removed = await self._store.write(_remove_some, job_id, mark, after)
            if not removed:
                return removed is not None
            mark = after


async def _lines_in(pieces: AsyncIterable[bytes], number: int) -> AsyncIterator[list[tuple[str, bytes]]]:
    """Yield the lines that are not blank with their places: the first line at once, later lines in groups.

    Raises:
        InvalidImportError: A line is too long.
    """
    lines: list[tuple[str, bytes]] = []
    parts: list[bytes] = []
    waiting = length = enough = 0
    async for piece in pieces:
        *ends, rest = piece.split(b"\n")
        for end in ends:
            text, parts, length = b"".join([*parts, end]), [], 0
            if text.strip():
                lines.append((f"line {number}", text))
            number += 1
        parts.append(rest)
        length += len(rest)
        waiting += len(piece)
        if length > LONGEST_LINE_BYTES:
            raise _invalid(f"line {number}", "", f"it is longer than {LONGEST_LINE_BYTES} bytes")
        if lines and waiting >= enough:
            yield lines
            lines, waiting, enough = [], 0, _BYTES_AT_ONCE
    if (text := b"".join(parts)).strip():
        lines.append((f"line {number}", text))
    if lines:
        yield lines


def _rows_of(job: JobInImport, lines: list[tuple[str, bytes]]) -> list[TrialRows]:
    return [
        job.add(read(ImportedTrial, text, place, job=job.export.job, sizes=job.sizes), place) for place, text in lines
    ]


def _mark(now: datetime) -> datetime:
    """Return a mark of this second, unique by its random microseconds."""
    return now.replace(microsecond=secrets.randbelow(1_000_000))


def _begin(transaction: Transaction, job: JobInImport) -> None:
    export, job_id = job.export, job.job_id
    if transaction.job(job_id) is not None:
        raise JobConflictError(
            f"job {job_id!r} exists: import under another job_id, or delete the job first", field="job.job_id"
        )
    other = transaction.import_mark(job_id)
    if other == job.mark:
        return  # Committed before the connection was lost.
    if other is not None:
        raise JobConflictError(
            f"job {job_id!r} is being imported: if that import was interrupted, the server forgets it {SILENCE} later",
            field="job.job_id",
        )
    refuse_folder_name(export.job)
    installed(export.job.policy)
    # A token of another server owns no job here: the job is open to all.
    owner = None if transaction.token(export.owner or "") is None else export.owner
    transaction.insert_job(export.job, export.created_at, owner=owner, shared=export.shared, importing_at=job.mark)


def _add(
    transaction: Transaction, job: JobInImport, trials: list[TrialRows], epochs: list[StoredEpoch], mark: datetime
) -> None:
    if not transaction.replace_import_mark(job.job_id, job.mark, mark):
        if transaction.import_mark(job.job_id) != mark:
            raise _given_up(job.job_id)
        return  # Committed before the connection was lost.
    transaction.insert_trials([each.trial for each in trials])
    transaction.insert_epochs(epochs)
    transaction.insert_power_profiles(each.power_profile for each in trials if each.power_profile is not None)
    transaction.insert_decisions(each.decision for each in trials if each.decision is not None)


def _finish(transaction: Transaction, job: JobInImport) -> JobSummary:
    if transaction.replace_import_mark(job.job_id, job.mark, None):
        job.save(transaction)
    # Without the mark, an earlier attempt may have committed before its connection was lost.
    stored = transaction.job(job.job_id)
    if stored is None:
        raise _given_up(job.job_id)
    return reading.job_summary(stored)


def _given_up(job_id: str) -> JobConflictError:
    return JobConflictError(f"the import of job {job_id!r} fell silent for {SILENCE}, and was given up")


def _remove_some(transaction: Transaction, job_id: str, before: datetime, after: datetime) -> int | None:
    """Remove rows; return their number, 0 with the job's own row, or None if the import has written since `before`."""
    is_held = transaction.replace_import_mark(job_id, before, after)
    # An earlier attempt may have committed before its connection was lost.
    if not is_held and transaction.import_mark(job_id) != after:
        return None
    return transaction.remove_some(job_id, limit=_ROWS_AT_ONCE)
