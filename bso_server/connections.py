"""Limits for clients' connections: their number, their buffered bytes, and how long they may wait for a client.

uvicorn has no deadlines for incomplete requests and unread responses. Connections with such requests or responses can
use up all files that a process may open, so that it cannot serve any other client. `BoundedProtocol` is uvicorn's
protocol with deadlines, and with fewer connections than open files.

uvicorn also parses all received bytes at once, and buffers heads, trailers and pipelined requests of any size.
`BoundedProtocol` passes the bytes to uvicorn in small pieces over several turns of the event loop. While uvicorn can
use no more bytes, it stops reading from the socket. A piece ends at the blank line after the head of a request, so that
uvicorn has at most one pipelined request that waits for the answer to an earlier request.

A connection *waits* while the client must act: send the head of a request, send its body, or read a response. The
application has its own deadline for bodies (`api.bodies.in_time`), so that the client gets an answer, and so that the
deadline applies under every ASGI server.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from typing import Any, NoReturn, cast

import h11
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.flow_control import FlowControl

from bso_server.settings import Settings
from zeus_plugins.protocol import ErrorBody

# Seconds that a connection may be idle between two requests, enforced by uvicorn.
KEEP_ALIVE_S = 5

# Seconds in which a client must read some of a waiting response.
_ANSWER_TIMEOUT_S = 60.0

# Seconds to send the last response before a connection is aborted.
_FAREWELL_S = 1.0

# Maximum connections of one process; each needs about 20 KB.
_MOST_CONNECTIONS = 4096

# Minimum of files left for other uses: the database, the log, and connections that are closing.
_FILES_LEFT = 64

# Maximum bytes and fields in the head of a request; again for its trailers.
MOST_HEAD_BYTES = 64 * 1024
MOST_FIELDS = 100

# Maximum for a URL, which Litestar may cache.
MOST_URL_BYTES = 8 * 1024

# Maximum of bytes in unfinished requests of all connections of one process.
_MOST_BYTES = 64 * 1024 * 1024

# Maximum bytes and pieces that one connection may have parsed before others have their turn.
_PIECE_BYTES = 4096
_PIECES = 8

_BLANK_LINE = re.compile(rb"\n\r?\n")

# Seconds between two log lines with the same warning about clients.
_QUIET_S = 60.0

_MESSAGES = {
    HTTPStatus.BAD_REQUEST: "not a valid HTTP request, or its URL names another host than its Host header",
    HTTPStatus.REQUEST_TIMEOUT: "the head of the request did not come in time: the server's setting "
    "ZEUS_BSO_READ_TIMEOUT_S says how many seconds it waits",
    HTTPStatus.REQUEST_URI_TOO_LONG: f"a URL may have at most {MOST_URL_BYTES} bytes",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: f"the head of a request, and its trailers, may have at most "
    f"{MOST_HEAD_BYTES} bytes and {MOST_FIELDS} fields each",
    HTTPStatus.SERVICE_UNAVAILABLE: "the server has no room for another connection at present: send the request again",
}

logger = logging.getLogger("bso_server")


def connections_allowed() -> tuple[int, int]:
    """Return the maximum number of connections under the limit of open files, and the files left for other uses."""
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
        unfinished_bytes: Maximum of bytes in unfinished requests of all connections.
        taken_bytes: Current number of bytes in unfinished requests of all connections.
    """

    read_timeout_s: float
    connections: int = field(default_factory=lambda: connections_allowed()[0])
    answer_timeout_s: float = _ANSWER_TIMEOUT_S
    unfinished_bytes: int = _MOST_BYTES
    taken_bytes: int = field(default=0, init=False)
    _said_at: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _turns: deque[Bounded] = field(default_factory=deque, init=False, repr=False)

    def add_turn(self, connection: Bounded) -> None:
        """Queue a connection that has more bytes for uvicorn.

        In each turn of the event loop, one queued connection passes bytes on, so that large requests do not delay
        small ones.
        """
        self._turns.append(connection)
        if len(self._turns) == 1:
            connection.loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        connection = self._turns.popleft()
        if self._turns:
            connection.loop.call_soon(self._take_turn)
        connection.pass_on()

    def is_news(self, warning: str) -> bool:
        """Return True at most once in `_QUIET_S` seconds for each warning."""
        now = time.monotonic()
        if now - self._said_at.get(warning, float("-inf")) < _QUIET_S:
            return False
        self._said_at[warning] = now
        return True


