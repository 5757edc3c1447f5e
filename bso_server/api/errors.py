"""The one place where errors become HTTP bodies, and the error answers of routes for the OpenAPI document."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from litestar import Request, Response
from litestar.exceptions import HTTPException, ValidationException
from litestar.openapi.datastructures import ResponseSpec

from bso_server.errors import STATUS_OF, BsoError, DatabaseUnavailableError, UnauthenticatedError
from bso_server.service.imports import MAX_IMPORT_BYTES
from zeus_plugins.protocol import ErrorBody, FieldError, RefusalReason

logger = logging.getLogger("bso_server")

HEADERS_OF: dict[type[BsoError], dict[str, str]] = {
    UnauthenticatedError: {"WWW-Authenticate": 'Bearer realm="zeus-bso", Basic realm="zeus-bso"'},
    # Seconds. The server itself has tried for some by then.
    DatabaseUnavailableError: {"Retry-After": "5"},
}

# What Litestar refuses in two words of its own.
_WORDS_OF = {
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: (
        "the request's body is larger than this server takes: its setting ZEUS_BSO_MAX_BODY_BYTES says the limit, and "
        f"{MAX_IMPORT_BYTES} bytes is that of an import; bso-server jobs import --database-url has none"
    ),
    HTTPStatus.TOO_MANY_REQUESTS: (
        "too many requests from this address within a minute: wait as many seconds as the header RateLimit-Reset says; "
        "the server's setting ZEUS_BSO_RATE_LIMIT_PER_MINUTE says how many it takes"
    ),
}

# What of the request is at fault where it is refused before its fields are looked at.
_FIELD_OF = {
    HTTPStatus.BAD_REQUEST: "body",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "body",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "Content-Type",
}

# Fields that one answer names at most.
_MOST_FIELDS = 20

_MISSING_PARAMETER = re.compile("Missing required [a-z]+ parameter '([^']+)'")

AnyRequest = Request[Any, Any, Any]


def domain_error(_request: AnyRequest, error: BsoError) -> Response[ErrorBody]:
    """Answer an error of the domain."""
    fields = () if error.field is None else (FieldError(field=error.field, message=error.message),)
    return _answer(STATUS_OF[type(error)], error.message, fields, HEADERS_OF.get(type(error)), error.reason)


def invalid_request(request: AnyRequest, error: ValidationException) -> Response[ErrorBody]:
    """Answer a request whose body or query does not fit: 422, naming each field."""
    missing = _MISSING_PARAMETER.search(error.detail)
    if missing is not None:
        fields = [FieldError(field=missing[1], message=error.detail)]
        return _answer(HTTPStatus.UNPROCESSABLE_ENTITY, error.detail, fields)
    details = error.extra if isinstance(error.extra, list) else []
    fields = [_field_error(request, detail) for detail in details[:_MOST_FIELDS] if isinstance(detail, dict)]
    message = "; ".join(f"{field.field}: {field.message}" for field in fields) or error.detail
    if len(details) > _MOST_FIELDS:
        message += f"; and {len(details) - _MOST_FIELDS} more"
    return _answer(HTTPStatus.UNPROCESSABLE_ENTITY, message, fields)


def http_error(_request: AnyRequest, error: HTTPException) -> Response[ErrorBody]:
    """Answer what Litestar refused by itself, such as an unknown route."""
    status = HTTPStatus(error.status_code)
    message = _WORDS_OF.get(status, error.detail)
    fields = [FieldError(field=_FIELD_OF[status], message=message)] if status in _FIELD_OF else []
    return _answer(status, message, fields, headers=error.headers)


def unexpected_error(request: AnyRequest, error: Exception) -> Response[ErrorBody]:
    """Answer a fault of the server: 500, with the details in its log alone."""
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _answer(HTTPStatus.INTERNAL_SERVER_ERROR, "the server failed at this request; its log says why")


def _field_error(request: AnyRequest, detail: dict[str, Any]) -> FieldError:
    key = str(detail.get("key") or "body")
    if key == "data":
        # A handler's parameter of that name is the body, and there is none.
        return FieldError(field="body", message="a JSON object must be sent")
    # Pydantic puts the exception's type before a validator's own words.
    message = str(detail.get("message", "")).removeprefix("Value error, ")
    return FieldError(field=_name_of(request, key, detail), message=message)


def _name_of(request: AnyRequest, key: str, detail: dict[str, Any]) -> str:
    """The client's name of a field; a handler may have another name for a parameter."""
    parameter = request.route_handler.parsed_fn_signature.parameters.get(key)
    names = None if parameter is None or detail.get("source") == "body" else parameter.kwarg_definition
    return getattr(names, "name", None) or key


def _answer(
    status: HTTPStatus,
    message: str,
    fields: Sequence[FieldError] = (),
    headers: dict[str, str] | None = None,
    reason: RefusalReason | None = None,
) -> Response[ErrorBody]:
    body = ErrorBody(
        title=status.phrase, status=status, detail=message, message=message, errors=tuple(fields), reason=reason
    )
    return Response(body, status_code=status, media_type="application/problem+json", headers=headers)


EXCEPTION_HANDLERS: dict[int | type[Exception], Any] = {
    BsoError: domain_error,
    ValidationException: invalid_request,
    HTTPException: http_error,
    Exception: unexpected_error,
}


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
