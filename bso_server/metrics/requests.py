"""Requests of a server: their ids, and log lines with these ids, as text or as JSON, without secrets."""

from __future__ import annotations

import json
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TypeAlias

from zeus_plugins.protocol import printable

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the current request."""

Application: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]

_HEADER = b"x-request-id"

# Ids of proxies and service meshes, without characters that could end a line or a quotation.
_ID = re.compile(rb"[A-Za-z0-9._:@+/=-]{1,128}")

# Status that proxies log if the client disconnects before the response begins.
_LEFT = 499

RequestDone: TypeAlias = Callable[[str, str | None, int, float], None]
"""Receives the method, the template of the route or None, the status and the duration in seconds of a request."""

# No code logs tokens; this removes the secret of a token that gets into a line by mistake, such as from a URL.
_SECRET = re.compile(r"(zbso_[0-9a-f]{8})_[A-Za-z0-9_-]+")


class TextFormatter(logging.Formatter):
    """Log lines as text, without control characters; further lines of a traceback or a statement are indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        # No line that an exception quotes may look like a log line.
        lines = super().format(record).split("\n")
        return _without_secrets("\n    ".join(map(printable, lines)))


class JsonFormatter(logging.Formatter):
    """One JSON object per line: ``time``, ``level``, ``logger``, ``message``.

    Lines about a request also have ``request_id``; errors have ``exception``.
    """

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request_id := REQUEST_ID.get()) is not None:
            line["request_id"] = request_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _without_secrets(json.dumps(line, ensure_ascii=False))


def _without_secrets(line: str) -> str:
    return _SECRET.sub(r"\1_…", line)


class RequestWatch:
    """ASGI application that gives each request of `app` an id, and reports it to `request_done`.

    `app` sets ``path_template`` in the scope to the template of the route.
    """

    def __init__(self, app: Application, *, request_done: RequestDone | None = None) -> None:
        self._app = app
        self._request_done = request_done

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
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            REQUEST_ID.reset(known_as)
            if self._request_done is not None:
                duration_s = time.perf_counter() - begun
                self._request_done(scope["method"], scope.get("path_template"), status, duration_s)


def _id_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the id in the headers of the client or a proxy, or a new one if it is missing or invalid."""
    for name, value in headers:
        if name == _HEADER:
            if _ID.fullmatch(value):
                return value
            break
    # Not `secrets`, which would take a tenth of the time of a report; an id is not a secret.
    return b"%016x" % random.getrandbits(64)  # nosec B311
