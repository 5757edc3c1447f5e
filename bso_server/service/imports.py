"""Imports: an export (`service.exports`) becomes a job, in one transaction.

The whole job is parsed and validated before the transaction. The limits keep the transaction below its deadline, and a
job below some hundred megabytes of memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain, count
from typing import Self, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError, ValidationInfo, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from bso_server.core.job import replay
from bso_server.core.model import OBSERVED, History, TrialRecord, cost_of
from bso_server.core.policy import find, installed
from bso_server.core.revisions import as_of
from bso_server.errors import InvalidImportError, JobConflictError
from bso_server.service import reading
from bso_server.service.exports import JobExport, TrialExport
from bso_server.service.refusals import refuse_folder_name
from bso_server.storage.rows import TRIAL, StoredDecision, StoredEpoch, StoredJob, StoredMemory, trial_from
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import ALIVE, ZEUS, CreatedJob, JobSummary, Origin, TrialState

MOST_TRIALS = 20_000
MOST_REPORTS = 200_000
"""Largest numbers of trials and of their reports in an import, whose transaction takes some seconds."""

# Size of a trial with about 100,000 reports.
LONGEST_LINE_BYTES = 32 * 1024 * 1024

# Fields that follow from a trial's epochs, which Zeus does not keep.
_OF_EPOCHS = ("epoch", "first_epoch")

Message = TypeVar("Message", bound=BaseModel)


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
        if self.power_limit_w is not None and self.power_limits is None:
            yield "power_limits", "goes with power_limit_w"

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


def read(kind: type[Message], line: bytes, place: str, **context: object) -> Message:
    """Return the message in a line of JSON.

    Raises:
        InvalidImportError: The line is no JSON, or the message is invalid; the error names the place and the field.
    """
    try:
        return kind.model_validate_json(line, context=context)
    except ValidationError as error:
        raise refusal(error, place) from error


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
    """A job during its import: `add` takes each trial, then `close` checks the job.

    Args:
        place: The place of the job in the export, for errors.
        given: The job's line.

    Raises:
        InvalidImportError: The line is no job, its fields contradict each other, or the job has too many trials.
    """

    def __init__(self, place: str, given: bytes) -> None:
        self.export = export = read(ImportedJob, given, place)
        if export.trials > MOST_TRIALS:
            message = f"an import takes at most {MOST_TRIALS} trials, and this job has {export.trials}"
            raise _invalid(place, "trials", f"{message}: move the whole database with its own tools")
        self._place = place
        self.job_id = export.job.job_id
        self._trials: list[TrialRecord] = []
        self._epochs: list[StoredEpoch] = []
        self._decisions: list[StoredDecision] = []
        # Events at which trials began or ended.
        self._events: set[int] = set()
        self._sizes = frozenset(export.job.batch_sizes)
        for revision in export.revisions:
            self._events.add(revision.event)
            self._sizes |= frozenset(as_of(export.job, export.revisions, revision.event - 1).batch_sizes)

    def add(self, place: str, line: bytes) -> None:
        """Add the next trial.

        Raises:
            InvalidImportError: The line is no trial, contradicts an earlier one, or is one too many.
        """
        trial = read(ImportedTrial, line, place, job=self.export.job, sizes=self._sizes)
        self._check_order(trial, place)
        if len(self._epochs) + len(trial.epochs) > MOST_REPORTS:
            message = f"an import takes at most {MOST_REPORTS} reports: remove older ones by bso-server db prune"
            raise _invalid(place, "epochs", f"{message}, and export the job again")
        key = self.job_id, trial.trial_number
        self._trials.append(trial.record_of(self.job_id))
        self._epochs += (StoredEpoch(*key, **dict(epoch)) for epoch in trial.epochs)
        if trial.decision is not None:
            self._decisions.append(StoredDecision(*key, trial.decision))

    def _check_order(self, trial: ImportedTrial, place: str) -> None:
        """Check that trials are numbered from 1 without gaps, begin at ascending events, and share no event."""
        if len(self._trials) == self.export.trials:
            raise _invalid(self._place, "trials", f"{self.export.trials} trials should follow, and there are more")
        number = len(self._trials) + 1
        if trial.trial_number != number:
            message = f"trials are numbered 1, 2, 3, …: number {number} is missing or out of order"
            raise _invalid(place, "trial_number", message)
        if self._trials and trial.started_event <= self._trials[-1].started_event:
            message = f"trial {number} begins after trial {number - 1}, at a larger event"
            raise _invalid(place, "started_event", message)
        for field in ("started_event", "ended_event"):
            event = getattr(trial, field)
            if event in self._events:
                raise _invalid(place, field, f"event {event} is taken already")
            if event is not None:
                self._events.add(event)

    def close(self) -> History:
        """Check the job after its last trial, and return its history, from which its caches follow.

        Raises:
            InvalidImportError: Trials or survivors are missing.
        """
        if len(self._trials) != self.export.trials:
            message = f"{self.export.trials} trials should follow, and there are {len(self._trials)}"
            raise _invalid(self._place, "trials", message)
        has_bandit = any(trial.origin is Origin.BANDIT for trial in self._trials)
        if (self.export.survivors is not None) is not has_bandit:
            message = "survivors go with trials of origin bandit: both or neither"
            raise _invalid(self._place, "survivors", message)
        return replay(self.export.job, self._trials, self.export.survivors)

    def save(self, transaction: Transaction, history: History, *, again: bool) -> JobSummary:
        """Insert the job with all its rows; a repeated attempt (`again`) may find that an earlier one has done so.

        Raises:
            JobConflictError: A job with this id exists.
            InvalidJobError: The job's id cannot be part of a URL.
            PolicyNotInstalledError: The job's policy is not installed.
        """
        export, job, event = self.export, self.export.job, max(self._events, default=0)
        # A token of another server owns no job here: the job is open to all.
        owner = None if transaction.token(export.owner or "") is None else export.owner
        stored = StoredJob(
            registration=job,
            created_at=export.created_at,
            rng_state=export.rng_state,
            owner=owner,
            shared=export.shared,
            event_count=event,
            trial_count=len(self._trials),
            cheapest=history.cheapest,
            bandit_entered_at=history.bandit_entered_at,
            folded_event=event,
            survivors=export.survivors,
            revised_event=export.revisions[-1].event if export.revisions else 0,
        )
        summary = reading.job_summary(stored)
        existing = transaction.job(self.job_id)
        if again and existing is not None and reading.job_summary(existing) == summary:
            return summary
        self.refuse_existing(transaction)
        transaction.insert_job(job, export.created_at, owner=owner, shared=export.shared)
        transaction.update_jobs([stored])
        transaction.insert_revisions(self.job_id, export.revisions)
        transaction.insert_trials(self._trials)
        transaction.insert_epochs(self._epochs)
        transaction.insert_decisions(self._decisions)
        transaction.replace_arms(self.job_id, history.arms.values())
        policy = find(job.policy)
        if policy.memory is not None:
            transaction.save_memory(StoredMemory(self.job_id, policy.version, event, history.memory), policy)
        transaction.log("job %s imported with %d trials", self.job_id, len(self._trials))
        return summary

    def refuse_existing(self, transaction: Transaction) -> None:
        """Raise as `save` if the job cannot be inserted."""
        if transaction.job(self.job_id) is not None:
            raise JobConflictError(
                f"job {self.job_id!r} exists: import under another job_id, or delete the job first",
                field="job.job_id",
            )
        refuse_folder_name(self.export.job)
        installed(self.export.job.policy)


async def import_job(store: Store, lines: Iterable[bytes], *, first_line: int = 1) -> JobSummary:
    """Create a job with all its trials from the lines of an export, or nothing.

    Args:
        store: Where the job is created, with long deadlines.
        lines: The lines, some of which may be blank.
        first_line: Number of the first line, for errors.

    Raises:
        InvalidImportError: The lines are no export, their fields contradict each other, or the job is too large.
        JobConflictError: A job with this id exists.
        InvalidJobError: The job's id cannot be part of a URL.
        PolicyNotInstalledError: The job's policy is not installed.
    """
    numbered = _numbered(lines, first_line)
    first = next(numbered, None)
    if first is None:
        raise _invalid(f"line {first_line}", "", "there is no export, the text is empty")
    job = JobInImport(*first)
    # Before the attempts, which take an equal job for the work of an earlier attempt.
    await store.read(job.refuse_existing)
    for place, line in numbered:
        job.add(place, line)
    history, attempts = job.close(), count()
    return await store.write(lambda transaction: job.save(transaction, history, again=next(attempts) > 0))


def _numbered(lines: Iterable[bytes], first: int) -> Iterator[tuple[str, bytes]]:
    """Yield the lines that are not blank with their places; raise `InvalidImportError` for a line that is too long."""
    for number, line in enumerate(lines, first):
        if len(line) > LONGEST_LINE_BYTES:
            raise _invalid(f"line {number}", "", f"it is longer than {LONGEST_LINE_BYTES} bytes")
        if line.strip():
            yield f"line {number}", line
