"""The HTTP status of each domain error.

A training that has the server in its own process gets the same numbers, in the errors that it raises.
"""

from __future__ import annotations

from http import HTTPStatus

from bso_server.errors import (
    BsoError,
    DatabaseNotReadyError,
    DatabaseUnavailableError,
    ForbiddenError,
    IllegalTransitionError,
    InvalidImportError,
    InvalidReportError,
    JobConflictError,
    KeyConflictError,
    NoSurvivorError,
    ReportConflictError,
    UnauthenticatedError,
    UnknownJobError,
    UnknownTokenError,
    UnknownTrialError,
    UntrustedHostError,
)

STATUS_OF: dict[type[BsoError], HTTPStatus] = {
    UnknownJobError: HTTPStatus.NOT_FOUND,
    UnknownTrialError: HTTPStatus.NOT_FOUND,
    JobConflictError: HTTPStatus.CONFLICT,
    ReportConflictError: HTTPStatus.CONFLICT,
    KeyConflictError: HTTPStatus.CONFLICT,
    IllegalTransitionError: HTTPStatus.CONFLICT,
    NoSurvivorError: HTTPStatus.CONFLICT,
    InvalidReportError: HTTPStatus.UNPROCESSABLE_ENTITY,
    InvalidImportError: HTTPStatus.UNPROCESSABLE_ENTITY,
    UnauthenticatedError: HTTPStatus.UNAUTHORIZED,
    ForbiddenError: HTTPStatus.FORBIDDEN,
    UntrustedHostError: HTTPStatus.BAD_REQUEST,
    UnknownTokenError: HTTPStatus.NOT_FOUND,
    DatabaseNotReadyError: HTTPStatus.SERVICE_UNAVAILABLE,
    DatabaseUnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
}
