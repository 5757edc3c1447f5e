"""The error answers of routes, for the OpenAPI document."""

from __future__ import annotations

from http import HTTPStatus

from litestar.openapi.datastructures import ResponseSpec

from zeus_plugins.protocol import ErrorBody

_MEANING = {
    HTTPStatus.BAD_REQUEST: "The request cannot be read: a body that is no JSON, or a host name not served here.",
    HTTPStatus.UNAUTHORIZED: "A token is needed, and there is none or not a good one.",
    HTTPStatus.FORBIDDEN: "The caller may not do that.",
    HTTPStatus.NOT_FOUND: "No such job or trial.",
    HTTPStatus.CONFLICT: "It contradicts what the server knows; the message says what, and what to change.",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "The body is too large.",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "The body says to be something else than JSON.",
    HTTPStatus.UNPROCESSABLE_ENTITY: "A parameter or a field of the body is wrong; each is named.",
    HTTPStatus.TOO_MANY_REQUESTS: "Too many requests from this address.",
    HTTPStatus.INTERNAL_SERVER_ERROR: "The server failed; its log says why.",
    HTTPStatus.SERVICE_UNAVAILABLE: "The database does not answer, has another schema, or can keep nothing.",
}

BODY = (
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
)
"""The error statuses of a route that reads a body."""

# What any route behind the guard may answer.
_ALWAYS = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.INTERNAL_SERVER_ERROR,
    HTTPStatus.SERVICE_UNAVAILABLE,
)


def errors(*statuses: HTTPStatus, always: tuple[HTTPStatus, ...] = _ALWAYS) -> dict[int, ResponseSpec]:
    """Error answers of a route: these statuses, and those that every route may answer."""
    return {
        int(status): ResponseSpec(
            ErrorBody,
            description=_MEANING[status],
            media_type="application/problem+json",
            generate_examples=False,
        )
        for status in sorted({*statuses, *always})
    }
