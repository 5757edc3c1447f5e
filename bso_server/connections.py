"""Limits for the connections of clients: their number, and how long a client may keep one waiting.

uvicorn has no deadlines for incomplete requests and unread responses, so that such connections can use up all files
that a process may open; then it can serve no further client. `BoundedProtocol` is uvicorn's protocol with deadlines,
and with a maximum of connections below that of files.

A connection *waits* while the client must act: before and within the head of a request, within its body, and until it
reads a response. The application has its own deadline for bodies (`api.bodies.in_time`), so that the client gets an
answer, and so that the deadline applies under every server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from bso_server.settings import Settings
from zeus_plugins.protocol import ErrorBody

# Seconds that a connection may be idle between two requests, enforced by uvicorn.
KEEP_ALIVE_S = 5

# Seconds in which a client must read some of a waiting response.
_ANSWER_TIMEOUT_S = 60.0

# Seconds to send the last response before a connection is aborted.
_FAREWELL_S = 1.0

# Maximum of connections of one process; each needs about 20 KB.
_MOST_CONNECTIONS = 4096

# Minimum of files for other uses: the database, the log, and connections that are closing.
_FILES_LEFT = 64

# Seconds between log lines about too many connections.
_QUIET_S = 60.0

_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"

logger = logging.getLogger("bso_server")


def connections_allowed() -> tuple[int, int]:
    """Return the maximum of connections under the process's limit of open files, and the files left for other uses."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows has no such limit
        return _MOST_CONNECTIONS, _FILES_LEFT
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS, _FILES_LEFT
    left = min(max(_FILES_LEFT, files // 4), files // 2)
    return min(files - left, _MOST_CONNECTIONS), left


@dataclass
class Limits:
    """Limits for all connections of a process.

    Attributes:
        read_timeout_s: Seconds in which a client must send the head of a request.
        connections: Maximum of connections.
        answer_timeout_s: Seconds in which a client must read some of a waiting response.
    """

    read_timeout_s: float
    connections: int = field(default_factory=lambda: connections_allowed()[0])
    answer_timeout_s: float = _ANSWER_TIMEOUT_S
    _full_said_at: float = field(default=float("-inf"), repr=False)

    def say_full(self, now: float) -> None:
        """Log that the maximum is reached, at most once in `_QUIET_S` seconds."""
        if now - self._full_said_at >= _QUIET_S:
            self._full_said_at = now
            logger.warning(
                "all %d connections are taken: those give way whose clients keep them waiting longest; a process that "
                "may open more files (ulimit -n) takes more",
                self.connections,
            )


class Bounded(asyncio.Protocol):
    """Additions to either of uvicorn's protocols, on httptools or on h11."""

    # Attributes of uvicorn's two protocols, which have no common base class.
    app: Any
    connections: set[Any]
    cycle: Any
    loop: asyncio.AbstractEventLoop
    timeout_keep_alive: float
    transport: asyncio.Transport

    def __init__(self, *args: Any, limits: Limits | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits or _limits_of_this_process()
        # Time at which the connection was made or the last response ended.
        self._since = self.loop.time()
        self._has_begun = False
        self._unread_since: float | None = None
        self._alarm: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            self._limits.say_full(self._since)
            self._make_room()
        self._look_again_at(self._deadline())

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        super().connection_lost(exc)
        if self._alarm is not None:
            self._alarm.cancel()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._has_begun = True
        super().data_received(data)

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().pause_writing()
        self._unread_since = self.loop.time()
        self._look_again_at(self._deadline())

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().resume_writing()
        self._unread_since = None

    def on_response_complete(self) -> None:
        """Reset the deadline; uvicorn calls this at the end of a response."""
        self._since = self.loop.time()
        self._has_begun = False
        super().on_response_complete()  # type: ignore[misc]  # of uvicorn's protocol

    @property
    def _is_between_requests(self) -> bool:
        """True if the application is answering no request; the head of one may be incomplete."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _waits(self) -> bool:
        return self._is_between_requests or self.cycle.more_body or self._unread_since is not None

    def _deadline(self) -> float:
        """Return the time until which the client must act, if the connection waits for it."""
        if self._unread_since is not None:
            return self._unread_since + self._limits.answer_timeout_s
        if not self._is_between_requests:
            return self.loop.time() + self._limits.read_timeout_s
        idle_s = 0 if self.cycle is None else self.timeout_keep_alive
        return self._since + idle_s + self._limits.read_timeout_s

    def _look_again_at(self, when: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self.loop.call_at(when, self._look)

    def _look(self) -> None:
        deadline = self._deadline()
        if self.loop.time() < deadline:
            self._look_again_at(deadline)
            return
        if self._has_begun and self._is_between_requests and not self.transport.is_closing():
            self.transport.write(_TOO_LATE)
        self.transport.close()
        # `close` waits until everything is sent, which may never happen.
        self._alarm = self.loop.call_later(_FAREWELL_S, self.transport.abort)

    def _make_room(self) -> None:
        """Abort the connection that has waited longest for its client; if none waits, refuse this one with 503."""
        others = (each for each in self.connections if each is not self and isinstance(each, Bounded))
        waiting = [each for each in others if each._waits and not each.transport.is_closing()]
        if waiting:
            min(waiting, key=lambda each: each._since).transport.abort()
        else:
            self.app = _come_back_later


class BoundedProtocol(Bounded, AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # one of two, found at run time
    """HTTP protocol of `bso-server serve`, and for `uvicorn --http bso_server.connections:BoundedProtocol`."""


@cache
def _limits_of_this_process() -> Limits:
    return Limits(read_timeout_s=Settings().read_timeout_s)


async def _come_back_later(_scope: Any, _receive: Any, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
    """Answer 503; the application of connections beyond the maximum."""
    status = HTTPStatus.SERVICE_UNAVAILABLE
    message = "the server has no room for another connection at present: send the request again"
    body = ErrorBody(title=status.phrase, status=status, detail=message, message=message).model_dump_json().encode()
    headers = [
        (b"content-type", b"application/problem+json"),
        (b"content-length", b"%d" % len(body)),
        (b"retry-after", b"5"),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
