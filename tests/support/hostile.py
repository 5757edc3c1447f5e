"""Clients that attack a server: each uses the maximum of its memory and time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress

_LARGE = 65536
_PAUSE_S = 0.05
_REQUEST = b"GET /api/jobs HTTP/1.1\r\nHost: localhost\r\n\r\n"
_LOGIN = b"POST /ui/login HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-www-form-urlencoded\r\n"


def _endless(begin: bytes, piece: bytes) -> Iterator[bytes]:
    yield begin
    while True:
        yield piece * (_LARGE // len(piece))


def pipelining() -> Iterator[bytes]:
    return _endless(b"", _REQUEST)


def endless_value() -> Iterator[bytes]:
    return _endless(_REQUEST[:-2] + b"X: ", b"x")


def tiny_fields() -> Iterator[bytes]:
    return _endless(_REQUEST[:-2], b"a:b\r\n")


def endless_url() -> Iterator[bytes]:
    return _endless(b"GET /", b"x")


def tiny_trailers() -> Iterator[bytes]:
    return _endless(_LOGIN + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n", b"a:b\r\n")


def endless_trailer() -> Iterator[bytes]:
    return _endless(_LOGIN + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nX: ", b"x")


def tiny_chunks() -> Iterator[bytes]:
    return _endless(_LOGIN + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n")


def slow_body() -> Iterator[bytes]:
    yield _LOGIN + b"Content-Length: 1000000\r\n\r\n"
    yield b"x" * 999_000
    while True:
        yield b""
        yield b"x"


def unread_answers() -> Iterator[bytes]:
    return _endless(b"", b"GET /ui/static/style.css HTTP/1.1\r\nHost: localhost\r\n\r\n")


def half_open() -> Iterator[bytes]:
    yield _REQUEST[:-8]
    while True:
        yield b""


KINDS = (
    pipelining,
    endless_value,
    tiny_fields,
    endless_url,
    tiny_trailers,
    endless_trailer,
    tiny_chunks,
    slow_body,
    unread_answers,
    half_open,
)


@asynccontextmanager
async def attacking(
    port: int, number: int, kinds: tuple[Callable[[], Iterator[bytes]], ...] = KINDS
) -> AsyncIterator[None]:
    """Keep this number of connections, of each kind in turn, for as long as the block runs."""
    attacks = [asyncio.create_task(_attack(port, kinds[each % len(kinds)])) for each in range(number)]
    try:
        yield
    finally:
        for attack in attacks:
            attack.cancel()
        await asyncio.gather(*attacks, return_exceptions=True)


async def _attack(port: int, kind: Callable[[], Iterator[bytes]]) -> None:
    """Send without reading; connect again whenever the server closes the connection."""
    loop = asyncio.get_running_loop()
    while True:
        with socket.socket() as connection, suppress(OSError):
            connection.setblocking(False)
            await loop.sock_connect(connection, ("127.0.0.1", port))
            for piece in kind():
                await loop.sock_sendall(connection, piece)
                await asyncio.sleep(0 if piece else _PAUSE_S)
        await asyncio.sleep(_PAUSE_S)
