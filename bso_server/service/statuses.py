"""The HTTP status of each domain error.

A training that has the server in its own process gets the same numbers, in the errors that it raises.
"""

from __future__ import annotations

from http import HTTPStatus

import bso_server.errors as errors

STATUS_OF: dict[type[errors.BsoError], HTTPStatus] = {
    errors.UnknownJobError: HTTPStatus.NOT_FOUND,
    errors.UnknownTrialError: HTTPStatus.NOT_FOUND,
    errors.JobConflictError: HTTPStatus.CONFLICT,
    errors.ReportConflictError: HTTPStatus.CONFLICT,
    errors.OtherRegistrationError: HTTPStatus.CONFLICT,
    errors.StaleLeaseError: HTTPStatus.CONFLICT,
    errors.KeyConflictError: HTTPStatus.CONFLICT,
    errors.IllegalTransitionError: HTTPStatus.CONFLICT,
    errors.NoSurvivorError: HTTPStatus.CONFLICT,
    errors.InvalidJobError: HTTPStatus.UNPROCESSABLE_ENTITY,
    errors.PolicyNotInstalledError: HTTPStatus.UNPROCESSABLE_ENTITY,
    errors.InvalidReportError: HTTPStatus.UNPROCESSABLE_ENTITY,
    errors.InvalidImportError: HTTPStatus.UNPROCESSABLE_ENTITY,
    errors.UnauthenticatedError: HTTPStatus.UNAUTHORIZED,
    errors.ForbiddenError: HTTPStatus.FORBIDDEN,
    errors.UntrustedHostError: HTTPStatus.BAD_REQUEST,
    errors.UnknownTokenError: HTTPStatus.NOT_FOUND,
    errors.RevokedTokenError: HTTPStatus.CONFLICT,
    errors.DatabaseNotReadyError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.DatabaseUnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
}
