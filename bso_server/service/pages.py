"""The content of the dashboard's pages: functions over one transaction that fill the views of `views`.

Each function also returns the view's version, a short text that changes whenever the view does. A caller that passes
the present version as `known` gets no view, and the database reads little more than the version.

Functions with a `job_id` raise `UnknownJobError`, functions with a `trial_number` also `UnknownTrialError`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from statistics import fmean
from typing import TypeVar

from bso_server.core.gp_voi.prior import CONSTANTS
from bso_server.core.model import TrialRecord
from bso_server.core.policy import stop_rule
from bso_server.core.savings import Tally, is_whole_run, no_verdict
from bso_server.service import reading
from bso_server.service.cache import Cache
from bso_server.service.commands import utc_now
from bso_server.service.loading import known_job, known_trial, load_history
from bso_server.service.revisions import terms_of
from bso_server.service.views import (
    CostUnit,
    FleetPage,
    JobLine,
    JobPage,
    JobsPage,
    SizeMeans,
    Tariff,
    TrialPage,
    TrialPoint,
)
from bso_server.storage import queries
from bso_server.storage.rows import StoredJob, TrialTotals
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import ALIVE, CreatedJob, TrialState

JOBS_ON_A_PAGE = 50
POINTS_OF_A_JOB = 1000
TRIALS_IN_THE_LOG = 50
_SURE = 2  # runs that met their target at the first report
_SPARKS = 30
_CACHED_LINES = 2000

View = TypeVar("View", JobsPage, JobPage, TrialPage, FleetPage)
Found = tuple[str, View | None]
"""The version of a view, and the view unless its reader knows this version."""


class Pages:
    """The content of all pages about jobs, with a cache; each method runs in a transaction that only reads."""

    def __init__(self, tariff: Tariff, clock: Callable[[], datetime] = utc_now) -> None:
        self._tariff, self._clock = tariff, clock
        self._lines = Cache[str, JobLine](_CACHED_LINES)

    def jobs(
        self,
        transaction: Transaction,
        *,
        containing: str | None = None,
        cursor: str | None = None,
        known: str | None = None,
    ) -> Found[JobsPage]:
        """Return a page of jobs whose ids contain a text, after the place `cursor`."""
        limit = JOBS_ON_A_PAGE + 1
        found = queries.job_versions(transaction, containing=containing, after=cursor, limit=limit)
        shown = found[:JOBS_ON_A_PAGE]
        silent = self._silent(transaction, [place[1:] for place, _ in shown])
        version = digest([containing, cursor, len(found), shown, silent])
        if version == known:
            return version, None
        lines = [self._line(transaction, place[1:], own) for place, own in shown]
        lines = [line.model_copy(update={"running": line.running - silent.get(line.job.job_id, 0)}) for line in lines]
        next_cursor = shown[-1][0] if len(found) > len(shown) else None
        return version, JobsPage(
            jobs=tuple(lines),
            next_cursor=next_cursor,
            containing=containing,
            tariff=self._tariff,
        )

    def _silent(self, transaction: Transaction, job_ids: list[str]) -> dict[str, int]:
        """Return the number of running trials of each job that have lost their lease: killed ones, most likely."""
        return queries.silent_counts(transaction, job_ids, self._clock(), [TrialState.RUNNING])

    def _line(self, transaction: Transaction, job_id: str, version: str) -> JobLine:
        line = self._lines.get(version) or _line_of(transaction, known_job(transaction, job_id))
        self._lines.put(version, line)
        return line

    def job(self, transaction: Transaction, job_id: str, *, known: str | None = None) -> Found[JobPage]:
        """Return one job."""
        stored = known_job(transaction, job_id)
        alive = [reading.as_seen(trial, self._clock()) for trial in queries.alive_trials(transaction, job_id)]
        # The page shows no leases, so heartbeats, which renew them, must not change its version.
        version = digest([stored, *(replace(trial, lease_expires_at=None) for trial in alive)])
        return version, None if version == known else self._job_page(transaction, stored, alive)

    def _job_page(self, transaction: Transaction, stored: StoredJob, alive: Sequence[TrialRecord]) -> JobPage:
        job, job_id = stored.registration, stored.job_id
        history = load_history(transaction, stored)
        tallies = queries.tallies(transaction, job_id)
        latest = queries.latest_trials(transaction, job_id, limit=TRIALS_IN_THE_LOG)
        view = reading.job_view(transaction, stored, history, tallies, latest, self._clock())
        states = {trial.trial_number: trial.state for trial in alive}
        found = queries.trial_totals(transaction, job_id, limit=POINTS_OF_A_JOB)
        totals = [replace(each, state=states.get(each.trial_number, each.state)) for each in found]
        return JobPage(
            view=view,
            created_at=stored.created_at,
            running=_running(alive),
            last_activity_at=max(_instants(stored, [*latest, *alive])),
            cost_unit=reading.cost_unit(job, view.arms),
            best_metric=_best_metric(transaction, job, tallies),
            points=_points(job, totals),
            means=_means_of(each for each in totals if each.trial_number >= view.since),
            energy_sources=_sources_of(totals),
            tariff=self._tariff,
        )

    def trial(
        self, transaction: Transaction, job_id: str, trial_number: int, *, known: str | None = None
    ) -> Found[TrialPage]:
        """Return one trial with its reports, and the job as it was when the trial's batch size was chosen."""
        stored, trial = known_trial(transaction, job_id, trial_number)
        trial = reading.as_seen(trial, self._clock())
        is_alive = trial.state in ALIVE
        cheapest_j = stored.min_cost_j if is_alive else None
        version = digest([stored.registration, stored.event_count, cheapest_j, trial])
        if version == known:
            return version, None
        rule = stop_rule(terms_of(transaction, stored, trial).registration, trial, cheapest_j)
        found = queries.trial_totals(transaction, job_id, limit=POINTS_OF_A_JOB, before=trial_number)
        totals = [_as_of(each, trial.started_event) for each in found]
        return version, TrialPage(
            job=stored.registration,
            cost_unit=_present_cost_unit(transaction, stored),
            trial=reading.trial_view(stored.registration, trial),
            reported_at=trial.reported_at,
            lease_expires_at=trial.lease_expires_at if is_alive else None,
            lease_epoch=trial.lease_epoch,
            report_count=trial.report_count,
            epochs=reading.epoch_views(transaction, stored.registration, trial),
            max_cost_j=rule.max_cost_j,
            max_epochs=rule.max_epochs,
            last_trial_number=stored.trial_count,
            explanation=reading.explanation_of(transaction, stored, trial),
            points=_points(stored.registration, totals),
            energy_sources=_sources_of(totals),
            tariff=self._tariff,
        )


