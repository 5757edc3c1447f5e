"""Rows of the tables, and what they are to the rest of the server."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from functools import lru_cache
from operator import attrgetter
from typing import Any

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import RowMapping

from bso_server.core.access import Scope, TokenRecord
from bso_server.core.job import JobState
from bso_server.core.model import Arm, Cheapest, TrialRecord
from bso_server.core.policy import Policy
from bso_server.storage.tables import trials
from zeus_plugins.protocol import (
    CandidateWorth,
    CreatedJob,
    Decision,
    Fingerprint,
    PowerLimitSample,
    SizeBelief,
    TrialState,
)

Row = RowMapping | Mapping[str, Any]
"""A table's row by the names of its columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJob(JobState):
    """A row of `jobs`.

    Attributes:
        created_at: When it was registered (UTC).
        rng_state: The state of its generator as JSON, or None.
        owner: Id of the token that it belongs to; None where it was registered without one: it is open to all.
        shared: Whether other tokens may use it, too.
    """

    created_at: datetime
    rng_state: str | None
    owner: str | None = None
    shared: bool = False


@dataclass(frozen=True, slots=True)
class StoredEpoch:
    """A row of `epochs`: a report that did not end its trial; fields as in `service.views.EpochView`."""

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
    """A row of `power_profiles`, measured on the job's GPUs; fields as in `service.views.PowerProfileView`."""

    job_id: str
    trial_number: int
    batch_size: int
    samples: tuple[PowerLimitSample, ...]
    stored_at: datetime


@dataclass(frozen=True, slots=True)
class StoredDecision:
    """A row of `decisions`."""

    job_id: str
    trial_number: int
    decision: Decision


@dataclass(frozen=True, slots=True)
class StoredMemory:
    """A row of `policy_memories`: what a job's policy remembers of the ends of trials up to `folded_event`."""

    job_id: str
    version: str
    folded_event: int
    memory: Any


@dataclass(frozen=True, slots=True)
class TrialTotals:
    """The part of a row of `trials` that tells what became of it; totals are None before its first report."""

    trial_number: int
    batch_size: int
    state: TrialState
    ended_event: int | None
    time_s: float | None
    energy_j: float | None


@lru_cache(maxsize=1024)
def _registration(spec: str, fingerprint: str | None, registration_id: str | None) -> CreatedJob:
    """A job's part that hardly changes. Parsing it for each report would cost more than the report."""
    registration = CreatedJob.model_validate_json(spec)
    if registration_id is not None:
        registration = registration.model_copy(update={"registration_id": registration_id})
    if fingerprint is not None:
        registration = registration.with_fingerprint(Fingerprint.model_validate_json(fingerprint))
    return registration


def job_from(row: Row) -> StoredJob:
    """A job from its row."""
    cheapest = None
    if row["min_cost_j"] is not None:
        cheapest = Cheapest(row["min_cost_trial_number"], row["min_cost_batch_size"], row["min_cost_j"])
    return StoredJob(
        registration=_registration(row["spec"], row["fingerprint"], row["registration_id"]),
        created_at=row["created_at"],
        event_count=row["event_count"],
        trial_count=row["trial_count"],
        cheapest=cheapest,
        bandit_entered_at=row["bandit_entered_event"],
        folded_event=row["folded_event"],
        rng_state=row["rng_state"],
        owner=row["owner"],
        shared=row["shared"],
        survivors=None if row["survivors"] is None else tuple(json.loads(row["survivors"])),
    )


def job_row(stored: StoredJob) -> dict[str, Any]:
    """The columns that may change, with the key."""
    cheapest, fingerprint = stored.cheapest, stored.registration.fingerprint
    return {
        "job_id": stored.job_id,
        "fingerprint": None if fingerprint is None else fingerprint.model_dump_json(),
        "event_count": stored.event_count,
        "trial_count": stored.trial_count,
        "min_cost_j": stored.min_cost_j,
        "min_cost_batch_size": None if cheapest is None else cheapest.batch_size,
        "min_cost_trial_number": None if cheapest is None else cheapest.trial_number,
        "bandit_entered_event": stored.bandit_entered_at,
        "folded_event": stored.folded_event,
        "rng_state": stored.rng_state,
        "survivors": None if stored.survivors is None else json.dumps(stored.survivors),
    }


# What a trial has used by its reports: in the record 0 before the first, so that sums need no case; elsewhere nothing.
_EPOCHS = ("epoch", "first_epoch", "first_cost_j")
_TOTALS = ("time_s", "energy_j", *_EPOCHS)


