"""Whole jobs on their way out of a database and into another one, trial by trial; pure.

An export is one JSON object with all facts and nothing else, `service.messages.JobExport`, its trials last and one on
each line; the exports of several jobs stand one after another in one text. Neither side ever holds all of it: a job may
have hundreds of thousands of reports. What follows from the facts (arms, the cheapest trial, counters) is made anew at
the import.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError

from bso_server.core.history import Arm, Cheapest, arms_after, cost_of
from bso_server.core.model import OBSERVED, TrialRecord
from bso_server.core.registry import find
from bso_server.core.replay import bandit_entered_from_the_start, memory_after
from bso_server.errors import InvalidImportError
from bso_server.service.json_stream import Element, Field, ListBegin, NotAnObjectError, ObjectReader
from bso_server.service.loading import Unsaved
from bso_server.service.messages import EpochExport, ExportHead, PowerProfileExport, TrialExport
from bso_server.storage.rows import (
    TRIAL,
    StoredDecision,
    StoredEpoch,
    StoredJob,
    StoredMemory,
    StoredPowerProfile,
    epoch_row,
    trial_from,
)
from zeus_plugins.protocol import ALIVE, ZEUS, JobRegistration, Origin, TrialState

_TRIALS = "trials"
_MEASURED = ("time_s", "energy_j", "reported_at")
_OF_EPOCHS = ("epoch", "first_epoch", "first_cost_j")


def head_of(stored: StoredJob) -> ExportHead:
    """The part of a job's export before its trials."""
    return ExportHead(
        job=stored.registration,
        created_at=stored.created_at,
        survivors=stored.survivors,
        rng_state=stored.rng_state,
        owner=stored.owner,
        shared=stored.shared,
    )


def exported(
    trials: Iterable[TrialRecord],
    epochs: Iterable[StoredEpoch],
    power_profiles: Iterable[StoredPowerProfile],
    decisions: Iterable[StoredDecision],
) -> list[TrialExport]:
    """Trials with everything that is kept of them."""
    profile_of = {
        profile.trial_number: PowerProfileExport.model_validate(profile, from_attributes=True)
        for profile in power_profiles
    }
    decision_of = {stored.trial_number: stored.decision for stored in decisions}
    by_trial: dict[int, list[EpochExport]] = {}
    for epoch in epochs:
        by_trial.setdefault(epoch.trial_number, []).append(EpochExport(**epoch_row(epoch)))
    return [
        TrialExport(
            **TRIAL.of(trial),
            decision=decision_of.get(trial.trial_number),
            power_profile=profile_of.get(trial.trial_number),
            epochs=tuple(by_trial.get(trial.trial_number, ())),
        )
        for trial in trials
    ]


def beginning(head: ExportHead) -> str:
    """The text of an export before its first trial."""
    return f'{head.model_dump_json().removesuffix("}")},"{_TRIALS}":['


def lines(trials: Iterable[TrialExport], *, is_first: bool) -> str:
    """The text of trials, the job's first one among them or not."""
    text = ",".join(f"\n{trial.model_dump_json()}" for trial in trials)
    return text if is_first or not text else f",{text}"


END = "\n]}\n"
"""The text of an export after its last trial."""

# No other line of an export is like it: within its strings there are no ends of lines.
_LAST_LINE = END.strip().encode()


def exports_in(lines: Iterable[bytes]) -> Iterator[Iterator[bytes]]:
    """The exports that stand one after another in a text, each piece by piece.

    The next one begins after the line that ends the one before, of which nobody need have read everything.

    Args:
        lines: The text, line by line; a long line may come in pieces.
    """
    lines = iter(lines)
    for first in lines:
        if first.strip():
            export = _export_from(first, lines)
            yield export
            deque(export, maxlen=0)


