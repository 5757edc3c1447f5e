"""Types of handler arguments: parameters of the request, and injected dependencies."""

from __future__ import annotations

from typing import Annotated, Any

from litestar.di import NamedDependency
from litestar.params import HeaderParameter, PathParameter, QueryParameter

from bso_server.service.commands import BatchSizeService
from bso_server.service.reading import JobReader
from bso_server.service.views import MAX_PAGE
from zeus_plugins.protocol import ID_PATTERN, MAX_ID_LENGTH, Stage, TrialState

Service = NamedDependency[BatchSizeService]

Reader = NamedDependency[JobReader]

# The largest integer that fits the column type of every database.
_LARGEST = 2**31 - 1

# In Python, `$` also matches before a final line break, which no id may have.
ID: dict[str, Any] = {"pattern": ID_PATTERN + r"(?!\n)", "max_length": MAX_ID_LENGTH}
_CURSOR: dict[str, Any] = {
    "name": "cursor",
    "description": "The next_cursor of the page before; absent: the first page.",
}

JobInPath = Annotated[str, PathParameter(**ID, description="The job.")]

JobInQuery = Annotated[str, QueryParameter(name="job_id", **ID, description="The job.")]

_IDEMPOTENCY_KEY = HeaderParameter(
    name="Idempotency-Key",
    pattern=r"^[\x21-\x7e]+$",
    min_length=1,
    max_length=255,
    description="Made for this request; the request repeated with it gets the same trial again.",
)

IdempotencyKey = Annotated[str | None, _IDEMPOTENCY_KEY]

RequiredIdempotencyKey = Annotated[str, _IDEMPOTENCY_KEY]

TrialNumber = Annotated[int, PathParameter(ge=1, le=_LARGEST, description="The trial, counting from 1 within the job.")]

ExplainedTrial = Annotated[
    int | None,
    QueryParameter(
        name="trial_number", ge=1, le=_LARGEST, description="The trial; without it, the one that would be started next."
    ),
]

JobIdPrefix = Annotated[
    str | None,
    QueryParameter(name="prefix", **ID, description="Only jobs that were registered with this job_id_prefix."),
]

StageFilter = Annotated[Stage | None, QueryParameter(name="stage", description="Only jobs in this stage.")]

StateFilter = Annotated[TrialState | None, QueryParameter(name="state", description="Only trials in this state.")]

Limit = Annotated[int, QueryParameter(ge=1, le=MAX_PAGE, description="Length of the page.")]

Latest = Annotated[
    int, QueryParameter(name="limit", ge=0, le=MAX_PAGE, description="How many of the latest trials to show.")
]

JobCursor = Annotated[str | None, QueryParameter(**_CURSOR, **ID)]

TrialCursor = Annotated[int, QueryParameter(**_CURSOR, ge=0, le=_LARGEST)]

FirstLine = Annotated[
    int,
    QueryParameter(ge=1, le=_LARGEST, description="Number of the body's first line in a larger file, for errors."),
]

Since = Annotated[int, QueryParameter(ge=0, le=_LARGEST, description="Only what happened after this event.")]
