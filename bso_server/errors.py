"""Errors of the domain, all derived from `BsoError`, with the HTTP status of each.

A training with the server in its own process gets the same statuses in its exceptions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from http import HTTPStatus
from typing import Any

from zeus_plugins.protocol import RefusalReason


class BsoError(Exception):
    """Base of all domain errors.

    Attributes:
        message: The problem, and its remedy.
        field: Field of the request that caused the error, or None.
        reason: Machine-readable reason of an error to which clients react, or None.
    """

    reason: RefusalReason | None = None

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class UnknownJobError(BsoError):
    """No job has this id."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"unknown job {job_id!r}: register it first", field="job_id")


class UnknownTrialError(BsoError):
    """The job has no such trial."""

    def __init__(self, job_id: str, trial_number: int, but: str = "") -> None:
        super().__init__(f"job {job_id!r} has no trial {trial_number}{but}", field="trial_number")


class JobConflictError(BsoError):
    """A job with another configuration has this job_id."""


class ReportConflictError(BsoError):
    """The report contradicts the end of its trial."""


class OtherRegistrationError(BsoError):
    """The trial belongs to a deleted job, whose id another job has now."""

    reason = RefusalReason.OTHER_REGISTRATION


class StaleLeaseError(BsoError):
    """A later run of the training has resumed the trial."""

    reason = RefusalReason.STALE_LEASE


class KeyConflictError(BsoError):
    """The trial that this idempotency key started has ended."""


class IllegalTransitionError(BsoError):
    """The trial cannot change from its state to the requested one."""


class InvalidJobError(BsoError):
    """The server cannot serve a job with this configuration."""


class PolicyNotInstalledError(BsoError):
    """The job's policy is not installed on the server, or cannot be loaded."""

    def __init__(self, message: str) -> None:
        super().__init__(message, field="policy")


class InvalidReportError(BsoError):
    """The report contradicts itself, its trial, or an earlier report."""


class InvalidImportError(BsoError):
    """An exported job contradicts itself."""


class NoSurvivorError(BsoError):
    """No batch size reached the target in a whole round of exploration."""


class UnauthenticatedError(BsoError):
    """The request has no valid token and needs one."""


class ForbiddenError(BsoError):
    """The caller is not permitted to do this."""


class UntrustedHostError(BsoError):
    """The request names a host that this server does not serve."""

    def __init__(self, host: str, *, tokenless: bool = False) -> None:
        super().__init__(
            f"this server has no tokens yet and answers to names of its own machine only, such as localhost, not to "
            f"{host!r}: use one of those, make a token by bso-server token create, or add this host to the server's "
            "setting ZEUS_BSO_ALLOWED_HOSTS"
            if tokenless
            else f"this server does not answer to host {host!r}: use another name for it, or add this one to its "
            "setting ZEUS_BSO_ALLOWED_HOSTS"
        )


class DatabaseNotReadyError(BsoError):
    """The database does not have this version's schema."""


class DatabaseUnavailableError(BsoError):
    """The database cannot be reached, loses its connections repeatedly, accepts no writes, or is damaged.

    A write that fails with this error may nevertheless have been committed.

    Attributes:
        detail: Database and failure, on one line; only for operators.
        fault: Reason why the database accepts no writes or cannot be read, in words for every client; None if it does
            not answer.
    """

    def __init__(self, detail: str, *, fault: str | None = None) -> None:
        if fault is None:
            message = "the database does not answer at present: send the request again; the server's log says more"
        else:
            message = (
                f"the server cannot do this at present, because {fault}: send the request again when its operator has "
                "mended that; the server's log says more"
            )
        super().__init__(message)
        self.detail = detail
        self.fault = fault


class ComputeFirstError(BsoError):
    """A transaction needs the result of a long computation: its store computes it, and repeats the transaction.

    Attributes:
        key: Requests with the same key share one computation.
        read: Reads the facts in a transaction, its argument. Returns a function that computes the result, in any thread
            and without the database. That function returns another one, which saves the result in a transaction, unless
            the facts have changed.
    """

    def __init__(self, message: str, key: Hashable, read: Callable[[Any], Callable[[], Callable[[Any], None]]]) -> None:
        super().__init__(message)
        self.key, self.read = key, read


STATUS_OF: dict[type[BsoError], HTTPStatus] = {
    UnknownJobError: HTTPStatus.NOT_FOUND,
    UnknownTrialError: HTTPStatus.NOT_FOUND,
    JobConflictError: HTTPStatus.CONFLICT,
    ReportConflictError: HTTPStatus.CONFLICT,
    OtherRegistrationError: HTTPStatus.CONFLICT,
    StaleLeaseError: HTTPStatus.CONFLICT,
    KeyConflictError: HTTPStatus.CONFLICT,
    IllegalTransitionError: HTTPStatus.CONFLICT,
    NoSurvivorError: HTTPStatus.CONFLICT,
    InvalidJobError: HTTPStatus.UNPROCESSABLE_ENTITY,
    PolicyNotInstalledError: HTTPStatus.UNPROCESSABLE_ENTITY,
    InvalidReportError: HTTPStatus.UNPROCESSABLE_ENTITY,
    InvalidImportError: HTTPStatus.UNPROCESSABLE_ENTITY,
    UnauthenticatedError: HTTPStatus.UNAUTHORIZED,
    ForbiddenError: HTTPStatus.FORBIDDEN,
    UntrustedHostError: HTTPStatus.BAD_REQUEST,
    ComputeFirstError: HTTPStatus.SERVICE_UNAVAILABLE,
    DatabaseNotReadyError: HTTPStatus.SERVICE_UNAVAILABLE,
    DatabaseUnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
}
