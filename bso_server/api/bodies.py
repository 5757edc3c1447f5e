"""The bodies of requests: their form, and the way they are read."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

from litestar import Request
from litestar.exceptions import ClientException, HTTPException, SerializationException
from litestar.types import Receive

# Bytes that buy a client another second for its body, so that a large one may come over a slow line.
_BYTES_PER_S = 16 * 1024


def in_time(receive: Receive, timeout_s: float) -> Receive:
    """Give a client so many seconds to send its body, and one more for each 16 KiB; only time spent waiting counts.

    Where it takes longer, what reads the body raises an `HTTPException`, 408. What comes after the body, such as the
    news that the client has left, may be waited for without end.
    """
    now, left_s = asyncio.get_running_loop().time, timeout_s
    is_whole = False

    async def receive_in_time() -> Any:
        nonlocal left_s, is_whole
        if is_whole:
            return await receive()
        began_at = now()
        try:
            async with asyncio.timeout_at(began_at + left_s):
                message: Any = await receive()
        except TimeoutError:
            raise HTTPException(
                "the body of the request did not come in time: the server's setting ZEUS_BSO_READ_TIMEOUT_S says how "
                "many seconds it waits",
                status_code=HTTPStatus.REQUEST_TIMEOUT,
                headers={"Connection": "close"},
            ) from None
        left_s += len(message.get("body", b"")) / _BYTES_PER_S - (now() - began_at)
        is_whole = not message.get("more_body", False)
        return message

    return receive_in_time


def require_json(content_type: str, also: str = "") -> None:
    """Raise for a body whose ``Content-Type`` says to be anything but JSON, or what a route takes `also`.

    One that does not say what it is counts as JSON: Zeus's clients send nothing else. A page in a browser, on the other
    hand, may send text and forms to any server that its reader reaches, without asking that server first.
    """
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type not in ("", "application/json", also) and not media_type.endswith("+json"):
        raise HTTPException(
            f"a body must be JSON, not {media_type!r}: send the header Content-Type: {also or 'application/json'}",
            status_code=HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        )


def decoded(body: bytes) -> Any:
    """A body that the fast parsers refuse, decoded as Python does it.

    Many clients write NaN and infinities into JSON, which has no such numbers. They are let through to the fields they
    were sent for, all of which refuse them, so that the answer names the field instead of a byte.

    Raises:
        ClientException: It is no JSON, or nested deeper than anything here.
    """
    try:
        return json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise ClientException(f"the body cannot be read as JSON: {error}") from error


class BodyRequest(Request[Any, Any, Any]):
    """A request whose body, where it cannot be JSON at all, is the client's fault."""

    async def json(self) -> Any:
        """The body, decoded; errors as in `require_json` and `decoded`."""
        require_json(self.headers.get("content-type", ""))
        try:
            return await super().json()
        except (SerializationException, ValueError, RecursionError):
            return decoded(await self.body())