def digest(parts: Iterable[object]) -> str:
    """Return the version of a view that depends on these parts."""
    return hashlib.sha256(repr(list(parts)).encode()).hexdigest()[:20]


def _as_of(trial: TrialTotals, event: int) -> TrialTotals:
    """Return the trial at this event of the job: without totals unless it had ended."""
    if trial.ended_event is not None and trial.ended_event < event:
        return trial
    return replace(trial, state=TrialState.RUNNING, time_s=None, energy_j=None, energy_source=None, metric=None)


def _line_of(transaction: Transaction, stored: StoredJob) -> JobLine:
    alive = queries.alive_trials(transaction, stored.job_id)
    latest = queries.latest_instants(transaction, stored.job_id, limit=_SPARKS)
    totals = queries.trial_totals(transaction, stored.job_id, limit=_SPARKS)
    tallies, kept = queries.tallies(transaction, stored.job_id), transaction.verdict(stored)
    verdict = kept[1] if kept else no_verdict(stored.registration)
    return JobLine(
        job=reading.job_summary(stored),
        gpu_model=stored.registration.gpu_model,
        default_batch_size=stored.registration.default_batch_size,
        best_batch_size=verdict.savings.batch_size,
        running=_running(alive),
        last_activity_at=max([*latest, *_instants(stored, alive)]),
        savings=verdict.savings,
        latest=_points(stored.registration, totals),
        energy_sources=_sources_of(totals),
        trial_states=dict(reading.trial_states(tallies)),
        best_metric=_best_metric(transaction, stored.registration, tallies),
        stuck=verdict.stuck,
        drift=verdict.drift,
        meets_at_once=queries.met_at_once(transaction, stored.registration) >= _SURE,
        trouble=verdict.trouble,
    )


def _running(alive: Sequence[TrialRecord]) -> int:
    return sum(trial.state is TrialState.RUNNING for trial in alive)


def _best_metric(transaction: Transaction, job: CreatedJob, tallies: Iterable[Tally]) -> float | None:
    """Return the best last metric of a job's trials; None once a trial has reached the target."""
    states = reading.trial_states(tallies)
    return queries.best_metric(transaction, job) if states and not states[TrialState.COMPLETED] else None


def _sources_of(totals: Iterable[TrialTotals]) -> tuple[str, ...]:
    return tuple(sorted({each.energy_source for each in totals if each.energy_source}))


def _instants(stored: StoredJob, trials: Iterable[TrialRecord]) -> list[datetime]:
    """Return the instants of the job's registration and of all messages about these trials."""
    instants = [instant for trial in trials for instant in (trial.started_at, trial.reported_at, trial.ended_at)]
    return [stored.created_at, *(instant for instant in instants if instant is not None)]


def _points(job: CreatedJob, totals: Sequence[TrialTotals]) -> tuple[TrialPoint, ...]:
    """Return trials with their costs."""
    costs = [
        None if each.energy_j is None or each.time_s is None else job.cost_j(time_s=each.time_s, energy_j=each.energy_j)
        for each in totals
    ]
    return tuple(
        TrialPoint(each.trial_number, each.batch_size, each.state, each.origin, cost_j, each.metric)
        for each, cost_j in zip(totals, costs, strict=True)
    )


def _means_of(totals: Iterable[TrialTotals]) -> tuple[SizeMeans, ...]:
    """Return the mean time and energy of the runs that count for the expected cost of an epoch at each size."""
    reached: dict[int, list[TrialTotals]] = {}
    for trial in totals:
        if is_whole_run(trial) and not trial.other_gpus:
            reached.setdefault(trial.batch_size, []).append(trial)
    found = []
    for size, runs in sorted(reached.items()):
        latest = runs[-CONSTANTS.most_cost_runs :]
        time_s, energy_j = (fmean(getattr(each, name) or 0.0 for each in latest) for name in ("time_s", "energy_j"))
        found.append(SizeMeans(batch_size=size, runs=len(latest), time_s=time_s, energy_j=energy_j))
    return tuple(found)


def _present_cost_unit(transaction: Transaction, stored: StoredJob) -> CostUnit | None:
    tallies, history = queries.tallies(transaction, stored.job_id), load_history(transaction, stored)
    found, _ = reading.expected_costs(transaction, stored, history, tallies)
    means = reading.completed(transaction, history, found.since)
    return reading.cost_unit(stored.registration, reading.arm_views(history, found.costs, means))
