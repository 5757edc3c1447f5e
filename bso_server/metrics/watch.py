"""The watch over one server, put together as its settings ask for it, and what it does around each request."""

from __future__ import annotations

import asyncio
import importlib
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from bso_server.core.occurrences import Listener, Occurrence
from bso_server.metrics.logs import REQUEST_ID
from bso_server.service.health import JobTotals

if TYPE_CHECKING:
    from bso_server.metrics.prometheus import DatabaseMetrics, Instruments
    from bso_server.metrics.tracing import Tracing

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Any]]
Send: TypeAlias = Callable[[Any], Awaitable[None]]
Application: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]

_HEADER = b"x-request-id"

# Enough for the ids that proxies and meshes make, and nothing that could end a line or a quotation.
_ID = re.compile(rb"[A-Za-z0-9._:@+/=-]{1,128}")

# As proxies log it: no answer was begun when the client left.
_LEFT = 499

RequestDone: TypeAlias = Callable[[str, str | None, int, float], None]
"""Takes the method, the route's template or None, the status and the seconds of a request that is over."""


SpanEnd: TypeAlias = Callable[[str, str | None, int], None]
"""Takes what a span is to say of its request: the method, the route's template or None, and the status."""

SpanOf: TypeAlias = Callable[[Iterable[tuple[bytes, bytes]]], AbstractContextManager[SpanEnd]]
"""Begins the span of a request with these headers, and ends it when the block is left."""


class RequestWatch:
    """An ASGI application around another one, which names the template of the route as ``path_template`` in the scope.

    Args:
        app: The application.
        request_done: Told of each request when it is over, or None.
        span_of: Traces requests, or None.
    """

    def __init__(
        self, app: Application, *, request_done: RequestDone | None = None, span_of: SpanOf | None = None
    ) -> None:
        self._app = app
        self._request_done = request_done
        self._span_of = span_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, status = _id_of(scope["headers"]), _LEFT

        async def send_with_id(message: Message) -> None:
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
    """The id that the client, or a proxy, has given the request, or a new one where there is none or not a good one."""
    for name, value in headers:
        if name == _HEADER:
            if _ID.fullmatch(value):
                return value
            break
    # Not `secrets`: asking the system for randomness costs as much as a tenth of a report, and an id is no secret.
    return b"%016x" % random.getrandbits(64)


class Watch:
    """The watch over one server. Its libraries are imported here, and only those that are needed.

    Args:
        counts: True if there are metrics.
        traces: True if requests are traced.

    Raises:
        ValueError: What is needed for traces is not installed.
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
        """Trace requests and transactions so."""
        self._tracing = tracing
        self._listeners.append(tracing.hear)

    def hear(self, occurrence: Occurrence) -> None:
        """Take notice of an occurrence: a `core.occurrences.Listener`."""
        for listener in self._listeners:
            listener(occurrence)

    def exposition(
        self, read_totals: Callable[[], Awaitable[Mapping[str, JobTotals]]], named: str | None
    ) -> Callable[[], Awaitable[bytes]] | None:
        """Return `metrics.prometheus.exposition` for this server, or None without metrics.

        Args:
            read_totals: Reads the totals of all jobs by their ids.
            named: Pattern of the ids of jobs that are told of by name, or None.
        """
        if self._instruments is None:
            return None
        from bso_server.metrics.prometheus import DatabaseMetrics, exposition

        instruments = self._instruments
        self._database = DatabaseMetrics(
            read_totals, instruments.totals_errors, named=named, directory=instruments.directory
        )
        return partial(exposition, instruments, self._database)

    def around(self, app: Application) -> Application:
        """The application with its requests watched."""
        return RequestWatch(
            app,
            request_done=None if self._instruments is None else self._instruments.request_done,
            span_of=None if self._tracing is None else self._tracing.span_of,
        )

    async def close(self) -> None:
        """End what goes on by itself, and hand over the traces that are left."""
        if self._database is not None:
            await self._database.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)


def require_tracing() -> None:
    """Raise `ValueError` unless what is needed for traces is installed."""
    importlib.import_module("bso_server.metrics.tracing")
