"""The use cases that only read: functions over one transaction that lock nothing and return views.

Functions with a `job_id` raise `UnknownJobError`, functions with a `trial_number` also `UnknownTrialError`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from operator import itemgetter
from typing import Concatenate, ParamSpec, TypeVar

from bso_server.core import policy, quality
from bso_server.core.model import (
    Expectations,
    ExpectedCost,
    History,
    Statistics,
    Suggestion,
    TrialRecord,
    advice_in_words,
    changed,
    cost_of,
    set_apart,
)
from bso_server.core.savings import Tally, default_cost
from bso_server.errors import DatabaseNotReadyError, DatabaseUnavailableError
from bso_server.service import exports
from bso_server.service.decisions import Basis, Decided, basis_of, decide
from bso_server.service.loading import known_job, known_trial, load_history
from bso_server.service.savings import savings_of
from bso_server.service.views import (
    DEFAULT_PAGE,
    CostUnit,
    EpochView,
    VersionView,
)
from bso_server.storage import queries
from bso_server.storage.migrations import HEAD
from bso_server.storage.rows import StoredJob, last_report, record_row, trial_row
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import (
    ALIVE,
    ArmView,
    CreatedJob,
    Decision,
    Explanation,
    JobList,
    JobSummary,
    JobView,
    MetricView,
    SavingsView,
    Stage,
    StopRule,
    TrialList,
    TrialState,
    TrialView,
    joules_in_words,
    package_version,
)

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger("bso_server")

# Seconds between two checks that the database can write, unless a write has failed: frequent readiness probes must not
# wear the disk.
_WRITABLE_FOR_S = 10.0


def list_jobs(
    transaction: Transaction,
    *,
    prefix: str | None = None,
    stage: Stage | None = None,
    limit: int | None = DEFAULT_PAGE,
    cursor: str | None = None,
) -> JobList:
    """Return a page of at most `limit` jobs (None: all), ordered by id as the database orders text.

    `prefix` and `stage` filter the jobs; `cursor` is `next_cursor` of the page before.
    """
    most = None if limit is None else limit + 1
    found = queries.jobs_page(transaction, prefix=prefix, stage=stage, after=cursor, limit=most)
    jobs = tuple(job_summary(stored) for stored in found[:limit])
    return JobList(jobs=jobs, next_cursor=jobs[-1].job_id if len(found) > len(jobs) else None)


def show_job(
    transaction: Transaction, job_id: str, *, limit: int | None = None, now: datetime | None = None
) -> JobView:
    """Return a job with its arms and its latest trials, at most `limit` of them (None: all), as they are seen `now`."""
    stored = known_job(transaction, job_id)
    history = load_history(transaction, stored)
    trials = queries.latest_trials(transaction, job_id, limit=limit)
    tallies = queries.tallies(transaction, job_id)
    return job_view(transaction, stored, history, tallies, trials, now or datetime.now(UTC))


def list_trials(
    transaction: Transaction,
    job_id: str,
    *,
    state: TrialState | None = None,
    limit: int = DEFAULT_PAGE,
    cursor: int = 0,
) -> TrialList:
    """Return a page of a job's trials in order of dispatch, with `state` only trials in that state; see `list_jobs`."""
    job = known_job(transaction, job_id).registration
    found = queries.trials_page(transaction, job_id, state=state, after=cursor, limit=limit + 1)
    trials = tuple(trial_view(job, as_seen(each, datetime.now(UTC))) for each in found[:limit])
    return TrialList(trials=trials, next_cursor=trials[-1].trial_number if len(found) > limit else None)


def explain(transaction: Transaction, job_id: str, trial_number: int | None = None) -> Explanation:
    """Return the reason for a trial's batch size, or without `trial_number` the next choice; raise as `decide`."""
    if trial_number is not None:
        return explanation_of(transaction, *known_trial(transaction, job_id, trial_number))
    return explanation_of_next(decide(basis_of_next(transaction, job_id)))


