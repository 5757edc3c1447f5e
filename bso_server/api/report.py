"""``POST /report``, the route that every training calls after every epoch, as an ASGI application of its own.

Litestar still routes the request, limits its rate, lets `AccessControl` see it, and answers its errors. Reading the
body and writing the answer are done here: the way there through a Litestar handler costs as much as all else that a
report needs. `api.openapi` describes the route.
"""

from __future__ import annotations

from http import HTTPMethod, HTTPStatus
from typing import cast

from litestar import asgi
from litestar.exceptions import MethodNotAllowedException
from litestar.exceptions.http_exceptions import RequestEntityTooLarge
from litestar.handlers import ASGIRouteHandler
from litestar.types import HTTPScope, Receive, Send
from litestar.types import Scope as AsgiScope

from bso_server.api.auth import needs
from bso_server.api.bodies import message_in, require_json
from bso_server.core.access import Caller, Scope
from bso_server.service.batch_size_service import BatchSizeService
from zeus_plugins.protocol import Paths, ReportResponse, TrainingResult


def report_route(service: BatchSizeService, max_body_bytes: int) -> ASGIRouteHandler:
    """Make the route, which reads bodies of at most so many bytes."""

    @asgi(Paths.REPORT, opt=needs(Scope.REPORT), copy_scope=False)
    async def report(scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Take the result of one evaluation and say whether the training goes on."""
        if cast("HTTPScope", scope)["method"] != HTTPMethod.POST:
            raise MethodNotAllowedException(headers={"Allow": HTTPMethod.POST})
        require_json(dict(scope["headers"]).get(b"content-type", b"").decode("latin-1"))
        body = await _body(receive, max_body_bytes)
        if body is not None:
            caller: Caller = scope["user"]
            await _answer(send, await service.report(message_in(body, TrainingResult), caller=caller))

    return report


async def _body(receive: Receive, limit: int) -> bytes | None:
    """The whole body, or None when the client has left before its end."""
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message["body"]
        if len(body) > limit:
            raise RequestEntityTooLarge
        if not message["more_body"]:
            return body


async def _answer(send: Send, answer: ReportResponse) -> None:
    body = answer.model_dump_json().encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
