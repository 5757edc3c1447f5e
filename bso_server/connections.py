"""The connections of clients: how many there are, and how long a client may keep one waiting.

uvicorn gives clients all the time in the world: half a head, an answer that nobody reads, and the rest of a body that
was answered already stay until the client ends the connection, and when all files that a process may open are
connections, nobody is served any more. `BoundedProtocol` is uvicorn's protocol with deadlines, and with a limit below
that of files.

A connection *waits* as long as it is its client's turn: before and within the head of a request, within its body, and
while an answer is not read. The body of a request that is being answered has its deadline in the application
(`api.bodies.in_time`), so that the client is told, and so that it holds under every server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from bso_server.settings import Settings
from zeus_plugins.protocol import ErrorBody

# Seconds that a connection may be idle between two requests; uvicorn sees to it.
KEEP_ALIVE_S = 5

# Seconds in which a client must take some of an answer that waits for it.
_ANSWER_TIMEOUT_S = 60.0

# Seconds in which what was written last goes out to a client that is given up.
_FAREWELL_S = 1.0

# Connections of one process at most, whatever the number of files that it may open. Each takes some 20 KB.
_MOST_CONNECTIONS = 4096

# Files that a process is left at least: its database, its log, and connections that are being closed.
_FILES_LEFT = 64

# Seconds between two lines of the log which say that there are too many connections.
_QUIET_S = 60.0

_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"

logger = logging.getLogger("bso_server")


def connections_allowed() -> tuple[int, int]:
    """The number of connections that a process takes by the number of files that it may open, and that of others."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows knows no such limit
        return _MOST_CONNECTIONS, _FILES_LEFT
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS, _FILES_LEFT
    left = min(max(_FILES_LEFT, files // 4), files // 2)
    return min(files - left, _MOST_CONNECTIONS), left


@dataclass
class Limits:
    """The bounds of all connections of a process.

    Attributes:
        read_timeout_s: Seconds that a client may take for the head of a request.
        connections: The largest number of them.
        answer_timeout_s: Seconds in which a client must take some of an answer that waits for it.
    """

    read_timeout_s: float
    connections: int = field(default_factory=lambda: connections_allowed()[0])
    answer_timeout_s: float = _ANSWER_TIMEOUT_S
    _full_said_at: float = field(default=float("-inf"), repr=False)

    def say_full(self, now: float) -> None:
        """Log that there are too many connections, now and then."""
        if now - self._full_said_at >= _QUIET_S:
            self._full_said_at = now
            logger.warning(
                "all %d connections are taken: those give way whose clients keep them waiting longest; a process that "
                "may open more files (ulimit -n) takes more",
                self.connections,
            )


if TYPE_CHECKING:
    # uvicorn's protocols have no common base.
    class _Protocol(asyncio.Protocol):
        app: Any
        connections: set[Any]
        cycle: Any
        loop: asyncio.AbstractEventLoop
        timeout_keep_alive: float
        transport: asyncio.Transport

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def on_response_complete(self) -> None: ...

else:
    _Protocol = object


class Bounded(_Protocol):
    """The additions of `BoundedProtocol` to either of uvicorn's protocols, that on httptools and that on h11."""

    def __init__(self, *args: Any, limits: Limits | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits or _limits_of_this_process()
        # The beginning of the client's turn, were it the client's.
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
        """Called by uvicorn at the end of an answer."""
        self._since = self.loop.time()
        self._has_begun = False
        super().on_response_complete()

    @property
    def _is_between_requests(self) -> bool:
        """True if no request is being answered; one may have begun."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _waits(self) -> bool:
        return self._is_between_requests or self.cycle.more_body or self._unread_since is not None

    def _deadline(self) -> float:
        """The time when the client has kept this connection waiting too long, if it does at all."""
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
        # It closes when all is sent, which may be never.
        self._alarm = self.loop.call_later(_FAREWELL_S, self.transport.abort)

    def _make_room(self) -> None:
        """Give up the connection that waits longest for its client; if none does, this one is told to come back."""
        others = (each for each in self.connections if each is not self and isinstance(each, Bounded))
        waiting = [each for each in others if each._waits and not each.transport.is_closing()]
        if waiting:
            min(waiting, key=lambda each: each._since).transport.abort()
        else:
            self.app = _come_back_later


class BoundedProtocol(Bounded, AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # one of two, found at run time
    """The HTTP protocol of `bso-server serve`, for `uvicorn --http bso_server.connections:BoundedProtocol` too."""


@cache
def _limits_of_this_process() -> Limits:
    return Limits(read_timeout_s=Settings().read_timeout_s)


async def _come_back_later(_scope: Any, _receive: Any, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
    """The application of a connection for which there is no room."""
    status = HTTPStatus.SERVICE_UNAVAILABLE
    message = "the server has no room for another connection at present: send the request again"
    body = ErrorBody(title=status.phrase, status=status, detail=message, message=message).model_dump_json().encode()
    headers = {"content-type": "application/problem+json", "content-length": str(len(body)), "retry-after": "5"}
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                *((name.encode(), value.encode()) for name, value in headers.items()),
                (b"connection", b"close"),
            ],
        }
    )
    await send({"type": "http.response.body", "body": body})
