"""Stored jobs as the read API shows them; pure."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from bso_server.core import policy
from bso_server.core.history import Arm, History, cost_of
from bso_server.core.model import EpochBound, Expectations, ExpectedCost, Suggestion, TrialRecord
from bso_server.core.savings import Tally, savings
from bso_server.core.words import stop_in_words
from bso_server.service.messages import (
    EpochList,
    EpochView,
    EventKind,
    EventPage,
    EventView,
    PowerProfileList,
    PowerProfileView,
)
from bso_server.storage.rows import TRIAL, StoredEpoch, StoredJob, StoredPowerProfile, epoch_row, last_report
from zeus_plugins.protocol import (
    ArmView,
    Decision,
    Explanation,
    GpuConfig,
    JobRegistration,
    JobSummary,
    JobView,
    Stage,
    StopRule,
    TrialFacts,
    TrialState,
    TrialView,
)


def summary(stored: StoredJob) -> JobSummary:
    """One line about a job."""
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


def job(stored: StoredJob, history: History, tallies: Sequence[Tally], trials: Sequence[TrialRecord]) -> JobView:
    """A job with its arms, the number of its trials in each state, its savings, and those `trials` to be shown."""
    expected = policy.expectations(history)
    states: Counter[TrialState] = Counter()
    for tally in tallies:
        states[tally.state] += tally.trials
    best = None if expected.best is None else expected.costs[expected.best].mean_j
    return JobView(
        job=stored.registration,
        stage=history.stage,
        min_cost_j=None if history.cheapest is None else history.cheapest.cost_j,
        best_batch_size=expected.best,
        arms=_arms(history, expected),
        trial_count=stored.trial_count,
        trial_states={state: states[state] for state in TrialState if state in states},
        trials=tuple(trial(stored.registration, each) for each in trials),
        savings=savings(stored.registration, tallies, best),
        owner=stored.owner,
        shared=stored.shared,
    )


def arms(history: History) -> tuple[ArmView, ...]:
    """The views of all batch sizes, ascending."""
    return _arms(history, policy.expectations(history))


def _arms(history: History, expected: Expectations) -> tuple[ArmView, ...]:
    return tuple(_arm(known, expected.costs.get(size)) for size, known in history.arms.items())


def _arm(known: Arm, expected: ExpectedCost | None) -> ArmView:
    costs = known.completed
    return ArmView(
        batch_size=known.batch_size,
        trials=known.trials,
        n=costs.count,
        mean_cost_j=costs.mean if costs.count else None,
        std_cost_j=costs.variance**0.5 if costs.count > 1 else None,
        infeasible=known.infeasible,
        expected_cost_j=None if expected is None else expected.mean_j,
        expected_cost_std_j=None if expected is None else expected.std_j,
    )


def trial(of_job: JobRegistration, stored: TrialRecord) -> TrialView:
    """One trial."""
    shown = TRIAL.of(stored)
    cost_j = cost_of(of_job, stored) if stored.report_count else None
    return TrialView(**shown, cost_j=cost_j, epochs=shown["epoch"])


def explanation(of_job: StoredJob, stored: TrialRecord, decision: Decision | None) -> Explanation:
    """The reason for a trial's batch size, and its stop."""
    return Explanation(
        job_id=of_job.job_id,
        policy=of_job.registration.policy,
        trial_number=stored.trial_number,
        batch_size=stored.batch_size,
        origin=stored.origin,
        state=stored.state,
        sentence=_sentence(of_job.registration, stored.reason, stored.bound, decision),
        decision=decision,
    )


def explanation_of_next(of_job: StoredJob, suggestion: Suggestion) -> Explanation:
    """The same of the trial that would be started next."""
    return Explanation(
        job_id=of_job.job_id,
        policy=of_job.registration.policy,
        trial_number=None,
        batch_size=suggestion.batch_size,
        origin=suggestion.origin,
        state=None,
        sentence=_sentence(of_job.registration, suggestion.reason, suggestion.bound, suggestion.decision),
        decision=suggestion.decision,
    )


def _sentence(job: JobRegistration, reason: str, bound: EpochBound | None, decision: Decision | None) -> str:
    rule, because = (None, None) if decision is None else (decision.stop, None)
    if bound is not None:
        rule, because = StopRule(max_epochs=bound.epochs), bound.reason
    stop = stop_in_words(rule, job.max_epochs, because)
    return f"{reason}; {stop}" if stop else reason


def epochs(of_job: JobRegistration, stored: TrialRecord, kept: Sequence[StoredEpoch]) -> EpochList:
    """A trial's reports, of which these are kept beside it, in order."""
    shown = [_epoch(of_job, each) for each in kept]
    # The last one is kept beside the trial, too, unless it ended the trial or was pruned.
    if stored.last_report is not None and (not kept or kept[-1].report_number < stored.report_count):
        shown.append(_epoch(of_job, last_report(stored)))
    return EpochList(epochs=tuple(shown))


def gpus_of(registration: JobRegistration) -> GpuConfig:
    """The hardware of a job."""
    return GpuConfig(**{name: getattr(registration, name) for name in GpuConfig.model_fields})


def power_profiles(of_job: StoredJob, kept: Iterable[StoredPowerProfile]) -> PowerProfileList:
    """A job's power-limit profiles."""
    return PowerProfileList(
        gpus=gpus_of(of_job.registration),
        profiles=tuple(PowerProfileView.model_validate(each, from_attributes=True) for each in kept),
    )


def events(dispatched: Iterable[TrialRecord], ended: Iterable[TrialRecord], *, since: int, limit: int) -> EventPage:
    """A page of the events of a job, from the first trials that began after event `since`, and that ended after it."""
    beginnings = [_event(EventKind.DISPATCHED, each.started_event, each, each.started_at) for each in dispatched]
    ends = [_event(EventKind.ENDED, each.ended_event, each, each.ended_at) for each in ended]
    page = sorted((event for event in beginnings + ends if event), key=lambda event: event.event)[:limit]
    return EventPage(events=tuple(page), next=page[-1].event if page else since)


# The columns as version 0.1.0 wrote them: scripts may count on their places.
_CSV_COLUMNS = [name for name in TrialFacts.model_fields if name != "metric"]
_AFTER_ENERGY = _CSV_COLUMNS.index("energy_source") + 1
_CSV_COLUMNS[_AFTER_ENERGY:_AFTER_ENERGY] = ["cost_j", "epochs", "metric", "owner"]


def trials_csv(trials: Iterable[TrialView]) -> str:
    """Trials as CSV (RFC 4180) with a header line: the fields of `TrialView`, empty where there is no value."""
    return csv_of([each.model_dump(mode="json") for each in trials], _CSV_COLUMNS)


def csv_of(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> str:
    """Rows, values by column, as CSV (RFC 4180) with a header line; without `columns` in the order of the first row."""
    text = io.StringIO()
    table = csv.DictWriter(text, columns or list(rows[0]))
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def _epoch(of_job: JobRegistration, kept: StoredEpoch) -> EpochView:
    return EpochView(**epoch_row(kept), cost_j=of_job.cost_j(time_s=kept.time_s, energy_j=kept.energy_j))


def _event(kind: EventKind, event: int | None, stored: TrialRecord, at: datetime | None) -> EventView | None:
    if event is None or at is None:
        return None
    number, size, state = stored.trial_number, stored.batch_size, stored.state
    return EventView(event=event, kind=kind, trial_number=number, batch_size=size, state=state, at=at)
