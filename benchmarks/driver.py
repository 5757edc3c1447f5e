"""A small HTTP client on asyncio, and the figures of its requests.

The client shares the machine with the servers that it measures, and must therefore use little CPU time: a `Connection`
sends a list of requests that were encoded beforehand, and sends each request in the callback that received the previous
answer, without a task switch in between.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.processes import BenchmarkError, Target

SUCCESS = range(200, 300)
NO_ANSWER = 0
"""The status under which requests without an answer are counted."""

_HEAD_END = b"\r\n\r\n"
# Only the header content-length is parsed, because uvicorn sends it; chunked answers raise an error below.
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
_NO_CONTENT = 204


class Exchange(NamedTuple):
    """The answer to one request.

    Attributes:
        status: HTTP status.
        latency_s: Seconds from handing the request to the socket until the complete answer was received.
        body: The answer's body.
    """

    status: int
    latency_s: float
    body: bytes


def encode(method: str, target: str, body: Mapping[str, object] | None = None) -> bytes:
    """Return a whole HTTP/1.1 request; `target` is the quoted path and query, `body` is sent as JSON."""
    head = [f"{method} {target} HTTP/1.1", "Host: localhost", "Accept: application/json"]
    payload = b"" if body is None else json.dumps(body).encode()
    if body is not None:
        head += ["Content-Type: application/json", f"Content-Length: {len(payload)}"]
    return "\r\n".join(head).encode() + _HEAD_END + payload


class Connection(asyncio.Protocol):
    """One connection to a server, for lists of requests (scripts) that are sent one at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._script: Sequence[bytes] = ()
        self._exchanges: list[Exchange] = []
        self._received = bytearray()
        self._sent_at = 0.0
        self._played: asyncio.Future[list[Exchange]] | None = None

    @classmethod
    async def open(cls, target: Target) -> Connection:
        """Connect to a server.

        Raises:
            BenchmarkError: No server listens there.
        """
        try:
            _, connection = await asyncio.get_running_loop().create_connection(cls, target.host, target.port)
        except OSError as error:
            raise BenchmarkError(f"no server at {target.host}:{target.port}: {error}") from error
        return connection

    def play(self, script: Sequence[bytes]) -> asyncio.Future[list[Exchange]]:
        """Send the requests, each after the answer to the previous request.

        Returns:
            The answers, in the order of the script. The future fails with `BenchmarkError` if the connection breaks
            or an answer has no content-length.
        """
        self._script, self._exchanges = script, []
        self._played = asyncio.get_running_loop().create_future()
        self._send_next()
        return self._played

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; called by the event loop."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - narrows the type: TCP gives no other
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Store the answer if it is complete, and send the next request; called by the event loop."""
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
            self._send_next()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the future of the current script; called by the event loop."""
        self._transport = None
        self._fail(BenchmarkError(f"the server closed the connection: {exc or 'no reason given'}"))

    def _send_next(self) -> None:
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
    """Return status and body of the pending answer, or None if it is not complete yet.

    Raises:
        BenchmarkError: The answer has no content-length.
    """
    head_end = received.find(_HEAD_END)
    if head_end < 0:
        return None
    status = int(received[9:12])
    length = _CONTENT_LENGTH.search(received, 0, head_end)
    if length is None:
        if status == _NO_CONTENT:
            return status, b""
        raise BenchmarkError(f"an answer without Content-Length: {bytes(received[:head_end])!r}")
    start = head_end + len(_HEAD_END)
    end = start + int(length[1])
    return (status, bytes(received[start:end])) if len(received) >= end else None


@dataclass(frozen=True, slots=True)
class RequestFigures:
    """Figures of one kind of request.

    Attributes:
        request: Method and path.
        due: Number of requests.
        answers: Number of answers per HTTP status; requests without an answer are counted under 0.
        p50_ms: Median latency of the answered requests.
        p99_ms: 99th percentile of the latency of the answered requests.
    """

    request: str
    due: int
    answers: dict[str, int]
    p50_ms: float
    p99_ms: float

    @property
    def failures(self) -> int:
        """Number of requests without an answer, or with an answer that is no success."""
        return sum(number for status, number in self.answers.items() if int(status) not in SUCCESS)


@dataclass(slots=True)
class Tally:
    """Answers and latencies of one kind of request, added up."""

    answers: Counter[int] = field(default_factory=Counter)
    latencies_s: list[float] = field(default_factory=list)

    def add(self, status: int, latency_s: float) -> None:
        """Count one answer."""
        self.answers[status] += 1
        self.latencies_s.append(latency_s)

    def figures(self, request: str) -> RequestFigures:
        """Return the figures of all counted requests."""
        ascending_ms = sorted(1e3 * latency_s for latency_s in self.latencies_s) or [0.0]
        return RequestFigures(
            request=request,
            due=self.answers.total(),
            answers={str(status): number for status, number in sorted(self.answers.items())},
            p50_ms=percentile(ascending_ms, 0.50),
            p99_ms=percentile(ascending_ms, 0.99),
        )


def percentile(ascending: Sequence[float], share: float) -> float:
    """Return the percentile by nearest rank: the smallest value that at least `share` of the values do not exceed."""
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)]
