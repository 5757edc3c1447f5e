"""A client that costs little: it shares the machine with the servers that it measures.

One `Player` is one keep-alive connection. It plays a script of requests that were encoded beforehand: the next one
leaves within the callback that brought the previous answer, without a task switch in between.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.errors import BenchmarkError

HEAD_END = b"\r\n\r\n"
# uvicorn and every other server worth measuring announce the length; chunked answers are refused below.
CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
STATUSES_WITHOUT_BODY = (204, 304)


class Exchange(NamedTuple):
    """One request and its answer.

    Attributes:
        status: HTTP status.
        latency_s: Seconds from handing the request to the socket until the answer was there in full.
        body: The answer's body.
    """

    status: int
    latency_s: float
    body: bytes


def encode(
    method: str, target: str, body: Mapping[str, object] | None = None, headers: Mapping[str, str] | None = None
) -> bytes:
    """A whole HTTP/1.1 request.

    Args:
        method: HTTP method.
        target: Path and query, already quoted.
        body: Sent as JSON, if given.
        headers: Further headers.
    """
    payload = b"" if body is None else json.dumps(body).encode()
    head = [f"{method} {target} HTTP/1.1", "Host: localhost", "Accept: application/json"]
    head += [f"{name}: {value}" for name, value in (headers or {}).items()]
    if body is not None:
        head += ["Content-Type: application/json", f"Content-Length: {len(payload)}"]
    return "\r\n".join(head).encode() + HEAD_END + payload


class Player(asyncio.Protocol):
    """One connection that plays scripts, one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._script: Sequence[bytes] = ()
        self._exchanges: list[Exchange] = []
        self._received = bytearray()
        self._sent_at = time.perf_counter()
        self._played: asyncio.Future[list[Exchange]] | None = None

    @classmethod
    async def connect(cls, host: str, port: int) -> Player:
        """Open a connection.

        Raises:
            BenchmarkError: Nobody listens there.
        """
        try:
            _, player = await asyncio.get_running_loop().create_connection(cls, host, port)
        except OSError as error:
            raise BenchmarkError(f"no server at {host}:{port}: {error}") from error
        return player

    def play(self, script: Sequence[bytes]) -> asyncio.Future[list[Exchange]]:
        """Send the requests, each after the answer to the one before.

        Returns:
            The exchanges, in the order of the script. The future fails with `BenchmarkError` if the connection breaks
            or the server speaks something that this client does not.
        """
        self._script, self._exchanges = script, []
        self._played = asyncio.get_running_loop().create_future()
        self._go_on()
        return self._played

    @property
    def idle_s(self) -> float:
        """Seconds since the last request left; infinite once the connection is closed."""
        return math.inf if self._transport is None else time.perf_counter() - self._sent_at

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - narrows the type: TCP gives no other
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Called by the event loop: take the answer if it is whole, and send the next request."""
        self._received += data
        try:
            answer = parse_answer(self._received)
        except BenchmarkError as error:
            self._fail(error)
            return
        if answer is not None:
            status, body = answer
            self._exchanges.append(Exchange(status, time.perf_counter() - self._sent_at, body))
            self._received.clear()
            self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._transport = None
        self._fail(BenchmarkError(f"the server closed the connection: {exc or 'no reason given'}"))

    def _go_on(self) -> None:
        played = self._played
        if played is None or played.done():
            return
        if len(self._exchanges) == len(self._script):
            played.set_result(self._exchanges)
        elif self._transport is None:
            self._fail(BenchmarkError("the server closed the connection between two requests"))
        else:
            self._sent_at = time.perf_counter()
            self._transport.write(self._script[len(self._exchanges)])

    def _fail(self, error: BenchmarkError) -> None:
        if self._played is not None and not self._played.done():
            self._played.set_exception(error)


def parse_answer(received: bytearray) -> tuple[int, bytes] | None:
    """Status and body of the one answer that is awaited, or None if it is not whole yet.

    Raises:
        BenchmarkError: The answer does not say how long it is.
    """
    head_end = received.find(HEAD_END)
    if head_end < 0:
        return None
    status = int(received[9:12])
    length = CONTENT_LENGTH.search(received, 0, head_end)
    if length is None:
        if status in STATUSES_WITHOUT_BODY:
            return status, b""
        raise BenchmarkError(f"an answer without Content-Length: {bytes(received[:head_end])!r}")
    start = head_end + len(HEAD_END)
    end = start + int(length[1])
    return (status, bytes(received[start:end])) if len(received) >= end else None
