"""The views of the read API and of the dashboard's pages, each also as JSON. Trainings need none of them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from bso_server.core.verdict import Saved
from zeus_plugins.protocol import (
    CreatedJob,
    Epochs,
    Explanation,
    Finite,
    Instant,
    JobSummary,
    JobView,
    Joules,
    Origin,
    PositiveInt,
    SavingsView,
    SavingsWord,
    Seconds,
    TrialState,
    TrialView,
    WireMessage,
)

DEFAULT_PAGE = 100
MAX_PAGE = 1000


class EpochExport(WireMessage):
    """One report of a trial, as kept: totals since the trial began.

    Attributes:
        report_number: Counts from 1 within the trial.
        epoch: Epochs trained; fractional within an epoch.
        time_s: Seconds.
        energy_j: Joules over all GPUs.
        metric: The validation metric.
        reported_at: When the report arrived (UTC).
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


class Liveness(WireMessage):
    """Answer of ``GET /health/live`` and ``GET /health/ready``."""

    status: Literal["ok"] = "ok"


class VersionView(WireMessage):
    """Answer of ``GET /version``: the server's version, and the schema revision that it needs."""

    version: str
    schema_revision: str


class Tariff(WireMessage):
    """The price and the carbon emissions of energy, from the server's settings.

    Attributes:
        price_per_kwh: In `currency`; None hides all amounts of money.
        currency: Name or sign.
        carbon_g_per_kwh: Grams of CO2 equivalent; None hides all amounts of carbon.
    """

    price_per_kwh: float | None = None
    currency: str | None = None
    carbon_g_per_kwh: float | None = None


@dataclass(frozen=True, slots=True)
class TrialPoint:
    """A trial in a chart; a dataclass, because validation of 1,000 would take most of a page's time."""

    trial_number: int
    batch_size: int
    state: TrialState
    origin: Origin
    cost_j: float | None  # joules so far; None before the first report
    metric: float | None  # the last one


class CostUnit(WireMessage):
    """Run now with which pages compare costs: at the default or, if its cost is unknown, at the cheapest size."""

    batch_size: int
    cost_j: float


class JobLine(WireMessage):
    """A job in the list of jobs."""

    job: JobSummary
    gpu_model: str
    default_batch_size: int
    best_batch_size: int | None  # according to the job's policy
    running: int  # number of running trials with a lease
    last_activity_at: datetime  # of the latest message of a training, or of the registration
    savings: SavingsView
    latest: tuple[TrialPoint, ...]
    energy_sources: tuple[str, ...]  # of the latest trials
    trial_states: dict[TrialState, int]  # number of trials in each state
    best_metric: float | None  # best last metric of all trials; None once a trial has reached the target
    stuck: str | None  # as in `JobView`
    drift: float | None  # share by which the last two runs cost more (negative: less); None if that may be chance
    meets_at_once: bool = False  # True if the first report of two runs has met the target
    trouble: int  # as in `core.savings.JobVerdict`

    @property
    def has_missed(self) -> bool:
        """True if runs of the job have ended, but none at the target."""
        return self.trouble < 2


class JobsPage(WireMessage):
    """The page ``/ui/`` and its JSON: a page of all jobs, ordered by `trouble`, then by id."""

    jobs: tuple[JobLine, ...]
    next_cursor: str | None  # the place after which the next page begins
    containing: str | None  # the text that all ids contain
    tariff: Tariff


class SizeMeans(WireMessage):
    """The mean time (s) and energy (J) of the latest runs of a batch size that reached the target."""

    batch_size: int
    runs: int
    time_s: float
    energy_j: float


class JobPage(WireMessage):
    """The page ``/ui/jobs/J`` and its JSON."""

    view: JobView
    created_at: datetime
    running: int  # number of running trials with a lease
    last_activity_at: datetime  # of the latest message of a training, or of the registration
    cost_unit: CostUnit | None  # None before a run has reached the target
    best_metric: float | None  # best last metric of all trials; None once a trial has reached the target
    points: tuple[TrialPoint, ...]  # the latest trials
    means: tuple[SizeMeans, ...]  # of each batch size that reached the target
    energy_sources: tuple[str, ...]  # of the latest trials
    tariff: Tariff


