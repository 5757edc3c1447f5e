"""``GET /metrics``, for Prometheus."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from litestar import Response, get
from litestar.handlers import HTTPRouteHandler

from bso_server.api.auth import needs
from bso_server.api.responses import errors
from bso_server.core.access import Scope
from zeus_plugins.protocol import Paths

# Litestar adds the character set.
_MEDIA_TYPE = "text/plain; version=0.0.4"


def metrics_route(exposition: Callable[[], Awaitable[bytes]], *, is_open: bool) -> HTTPRouteHandler:
    """Make the route, for callers that may read, or for everybody."""

    @get(
        Paths.METRICS,
        summary="Metrics",
        opt=needs(None if is_open else Scope.READ),
        media_type=_MEDIA_TYPE,
        responses=errors(),
    )
    async def metrics() -> Response[bytes]:
        """The counts of this server since its start, and totals of its database, in Prometheus's text format."""
        return Response(await exposition(), media_type=_MEDIA_TYPE)

    return metrics
