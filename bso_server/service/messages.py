"""The read API's messages beyond `zeus_plugins.protocol`: parts of a job, and whole jobs to be moved between servers.

Trainings need none of it.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints

from zeus_plugins.protocol import (
    ArmView,
    BatchSize,
    Decision,
    Epochs,
    Finite,
    GpuConfig,
    Instant,
    JobRegistration,
    Joules,
    NonNegativeInt,
    PositiveInt,
    PowerLimitSamples,
    Seconds,
    TrialFacts,
    TrialState,
    WireMessage,
)

DEFAULT_PAGE = 100
MAX_PAGE = 1000

# A job of hundreds of thousands of reports. Larger ones are imported next to the database, without HTTP.
MAX_IMPORT_BYTES = 256 * 1024 * 1024


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


class EventPage(WireMessage):
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


# Leaves an imported job room for as many events again.
EventNumber = Annotated[int, Field(gt=0, le=2**30)]


class TrialExport(TrialFacts):
    """Everything that is kept of a trial, but for its token and the client's key, which mean nothing elsewhere.

    Attributes:
        started_event: Event of the job at which it was dispatched.
        reported_at: When its last report was taken (UTC), or None.
        ended_event: Event of the job at which it ended, or None.
        epoch: Epochs trained as of its last report, or None.
        report_count: Reports taken.
        longest_gap_s: Longest time between two of them, seconds.
        lease_expires_at: When it counts as abandoned if nothing more is heard of it (UTC); None for one that has ended.
        heartbeats: Whether its training sends heartbeats.
        lease_epoch: Counts the runs of its training; more than 1 where one has resumed from a checkpoint.
        first_epoch: Epochs trained as of its first report, or None.
        first_cost_j: Its cost in joules by then, or None.
        cost_deviations_j2: The spread of its epochs' costs, as `TrialRecord` has it; None where that is not known.
        decision: The numbers behind the choice of its batch size; None where no policy chose it, or before version 0.2.
        power_profile: What it measured of its power limits, if that was new to the job and is kept, or None.
        epochs: Its reports that are kept beside it, in order. The one that ended it stands in the fields above alone.
    """

    started_event: EventNumber
    reported_at: Instant | None
    ended_event: EventNumber | None
    epoch: Epochs | None
    report_count: NonNegativeInt
    longest_gap_s: Annotated[float, Field(ge=0, le=1e10, allow_inf_nan=False)]
    lease_expires_at: Instant | None
    heartbeats: bool
    lease_epoch: PositiveInt = 1
    first_epoch: Epochs | None = None
    first_cost_j: Joules | None = None
    cost_deviations_j2: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    decision: Decision | None = None
    power_profile: PowerProfileExport | None = None
    epochs: tuple[EpochExport, ...] = ()


class ExportHead(WireMessage):
    """The part of an export before the job's trials.

    Attributes:
        format: Says what this is.
        version: Version of the format.
        job: The job as registered; its `job_id` is required.
        created_at: When it was registered (UTC).
        survivors: Batch sizes with which the bandit stage was entered, ascending, or None before that.
        rng_state: State of the job's random generator as JSON, or None for one without a seed or before its first draw.
        owner: Id of the token that it belongs to, or None. It means something to a server that has this token.
        shared: Whether other tokens may run trials of it, too.
    """

    format: Literal["zeus-bso-job"] = "zeus-bso-job"
    version: Literal[1] = 1
    job: JobRegistration
    created_at: Instant
    survivors: Annotated[tuple[BatchSize, ...], Field(min_length=1)] | None
    rng_state: Annotated[str, StringConstraints(max_length=1000)] | None
    owner: Annotated[str, StringConstraints(pattern="^[0-9a-f]{8}$")] | None = None
    shared: bool = False

    def renamed(self, job_id: str) -> Self:
        """The same job under another id.

        Raises:
            pydantic.ValidationError: The id cannot be this job's.
        """
        job = JobRegistration.model_validate({**self.job.model_dump(), "job_id": job_id})
        return self.model_copy(update={"job": job})


class JobExport(ExportHead):
    """A whole job: answer of ``GET /api/jobs/{job_id}/export``, body of ``POST /api/import``.

    Attributes:
        trials: Every trial, in order of dispatch. They come last.
    """

    trials: tuple[TrialExport, ...]