def basis_of_next(transaction: Transaction, job_id: str) -> Basis:
    """Read the basis of the next choice."""
    return basis_of(transaction, known_job(transaction, job_id))


def explanation_of_next(decided: Decided) -> Explanation:
    """Return the reason for the next choice."""
    return _explanation(decided.job, decided.suggestion, decided.suggestion.decision)


def explanation_of(transaction: Transaction, stored: StoredJob, trial: TrialRecord) -> Explanation:
    """Return the reason for a trial's batch size, with its stored decision, if any."""
    kept = queries.decisions_of(transaction, stored.job_id, trial.trial_number, trial.trial_number)
    explanation = _explanation(stored, trial, kept[0].decision if kept else None)
    return explanation.model_copy(update={"trial_number": trial.trial_number, "state": trial.state})


def _explanation(stored: StoredJob, chosen: Suggestion | TrialRecord, decision: Decision | None) -> Explanation:
    rule, because = None if decision is None else decision.stop, None
    if chosen.bound is not None:
        rule, because = StopRule(max_epochs=chosen.bound.epochs), chosen.bound.reason
    stop = stop_in_words(rule, stored.registration.max_epochs, because)
    return Explanation(
        job_id=stored.job_id,
        policy=stored.registration.policy,
        trial_number=None,
        batch_size=chosen.batch_size,
        origin=chosen.origin,
        state=None,
        sentence=f"{chosen.reason}; {stop}" if stop else chosen.reason,
        decision=decision,
        warm=stored.registration.warm_in_force,
    )


def stop_in_words(rule: StopRule | None, max_epochs: int, because: str | None = None) -> str:
    """Describe when a trial is stopped; empty if only the job's `max_epochs` stops it.

    `because` is the reason for the bound on the trial's epochs.
    """
    if rule is None:
        return ""
    if rule.max_epochs < max_epochs:
        epochs = "1 epoch" if rule.max_epochs == 1 else f"{rule.max_epochs} epochs"
        return f"stop it after {epochs} unless it has reached the target{f': {because}' if because else ''}"
    if rule.max_cost_j is not None:
        return f"stop it at {joules_in_words(rule.max_cost_j)} unless it has reached the target"
    return ""


def version_view() -> VersionView:
    """Return the running version."""
    return VersionView(version=package_version(), schema_revision=HEAD)


