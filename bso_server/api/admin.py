"""Routes for those who run the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus

from litestar import Response, delete, get, post, put
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.spec import SecurityRequirement

from bso_server.api.auth import CallerRequest, needs
from bso_server.api.bodies import require_json
from bso_server.api.errors import BODY, errors
from bso_server.api.parameters import FirstLine, JobInPath, Reader, Service, TrialNumber
from bso_server.core.access import Scope
from bso_server.service.exports import MEDIA_TYPE
from bso_server.service.imports import MAX_IMPORT_BYTES
from bso_server.service.reading import version_view
from bso_server.service.views import Liveness, VersionView
from zeus_plugins.protocol import JobSummary, Paths, TrialView

# In the OpenAPI document: no token is needed.
_OPEN: list[SecurityRequirement] = [{}]

# Of Prometheus's text format; Litestar adds the character set.
_METRICS_TYPE = "text/plain; version=0.0.4"


@post(
    Paths.IMPORT,
    summary="Import a job",
    opt=needs(Scope.ADMIN),
    request_max_body_size=MAX_IMPORT_BYTES,
    responses=errors(HTTPStatus.CONFLICT, *BODY),
)
async def import_job(request: CallerRequest, service: Service, first_line: FirstLine = 1) -> JobSummary:
    """Create a job with all its trials from an export: JSON Lines, as `GET /api/jobs/{job_id}/export` writes them."""
    require_json(request.headers.get("content-type", ""), MEDIA_TYPE)
    return await service.imports.import_job(request.stream(), first_line=first_line)


@post(
    Paths.API_JOBS + "/{job_id:str}/trials/{trial_number:int}/discard",
    summary="Set a trial aside",
    opt=needs(Scope.ADMIN),
    status_code=HTTPStatus.OK,
    responses=errors(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def discard_trial(job_id: JobInPath, trial_number: TrialNumber, service: Service) -> TrialView:
    """Take a trial that has ended out of all that the job's decisions rest on; it stays to be seen, as withdrawn."""
    return await service.transact(service.commands.discard, job_id, trial_number)


_SHARE = Paths.API_JOBS + "/{job_id:str}/share"
_ERRORS_OF_JOB = errors(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY)


@put(_SHARE, summary="Share a job", opt=needs(Scope.ADMIN), responses=_ERRORS_OF_JOB)
async def share_job(job_id: JobInPath, service: Service) -> JobSummary:
    """Let every token that may report run trials of the job, beside the one that it belongs to."""
    return await service.transact(service.commands.share, job_id)


@delete(
    _SHARE,
    summary="Stop sharing a job",
    opt=needs(Scope.ADMIN),
    status_code=HTTPStatus.OK,
    responses=_ERRORS_OF_JOB,
)
async def stop_sharing_job(job_id: JobInPath, service: Service) -> JobSummary:
    """Let no other token than the one that the job belongs to begin further trials; those that run go on."""
    return await service.transact(service.commands.share, job_id, shared=False)


@get(Paths.HEALTH, summary="Tell that the process is up", opt=needs(None), security=_OPEN, responses=errors(always=()))
async def live() -> Liveness:
    """Say that the process is up."""
    return Liveness()


@get(
    Paths.READY,
    summary="Tell that requests can be served",
    opt=needs(None),
    security=_OPEN,
    responses=errors(HTTPStatus.SERVICE_UNAVAILABLE, always=()),
)
async def ready(reader: Reader) -> Liveness:
    """Say whether the database answers, has the right schema, and keeps what is written."""
    await reader.check_ready()
    return Liveness()


@get(Paths.VERSION, summary="Tell the running version", opt=needs(None), security=_OPEN, responses=errors(always=()))
async def show_version() -> VersionView:
    """The version of the server, and of the schema that it needs."""
    return version_view()


def metrics_route(exposition: Callable[[], Awaitable[bytes]], *, is_open: bool) -> HTTPRouteHandler:
    """Make the route ``GET /metrics``, for callers that may read, or for everybody."""

    @get(
        Paths.METRICS,
        summary="Metrics",
        opt=needs(None if is_open else Scope.READ),
        media_type=_METRICS_TYPE,
        responses=errors(),
    )
    async def metrics() -> Response[bytes]:
        """The counts of this server since its start, and totals of its database, in Prometheus's text format."""
        return Response(await exposition(), media_type=_METRICS_TYPE)

    return metrics
