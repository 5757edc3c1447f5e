"""The watch over each request: its id, its place in the metrics, and perhaps its trace."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias

from bso_server.metrics.logs import REQUEST_ID

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


class Span(Protocol):
    """The trace of a request."""

    def done(self, method: str, route: str | None, status: int) -> None:
        """Say what became of it."""


SpanOf: TypeAlias = Callable[[Iterable[tuple[bytes, bytes]]], AbstractContextManager[Span | None]]
"""Begins the span of a request with these headers, and ends it when the block is left."""


def _no_span(_: Iterable[tuple[bytes, bytes]]) -> AbstractContextManager[Span | None]:
    return nullcontext()


def _uncounted(_method: str, _route: str | None, _status: int, _duration_s: float) -> None:
    """Count nothing."""


class RequestWatch:
    """An ASGI application around another one, which names the template of the route as ``path_template`` in the scope.

    Args:
        app: The application.
        request_done: Told of each request when it is over.
        span_of: Traces requests.
    """

    def __init__(self, app: Application, *, request_done: RequestDone = _uncounted, span_of: SpanOf = _no_span) -> None:
        self._app = app
        self.request_done = request_done
        self.span_of = span_of

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
        with self.span_of(scope["headers"]) as span:
            try:
                await self._app(scope, receive, send_with_id)
            finally:
                REQUEST_ID.reset(known_as)
                method, route = scope["method"], scope.get("path_template")
                self.request_done(method, route, status, time.perf_counter() - begun)
                if span is not None:
                    span.done(method, route, status)


def _id_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The id that the client, or a proxy, has given the request, or a new one where there is none or not a good one."""
    for name, value in headers:
        if name == _HEADER:
            return value if _ID.fullmatch(value) else _new_id()
    return _new_id()


def _new_id() -> bytes:
    return secrets.token_hex(8).encode()
