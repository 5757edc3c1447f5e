"""Types of handler arguments that several modules use: parameters of the request, and injected dependencies."""

from __future__ import annotations

from typing import Annotated, Any

from litestar.di import NamedDependency
from litestar.params import PathParameter, QueryParameter

from bso_server.service.commands import BatchSizeService
from bso_server.service.fleet import GROUP, PERIOD, FleetReader
from bso_server.service.reading import JobReader
from zeus_plugins.protocol import ID_PATTERN, MAX_ID_LENGTH

Service = NamedDependency[BatchSizeService]
Reader = NamedDependency[JobReader]
Fleet = NamedDependency[FleetReader]

LARGEST = 2**31 - 1
"""The largest integer that fits the column type of every database."""

# In Python, `$` also matches before a final line break, which no id may have.
ID: dict[str, Any] = {"pattern": ID_PATTERN + r"(?!\n)", "max_length": MAX_ID_LENGTH}

JobInPath = Annotated[str, PathParameter(**ID, description="The job.")]
JobInQuery = Annotated[str, QueryParameter(name="job_id", **ID, description="The job.")]
TrialNumber = Annotated[int, PathParameter(ge=1, le=LARGEST, description="The trial, counting from 1 within the job.")]
Since = Annotated[
    str,
    QueryParameter(
        name="since", pattern=PERIOD.replace("$", r"(?!\n)$"), description="Length of the period: hours, days or weeks."
    ),
]
GroupedBy = Annotated[
    str,
    QueryParameter(
        name="by",
        pattern=GROUP.replace("$", r"(?!\n)$"),
        description="Groups of jobs: `owner`, `model`, `gpu`, `job`, or the name of a tag.",
    ),
]
