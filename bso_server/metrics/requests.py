"""Durations of requests, and log lines without secrets."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from zeus_plugins.protocol import printable

Application: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]

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
        return _SECRET.sub(r"\1_…", "\n    ".join(map(printable, lines)))


class RequestWatch:
    """ASGI application that reports each request of `app` to `request_done`.

    `app` sets ``path_template`` in the scope to the template of the route.
    """

    def __init__(self, app: Application, request_done: RequestDone) -> None:
        self._app = app
        self._request_done = request_done

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.perf_counter(), _LEFT

        async def send_and_note(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            duration_s = time.perf_counter() - begun
            self._request_done(scope["method"], scope.get("path_template"), status, duration_s)
