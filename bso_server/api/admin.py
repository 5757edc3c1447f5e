"""Routes for operators of the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus

from litestar import Response, get, post
from litestar.exceptions import HTTPException
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.spec import SecurityRequirement

from bso_server.api.auth import needs, readable
from bso_server.api.errors import errors
from bso_server.api.requests import JobInPath, Reader, Service, TrialNumber
from bso_server.core.access import Scope
from bso_server.service.reading import version_view
from bso_server.service.views import Liveness, VersionView
from zeus_plugins.protocol import Paths, TrialView

# The OpenAPI document says by this that no token is needed.
_OPEN: list[SecurityRequirement] = [{}]

# Prometheus's text format; Litestar adds the character set.
_METRICS_TYPE = "text/plain; version=0.0.4"


@post("/api/import", opt=needs(Scope.ADMIN), include_in_schema=False)
async def refuse_import() -> None:
    """Name the command that replaces this route."""
    message = "this route was removed: bso-server jobs import FILE imports jobs where the database can be reached"
    raise HTTPException(message, status_code=HTTPStatus.GONE)


@post(
    Paths.API_JOBS + "/{job_id:str}/trials/{trial_number:int}/discard",
    summary="Set a trial aside",
    opt=needs(Scope.ADMIN),
    status_code=HTTPStatus.OK,
    responses=errors(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def discard_trial(job_id: JobInPath, trial_number: TrialNumber, service: Service) -> TrialView:
    """Exclude an ended trial from the job's decisions. It stays visible in the state withdrawn."""
    return await service.transact(service.commands.discard, job_id, trial_number)


@readable(
    Paths.HEALTH, summary="Tell that the process is up", opt=needs(None), security=_OPEN, responses=errors(always=())
)
async def live() -> Liveness:
    """Answer while the process runs."""
    return Liveness()


@readable(
    Paths.READY,
    summary="Tell that requests can be served",
    opt=needs(None),
    security=_OPEN,
    responses=errors(HTTPStatus.SERVICE_UNAVAILABLE, always=()),
)
async def ready(reader: Reader) -> Liveness:
    """Check that the database answers, has the schema of this version, and can be written."""
    await reader.check_ready()
    return Liveness()


@get(Paths.VERSION, summary="Tell the running version", opt=needs(None), security=_OPEN, responses=errors(always=()))
async def show_version() -> VersionView:
    """Return the version of the server and of the schema that it needs."""
    return version_view()


def metrics_route(exposition: Callable[[], Awaitable[bytes]], *, is_open: bool) -> HTTPRouteHandler:
    """Make the route ``GET /metrics``, for callers that may read, or with `is_open` for all callers."""

    @get(
        Paths.METRICS,
        summary="Metrics",
        opt=needs(None if is_open else Scope.READ),
        media_type=_METRICS_TYPE,
        responses=errors(),
    )
    async def metrics() -> Response[bytes]:
        """Return counts since the server started and totals of its database, in Prometheus's text format."""
        return Response(await exposition(), media_type=_METRICS_TYPE)

    return metrics
