"""The views of the read API and of the dashboard's pages, each also as JSON. Trainings need none of them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from bso_server.core.access import Scope
from bso_server.core.savings import Span
from zeus_plugins.protocol import (
    ArmView,
    CreatedJob,
    Epochs,
    Explanation,
    Finite,
    GpuConfig,
    Instant,
    JobSummary,
    JobView,
    Joules,
    PositiveInt,
    PowerLimitSamples,
    SavingsView,
    Seconds,
    TrialState,
    TrialView,
    WireMessage,
)

DEFAULT_PAGE = 100
MAX_PAGE = 1000


class ArmList(WireMessage):
    """Answer of ``GET /api/jobs/{job_id}/arms``: every batch size, ascending."""

    arms: tuple[ArmView, ...]


class EpochExport(WireMessage):
    """One report of a trial, as kept: totals since the trial began.

    Attributes:
        report_number: Counts from 1 within the trial.
        epoch: Epochs trained; fractional within an epoch.
        time_s: Seconds.
        energy_j: Joules over all GPUs.
        metric: The validation metric.
        reported_at: When the report was taken (UTC).
    """

    report_number: PositiveInt
    epoch: Epochs
    time_s: Seconds
    energy_j: Joules
    metric: Finite
    reported_at: Instant


class EpochView(EpochExport):
    """One report of a trial, with ``cost_j``: ``η·energy + (1 − η)·max_power·time`` in joules."""

    cost_j: float


class EpochList(WireMessage):
    """Answer of ``GET /api/jobs/{job_id}/trials/{trial_number}/epochs``: the trial's reports, in order.

    The last one is always there; of the others those that were not pruned.
    """

    epochs: tuple[EpochView, ...]


class PowerProfileExport(WireMessage):
    """The power-limit profile that a trial has left for later ones of its batch size, as kept.

    Attributes:
        samples: What steps cost under each power limit, ascending by limit.
        stored_at: When that was stored (UTC).
    """

    samples: Annotated[PowerLimitSamples, Field(min_length=1)]
    stored_at: Instant


class PowerProfileView(PowerProfileExport):
    """A power-limit profile, with the trial that has left it."""

    trial_number: int
    batch_size: int


class PowerProfileList(WireMessage):
    """Answer of ``GET /api/jobs/{job_id}/power_profiles``.

    Attributes:
        gpus: The job's, on which they were measured.
        profiles: Those of trials that measured something new, in order of dispatch, unless they were pruned. The last
            one of a batch size is the one that is handed out.
    """

    gpus: GpuConfig
    profiles: tuple[PowerProfileView, ...]


class EventKind(StrEnum):
    """An event in a trial's life."""

    DISPATCHED = "dispatched"
    ENDED = "ended"


class EventView(WireMessage):
    """A trial began or ended.

    Attributes:
        event: Number of the event in the job, ascending; numbers may be left out.
        kind: What happened.
        trial_number: The trial.
        batch_size: Its batch size.
        state: Where the trial stands now, which for an end is how it ended.
        at: When that happened (UTC).
    """

    event: int
    kind: EventKind
    trial_number: int
    batch_size: int
    state: TrialState
    at: datetime


class EventList(WireMessage):
    """Answer of ``GET /api/jobs/{job_id}/events``.

    An abandoned trial that comes back to life takes the event of its end back, and gets another one when it ends again.

    Attributes:
        events: What happened after ``since``, in order; at most ``limit`` events.
        next: What to ask for as ``since`` to learn what happens after these.
    """

    events: tuple[EventView, ...]
    next: int


class Liveness(WireMessage):
    """Answer of ``GET /health/live`` and ``GET /health/ready``."""

    status: Literal["ok"] = "ok"


class VersionView(WireMessage):
    """Answer of ``GET /version``: that of the server, and the revision of the database's schema that it needs."""

    version: str
    schema_revision: str


class Tariff(WireMessage):
    """The price of energy and the carbon that it stands for, as the server's settings give them.

    Attributes:
        price_per_kwh: In `currency`; None: not known, and no money is spoken of.
        currency: Its name or sign.
        carbon_g_per_kwh: Grams of CO2 equivalent; None likewise.
    """

    price_per_kwh: float | None = None
    currency: str | None = None
    carbon_g_per_kwh: float | None = None


