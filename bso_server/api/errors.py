"""Error answers: exceptions as HTTP bodies, and the answers that the OpenAPI document lists for each route."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from litestar import Request, Response
from litestar.exceptions import HTTPException, ValidationException
from litestar.openapi.datastructures import ResponseSpec

from bso_server.api.requests import MAX_BODY_BYTES
from bso_server.errors import STATUS_OF, BsoError
from zeus_plugins.protocol import ErrorBody, FieldError, RefusalReason

logger = logging.getLogger("bso_server")

_HEADERS_OF = {
    HTTPStatus.UNAUTHORIZED: {"WWW-Authenticate": 'Bearer realm="zeus-bso", Basic realm="zeus-bso"'},
    # Seconds; short, because the server itself has already retried.
    HTTPStatus.SERVICE_UNAVAILABLE: {"Retry-After": "5"},
}

# Replaces Litestar's message, which does not say what to change.
_TOO_LARGE = f"the request's body has more than {MAX_BODY_BYTES} bytes: send less"

# The faulty part of a request that is refused before its fields are validated.
_FIELD_OF = {
    HTTPStatus.BAD_REQUEST: "body",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "body",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "Content-Type",
}

# One answer names at most this number of fields.
_MOST_FIELDS = 20

_MISSING_PARAMETER = re.compile("Missing required [a-z]+ parameter '([^']+)'")

AnyRequest = Request[Any, Any, Any]


def domain_error(_request: AnyRequest, error: BsoError) -> Response[ErrorBody]:
    """Answer an error that the service raised."""
    fields = () if error.field is None else (FieldError(field=error.field, message=error.message),)
    status = STATUS_OF[type(error)]
    return _answer(status, error.message, fields, _HEADERS_OF.get(status), error.reason)


def invalid_request(request: AnyRequest, error: ValidationException) -> Response[ErrorBody]:
    """Answer an invalid body or query with 422, naming each field."""
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
    """Answer a request that Litestar refused, such as one for an unknown route."""
    status = HTTPStatus(error.status_code)
    message = _TOO_LARGE if status is HTTPStatus.REQUEST_ENTITY_TOO_LARGE else error.detail
    fields = [FieldError(field=_FIELD_OF[status], message=message)] if status in _FIELD_OF else []
    return _answer(status, message, fields, headers=error.headers)


def unexpected_error(request: AnyRequest, error: Exception) -> Response[ErrorBody]:
    """Answer an unexpected exception with 500; only the log has the details."""
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _answer(HTTPStatus.INTERNAL_SERVER_ERROR, "the server failed at this request; its log says why")


def _field_error(request: AnyRequest, detail: dict[str, Any]) -> FieldError:
    key = str(detail.get("key") or "body")
    if key == "data":
        # `data` is the handler's name for the body: the request has no body.
        return FieldError(field="body", message="a JSON object must be sent")
    if detail.get("source") != "body":
        # Clients may know a parameter by another name than the handler.
        parameter = request.route_handler.parsed_fn_signature.parameters.get(key)
        key = getattr(getattr(parameter, "kwarg_definition", None), "name", None) or key
    # Pydantic puts the exception's type before the validator's message.
    return FieldError(field=key, message=str(detail.get("message", "")).removeprefix("Value error, "))


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
    HTTPStatus.BAD_REQUEST: "A body that is no JSON, or a host name not served here.",
    HTTPStatus.UNAUTHORIZED: "A token is needed, and there is none or not a good one.",
    HTTPStatus.FORBIDDEN: "The caller may not do that.",
    HTTPStatus.NOT_FOUND: "No such job or trial.",
    HTTPStatus.CONFLICT: "It contradicts what the server knows; the message says what, and what to change.",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "The body is too large.",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "The body says to be something else than JSON.",
    HTTPStatus.UNPROCESSABLE_ENTITY: "A parameter or a field of the body is wrong; each is named.",
    HTTPStatus.INTERNAL_SERVER_ERROR: "The server failed; its log says why.",
    HTTPStatus.SERVICE_UNAVAILABLE: "The database does not answer, has another schema, is damaged, or takes no writes.",
}

BODY = (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNSUPPORTED_MEDIA_TYPE, HTTPStatus.UNPROCESSABLE_ENTITY)
"""The error statuses of a route that reads a body."""

# Error statuses of every route that checks its caller.
_ALWAYS = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.INTERNAL_SERVER_ERROR,
    HTTPStatus.SERVICE_UNAVAILABLE,
)


def errors(*statuses: HTTPStatus, always: tuple[HTTPStatus, ...] = _ALWAYS) -> dict[int, ResponseSpec]:
    """Return the error answers of a route for the OpenAPI document: for `statuses`, and for the statuses `always`."""
    return {
        int(status): ResponseSpec(
            ErrorBody, description=_MEANING[status], media_type="application/problem+json", generate_examples=False
        )
        for status in sorted({*statuses, *always})
    }
