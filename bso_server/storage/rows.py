"""Rows of the tables, and what they are to the rest of the server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import (
    RowMapping,
)

from bso_server.core.access import Scope, TokenRecord
from bso_server.core.gp_voi.beliefs import Belief, Streak
from bso_server.core.history import Arm, Cheapest
from bso_server.core.model import EpochBound, Job, TrialRecord
from bso_server.core.statistics import Statistics, WeightedStatistics
from zeus_plugins.protocol import EndReason, JobRegistration, Origin, PowerLimitSample, TrialState

Row = RowMapping | Mapping[str, Any]
"""A table's row by the names of its columns."""


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

    @property
    def min_cost_j(self) -> float | None:
        """The cost of the cheapest trial that reached the target, joules; None before the first."""
        return None if self.cheapest is None else self.cheapest.cost_j


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


def job_row(stored: StoredJob) -> dict[str, Any]:
    """The columns that may change, with the key."""
    cheapest = stored.cheapest
    return {
        "job_id": stored.job.job_id,
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


def trial_row(trial: StoredTrial) -> dict[str, Any]:
    """The columns that may change, with the key. A trial without reports has no totals, rather than zeros."""
    record = trial.record
    return {
        **progress_row(trial),
        "state": record.state.value,
        "end_reason": None if record.end_reason is None else record.end_reason.value,
        "ended_at": trial.ended_at,
        "ended_event": record.ended_event,
        "heartbeats": record.heartbeats,
        "epoch_bound": None if record.bound is None else record.bound.epochs,
        "epoch_bound_reason": None if record.bound is None else record.bound.reason,
    }


def whole_trial_row(trial: StoredTrial) -> dict[str, Any]:
    """Every column of a trial, as it is inserted."""
    record = trial.record
    return {
        **trial_row(trial),
        "batch_size": record.batch_size,
        "origin": record.origin.value,
        "reason": trial.reason,
        "started_at": trial.started_at,
        "started_event": record.started_event,
        "owner": trial.owner,
        "power_limit_w": trial.power_limit_w,
        "power_limits": trial.power_limits,
    }


def progress_row(trial: StoredTrial) -> dict[str, Any]:
    """The columns that a report changes of a trial that goes on, with the key."""
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


def power_profile_row(profile: StoredPowerProfile) -> dict[str, Any]:
    """The row of a power-limit profile."""
    row = {field.name: getattr(profile, field.name) for field in fields(profile)}
    return row | {"samples": _SAMPLES.dump_json(profile.samples).decode()}


def token_from(row: RowMapping) -> TokenRecord:
    """A token from its row."""
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


def arm_from(row: RowMapping) -> Arm:
    """An arm from its row."""
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


def arm_row(arm: Arm) -> dict[str, Any]:
    """The row of an arm."""
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