class JobReader:
    """Runner of these queries for many callers at once.

    Args:
        store: The database.
        patience_s: Seconds after which a silent database counts as not ready.
    """

    def __init__(self, store: Store, *, patience_s: float = 5.0) -> None:
        self._store = store
        self._patience_s = patience_s
        self._writable_until = -math.inf

    async def read(self, query: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the answer to a query, from one snapshot of the database."""
        return await self._store.read(query, *args, **kwargs)

    def export(self, job_id: str) -> AsyncIterator[bytes]:
        """Yield a whole job piece by piece, see `exports.export`."""
        return exports.export(self._store.patient(), job_id)

    async def check_ready(self) -> None:
        """Check that requests can be served.

        Raises:
            DatabaseNotReadyError: The database is silent, has another schema, cannot write, or is damaged.
        """
        try:
            async with asyncio.timeout(self._patience_s):
                await self._store.check_schema()
                if self._store.fault is not None or time.monotonic() > self._writable_until:
                    await self._store.check_writable()
                    self._writable_until = time.monotonic() + _WRITABLE_FOR_S
        except DatabaseNotReadyError as error:
            logger.warning("not ready: %s", error)
            raise DatabaseNotReadyError("the database has another schema; the server's log names both") from error
        except Exception as error:
            # Every request would meet this error. The answer must not show the database's address to strangers.
            said = error.detail if isinstance(error, DatabaseUnavailableError) else f"{type(error).__name__}: {error}"
            logger.warning("not ready: %s", said)
            fault = error.fault if isinstance(error, DatabaseUnavailableError) else None
            reason = "the database does not answer" if fault is None else f"the server is not ready, because {fault}"
            raise DatabaseNotReadyError(f"{reason}; the server's log says why") from error


def job_summary(stored: StoredJob) -> JobSummary:
    """Return a job without its trials and arms."""
    return JobSummary(
        job_id=stored.job_id,
        job_id_prefix=stored.registration.job_id_prefix,
        policy=stored.registration.policy,
        stage=Stage.PRUNING if stored.bandit_entered_at is None else Stage.BANDIT,
        created_at=stored.created_at,
        trials=stored.trial_count,
        min_cost_j=stored.min_cost_j,
        min_cost_batch_size=None if stored.cheapest is None else stored.cheapest.batch_size,
        owner=stored.owner,
        shared=stored.shared,
    )


def job_view(
    transaction: Transaction,
    stored: StoredJob,
    history: History,
    tallies: Sequence[Tally],
    trials: Sequence[TrialRecord],
    now: datetime,
) -> JobView:
    """Return a job with its arms, the number of its trials in each state, its savings, and these `trials`."""
    (found, savings), states = expected_costs(transaction, stored, history, tallies), trial_states(tallies)
    for trial in queries.alive_trials(transaction, stored.job_id):
        states.subtract([trial.state])
        states.update([as_seen(trial, now).state])
    return JobView(
        job=stored.registration,
        stage=history.stage,
        min_cost_j=None if history.cheapest is None else history.cheapest.cost_j,
        best_batch_size=savings.batch_size,
        arms=arm_views(history, found.costs, completed(transaction, history, found.since)),
        trial_count=stored.trial_count,
        trial_states={state: states[state] for state in TrialState if states[state]},
        trials=tuple(trial_view(stored.registration, as_seen(each, now)) for each in trials),
        since=found.since,
        savings=savings,
        owner=stored.owner,
        shared=stored.shared,
        revisions=transaction.revisions(stored.job_id) if stored.revised_event else (),
        stuck=stuck_advice(history, {} if history.recurrences else queries.missed_metrics(transaction, history.job)),
    )


def expected_costs(
    transaction: Transaction, stored: StoredJob, history: History, tallies: Sequence[Tally]
) -> tuple[Expectations, SavingsView]:
    """Return the expected cost of a run now at each size, the default's by `default_cost`, and the savings."""
    found, default = policy.expectations(history), history.job.default_batch_size
    savings, costs = savings_of(transaction, stored, tallies, found.best), dict(found.costs)
    if savings.cost_j.now is not None and found.best in costs and default in costs:
        costs[default] = default_cost(costs[found.best].mean_j, savings.cost_j.now)
    return replace(found, costs=costs), savings


def cost_unit(job: CreatedJob, arms: Sequence[ArmView]) -> CostUnit | None:
    """Return the run with which pages compare costs; None before a run has reached the target.

    Its cost is the expected one or, of a policy that expects none, the mean of its runs.
    """
    if not any(arm.n for arm in arms):
        return None
    found = {arm.batch_size: arm.mean_cost_j if arm.expected_cost_j is None else arm.expected_cost_j for arm in arms}
    costs_j = {size: cost_j for size, cost_j in found.items() if cost_j is not None}
    default = job.default_batch_size
    size = default if default in costs_j else min(costs_j, key=costs_j.__getitem__)
    return CostUnit(batch_size=size, cost_j=costs_j[size])


def stuck_advice(history: History, missed: Mapping[int, float | None]) -> str | None:
    """Return advice for a job of which every batch size has missed the target; None of any other job.

    `missed` is by `queries.missed_metrics`.
    """
    job = history.job
    if job.target_metric is None or history.recurrences or not history.runnable_sizes:
        return None
    if not history.runnable_sizes <= missed.keys():
        return None
    monitor = None if job.fingerprint is None else job.fingerprint.monitor
    target = f"{monitor or 'the target,'} {job.target_metric:g}"
    known = [(metric, size) for size, metric in sorted(missed.items()) if metric is not None]
    best = ""
    if known:
        metric, size = (max if job.higher_is_better_metric else min)(known, key=itemgetter(0))
        best = f"; the best run reached {metric:.4g} at {size}"
    return f"no batch size has reached {target}{best}: {advice_in_words(job)}"


def trial_states(tallies: Iterable[Tally]) -> Counter[TrialState]:
    """Return the number of trials in each state."""
    states: Counter[TrialState] = Counter()
    for tally in tallies:
        states[tally.state] += tally.trials
    return states


def completed(transaction: Transaction, history: History, since: int) -> Mapping[int, Statistics]:
    """Return the costs of the runs that reached the target, by size, without trials before number `since`."""
    if not since:
        return {size: arm.completed for size, arm in history.arms.items()}
    costs_j: dict[int, list[float]] = defaultdict(list)
    for run in queries.completed_runs(transaction, history.job.job_id, since=0):
        if run.trial_number >= since:
            costs_j[run.batch_size].append(history.job.cost_j(time_s=run.time_s, energy_j=run.energy_j))
    return {size: Statistics.of(costs_j[size]) for size in history.arms}


def arm_views(
    history: History, expected: Mapping[int, ExpectedCost], means: Mapping[int, Statistics]
) -> tuple[ArmView, ...]:
    """Return the results and expected costs of the job's sizes, ascending; `means` are by `completed`."""
    left_out = quality.left_out(history.job, history.arms)
    return tuple(
        ArmView(
            batch_size=size,
            trials=arm.trials,
            n=arm.completed.count,
            mean_cost_j=means[size].mean if means[size].count else None,
            std_cost_j=means[size].variance ** 0.5 if means[size].count > 1 else None,
            infeasible=history.excluded.get(size),
            expected_cost_j=expected[size].mean_j if size in expected else None,
            expected_low_j=low_j,
            expected_high_j=high_j,
            metrics=_metrics(history, size),
            left_out=left_out.get(size),
        )
        for size, arm in history.arms.items()
        if size in history.job.batch_sizes
        for low_j, high_j in [(expected[size].band_j if size in expected else None) or (None, None)]
    )


def _metrics(history: History, size: int) -> tuple[MetricView, ...]:
    is_default = size == history.job.default_batch_size
    return tuple(
        MetricView(
            name=each.name,
            runs=each.values.count,
            mean=each.values.mean,
            std=each.values.sample_std,
            lower_is_better=each.is_lower_better,
            margin=each.margin,
            low=None if each.interval is None else each.interval.low,
            high=None if each.interval is None else each.interval.high,
            verdict=None if is_default else each.verdict,
        )
        for each in quality.comparisons(history.job, history.arms, size)
    )


def as_seen(trial: TrialRecord, now: datetime) -> TrialRecord:
    """Return a trial as views show it: abandoned from the end of its lease on, though the database learns this later.

    Without a server, the next launch of the job stores this state.
    """
    is_lost = trial.state in ALIVE and trial.lease_expires_at is not None and trial.lease_expires_at < now
    return changed(trial, state=TrialState.ABANDONED) if is_lost else trial


def trial_view(job: CreatedJob, trial: TrialRecord) -> TrialView:
    """Return one trial of a job."""
    shown = trial_row(trial)
    share, _ = set_apart(trial.startup_s, trial.first_time_s, trial.first_epoch)
    return TrialView(
        **shown,
        cost_j=cost_of(job, trial) if trial.report_count else None,
        startup_j=None if trial.startup_s is None else share * trial.first_energy_j,
        epochs=shown["epoch"],
    )


def epoch_views(transaction: Transaction, job: CreatedJob, trial: TrialRecord) -> tuple[EpochView, ...]:
    """Return a trial's reports that were not pruned, in order."""
    kept = queries.epochs_between(transaction, trial.job_id, trial.trial_number, trial.trial_number)
    # Table `epochs` lacks the last report if it ended the trial or was pruned; the trial's own row always has it.
    if trial.last_report is not None and (not kept or kept[-1].report_number < trial.report_count):
        kept = [*kept, last_report(trial)]
    return tuple(
        EpochView(**record_row(each), cost_j=job.cost_j(time_s=each.time_s, energy_j=each.energy_j)) for each in kept
    )
