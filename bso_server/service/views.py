"""Stored jobs as the read API shows them; pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from bso_server.core.cost import cost
from bso_server.core.history import Arm, History, cost_of
from bso_server.core.model import Job
from bso_server.service.messages import (
    EpochList,
    EpochView,
    EventKind,
    EventPage,
    EventView,
    PowerProfileList,
    PowerProfileView,
)
from bso_server.storage.rows import StoredEpoch, StoredJob, StoredPowerProfile, StoredTrial
from zeus_plugins.protocol import ArmView, GpuConfig, JobRegistration, JobSummary, JobView, Stage, TrialView


def summary(stored: StoredJob) -> JobSummary:
    """One line about a job."""
    return JobSummary(
        job_id=stored.job.job_id,
        job_id_prefix=stored.registration.job_id_prefix,
        policy=stored.registration.policy,
        stage=Stage.PRUNING if stored.bandit_entered_at is None else Stage.BANDIT,
        created_at=stored.created_at,
        trials=stored.trial_count,
        min_cost_j=stored.min_cost_j,
        min_cost_batch_size=None if stored.cheapest is None else stored.cheapest.batch_size,
    )


def job(stored: StoredJob, trials: Sequence[StoredTrial]) -> JobView:
    """A job with its arms and trials."""
    history = History.of(stored.job, (each.record for each in trials))
    arms = tuple(map(arm, history.arms.values()))
    tried = [each for each in arms if each.mean_cost_j is not None]
    best = min(tried, key=lambda each: each.mean_cost_j or 0.0, default=None)
    return JobView(
        job=stored.registration,
        stage=history.stage,
        min_cost_j=None if history.cheapest is None else history.cheapest.cost_j,
        best_batch_size=None if best is None else best.batch_size,
        arms=arms,
        trials=tuple(trial(stored.job, each) for each in trials),
    )


def arm(known: Arm) -> ArmView:
    """What is known of a batch size."""
    costs = known.completed
    return ArmView(
        batch_size=known.batch_size,
        trials=known.trials,
        n=costs.count,
        mean_cost_j=costs.mean if costs.count else None,
        std_cost_j=costs.variance**0.5 if costs.count > 1 else None,
        infeasible=known.infeasible,
    )


def trial(of_job: Job, stored: StoredTrial) -> TrialView:
    """One trial."""
    record = stored.record
    reported = record.metric is not None
    return TrialView(
        trial_number=record.trial_number,
        batch_size=record.batch_size,
        state=record.state,
        origin=record.origin,
        reason=stored.reason,
        message=record.message,
        started_at=stored.started_at,
        ended_at=stored.ended_at,
        end_reason=record.end_reason,
        time_s=record.time_s if reported else None,
        energy_j=record.energy_j if reported else None,
        energy_source=stored.energy_source,
        cost_j=cost_of(of_job, record) if reported else None,
        epochs=record.epoch if reported else None,
        metric=record.metric,
        owner=stored.owner,
        epoch_bound=None if record.bound is None else record.bound.epochs,
        epoch_bound_reason=None if record.bound is None else record.bound.reason,
        power_limit_w=stored.power_limit_w,
        power_limits=stored.power_limits,
    )


def epochs(of_job: Job, stored: StoredTrial, kept: Sequence[StoredEpoch]) -> EpochList:
    """A trial's reports.

    Args:
        of_job: The trial's job.
        stored: The trial.
        kept: Its reports that are kept beside it, in order.
    """
    shown = [_epoch(of_job, each) for each in kept]
    last = _last_report(stored)
    # It is kept beside the trial, too, unless it ended the trial or was pruned.
    if last is not None and (not kept or kept[-1].report_number < last.report_number):
        shown.append(_epoch(of_job, last))
    return EpochList(epochs=tuple(shown))


def gpus_of(registration: JobRegistration) -> GpuConfig:
    """The hardware of a job."""
    return GpuConfig(**{name: getattr(registration, name) for name in GpuConfig.model_fields})


def power_profiles(of_job: StoredJob, kept: Iterable[StoredPowerProfile]) -> PowerProfileList:
    """A job's power-limit profiles."""
    return PowerProfileList(
        gpus=gpus_of(of_job.registration),
        profiles=tuple(
            PowerProfileView(
                trial_number=each.trial_number,
                batch_size=each.batch_size,
                samples=each.samples,
                stored_at=each.stored_at,
            )
            for each in kept
        ),
    )


def events(dispatched: Iterable[StoredTrial], ended: Iterable[StoredTrial], *, since: int, limit: int) -> EventPage:
    """What happened in a job.

    Args:
        dispatched: Trials that began after event `since`: the first `limit` of them, or all.
        ended: Trials that ended after it: the first `limit` of them, or all.
        since: Where the page begins.
        limit: Events on the page.
    """
    beginnings = [_event(EventKind.DISPATCHED, each.record.started_event, each, each.started_at) for each in dispatched]
    ends = [_event(EventKind.ENDED, each.record.ended_event, each, each.ended_at) for each in ended]
    page = sorted((event for event in beginnings + ends if event), key=lambda event: event.event)[:limit]
    return EventPage(events=tuple(page), next=page[-1].event if page else since)


def trials_csv(trials: Iterable[TrialView]) -> str:
    """Trials as CSV (RFC 4180) with a header line: the fields of `TrialView`, empty where there is no value."""
    return csv_of([each.model_dump(mode="json") for each in trials], list(TrialView.model_fields))


def csv_of(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> str:
    """Rows as CSV (RFC 4180) with a header line.

    Args:
        rows: Values by column.
        columns: Their order; None: as in the first row.
    """
    text = io.StringIO()
    table = csv.DictWriter(text, columns or list(rows[0]))
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def _last_report(stored: StoredTrial) -> StoredEpoch | None:
    record = stored.record
    if record.metric is None or stored.reported_at is None:
        return None
    return StoredEpoch(
        job_id=stored.job_id,
        trial_number=record.trial_number,
        report_number=record.reports,
        epoch=record.epoch,
        time_s=record.time_s,
        energy_j=record.energy_j,
        metric=record.metric,
        reported_at=stored.reported_at,
    )


def _epoch(of_job: Job, kept: StoredEpoch) -> EpochView:
    return EpochView(
        report_number=kept.report_number,
        epoch=kept.epoch,
        time_s=kept.time_s,
        energy_j=kept.energy_j,
        cost_j=cost(energy_j=kept.energy_j, time_s=kept.time_s, max_power_w=of_job.max_power, eta=of_job.eta_knob),
        metric=kept.metric,
        reported_at=kept.reported_at,
    )


def _event(kind: EventKind, event: int | None, stored: StoredTrial, at: datetime | None) -> EventView | None:
    if event is None or at is None:
        return None
    record = stored.record
    return EventView(
        event=event,
        kind=kind,
        trial_number=record.trial_number,
        batch_size=record.batch_size,
        state=record.state,
        at=at,
    )
