"""Observation of one server: ids of requests, metrics and traces, as far as the settings enable them."""

from __future__ import annotations

import asyncio
import importlib
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from bso_server.core.occurrences import Listener, Occurrence
from bso_server.metrics import DIRECTORY_VARIABLE
from bso_server.metrics.logs import REQUEST_ID
from bso_server.service.health import JobTotals

if TYPE_CHECKING:
    from bso_server.metrics.prometheus import DatabaseMetrics, Instruments
    from bso_server.metrics.tracing import Tracing

Application: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]

_HEADER = b"x-request-id"

# Ids of proxies and service meshes, without characters that could end a line or a quotation.
_ID = re.compile(rb"[A-Za-z0-9._:@+/=-]{1,128}")

# Status that proxies log if the client disconnects before the response begins.
_LEFT = 499

RequestDone: TypeAlias = Callable[[str, str | None, int, float], None]
"""Receives the method, the template of the route or None, the status and the duration in seconds of a request."""

SpanOf: TypeAlias = Callable[
    [Iterable[tuple[bytes, bytes]]], AbstractContextManager[Callable[[str, str | None, int], None]]
]
"""Context of the span of a request with these headers; its value receives the method, the route and the status."""


class RequestWatch:
    """ASGI application that gives each request of `app` an id, reports it to `request_done`, and traces it.

    `app` sets ``path_template`` in the scope to the template of the route.
    """

    def __init__(
        self, app: Application, *, request_done: RequestDone | None = None, span_of: SpanOf | None = None
    ) -> None:
        self._app = app
        self._request_done = request_done
        self._span_of = span_of

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, status = _id_of(scope["headers"]), _LEFT

        async def send_with_id(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (_HEADER, request_id)]
            await send(message)

        begun, known_as = time.perf_counter(), REQUEST_ID.set(request_id.decode())
        with nullcontext() if self._span_of is None else self._span_of(scope["headers"]) as end_span:
            try:
                await self._app(scope, receive, send_with_id)
            finally:
                REQUEST_ID.reset(known_as)
                method, route = scope["method"], scope.get("path_template")
                if self._request_done is not None:
                    self._request_done(method, route, status, time.perf_counter() - begun)
                if end_span is not None:
                    end_span(method, route, status)


def _id_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the id in the headers of the client or a proxy, or a new one if it is missing or invalid."""
    for name, value in headers:
        if name == _HEADER:
            if _ID.fullmatch(value):
                return value
            break
    # Not `secrets`, which would take a tenth of the time of a report; an id is not a secret.
    return b"%016x" % random.getrandbits(64)  # nosec B311


class Watch:
    """Observation of one server: metrics if it `counts`, traces if it `traces`; it imports only the needed modules.

    Raises:
        ValueError: OpenTelemetry is needed and not installed.
    """

    def __init__(self, *, counts: bool, traces: bool) -> None:
        self._instruments: Instruments | None = None
        self._tracing: Tracing | None = None
        self._database: DatabaseMetrics | None = None
        self._listeners: list[Listener] = []
        if counts:
            from bso_server.metrics.prometheus import Instruments

            self._instruments = Instruments()
            self._listeners.append(self._instruments.hear)
        if traces:
            from bso_server.metrics.tracing import Tracing

            self.trace_by(Tracing())

    def trace_by(self, tracing: Tracing) -> None:
        """Trace requests and transactions."""
        self._tracing = tracing
        self._listeners.append(tracing.hear)

    def hear(self, occurrence: Occurrence) -> None:
        """Forward an occurrence to the metrics and the traces; a `core.occurrences.Listener`."""
        for listener in self._listeners:
            listener(occurrence)

    def exposition(
        self, read_totals: Callable[[], Awaitable[Mapping[str, JobTotals]]], named: str | None
    ) -> Callable[[], Awaitable[bytes]] | None:
        """Return `prometheus.exposition` for this server, or None without metrics; see `DatabaseMetrics`."""
        if self._instruments is None:
            return None
        from bso_server.metrics.prometheus import DatabaseMetrics, exposition

        instruments = self._instruments
        self._database = DatabaseMetrics(
            read_totals, instruments.totals_errors, named=named, directory=instruments.directory
        )
        return partial(exposition, instruments, self._database)

    def around(self, app: Application) -> Application:
        """Return the application with the observation of its requests."""
        return RequestWatch(
            app,
            request_done=None if self._instruments is None else self._instruments.request_done,
            span_of=None if self._tracing is None else self._tracing.span_of,
        )

    async def close(self) -> None:
        """Cancel the reading of totals, and export the remaining traces."""
        if self._database is not None:
            await self._database.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)


@contextmanager
def counted_together(processes: int) -> Iterator[None]:
    """Make the processes that the block starts share their counts; raise `OSError` without room for temporary files."""
    # An inherited directory would contain the counts of an earlier start.
    os.environ.pop(DIRECTORY_VARIABLE, None)
    if processes == 1:
        yield
        return
    directory = tempfile.mkdtemp(prefix=f"zeus-bso-metrics-{os.getpid()}-")
    os.environ[DIRECTORY_VARIABLE] = directory
    try:
        yield
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def require_tracing() -> None:
    """Raise `ValueError` if OpenTelemetry is not installed."""
    importlib.import_module("bso_server.metrics.tracing")