class Bounded(asyncio.Protocol):
    """Mixin that adds the limits to either of uvicorn's protocols, on httptools or on h11."""

    # Attributes of uvicorn's two protocols, which have no common base class.
    app: Any
    connections: set[Any]
    cycle: Any
    flow: FlowControl
    loop: asyncio.AbstractEventLoop
    timeout_keep_alive: float
    transport: asyncio.Transport
    # On httptools.
    headers: list[tuple[bytes, bytes]]
    url: bytes
    # On h11.
    conn: Any

    def __init__(self, *args: Any, limits: Limits | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits or _limits_of_this_process()
        # Time at which the connection was made or the last response ended.
        self._since = self.loop.time()
        self._has_begun = False
        self._unread_since: float | None = None
        self._alarm: asyncio.TimerHandle | None = None
        # Received bytes that were not passed to uvicorn yet.
        self._held = bytearray()
        self._has_turn = False
        # Bytes of the current request's head, or of the trailers after its body.
        self._head_bytes = 0
        self._refusal = HTTPStatus.BAD_REQUEST
        # This connection's part of `Limits.taken_bytes`.
        self._taken_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        # uvicorn pauses and resumes reading by calls to this object.
        self.flow = FlowControl(cast("asyncio.Transport", self))
        if len(self.connections) > self._limits.connections:
            if self._limits.is_news("full"):
                logger.warning(
                    "all %d connections are taken: those give way whose clients keep them waiting longest; a process "
                    "that may open more files (ulimit -n) takes more",
                    self._limits.connections,
                )
            self._make_room()
        self._look_again_at(self._deadline())

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        super().connection_lost(exc)
        self._drop()
        if self._alarm is not None:
            self._alarm.cancel()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._held += data
        self.pass_on()

    def pause_reading(self) -> None:
        """Do nothing: `pass_on` stops reading when uvicorn has set `flow.read_paused`."""

    def resume_reading(self) -> None:
        """Queue this connection to pass on more bytes, because uvicorn can use them."""
        if not self._has_turn:
            self._has_turn = True
            self._limits.add_turn(self)

    def pass_on(self) -> None:
        """Pass some received bytes to uvicorn; continue to read from the socket once uvicorn has all of them."""
        self._has_turn = False
        room = _PIECE_BYTES
        for _ in range(_PIECES):
            if not self._can_use_more or room == 0:
                break
            end = _BLANK_LINE.search(self._held, 0, room)
            piece = bytes(self._held[: room if end is None else end.end()])
            del self._held[: len(piece)]
            room -= len(piece)
            self._has_begun = True
            self._head_bytes += len(piece)
            if self._head_bytes > MOST_HEAD_BYTES:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            else:
                super().data_received(piece)
        if not self.transport.is_closing():
            self._count()
        if self.transport.is_closing():
            self._drop()
        elif self._held or self.flow.read_paused:
            self.transport.pause_reading()
            if self._can_use_more:
                self.resume_reading()
        else:
            self.transport.resume_reading()

    @property
    def _can_use_more(self) -> bool:
        """True if received bytes are left, and uvicorn has no complete request that waits for its answer.

        uvicorn sends no answer while the client leaves earlier answers unread.
        """
        return (
            bool(self._held)
            and not self.transport.is_closing()
            and not self.flow.read_paused
            and (self._is_between_requests or self.cycle.more_body)
        )

    def _count(self) -> None:
        """Count the bytes of this connection's unfinished request.

        If all connections exceed the maximum together, abort the connection with the most bytes.
        """
        body = 0 if self._is_between_requests else len(self.cycle.body)
        taken = len(self._held) + self._head_bytes + body
        self._limits.taken_bytes += taken - self._taken_bytes
        self._taken_bytes = taken
        if self._limits.taken_bytes > self._limits.unfinished_bytes:
            largest = max(
                (each for each in self.connections if isinstance(each, Bounded)), key=lambda each: each._taken_bytes
            )
            largest.transport.abort()
            largest._drop()

    def _drop(self) -> None:
        """Forget the bytes of an unfinished request."""
        self._held.clear()
        self._limits.taken_bytes -= self._taken_bytes
        self._taken_bytes = 0

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
        self.resume_reading()

    # uvicorn's protocol on httptools has these five methods, which its parser calls.

    def on_url(self, url: bytes) -> None:
        """Refuse a URL that is too long."""
        super().on_url(url)  # type: ignore[misc]  # of uvicorn's protocol
        if len(self.url) > MOST_URL_BYTES:
            self._stop_parser(HTTPStatus.REQUEST_URI_TOO_LONG)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Refuse too many fields."""
        super().on_header(name, value)  # type: ignore[misc]  # of uvicorn's protocol
        if len(self.headers) > MOST_FIELDS:
            self._stop_parser(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def on_headers_complete(self) -> None:
        """Refuse an absolute URL whose host differs from the ``Host`` header, which alone the application sees."""
        authority = self.url.partition(b"://")[2].partition(b"/")[0]
        if not self.url.startswith(b"/") and authority != dict(self.headers).get(b"host"):
            self._stop_parser(HTTPStatus.BAD_REQUEST)
        super().on_headers_complete()  # type: ignore[misc]  # of uvicorn's protocol
        self._head_bytes = 0
        # Trailers must not be added to the headers that the application sees.
        self.headers = []

    def on_body(self, body: bytes) -> None:
        """Restart the count of bytes, for trailers."""
        self._head_bytes = 0
        super().on_body(body)  # type: ignore[misc]  # of uvicorn's protocol

    def on_message_complete(self) -> None:
        """Restart the count of bytes, for the next head."""
        self._head_bytes = 0
        super().on_message_complete()  # type: ignore[misc]  # of uvicorn's protocol

    def _stop_parser(self, refusal: HTTPStatus) -> NoReturn:
        """Raise an error, so that uvicorn calls `send_400_response`, which answers with `refusal`."""
        self._refusal = refusal
        raise ValueError(refusal.phrase)

    def handle_events(self) -> None:
        """Refuse a URL that is too long, or too many fields; uvicorn's protocol on h11 has this method."""
        head = self.conn.trailing_data[0] if self.conn.their_state is h11.IDLE else b""
        if len(head.partition(b" ")[2].partition(b" ")[0]) > MOST_URL_BYTES:
            self._refuse(HTTPStatus.REQUEST_URI_TOO_LONG)
        elif head.count(b"\n") > MOST_FIELDS + 2:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        else:
            super().handle_events()  # type: ignore[misc]  # of uvicorn's protocol
            self._head_bytes = len(self.conn.trailing_data[0])

    def send_400_response(self, _message: str) -> None:
        """Refuse a request that cannot be parsed; uvicorn calls this."""
        self._refuse(self._refusal)

    @property
    def _is_between_requests(self) -> bool:
        """True if the application is answering no request; part of the next request's head may have arrived."""
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
        elif self._has_begun and self._is_between_requests:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT)
        else:
            self._close()

    def _refuse(self, status: HTTPStatus) -> None:
        """Answer with this status, unless an answer has begun, and close the connection."""
        if not self.transport.is_closing() and (self._is_between_requests or not self.cycle.response_started):
            headers, body = _problem(status, _MESSAGES[status])
            lines = [b"HTTP/1.1 %d %s" % (status, status.phrase.encode()), *map(b": ".join, headers), b"", body]
            self.transport.write(b"\r\n".join(lines))
        self._close()

    def _close(self) -> None:
        self.transport.close()
        if self._alarm is not None:
            self._alarm.cancel()
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
    limits = Limits(read_timeout_s=Settings().read_timeout_s)

    def is_news(record: logging.LogRecord) -> bool:
        return record.levelno != logging.WARNING or limits.is_news(str(record.msg))

    # uvicorn warns of each request that it cannot parse, which would fill the log.
    logging.getLogger("uvicorn.error").addFilter(is_news)
    return limits


def _problem(status: HTTPStatus, message: str) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return the headers and the body of an answer after which the connection is closed."""
    body = ErrorBody(title=status.phrase, status=status, detail=message, message=message).model_dump_json().encode()
    headers = [
        (b"content-type", b"application/problem+json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
    ]
    return headers, body


async def _come_back_later(_scope: Any, _receive: Any, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
    """Answer 503: the application for connections beyond the maximum."""
    status = HTTPStatus.SERVICE_UNAVAILABLE
    headers, body = _problem(status, _MESSAGES[status])
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"retry-after", b"5")]})
    await send({"type": "http.response.body", "body": body})
