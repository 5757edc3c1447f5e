"""Request bodies: media type, deadline and decoding."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from litestar import Request
from litestar.exceptions import ClientException, HTTPException, SerializationException
from litestar.types import Receive

MAX_BODY_BYTES = 1024 * 1024
"""Maximum size of a request body."""

# For each portion of this size, a client gets one more second, so that a large body may come over a slow line.
_BYTES_PER_S = 16 * 1024


def in_time(receive: Receive, timeout_s: float) -> Receive:
    """Return a `receive` that gives the client `timeout_s` seconds for its body, and one more second for each 16 KiB.

    Only time spent waiting counts. At the deadline, `receive` raises an `HTTPException` with status 408. Messages after
    the body, such as the client's disconnection, have no deadline.
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


def require_json(headers: Mapping[str, str]) -> None:
    """Raise unless a body is not encoded, and its ``Content-Type`` is JSON or missing.

    Zeus's clients send no ``Content-Type``. Text and forms are refused because a web page of another site may send them
    to this server without a preflight request.
    """
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    encoding, problem = headers.get("content-encoding", "identity"), None
    if media_type not in ("", "application/json") and not media_type.endswith("+json"):
        problem = f"must be JSON, not {media_type!r}: send the header Content-Type: application/json"
    elif encoding.lower() != "identity":
        problem = f"must not be encoded, as the header Content-Encoding: {encoding:.40} says: send it as it is"
    if problem is not None:
        raise HTTPException(f"a body {problem}", status_code=HTTPStatus.UNSUPPORTED_MEDIA_TYPE)


class BodyRequest(Request[Any, Any, Any]):
    """Request that refuses a body other than JSON with a client error."""

    async def json(self) -> Any:
        """Decode the body; raise like `require_json`, and `ClientException` for a body that is not JSON."""
        require_json(self.headers)
        try:
            return await super().json()
        except (SerializationException, ValueError, RecursionError):
            body = await self.body()
        # Python's parser accepts NaN and infinities. Every field refuses them, so the answer names the field instead of
        # a byte of the body.
        try:
            return json.loads(body.decode())
        except (ValueError, RecursionError) as error:
            raise ClientException(f"the body cannot be read as JSON: {error}") from error
