"""The content of the dashboard's pages: views, and the queries that fill them, each a function over one transaction.

Each query gives the version of what it found, too: a short text that changes whenever the view does. A reader who
knows it already gets no view, and the database is hardly asked for more than the version.

Those that take a `job_id` or a `trial_number` raise `UnknownJobError` or `UnknownTrialError` if there is none.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from itertools import accumulate
from typing import TypeVar

from bso_server.core.model import Expectations, TrialRecord
from bso_server.core.policy import expectations, stop_rule
from bso_server.core.savings import Tally, cost_of_default_j, gain_j, savings
from bso_server.core.whatif import Line, best_by_eta
from bso_server.errors import PolicyNotInstalledError
from bso_server.service import views
from bso_server.service.loading import known_job, known_trial, load_history
from bso_server.service.older_trials import OlderTrials
from bso_server.service.page_views import (
    EtaSpan,
    HealthPage,
    JobLine,
    JobPage,
    JobsPage,
    MomentPage,
    SizeMeans,
    Tariff,
    TokensPage,
    TrialPage,
    TrialPoint,
    WhatIfPage,
)
from bso_server.service.queries import explanation_of
from bso_server.storage import queries as stored_views
from bso_server.storage.rows import StoredJob, TrialTotals
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import ALIVE, JobRegistration, SavingsView, TrialState

JOBS_ON_A_PAGE = 50
POINTS_OF_A_JOB = 1000
TRIALS_IN_THE_LOG = 50
_SPARKS = 30
_CACHED_JOBS = 2000

View = TypeVar("View", JobsPage, JobPage, MomentPage, TrialPage, WhatIfPage, HealthPage, TokensPage)
Found = tuple[str, View | None]
"""The version of a view, and the view unless its reader knows this version."""


class Pages:
    """The queries of this module, each to be run in a transaction that only reads.

    What follows from the trials of a job in the list of jobs is remembered until one of them changes.

    Args:
        tariff: The price of energy.
    """

    def __init__(self, tariff: Tariff) -> None:
        self.tariff = tariff
        self._lines: OrderedDict[str, JobLine] = OrderedDict()
        self._older = OlderTrials()
        # Transactions run in several threads.
        self._lock = threading.Lock()

    def jobs(
        self,
        transaction: Transaction,
        *,
        containing: str | None = None,
        cursor: str | None = None,
        known: str | None = None,
    ) -> Found[JobsPage]:
        """A page of jobs whose ids contain a text, after the one that `cursor` names."""
        found = stored_views.job_versions(transaction, containing=containing, after=cursor, limit=JOBS_ON_A_PAGE + 1)
        shown = found[:JOBS_ON_A_PAGE]
        version = digest([containing, cursor, len(found), shown])
        if version == known:
            return version, None
        lines = tuple(self._line(transaction, job_id, own) for job_id, own in shown)
        next_cursor = shown[-1][0] if len(found) > len(shown) else None
        return version, JobsPage(jobs=lines, next_cursor=next_cursor, containing=containing, tariff=self.tariff)

    def _line(self, transaction: Transaction, job_id: str, version: str) -> JobLine:
        with self._lock:
            line = self._lines.pop(version, None)
        line = line or _line_of(transaction, known_job(transaction, job_id))
        with self._lock:
            self._lines[version] = line
            if len(self._lines) > _CACHED_JOBS:
                self._lines.popitem(last=False)
        return line

    def job(self, transaction: Transaction, job_id: str, *, known: str | None = None) -> Found[JobPage]:
        """One job."""
        stored = known_job(transaction, job_id)
        # None has ended after the latest event.
        alive = transaction.open_trials(job_id, stored.event_count, with_explorations=False)
        version = _version_of(stored, alive, stored_views.withdrawn_count(transaction, job_id))
        return version, None if version == known else self._job_page(transaction, stored, alive)

    def report(self, transaction: Transaction, job_id: str) -> JobPage:
        """One job, for a reader who knows nothing of it."""
        stored = known_job(transaction, job_id)
        return self._job_page(transaction, stored, stored_views.alive_trials(transaction, job_id))

    def _job_page(self, transaction: Transaction, stored: StoredJob, alive: Sequence[TrialRecord]) -> JobPage:
        job_id = stored.job_id
        history, _ = load_history(transaction, stored)
        older = max(stored.trial_count - POINTS_OF_A_JOB, 0)
        tallies, bins = self._older.look(transaction, stored, alive, older)
        latest = stored_views.latest_trials(transaction, job_id, limit=TRIALS_IN_THE_LOG)
        view = views.job(stored, history, tallies, latest)
        totals = stored_views.trial_totals(transaction, job_id, limit=POINTS_OF_A_JOB)
        means = means_of(stored.registration, tallies)
        points = _points(stored.registration, totals, tallies, view.savings, means)
        profiles = views.power_profiles(stored, stored_views.power_profiles_of(transaction, job_id)).profiles
        newest = {profile.batch_size: profile for profile in profiles}
        return JobPage(
            view=view,
            created_at=stored.created_at,
            running=len(alive),
            last_activity_at=max(_instants(stored, [*latest, *alive])),
            points=points,
            older=bins,
            paid_back_in=_paid_back_in(points, stored.registration.default_batch_size),
            means=means,
            best_by_eta=best_sizes(stored.registration, means),
            power_profiles=tuple(newest[size] for size in sorted(newest)),
            tariff=self.tariff,
        )

    def trial(
        self, transaction: Transaction, job_id: str, trial_number: int, *, known: str | None = None
    ) -> Found[TrialPage]:
        """One trial with its reports."""
        stored, trial = known_trial(transaction, job_id, trial_number)
        is_alive = trial.state in ALIVE
        cheapest_j = None if stored.cheapest is None or not is_alive else stored.cheapest.cost_j
        version = digest([stored.registration, stored.trial_count, cheapest_j, trial])
        if version == known:
            return version, None
        kept = stored_views.epochs_of(transaction, job_id, trial_number)
        profile = stored_views.power_profiles_of(transaction, job_id, trial_number, trial_number)
        rule = stop_rule(stored.registration, trial, cheapest_j)
        return version, TrialPage(
            job=stored.registration,
            trial=views.trial(stored.registration, trial),
            reported_at=trial.reported_at,
            lease_expires_at=trial.lease_expires_at if is_alive else None,
            lease_epoch=trial.lease_epoch,
            report_count=trial.report_count,
            epochs=views.epochs(stored.registration, trial, kept).epochs,
            max_cost_j=rule.max_cost_j,
            max_epochs=rule.max_epochs,
            power_profile=next(iter(views.power_profiles(stored, profile).profiles), None),
            last_trial_number=stored.trial_count,
            explanation=explanation_of(transaction, stored, trial),
            tariff=self.tariff,
        )

    def moment(
        self, transaction: Transaction, job_id: str, trial_number: int, *, known: str | None = None
    ) -> Found[MomentPage]:
        """The knowledge of the moment at which a trial was chosen."""
        stored, trial = known_trial(transaction, job_id, trial_number)
        # Later ends of the trials before it show in none of this.
        withdrawn = stored_views.withdrawn_count(transaction, job_id)
        version = digest([stored.registration, stored.trial_count, trial, withdrawn])
        if version == known:
            return version, None
        totals = stored_views.trial_totals(transaction, job_id, limit=POINTS_OF_A_JOB, before=trial_number)
        return version, MomentPage(
            job=stored.registration,
            trial=views.trial(stored.registration, trial),
            explanation=explanation_of(transaction, stored, trial),
            points=_points(stored.registration, [_as_of(each, trial.started_event) for each in totals]),
            last_trial_number=stored.trial_count,
        )


def _as_of(trial: TrialTotals, event: int) -> TrialTotals:
    """The trial as it stood at this event of the job, as far as that is known."""
    if trial.ended_event is not None and trial.ended_event < event:
        return trial
    return replace(trial, state=TrialState.RUNNING, time_s=None, energy_j=None)


def _version_of(stored: StoredJob, alive: Sequence[TrialRecord], withdrawn: int) -> str:
    # Heartbeats renew leases, of which no page of a job tells.
    silent = [replace(trial, lease_expires_at=None) for trial in alive]
    return digest([stored, withdrawn, silent])


def digest(parts: Iterable[object]) -> str:
    """The version of a view that depends on these."""
    return hashlib.sha256(repr(list(parts)).encode()).hexdigest()[:20]


def _line_of(transaction: Transaction, stored: StoredJob) -> JobLine:
    alive = stored_views.alive_trials(transaction, stored.job_id)
    expected = Expectations({}, None)
    # A job whose policy is not here must not hide all others.
    with suppress(PolicyNotInstalledError):
        expected = expectations(load_history(transaction, stored)[0])
    best = expected.best
    tallies = stored_views.tallies(transaction, stored.job_id)
    best_cost_j = None if best is None else expected.costs[best].mean_j
    totals = stored_views.trial_totals(transaction, stored.job_id, limit=_SPARKS)
    return JobLine(
        job=views.summary(stored),
        gpu_model=stored.registration.gpu_model,
        default_batch_size=stored.registration.default_batch_size,
        best_batch_size=best,
        running=len(alive),
        last_activity_at=max(
            [*stored_views.latest_instants(transaction, stored.job_id, limit=_SPARKS), *_instants(stored, alive)]
        ),
        savings=savings(stored.registration, tallies, best_cost_j),
        latest=_points(stored.registration, totals),
    )


def _instants(stored: StoredJob, trials: Iterable[TrialRecord]) -> list[datetime]:
    """The instants at which something was heard of a job and these of its trials."""
    instants = [instant for trial in trials for instant in (trial.started_at, trial.reported_at, trial.ended_at)]
    return [stored.created_at, *(instant for instant in instants if instant is not None)]


def _points(
    job: JobRegistration,
    totals: Sequence[TrialTotals],
    tallies: Sequence[Tally] = (),
    saved: SavingsView | None = None,
    means: Sequence[SizeMeans] = (),
) -> tuple[TrialPoint, ...]:
    """The latest trials; with savings and regret run by run where what all trials have come to is given."""
    nothing: Sequence[float | None] = [None] * len(totals)
    costs = [
        None if each.energy_j is None or each.time_s is None else job.cost_j(time_s=each.time_s, energy_j=each.energy_j)
        for each in totals
    ]
    spent = [(each, cost_j or 0.0) for each, cost_j in zip(totals, costs, strict=True)]
    saved_j = regret_j = nothing
    if saved is not None:
        default_j = cost_of_default_j(job, tallies) or 0.0
        saved_j = _sums([gain_j(job, each, cost_j, default_j) for each, cost_j in spent], saved.cost_j.saved)
    if means:
        least_j = min(each.cost_j for each in means)
        losses = [_loss_j(each.state, cost_j, least_j) for each, cost_j in spent]
        regret_j = _sums(losses, _regret_j(job, tallies, least_j))
    return tuple(
        TrialPoint(each.trial_number, each.batch_size, each.state, *numbers)
        for each, *numbers in zip(totals, costs, saved_j, regret_j, strict=True)
    )


def _sums(steps: Sequence[float], last: float) -> list[float]:
    """Sums of steps, which have come to `last` with the latest one."""
    return [*accumulate(steps, initial=last - sum(steps))][1:]


def _loss_j(state: TrialState, cost_j: float, least_j: float) -> float:
    if state in ALIVE or state is TrialState.WITHDRAWN:
        return 0.0
    return cost_j - (least_j if state is TrialState.COMPLETED else 0.0)


def _regret_j(job: JobRegistration, tallies: Iterable[Tally], least_j: float) -> float:
    ended = [tally for tally in tallies if tally.state not in ALIVE and tally.state is not TrialState.WITHDRAWN]
    reached = sum(tally.trials for tally in ended if tally.state is TrialState.COMPLETED)
    spent = sum(job.cost_j(time_s=tally.sums.time_s, energy_j=tally.sums.energy_j) for tally in ended)
    return spent - reached * least_j


def _paid_back_in(points: Sequence[TrialPoint], default_batch_size: int) -> int | None:
    """See `JobPage`: nothing but rounding may be lost from then on, and something was before."""
    if not points or points[-1].saved_j is None or points[-1].saved_j <= 0:
        return None
    paid = None
    for point in reversed(points):
        if point.saved_j is None or point.saved_j <= 0:
            return paid
        if point.batch_size != default_batch_size:
            paid = point.trial_number
    return None


def best_sizes(job: JobRegistration, means: Iterable[SizeMeans]) -> tuple[EtaSpan, ...]:
    """The sizes with the cheapest runs on average, as η goes from 0 to 1."""
    lines = [Line(each.batch_size, job.max_power * each.time_s, each.energy_j) for each in means]
    return tuple(EtaSpan(low=each.low, high=each.high, batch_size=each.batch_size) for each in best_by_eta(lines))


def means_of(job: JobRegistration, tallies: Iterable[Tally]) -> tuple[SizeMeans, ...]:
    """The mean time, energy and cost of the runs to the target at each size, under the job's η."""
    reached: dict[int, list[Tally]] = {}
    for tally in tallies:
        if tally.state is TrialState.COMPLETED:
            reached.setdefault(tally.batch_size, []).append(tally)
    found = []
    for size, own in sorted(reached.items()):
        runs = sum(tally.trials for tally in own)
        time_s = sum(tally.sums.time_s for tally in own) / runs
        energy_j = sum(tally.sums.energy_j for tally in own) / runs
        cost_j = job.cost_j(time_s=time_s, energy_j=energy_j)
        found.append(SizeMeans(batch_size=size, runs=runs, time_s=time_s, energy_j=energy_j, cost_j=cost_j))
    return tuple(found)
