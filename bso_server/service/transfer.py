"""Whole jobs on their way out of a database and into another one; pure.

An export holds facts alone. What follows from them (arms, the cheapest trial, counters) is made anew at the import.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bso_server.core.history import Arm, History, cost_of
from bso_server.core.model import OBSERVED, TrialRecord
from bso_server.errors import InvalidImportError
from bso_server.service.messages import EpochExport, JobExport, PowerProfileExport, TrialExport
from bso_server.storage.rows import (
    TRIAL,
    StoredEpoch,
    StoredJob,
    StoredPowerProfile,
    epoch_row,
    trial_from,
)
from zeus_plugins.protocol import ALIVE, JobRegistration, Origin, TrialState

_MEASURED = ("time_s", "energy_j", "epoch", "metric", "reported_at", "first_epoch", "first_cost_j")


@dataclass(frozen=True, slots=True)
class ImportedJob:
    """The rows that an import writes."""

    stored: StoredJob
    arms: Sequence[Arm]
    trials: Sequence[TrialRecord]
    epochs: Sequence[StoredEpoch]
    power_profiles: Sequence[StoredPowerProfile]


def exported(
    stored: StoredJob,
    trials: Iterable[TrialRecord],
    epochs: Iterable[StoredEpoch],
    power_profiles: Iterable[StoredPowerProfile],
) -> JobExport:
    """A job with everything that is kept of it."""
    profile_of = {
        profile.trial_number: PowerProfileExport.model_validate(profile, from_attributes=True)
        for profile in power_profiles
    }
    by_trial: dict[int, list[EpochExport]] = {}
    for epoch in epochs:
        by_trial.setdefault(epoch.trial_number, []).append(EpochExport(**epoch_row(epoch)))
    return JobExport(
        job=stored.registration,
        created_at=stored.created_at,
        survivors=stored.survivors,
        rng_state=stored.rng_state,
        owner=stored.owner,
        shared=stored.shared,
        trials=tuple(
            TrialExport(
                **TRIAL.of(trial),
                power_profile=profile_of.get(trial.trial_number),
                epochs=tuple(by_trial.get(trial.trial_number, ())),
            )
            for trial in trials
        ),
    )


def imported(export: JobExport) -> ImportedJob:
    """Take an export apart, and make anew what follows from its facts.

    Raises:
        InvalidImportError: Its facts contradict each other.
    """
    job_id = export.job.job_id
    if job_id is None:
        raise InvalidImportError("an exported job has an id", field="job.job_id")
    for field, message in _contradictions(export):
        raise InvalidImportError(message, field=field)
    trials = [_record(job_id, trial) for trial in export.trials]
    history = History.of(export.job, trials, export.survivors)
    stored = StoredJob.after(
        trials,
        history,
        created_at=export.created_at,
        rng_state=export.rng_state,
        owner=export.owner,
        shared=export.shared,
    )
    epochs = [
        StoredEpoch(job_id=job_id, trial_number=trial.trial_number, **dict(epoch))
        for trial in export.trials
        for epoch in trial.epochs
    ]
    profiles = [
        StoredPowerProfile(job_id, trial.trial_number, trial.batch_size, **dict(trial.power_profile))
        for trial in export.trials
        if trial.power_profile is not None
    ]
    return ImportedJob(stored, tuple(history.arms.values()), trials, epochs, profiles)


def _contradictions(export: JobExport) -> Iterator[tuple[str, str]]:
    """The contradictions in an export: the field, and the reason."""
    yield from _contradictions_of_order(export.trials)
    for index, trial in enumerate(export.trials):
        for field, message in _contradictions_of(trial, export.job):
            yield f"trials.{index}.{field}", f"trial {trial.trial_number}: {message}"
    entered = any(trial.origin is Origin.BANDIT for trial in export.trials)
    if (export.survivors is not None) is not entered:
        yield "survivors", "survivors go with trials of origin bandit: both or neither"
    survivors = export.survivors or ()
    if list(survivors) != sorted(set(survivors) & set(export.job.batch_sizes)):
        yield "survivors", "survivors are some of the job's batch_sizes, ascending"
    if export.rng_state is not None:
        try:
            np.random.default_rng(0).bit_generator.state = json.loads(export.rng_state)
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            yield "rng_state", f"not the state of a random generator: {error}"


def _contradictions_of_order(trials: Sequence[TrialExport]) -> Iterator[tuple[str, str]]:
    """Trials count from 1; each begins after the one before it, and no two things happen at the same event."""
    for index, trial in enumerate(trials):
        if trial.trial_number != index + 1:
            message = f"trials are numbered 1, 2, 3, …: number {index + 1} is missing or out of order"
            yield f"trials.{index}.trial_number", message
    for index, (before, after) in enumerate(pairwise(trials), start=1):
        if after.started_event <= before.started_event:
            message = f"trial {after.trial_number} begins after trial {before.trial_number}, so at a larger event"
            yield f"trials.{index}.started_event", message
    taken = {trial.started_event for trial in trials}
    for index, trial in enumerate(trials):
        if trial.ended_event in taken:
            yield f"trials.{index}.ended_event", f"event {trial.ended_event} is another trial's too"
        if trial.ended_event is not None:
            taken.add(trial.ended_event)


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
    for name in _MEASURED:
        if (getattr(trial, name) is None) is reported:
            yield name, f"goes with having reported, and report_count is {trial.report_count}"
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


def _record(job_id: str, trial: TrialExport) -> TrialRecord:
    kept = {name: value for name, value in trial if name in TRIAL.names}
    return trial_from({"job_id": job_id, **kept})