class TrialColumns:
    """Some of the columns of `trials`, two at least, to be read off records with each report: put together once."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self._values = attrgetter(*self.names)
        self._no_totals = {name: None for name in _TOTALS if name in self.names}
        self._no_epochs = {name: None for name in _EPOCHS if name in self.names}

    def of(self, trial: TrialRecord) -> dict[str, Any]:
        """Their values by name. A trial without reports has no totals, rather than zeros, one from Zeus no epochs."""
        row = dict(zip(self.names, self._values(trial), strict=True))
        if not trial.epoch:
            row |= self._no_epochs if trial.report_count else self._no_totals
        return row


def _written_with(*occasions: str) -> TrialColumns:
    """The columns that are written then, with the key."""
    return TrialColumns(
        column.name for column in trials.c if column.primary_key or column.info.get("written") in occasions
    )


TRIAL = TrialColumns(trials.c.keys())
TRIAL_AT_REPORT = _written_with("report")
TRIAL_AT_TRANSITION = _written_with("report", "state")
TRIAL_AT_POWER_LIMIT = _written_with("power limit")


def trial_from(values: Row) -> TrialRecord:
    """A trial from its columns, or from the fields of an export that are columns."""
    totals = {name: values[name] or 0.0 for name in _TOTALS}
    return TrialRecord.of_row({**values, **totals})


_EPOCH_FIELDS = [field.name for field in fields(StoredEpoch)]
_epoch_values = attrgetter(*_EPOCH_FIELDS)
_last_report_values = attrgetter(*({"report_number": "report_count"}.get(name, name) for name in _EPOCH_FIELDS))


def last_report(trial: TrialRecord) -> StoredEpoch:
    """The last report of a trial that has reported, as it stands among its epochs."""
    return StoredEpoch(*_last_report_values(trial))


def epoch_row(epoch: StoredEpoch) -> dict[str, Any]:
    """The row of a report."""
    return dict(zip(_EPOCH_FIELDS, _epoch_values(epoch), strict=True))


_SAMPLES = TypeAdapter(tuple[PowerLimitSample, ...])


def power_profile_from(row: Row) -> StoredPowerProfile:
    """A power-limit profile from its row."""
    return StoredPowerProfile(**{**row, "samples": _SAMPLES.validate_json(row["samples"])})


def power_profile_row(profile: StoredPowerProfile) -> dict[str, Any]:
    """The row of a power-limit profile."""
    row = {field.name: getattr(profile, field.name) for field in fields(profile)}
    return row | {"samples": _SAMPLES.dump_json(profile.samples).decode()}


@lru_cache(maxsize=64)
def _memories(policy: Policy) -> TypeAdapter[Any]:
    return TypeAdapter(None if policy.memory is None else policy.memory.kind)


def memory_from(row: Row, policy: Policy) -> StoredMemory | None:
    """A policy's memory from its row; None if another version, or another policy of this name, has made it."""
    if row["version"] != policy.version:
        return None
    try:
        memory = _memories(policy).validate_json(row["memory"])
    except ValidationError:
        return None
    return StoredMemory(row["job_id"], row["version"], row["folded_event"], memory)


def memory_row(stored: StoredMemory, policy: Policy) -> dict[str, Any]:
    """The row of a policy's memory."""
    row = {field.name: getattr(stored, field.name) for field in fields(stored)}
    return row | {"memory": _memories(policy).dump_json(stored.memory).decode()}


# In the order of their fields: names would take more room than the numbers. New fields come last.
_LISTED: dict[str, type[SizeBelief | CandidateWorth]] = {"sizes": SizeBelief, "candidates": CandidateWorth}


def decision_from(row: Row) -> StoredDecision:
    """A decision from its row."""
    told = json.loads(row["decision"])
    for name, kind in _LISTED.items():
        told[name] = [dict(zip(kind.model_fields, values, strict=False)) for values in told[name]]
    return StoredDecision(row["job_id"], row["trial_number"], Decision.model_validate(told))


def decision_row(stored: StoredDecision) -> dict[str, Any]:
    """The row of a decision."""
    told = stored.decision.model_dump(mode="json")
    for name in _LISTED:
        told[name] = [list(each.values()) for each in told[name]]
    text = json.dumps(told, separators=(",", ":"))
    return {"job_id": stored.job_id, "trial_number": stored.trial_number, "decision": text}


def token_from(row: Row) -> TokenRecord:
    """A token from its row."""
    return TokenRecord(**{**row, "scopes": frozenset(map(Scope, row["scopes"].split()))})


def token_row(token: TokenRecord) -> dict[str, Any]:
    """The row of a token."""
    return asdict(token) | {"scopes": " ".join(sorted(token.scopes))}


_ARM = TypeAdapter(Arm)


def arm_from(row: Row) -> Arm:
    """Return the arm that a row holds."""
    return _ARM.validate_json(row["arm"])


def arm_row(job_id: str, arm: Arm) -> dict[str, Any]:
    """Return the row of a job's arm."""
    return {"job_id": job_id, "batch_size": arm.batch_size, "arm": _ARM.dump_json(arm).decode()}