def _export_from(first: bytes, following: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    begins_line = first.endswith(b"\n")
    for piece in following:
        yield piece
        if begins_line and piece.strip() == _LAST_LINE:
            return
        begins_line = piece.endswith(b"\n")


class ExportReader:
    """Reads an export that comes in pieces.

    Attributes:
        head: What stands before the trials, once that is there.
    """

    def __init__(self) -> None:
        self.head: ExportHead | None = None
        self._fields: dict[str, Any] = {}
        self._object = ObjectReader(_TRIALS)
        self._trials = 0

    def feed(self, piece: bytes) -> list[TrialExport]:
        """The trials that end with this piece; an empty piece is the end of the export.

        Raises:
            InvalidImportError: It is no export, or has its fields in another order.
            MalformedJsonError: It is no JSON.
        """
        found = []
        try:
            parts = self._object.feed(piece)
        except NotAnObjectError as error:
            raise InvalidImportError("a JSON object must be sent", field="body") from error
        for part in parts:
            match part:
                case Field(name, value):
                    self._take(name, value)
                case ListBegin():
                    if self.head is not None:
                        raise InvalidImportError("there are trials twice", field=_TRIALS)
                    self.head = _validated(ExportHead, self._fields)
                case Element(value):
                    found.append(_validated(TrialExport, value, f"{_TRIALS}.{self._trials}"))
                    self._trials += 1
        if not piece and self.head is None:
            # The first field that is missing, whichever it is.
            _validated(ExportHead, self._fields)
            raise InvalidImportError("a list of trials is required, if only an empty one", field=_TRIALS)
        return found

    def _take(self, name: str, value: Any) -> None:
        if name == _TRIALS:
            raise InvalidImportError("trials are a list", field=_TRIALS)
        if self.head is not None and name in ExportHead.model_fields:
            raise InvalidImportError(f"{name} stands before the trials, as jobs export writes it", field=name)
        self._fields[name] = value


def _validated(kind: type[Any], value: Any, place: str = "") -> Any:
    """The message that was read at this place of an export."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first, *others = error.errors(include_url=False, include_context=False, include_input=False)
        field = ".".join(map(str, [*([place] if place else []), *first["loc"]])) or "body"
        said, more = first["msg"].removeprefix("Value error, "), f"; and {len(others)} more" if others else ""
        hint = " before the trials, as jobs export writes it" if first["type"] == "missing" and not place else ""
        raise InvalidImportError(f"{field}: {said}{hint}{more}", field=field) from error


@dataclass(frozen=True, slots=True)
class ImportedTrial:
    """The rows of one trial."""

    trial: TrialRecord
    epochs: tuple[StoredEpoch, ...]
    power_profile: StoredPowerProfile | None
    decision: StoredDecision | None


class ImportedJob:
    """A job that is imported, trial by trial, and then what follows from them, end by end.

    Raises:
        InvalidImportError: What the export says before the trials contradicts itself.
    """

    def __init__(self, head: ExportHead) -> None:
        if head.job.job_id is None:
            raise InvalidImportError("an exported job has an id", field="job.job_id")
        self.head, self.job_id = head, head.job.job_id
        for field, message in _contradictions_of_head(head):
            raise InvalidImportError(message, field=field)
        self._event_count = self._trial_count = self._started_event = 0
        self._trials_of = dict.fromkeys(head.job.batch_sizes, 0)
        self._bandit_entered_at = bandit_entered_from_the_start(head.job)
        self._has_bandit = False
        # The index of the trial that began or ended at an event.
        self._taken: dict[int, int] = {}
        self._arms: dict[int, Arm] = {}
        self._cheapest: Cheapest | None = None
        self._memory = find(head.job.policy).begun_memory(head.job)

    def take_all(self, exported: Iterable[TrialExport]) -> list[ImportedTrial]:
        """The next trials.

        Raises:
            InvalidImportError: One contradicts itself or one before.
        """
        return list(map(self._take, exported))

    def _take(self, exported: TrialExport) -> ImportedTrial:
        index = self._trial_count
        for field, message in self._order(exported, index):
            raise InvalidImportError(message, field=f"{_TRIALS}.{field}")
        for field, message in _contradictions_of(exported, self.head.job):
            raise InvalidImportError(f"trial {exported.trial_number}: {message}", field=f"{_TRIALS}.{index}.{field}")
        self._trial_count += 1
        self._trials_of[exported.batch_size] += 1
        if exported.origin is Origin.BANDIT:
            self._has_bandit = True
            if self._bandit_entered_at is None:
                self._bandit_entered_at = exported.started_event
        key = self.job_id, exported.trial_number
        profile = exported.power_profile
        return ImportedTrial(
            _record(self.job_id, exported),
            tuple(StoredEpoch(*key, **dict(epoch)) for epoch in exported.epochs),
            None if profile is None else StoredPowerProfile(*key, exported.batch_size, **dict(profile)),
            None if exported.decision is None else StoredDecision(*key, exported.decision),
        )

    def close(self) -> None:
        """There are no more trials.

        Raises:
            InvalidImportError: Something is missing.
        """
        if (self.head.survivors is not None) is not self._has_bandit:
            message = "survivors go with trials of origin bandit: both or neither"
            raise InvalidImportError(message, field="survivors")
        self._taken.clear()
        self._arms = {size: Arm(size, trials=number) for size, number in self._trials_of.items()}

    def fold(self, ended: Iterable[TrialRecord]) -> None:
        """Remember the next trials in order of their ends."""
        job, ended = self.head.job, list(ended)
        for trial in ended:
            self._cheapest = Cheapest.of_both(self._cheapest, job, trial)
        self._arms |= arms_after(job, self._arms, ended, bandit_entered_at=self._bandit_entered_at)
        self._memory = memory_after(job, self._memory, ended)

    @property
    def stored(self) -> StoredJob:
        """The row of the job, once all trials that have ended were folded."""
        return StoredJob(
            registration=self.head.job,
            created_at=self.head.created_at,
            rng_state=self.head.rng_state,
            owner=self.head.owner,
            shared=self.head.shared,
            event_count=self._event_count,
            trial_count=self._trial_count,
            cheapest=self._cheapest,
            bandit_entered_at=self._bandit_entered_at,
            folded_event=self._event_count,
            survivors=self.head.survivors,
        )

    @property
    def unsaved(self) -> Unsaved:
        """Its policy's memory, once all trials that have ended were folded."""
        policy, memory = find(self.head.job.policy), None
        if policy.memory is not None:
            memory = StoredMemory(self.job_id, policy.version, self._event_count, self._memory)
        return Unsaved(self._arms, memory)

    def _order(self, trial: TrialExport, index: int) -> Iterator[tuple[str, str]]:
        """Trials count from 1; each begins after the one before it, and no two things happen at the same event."""
        if trial.trial_number != index + 1:
            message = f"trials are numbered 1, 2, 3, …: number {index + 1} is missing or out of order"
            yield f"{index}.trial_number", message
        if trial.started_event <= self._started_event:
            yield f"{index}.started_event", f"trial {trial.trial_number} begins after trial {index}, at a larger event"
        other = self._taken.setdefault(trial.started_event, index)
        if other != index:
            yield f"{other}.ended_event", f"event {trial.started_event} is another trial's too"
        if trial.ended_event is not None:
            if trial.ended_event in self._taken:
                yield f"{index}.ended_event", f"event {trial.ended_event} is taken already"
            self._taken[trial.ended_event] = index
        self._started_event = trial.started_event
        self._event_count = max(self._event_count, trial.started_event, trial.ended_event or 0)


def _contradictions_of_head(head: ExportHead) -> Iterator[tuple[str, str]]:
    survivors = head.survivors or ()
    if list(survivors) != sorted(set(survivors) & set(head.job.batch_sizes)):
        yield "survivors", "survivors are some of the job's batch_sizes, ascending"
    if head.rng_state is not None:
        try:
            np.random.default_rng(0).bit_generator.state = json.loads(head.rng_state)
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            yield "rng_state", f"not the state of a random generator: {error}"


def _contradictions_of(trial: TrialExport, job: JobRegistration) -> Iterator[tuple[str, str]]:
    alive, reported = trial.state in ALIVE, trial.report_count > 0
    if trial.batch_size not in job.batch_sizes:
        yield "batch_size", f"{trial.batch_size} is not one of the job's batch_sizes {list(job.batch_sizes)}"
    for name in ("ended_event", "ended_at"):
        if (getattr(trial, name) is None) is not alive:
            yield name, f"goes with having ended, and the trial is {trial.state}"
    if trial.ended_event is not None and trial.ended_event < trial.started_event:
        yield "ended_event", "lies before started_event"
    if (trial.lease_expires_at is None) is alive:
        yield "lease_expires_at", f"goes with being alive, and the trial is {trial.state}"
    for name in (*_MEASURED, *(() if _is_of_zeus(trial, job) else ("metric", *_OF_EPOCHS))):
        if (getattr(trial, name) is None) is reported:
            yield name, f"goes with having reported, and report_count is {trial.report_count}"
    if trial.cost_deviations_j2 is not None and not reported:
        yield "cost_deviations_j2", "goes with having reported, and report_count is 0"
    if trial.state in OBSERVED and not reported:
        yield "report_count", f"a trial becomes {trial.state} by a report"
    if trial.state is TrialState.COMPLETED and cost_of(job, _record("", trial)) <= 0:
        yield "energy_j", "the target was reached at a cost of 0 J, which no later run could beat"
    if (trial.epoch_bound is None) is not (trial.epoch_bound_reason is None):
        yield "epoch_bound_reason", "goes with epoch_bound: both or neither"
    for name in ("power_limit_w", "power_profile"):
        if getattr(trial, name) is not None and trial.power_limits is None:
            yield "power_limits", f"goes with {name}"
    # The report that ended a trial is not kept beside it.
    kept = trial.report_count - (trial.state in OBSERVED)
    numbers = [epoch.report_number for epoch in trial.epochs]
    if numbers != sorted(set(numbers)) or numbers[-1:] > [kept]:
        yield "epochs", f"there are {kept} of them at most, each with its own report_number, ascending"
    if trial.first_epoch is not None and trial.epoch is not None:
        is_beyond = trial.first_epoch > trial.epoch
        if is_beyond or (trial.report_count == 1 and trial.first_epoch != trial.epoch):
            yield "first_epoch", f"does not go with epoch {trial.epoch:g} after {trial.report_count} reports"


def _is_of_zeus(trial: TrialExport, job: JobRegistration) -> bool:
    """True if nothing is known of the trial's epochs, as of one from Zeus, and its policy does not need them."""
    is_untold = trial.report_count > 0 and not trial.epochs and all(getattr(trial, name) is None for name in _OF_EPOCHS)
    return is_untold and trial.state not in ALIVE and job.policy == ZEUS


def _record(job_id: str, trial: TrialExport) -> TrialRecord:
    kept = {name: value for name, value in trial if name in TRIAL.names}
    return trial_from({"job_id": job_id, **kept})