@dataclass(frozen=True, slots=True)
class TrialPoint:
    """A trial in a chart. Of a thousand, checking what the database has kept would take most of a page's time.

    Attributes:
        trial_number: The trial.
        batch_size: Its batch size.
        state: Where it stands.
        cost_j: Its cost until now, joules; None before its first report.
        saved_j: The cost that the job had saved with it and all trials before, joules, by what its default is known to
            cost today; None where that is nothing.
        regret_j: The cost of it and all trials before beyond what as many runs to the target would have cost at the
            size that is cheapest on average, joules; None while no size has reached the target.
    """

    trial_number: int
    batch_size: int
    state: TrialState
    cost_j: float | None
    saved_j: float | None = None
    regret_j: float | None = None


@dataclass(frozen=True, slots=True)
class TrialBin:
    """Trials that are too old to be shown one by one.

    Attributes:
        first: The first of them.
        last: The last of them.
        reached: The number of them that have reached the target.
        low_j: The cost that one in ten of those remained below, joules; None where there are none, here and below.
        median_j: The cost that half of them remained below.
        high_j: The cost that nine in ten of them remained below.
    """

    first: int
    last: int
    reached: int
    low_j: float | None
    median_j: float | None
    high_j: float | None


class JobLine(WireMessage):
    """A job in the list of jobs.

    Attributes:
        job: The job in short.
        gpu_model: Model of its GPUs.
        default_batch_size: The size that its owner would use.
        best_batch_size: The size that its policy holds to be the best, or None.
        running: Trials that run or may go on.
        last_activity_at: When something was last heard of it (UTC).
        savings: What it has saved until now; None before the default has reached the target.
        latest: Its latest trials, for a small picture.
    """

    job: JobSummary
    gpu_model: str
    default_batch_size: int
    best_batch_size: int | None
    running: int
    last_activity_at: datetime
    savings: SavingsView | None
    latest: tuple[TrialPoint, ...]


class JobsPage(WireMessage):
    """The page ``/ui/`` and its twin: a page of jobs, ordered by id.

    Attributes:
        jobs: The jobs.
        next_cursor: The id after which the next page begins, or None.
        containing: The text that the ids contain, or None.
        tariff: The price of energy.
    """

    jobs: tuple[JobLine, ...]
    next_cursor: str | None
    containing: str | None
    tariff: Tariff


class SizeMeans(WireMessage):
    """The mean time (s), energy (J) and cost (J) of the runs of a batch size that reached the target."""

    batch_size: int
    runs: int
    time_s: float
    energy_j: float
    cost_j: float


class JobPage(WireMessage):
    """The page ``/ui/jobs/J`` and its twin.

    Attributes:
        view: The job with its batch sizes and its latest trials.
        created_at: When it was registered (UTC).
        running: Trials that run or may go on.
        last_activity_at: When something was last heard of it (UTC).
        points: The latest trials, for the charts.
        older: The trials before those.
        paid_back_in: The trial from which on nothing was lost any more over the default; None while something is, and
            where it is older than `points`.
        means: Each batch size that reached the target.
        best_by_eta: Which of them would be the best under another η, as that goes from 0 to 1.
        power_profiles: The newest power-limit profile of each size that has one.
        tariff: The price of energy.
    """

    view: JobView
    created_at: datetime
    running: int
    last_activity_at: datetime
    points: tuple[TrialPoint, ...]
    older: tuple[TrialBin, ...]
    paid_back_in: int | None
    means: tuple[SizeMeans, ...]
    best_by_eta: tuple[Span, ...]
    power_profiles: tuple[PowerProfileView, ...]
    tariff: Tariff


