"""The errors of the domain, all of them below `BsoError`, and the HTTP status of each.

A training that has the server in its own process gets the same statuses, in the errors that it raises.
"""

from __future__ import annotations

from http import HTTPStatus

from zeus_plugins.protocol import RefusalReason


class BsoError(Exception):
    """Base of all domain errors.

    Attributes:
        message: What went wrong and what to change.
        field: The field of the request at fault, if there is one.
        reason: The same for programs, of errors that a client acts on.
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

    def __init__(self, job_id: str, trial_number: int) -> None:
        super().__init__(f"job {job_id!r} has no trial {trial_number}", field="trial_number")


class JobConflictError(BsoError):
    """The job_id is taken by a job with another configuration."""


class ReportConflictError(BsoError):
    """The trial ended, and not the way this report says."""


class OtherRegistrationError(BsoError):
    """The trial is one of a job that was deleted, and whose id another job has now."""

    reason = RefusalReason.OTHER_REGISTRATION


class StaleLeaseError(BsoError):
    """The trial was given to a later run of its training."""

    reason = RefusalReason.STALE_LEASE


class KeyConflictError(BsoError):
    """The trial that this idempotency key started has ended."""


class IllegalTransitionError(BsoError):
    """A trial cannot go from the state it is in to the one asked for."""


class InvalidJobError(BsoError):
    """A job that cannot be served."""


class PolicyNotInstalledError(BsoError):
    """The job's policy is not installed where the server runs, or cannot be loaded."""

    def __init__(self, message: str) -> None:
        super().__init__(message, field="policy")


class InvalidReportError(BsoError):
    """A report contradicts itself, its trial, or what the trial reported before."""


class InvalidImportError(BsoError):
    """The facts of an exported job contradict each other."""


class ZeusDatabaseError(BsoError):
    """A database cannot be read as that of a Zeus 0.16 server."""


class NoSurvivorError(BsoError):
    """A whole exploration round passed without one batch size reaching the target."""


class UnauthenticatedError(BsoError):
    """The request needs a token and shows none, or shows one that is not good."""


class ForbiddenError(BsoError):
    """The caller is known, and may not do that."""


class UntrustedHostError(BsoError):
    """The request was sent to a host name that this server does not answer to."""

    def __init__(self, host: str, *, tokenless: bool = False) -> None:
        super().__init__(
            f"this server has no tokens yet and answers to names of its own machine only, such as localhost, not to "
            f"{host!r}: use one of those, make a token by bso-server token create, or add this host to the server's "
            "setting ZEUS_BSO_ALLOWED_HOSTS"
            if tokenless
            else f"this server does not answer to host {host!r}: use another name for it, or add this one to its "
            "setting ZEUS_BSO_ALLOWED_HOSTS"
        )


class UnknownTokenError(BsoError):
    """No token has this id."""

    def __init__(self, token_id: str) -> None:
        super().__init__(f"unknown token {token_id!r}: bso-server token list shows the ids")


class RevokedTokenError(BsoError):
    """A token that was revoked can neither be rotated nor be given anything."""

    def __init__(self, token_id: str) -> None:
        super().__init__(
            f"token {token_id} was revoked, which is for good: make another one by bso-server token create, and hand "
            f"over what belongs to this one by bso-server token transfer {token_id} ID"
        )


class DatabaseNotReadyError(BsoError):
    """The database was not brought to this version's schema."""


class DatabaseUnavailableError(BsoError):
    """The database cannot be reached, its connections are lost again and again, or it can keep nothing.

    A write that was under way may be in force nevertheless.

    Attributes:
        detail: Which database, and what happened, on one line. Not for every client to read.
        fault: What keeps a database that answers from keeping anything, for every client to read, or None.
    """

    def __init__(self, detail: str, *, fault: str | None = None) -> None:
        if fault is None:
            message = "the database does not answer at present: send the request again; the server's log says more"
        else:
            message = (
                f"the server can keep nothing at present, for {fault}: send the request again when its operator has "
                "mended that; the server's log says more"
            )
        super().__init__(message)
        self.detail = detail
        self.fault = fault


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
    UnknownTokenError: HTTPStatus.NOT_FOUND,
    RevokedTokenError: HTTPStatus.CONFLICT,
    DatabaseNotReadyError: HTTPStatus.SERVICE_UNAVAILABLE,
    DatabaseUnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
}
