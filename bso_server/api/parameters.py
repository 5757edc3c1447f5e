"""Parameters beside the body."""

from __future__ import annotations

from typing import Annotated

from litestar.params import Parameter

from bso_server.service.messages import MAX_PAGE
from zeus_plugins.protocol import ID_PATTERN, MAX_ID_LENGTH, Stage, TrialState

# The largest number that every database takes for an integer column.
_LARGEST = 2**31 - 1

JobId = Annotated[str, Parameter(pattern=ID_PATTERN, max_length=MAX_ID_LENGTH, description="The job.")]

_IDEMPOTENCY_KEY = Parameter(
    header="Idempotency-Key",
    pattern=r"^[\x21-\x7e]+$",
    min_length=1,
    max_length=255,
    description="Made for this request; the request repeated with it gets the same trial again.",
)

IdempotencyKey = Annotated[str | None, _IDEMPOTENCY_KEY]

RequiredIdempotencyKey = Annotated[str, _IDEMPOTENCY_KEY]

TrialNumber = Annotated[int, Parameter(ge=1, le=_LARGEST, description="The trial, counting from 1 within the job.")]

JobIdPrefix = Annotated[
    str | None,
    Parameter(
        query="prefix",
        pattern=ID_PATTERN,
        max_length=MAX_ID_LENGTH,
        description="Only jobs that were registered with this job_id_prefix.",
    ),
]

StageFilter = Annotated[Stage | None, Parameter(query="stage", description="Only jobs in this stage.")]

StateFilter = Annotated[TrialState | None, Parameter(query="state", description="Only trials in this state.")]

Limit = Annotated[int, Parameter(ge=1, le=MAX_PAGE, description="Length of the page.")]

JobCursor = Annotated[
    str | None,
    Parameter(
        query="cursor",
        pattern=ID_PATTERN,
        max_length=MAX_ID_LENGTH,
        description="The next_cursor of the page before; absent: the first page.",
    ),
]

TrialCursor = Annotated[
    int,
    Parameter(
        query="cursor",
        ge=0,
        le=_LARGEST,
        description="The next_cursor of the page before; absent: the first page.",
    ),
]

Since = Annotated[int, Parameter(ge=0, le=_LARGEST, description="Only what happened after this event.")]
