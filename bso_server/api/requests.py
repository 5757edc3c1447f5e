"""Requests: types of arguments that handlers in several modules take; media type, deadline and decoding of bodies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any

from litestar import Request
from litestar.di import NamedDependency
from litestar.exceptions import ClientException, HTTPException, SerializationException
from litestar.params import PathParameter, QueryParameter
from litestar.types import Receive

from bso_server.service.commands import BatchSizeService
from bso_server.service.fleet import GROUP, PERIOD, FleetReader
from bso_server.service.reading import JobReader
from zeus_plugins.protocol import ID_PATTERN, MAX_ID_LENGTH

Service = NamedDependency[BatchSizeService]
Reader = NamedDependency[JobReader]
Fleet = NamedDependency[FleetReader]

LARGEST = 2**31 - 1
"""The largest integer that fits the column type of every database."""

# In Python, `$` also matches before a final line break, which no id may have.
ID: dict[str, Any] = {"pattern": ID_PATTERN + r"(?!\n)", "max_length": MAX_ID_LENGTH}

JobInPath = Annotated[str, PathParameter(**ID, description="The job.")]
JobInQuery = Annotated[str, QueryParameter(name="job_id", **ID, description="The job.")]
TrialNumber = Annotated[int, PathParameter(ge=1, le=LARGEST, description="The trial, counting from 1 within the job.")]
Since = Annotated[
    str,
    QueryParameter(
        name="since", pattern=PERIOD.replace("$", r"(?!\n)$"), description="Length of the period: hours, days or weeks."
    ),
]
GroupedBy = Annotated[
    str,
    QueryParameter(
        name="by",
        pattern=GROUP.replace("$", r"(?!\n)$"),
        description="Groups of jobs: `owner`, `model`, `gpu`, `job`, or the name of a tag.",
    ),
]

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