class TrialPage(WireMessage):
    """The page ``/ui/jobs/J/trials/N`` and its JSON: a trial, and the job as it was when its batch size was chosen."""

    job: CreatedJob
    cost_unit: CostUnit | None  # of the present, so that a cost is the same on all pages
    trial: TrialView
    reported_at: datetime | None  # arrival of the last report
    lease_expires_at: datetime | None  # when the server abandons the silent trial; None after its end
    lease_epoch: int  # number of runs of the trial's training
    report_count: int
    epochs: tuple[EpochView, ...]  # the reports that were not pruned
    max_cost_j: float | None  # cost at which the server stops the trial; None without such a bound
    max_epochs: int  # epochs after which the server stops the trial without the target
    last_trial_number: int  # of the job
    explanation: Explanation  # with the beliefs at the trial's begin
    points: tuple[TrialPoint, ...]  # the latest trials before it, in their states at its start
    energy_sources: tuple[str, ...]  # of the trials that had ended before it
    tariff: Tariff


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSum:
    """Jobs with trials that ended in the period of a report, and what these trials took and saved.

    Attributes:
        key: Value by which the jobs are grouped, or the id of a single job.
        jobs: Number of jobs.
        saves: Number of jobs that are shown to save.
        loses: Number of jobs that are shown to lose.
        runs: Number of trials that ended in the period.
        energy_j: Joules that these trials took.
        estimated_j: Joules of `energy_j` that are estimated.
        time_s: Seconds.
        cost_j: Cost, joules.
        cost_saved_j: Cost saved in the period by the jobs with a shown verdict on their cost; None: no such job.
        energy_saved_j: Energy saved by the jobs with a shown verdict on their energy; None likewise.
        time_saved_s: Time saved by the jobs with a shown verdict on their time; None likewise.
    """

    key: str
    jobs: int
    saves: int
    loses: int
    runs: int
    energy_j: float
    estimated_j: float
    time_s: float
    cost_j: float
    cost_saved_j: Saved | None = None
    energy_saved_j: Saved | None = None
    time_saved_s: Saved | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetJob(FleetSum):
    """One job in a report.

    Attributes:
        word: Present verdict, by cost.
        owner: Name of the token that owns the job, with its id; None without a token.
        model: Class of the trained model; None if unknown.
        gpu_model: Model of its GPUs.
        tags: Tags by their names.
        advice: Why the job saves nothing and what to do, in words; None for other jobs.
        stuck: As in `JobView`.
    """

    word: SavingsWord
    owner: str | None
    model: str | None
    gpu_model: str
    tags: dict[str, str]
    advice: str | None
    stuck: str | None


class FleetPage(WireMessage):
    """Answer of ``GET /api/report``, and the page ``/ui/report``: what the jobs of a period used and saved.

    Attributes:
        since: Begin of the period (UTC).
        until: Its end.
        by: Property, or name of the tag, by which jobs are grouped.
        total: All jobs.
        saving: Jobs that are shown to save.
        losing: Jobs that are shown to lose.
        groups: Groups that add up to `total`, by energy; beyond the largest ones, one group holds the rest.
        costliest: Jobs that used the most energy.
        idle: Jobs that lose or save nothing, by energy; `idle_jobs` is their number.
        stuck: Jobs of which every batch size has missed the target, by energy; `stuck_jobs` is their number.
        outdated: Number of jobs of which the verdict does not include the latest runs yet.
    """

    since: Instant
    until: Instant
    by: str
    total: FleetSum
    saving: FleetSum
    losing: FleetSum
    groups: tuple[FleetSum, ...]
    costliest: tuple[FleetJob, ...]
    idle: tuple[FleetJob, ...]
    idle_jobs: int
    stuck: tuple[FleetJob, ...]
    stuck_jobs: int
    outdated: int
    tariff: Tariff
