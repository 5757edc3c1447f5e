"""Routes for those who run the server."""

from __future__ import annotations

from http import HTTPStatus

from litestar import get, post
from litestar.openapi.spec import SecurityRequirement
from litestar.params import JSONBody

from bso_server.api.auth import needs
from bso_server.api.parameters import Reader, Service
from bso_server.api.responses import BODY, errors
from bso_server.core.access import Scope
from bso_server.service.messages import MAX_IMPORT_BYTES, JobExport, Liveness, VersionView
from zeus_plugins.protocol import JobSummary, Paths

# In the OpenAPI document: no token is needed.
_OPEN: list[SecurityRequirement] = [{}]


@post(
    Paths.IMPORT,
    summary="Import a job",
    opt=needs(Scope.ADMIN),
    request_max_body_size=MAX_IMPORT_BYTES,
    responses=errors(HTTPStatus.CONFLICT, *BODY),
)
async def import_job(data: JSONBody[JobExport], service: Service) -> JobSummary:
    """Create a job with all its trials from what another server exported."""
    return await service.import_job(data)


@get(Paths.HEALTH, summary="Whether the process is up", opt=needs(None), security=_OPEN, responses=errors(always=()))
async def live() -> Liveness:
    """Say that the process is up."""
    return Liveness()


@get(
    Paths.READY,
    summary="Whether requests can be served",
    opt=needs(None),
    security=_OPEN,
    responses=errors(HTTPStatus.SERVICE_UNAVAILABLE, always=()),
)
async def ready(reader: Reader) -> Liveness:
    """Say whether the database answers and has the right schema."""
    await reader.check_ready()
    return Liveness()


@get(Paths.VERSION, summary="What is running", opt=needs(None), security=_OPEN, responses=errors(always=()))
async def show_version(reader: Reader) -> VersionView:
    """The version of the server, and of the schema that it needs."""
    return reader.version()
