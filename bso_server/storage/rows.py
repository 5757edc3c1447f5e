"""Conversion between rows of the tables and the records that the rest of the server uses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from functools import lru_cache
from operator import attrgetter
from typing import Any

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import RowMapping

from bso_server.core.access import Scope, TokenRecord
from bso_server.core.job import JobState
from bso_server.core.model import Cheapest, TrialRecord
from bso_server.core.policy import Policy
from bso_server.storage.tables import trials
from zeus_plugins.protocol import (
    CandidateWorth,
    CreatedJob,
    Decision,
    Fingerprint,
    Origin,
    SizeBelief,
    TrialState,
)

Row = RowMapping | Mapping[str, Any]
"""Values of a row by column name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJob(JobState):
    """Row of `tables.jobs`; a job without an owner is open to all."""

    created_at: datetime
    rng_state: str | None
    owner: str | None = None
    shared: bool = False


@dataclass(frozen=True, slots=True)
class StoredEpoch:
    """Row of `epochs`: a report that did not end its trial; fields as in `service.views.EpochView`."""

    job_id: str
    trial_number: int
    report_number: int
    epoch: float
    time_s: float
    energy_j: float
    metric: float
    reported_at: datetime


@dataclass(frozen=True, slots=True)
class StoredDecision:
    """Row of `decisions`."""

    job_id: str
    trial_number: int
    decision: Decision


@dataclass(frozen=True, slots=True)
class StoredMemory:
    """Row of `policy_memories`: memory of a job's policy, learned from the trials that ended up to `folded_event`."""

    job_id: str
    version: str
    folded_event: int
    memory: Any


@dataclass(frozen=True, slots=True)
class TrialTotals:
    """Outcome of a trial; totals are None before its first report."""

    trial_number: int
    batch_size: int
    state: TrialState
    origin: Origin
    ended_event: int | None
    time_s: float | None
    energy_j: float | None
    energy_source: str | None
    metric: float | None
    other_gpus: bool


@lru_cache(maxsize=1024)
def _registration(
    spec: str, fingerprint: str | None, registration_id: str | None, target: float | None, target_runs: str | None
) -> CreatedJob:
    # Cached, because to parse the registration for each report would take longer than the rest of the report.
    registration = CreatedJob.model_validate_json(spec)
    if registration_id is not None:
        registration = registration.model_copy(update={"registration_id": registration_id})
    if target is not None:
        # The spec still has the target with which the job was registered.
        update = {"target_metric": target, "target_runs": tuple(json.loads(target_runs or "[]"))}
        registration = registration.model_copy(update=update)
    if fingerprint is not None:
        registration = registration.with_fingerprint(Fingerprint.model_validate_json(fingerprint))
    return registration


def job_from(row: Row) -> StoredJob:
    """Return the job in a row."""
    cheapest = None
    if row["min_cost_j"] is not None:
        cheapest = Cheapest(row["min_cost_trial_number"], row["min_cost_batch_size"], row["min_cost_j"])
    return StoredJob(
        registration=_registration(
            row["spec"], row["fingerprint"], row["registration_id"], row["target_metric"], row["target_runs"]
        ),
        created_at=row["created_at"],
        event_count=row["event_count"],
        trial_count=row["trial_count"],
        cheapest=cheapest,
        bandit_entered_at=row["bandit_entered_event"],
        folded_event=row["folded_event"],
        revised_event=row["revised_event"],
        rng_state=row["rng_state"],
        owner=row["owner"],
        shared=row["shared"],
        survivors=None if row["survivors"] is None else tuple(json.loads(row["survivors"])),
    )


def job_row(stored: StoredJob) -> dict[str, Any]:
    """Return the columns of a job that may change, with its key."""
    cheapest, fingerprint = stored.cheapest, stored.registration.fingerprint
    runs = stored.registration.target_runs
    return {
        "job_id": stored.job_id,
        "shared": stored.shared,
        "fingerprint": None if fingerprint is None else fingerprint.model_dump_json(),
        "target_metric": None if runs is None else stored.registration.target_metric,
        "target_runs": None if runs is None else json.dumps(runs),
        "event_count": stored.event_count,
        "trial_count": stored.trial_count,
        "min_cost_j": stored.min_cost_j,
        "min_cost_batch_size": None if cheapest is None else cheapest.batch_size,
        "min_cost_trial_number": None if cheapest is None else cheapest.trial_number,
        "bandit_entered_event": stored.bandit_entered_at,
        "folded_event": stored.folded_event,
        "revised_event": stored.revised_event,
        "rng_state": stored.rng_state,
        "survivors": None if stored.survivors is None else json.dumps(stored.survivors),
    }