class TrialPage(WireMessage):
    """The page ``/ui/jobs/J/trials/N`` and its twin.

    Attributes:
        job: The job as registered.
        trial: The trial.
        reported_at: When its last report was taken (UTC), or None.
        lease_expires_at: When it counts as abandoned if nothing more is heard of it (UTC); None once it has ended.
        lease_epoch: Counts the runs of its training.
        report_count: Its reports.
        epochs: Those that are kept, in order.
        max_cost_j: The cost at which it is stopped, joules, as of now; None without such a bound.
        max_epochs: The epochs after which it is stopped without the target.
        power_profile: What it measured of its power limits, or None.
        last_trial_number: The number of the job's latest trial.
        explanation: Why it has its batch size, with what was believed by then.
        tariff: The price of energy.
    """

    job: CreatedJob
    trial: TrialView
    reported_at: datetime | None
    lease_expires_at: datetime | None
    lease_epoch: int
    report_count: int
    epochs: tuple[EpochView, ...]
    max_cost_j: float | None
    max_epochs: int
    power_profile: PowerProfileView | None
    last_trial_number: int
    explanation: Explanation
    tariff: Tariff


class MomentPage(WireMessage):
    """The page ``/ui/jobs/J?at=N`` and its twin: what was known when a trial was chosen.

    Attributes:
        job: The job as registered.
        trial: The trial, with what has become of it since.
        explanation: Why it has its batch size, with what was believed by then.
        points: The latest trials before it, as they stood; those that still ran have no cost.
        last_trial_number: The number of the job's latest trial.
    """

    job: CreatedJob
    trial: TrialView
    explanation: Explanation
    points: tuple[TrialPoint, ...]
    last_trial_number: int


class WhatIfPage(WireMessage):
    """The page ``/ui/jobs/J/whatif`` and its twin.

    Attributes:
        job: The job as registered.
        eta: The η that is asked about.
        beta: The β, or None.
        batch_size: The size with the cheapest runs on average under that η; None while none has reached the target.
        own_batch_size: The same under the job's own η.
        energy_share: Energy of a run at the first over that of one at the second, by their means; None likewise.
        time_share: The same of time.
        bound_j: β times what a run of `batch_size` costs on average, joules; None without β.
        means: Each batch size that reached the target, at what its runs cost under that η.
        best_by_eta: The best of them, as η goes from 0 to 1.
        tariff: The price of energy.
    """

    job: CreatedJob
    eta: float
    beta: float | None
    batch_size: int | None
    own_batch_size: int | None
    energy_share: float | None
    time_share: float | None
    bound_j: float | None
    means: tuple[SizeMeans, ...]
    best_by_eta: tuple[Span, ...]
    tariff: Tariff


class HealthPage(WireMessage):
    """The page ``/ui/health`` and its twin.

    Attributes:
        version: That of the server.
        process: The process that has answered: one of the server's workers.
        started_at: The instant at which that began to serve (UTC).
        database: The kind of the database, with the driver.
        schema_needed: The revision of its schema that this version needs.
        schema_found: The revision that it has; None where it has none, or does not answer.
        trouble: The reason why requests cannot be served, or None.
        answer_s: Seconds that the database took to answer a small question, or None.
    """

    version: str
    process: int
    started_at: datetime
    database: str
    schema_needed: str
    schema_found: str | None
    trouble: str | None
    answer_s: float | None


class TokenLine(WireMessage):
    """A token in the list of tokens, without its secret.

    Attributes:
        token_id: Its public part.
        name: Its purpose or its holder.
        scopes: The rights that it gives.
        shares_jobs: True if other tokens may use the jobs that it registers.
        created_at: The instant at which it was made (UTC); `rotated_at` and `revoked_at` likewise.
        rotated_at: That of its latest secret, if that is not its first.
        revoked_at: That of its revocation, or None.
        jobs: The jobs that belong to it.
    """

    token_id: str
    name: str
    scopes: tuple[Scope, ...]
    shares_jobs: bool
    created_at: datetime
    rotated_at: datetime | None
    revoked_at: datetime | None
    jobs: int


class TokensPage(WireMessage):
    """The page ``/ui/tokens`` and its twin.

    Attributes:
        tokens: Every token, oldest first.
        own: The token that the reader has shown; None where none was needed.
    """

    tokens: tuple[TokenLine, ...]
    own: str | None
