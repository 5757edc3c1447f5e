"""Stored jobs as the read API shows them; pure."""

from __future__ import annotations

from collections.abc import Sequence

from bso_server.core.history import Arm, History, cost_of
from bso_server.core.model import Job
from bso_server.store import StoredJob, StoredTrial
from zeus_plugins.protocol import ArmView, JobSummary, JobView, TrialView


def summary(stored: StoredJob) -> JobSummary:
    """One line about a job."""
    return JobSummary(
        job_id=stored.job.job_id,
        job_id_prefix=stored.registration.job_id_prefix,
        policy=stored.registration.policy,
        created_at=stored.created_at,
        trials=stored.trial_count,
        min_cost_j=None if stored.cheapest is None else stored.cheapest.cost_j,
        min_cost_batch_size=None if stored.cheapest is None else stored.cheapest.batch_size,
    )


def job(stored: StoredJob, trials: Sequence[StoredTrial]) -> JobView:
    """A job with its arms and trials."""
    history = History.of(stored.job, (trial.record for trial in trials))
    arms = tuple(_arm(arm) for arm in history.arms.values())
    tried = [arm for arm in arms if arm.mean_cost_j is not None]
    best = min(tried, key=lambda arm: arm.mean_cost_j or 0.0, default=None)
    return JobView(
        job=stored.registration,
        stage=history.stage,
        min_cost_j=None if history.cheapest is None else history.cheapest.cost_j,
        best_batch_size=None if best is None else best.batch_size,
        arms=arms,
        trials=tuple(_trial(stored.job, trial) for trial in trials),
    )


def _arm(arm: Arm) -> ArmView:
    costs = arm.completed
    return ArmView(
        batch_size=arm.batch_size,
        trials=arm.trials,
        n=costs.count,
        mean_cost_j=costs.mean if costs.count else None,
        std_cost_j=costs.variance**0.5 if costs.count > 1 else None,
        infeasible=arm.infeasible,
    )


def _trial(job: Job, trial: StoredTrial) -> TrialView:
    record = trial.record
    reported = record.metric is not None
    return TrialView(
        trial_number=record.trial_number,
        batch_size=record.batch_size,
        state=record.state,
        origin=record.origin,
        reason=trial.reason,
        message=record.message,
        started_at=trial.started_at,
        ended_at=trial.ended_at,
        end_reason=record.end_reason,
        time_s=record.time_s if reported else None,
        energy_j=record.energy_j if reported else None,
        energy_source=trial.energy_source,
        cost_j=cost_of(job, record) if reported else None,
        epochs=record.epoch if reported else None,
        metric=record.metric,
    )