# Before a trial's first report, its totals are 0 in the record, so that sums need no special case, and null in the row.
_EPOCHS = {"epoch", "first_epoch", "first_time_s", "first_energy_j"}
_TOTALS = {"time_s", "energy_j", *_EPOCHS}


def _written_with(*occasions: str) -> tuple[str, ...]:
    return tuple(c.name for c in trials.c if c.primary_key or c.info.get("written") in occasions)


# Columns of `trials`: all of them, and for each occasion the key and the columns that are updated then.
TRIAL = tuple(trials.c.keys())
TRIAL_AT_REPORT = _written_with("report")
TRIAL_AT_TRANSITION = _written_with("report", "state")


def trial_row(trial: TrialRecord, columns: tuple[str, ...] = TRIAL) -> dict[str, Any]:
    """Return columns of a trial; totals are null before the first report, epochs also in trials imported from Zeus."""
    row = {name: getattr(trial, name) for name in columns}
    if not trial.epoch:
        row |= dict.fromkeys(row.keys() & (_EPOCHS if trial.report_count else _TOTALS))
    return row


def trial_from(values: Row) -> TrialRecord:
    """Return the trial in a row, or in the fields of an exported trial that are columns."""
    totals = {name: values[name] or 0.0 for name in _TOTALS}
    return TrialRecord.of_row({**values, **totals})


_last_report_values = attrgetter(
    *("report_count" if field.name == "report_number" else field.name for field in fields(StoredEpoch))
)


def last_report(trial: TrialRecord) -> StoredEpoch:
    """Return the last report of a trial that has reported, as a row of `epochs`."""
    return StoredEpoch(*_last_report_values(trial))


def record_row(record: StoredEpoch | StoredMemory) -> dict[str, Any]:
    """Return the row of a record with one column per field."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


@lru_cache(maxsize=64)
def _memories(policy: Policy) -> TypeAdapter[Any]:
    return TypeAdapter(None if policy.memory is None else policy.memory.kind)


def memory_from(row: Row, policy: Policy) -> StoredMemory | None:
    """Return a policy's memory; None if another version, or another policy with this name, has written the row."""
    if row["version"] != policy.version:
        return None
    try:
        memory = _memories(policy).validate_json(row["memory"])
    except ValidationError:
        return None
    return StoredMemory(row["job_id"], row["version"], row["folded_event"], memory)


def memory_row(stored: StoredMemory, policy: Policy) -> dict[str, Any]:
    """Return the row of a policy's memory."""
    return record_row(stored) | {"memory": _memories(policy).dump_json(stored.memory).decode()}


# Records that are stored as lists of values, in the order of their fields, to save space. Add new fields at the end.
_LISTED: dict[str, type[SizeBelief | CandidateWorth]] = {"sizes": SizeBelief, "candidates": CandidateWorth}


def decision_from(row: Row) -> StoredDecision:
    """Return the decision in a row."""
    stored = json.loads(row["decision"])
    for name, kind in _LISTED.items():
        stored[name] = [dict(zip(kind.model_fields, values, strict=False)) for values in stored[name]]
    return StoredDecision(row["job_id"], row["trial_number"], Decision.model_validate(stored))


def decision_row(stored: StoredDecision) -> dict[str, Any]:
    """Return the row of a decision."""
    values = stored.decision.model_dump(mode="json")
    for name in _LISTED:
        values[name] = [list(each.values()) for each in values[name]]
    text = json.dumps(values, separators=(",", ":"))
    return {"job_id": stored.job_id, "trial_number": stored.trial_number, "decision": text}


def token_from(row: Row) -> TokenRecord:
    """Return the token in a row."""
    return TokenRecord(**{**row, "scopes": frozenset(map(Scope, row["scopes"].split()))})


def token_row(token: TokenRecord) -> dict[str, Any]:
    """Return the row of a token."""
    return asdict(token) | {"scopes": " ".join(sorted(token.scopes))}
