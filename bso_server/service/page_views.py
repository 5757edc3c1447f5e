"""The views that the dashboard's pages show, each also as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from bso_server.core.access import Scope
from bso_server.service.messages import EpochView, PowerProfileView
from bso_server.simulate.messages import Eta, Replayed
from zeus_plugins.protocol import (
    Explanation,
    JobRegistration,
    JobSummary,
    JobView,
    PositiveFinite,
    SavingsView,
    TrialState,
    TrialView,
    WireMessage,
)

# A kilowatt-hour.
_KWH_J = 3.6e6


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

    def price(self, energy_j: float) -> float | None:
        """The price of so much energy."""
        return None if self.price_per_kwh is None else energy_j / _KWH_J * self.price_per_kwh

    def carbon_g(self, energy_j: float) -> float | None:
        """The carbon of so much energy, grams."""
        return None if self.carbon_g_per_kwh is None else energy_j / _KWH_J * self.carbon_g_per_kwh


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


class EtaSpan(WireMessage):
    """The values of η, from `low` to `high`, at which a batch size has the cheapest runs on average."""

    low: float
    high: float
    batch_size: int


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
    best_by_eta: tuple[EtaSpan, ...]
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

    job: JobRegistration
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

    job: JobRegistration
    trial: TrialView
    explanation: Explanation
    points: tuple[TrialPoint, ...]
    last_trial_number: int


class ReplayState(StrEnum):
    """The progress of a replay; busy: another one is being played."""

    BUSY = "busy"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class ReplayView(WireMessage):
    """A replay of a job by the simulator.

    Attributes:
        event: The job's event up to which its runs count.
        state: Its progress.
        reason: The reason why there is no answer, where it has failed.
        replayed: The answer.
    """

    event: int
    state: ReplayState
    reason: str | None = None
    replayed: Replayed | None = None


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
        event: The latest event of the job.
        replay: The simulator's answer, where it was asked.
        tariff: The price of energy.
    """

    job: JobRegistration
    eta: Eta
    beta: PositiveFinite | None
    batch_size: int | None
    own_batch_size: int | None
    energy_share: float | None
    time_share: float | None
    bound_j: float | None
    means: tuple[SizeMeans, ...]
    best_by_eta: tuple[EtaSpan, ...]
    event: int
    replay: ReplayView | None
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
