"""Errors of the training side; all are `ZeusBSOError`.

``except`` clauses written for Zeus 0.16 work: five of the names are Zeus's own, and `ZeusBSORuntimError` (Zeus's
spelling) is another name of `ZeusBSORuntimeError`.
"""

from __future__ import annotations

__all__ = [
    "ZeusBSOBadOperationError",
    "ZeusBSOConfigError",
    "ZeusBSOError",
    "ZeusBSOOperationOrderError",
    "ZeusBSORuntimError",
    "ZeusBSORuntimeError",
    "ZeusBSOServerUnreachableError",
    "ZeusBSOTokenError",
    "ZeusBSOTrainFailError",
]

_RETRYABLE = frozenset({408, 425, 429})  # request timeout, too early, too many requests


class ZeusBSOError(Exception):
    """Base class of the errors in this module."""


class ZeusBSORuntimeError(ZeusBSOError):
    """The server refused a request, or failed.

    Attributes:
        status: HTTP status of the answer; None without an answer.
        is_foreign: Whether the answer does not look like that of a batch size optimization server: the URL is wrong, or
            a proxy answers in its place.
        reason: Machine-readable reason of a refusal (`zeus_plugins.protocol.RefusalReason`), or None.
    """

    def __init__(
        self, message: str, *, status: int | None = None, is_foreign: bool = False, reason: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.is_foreign = is_foreign
        self.reason = reason

    @property
    def is_outage(self) -> bool:
        """True if the same request may succeed later: no answer, a failing server, or a server that asks to wait."""
        return self.status is None or self.status >= 500 or self.status in _RETRYABLE


ZeusBSORuntimError = ZeusBSORuntimeError


class ZeusBSOServerUnreachableError(ZeusBSORuntimeError):
    """The server gave no answer: wrong URL, not running, or timed out."""


class ZeusBSOConfigError(ZeusBSOError):
    """The job, the environment or the training script cannot work as configured.

    Attributes:
        status: HTTP status, if the server found the problem; otherwise None.
        of_size: Whether the problem is one of the batch size in force, so that another size may work.
    """

    def __init__(self, message: str, *, status: int | None = None, of_size: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.of_size = of_size


class ZeusBSOTokenError(ZeusBSOConfigError):
    """The server does not accept the token, or the token does not permit this request."""


class ZeusBSOOperationOrderError(ZeusBSOError):
    """A method was called before another method that it needs."""


class ZeusBSOBadOperationError(ZeusBSOError):
    """A method was called with an argument that it cannot use, or in the wrong place."""


class ZeusBSOTrainFailError(ZeusBSOError):
    """The trial ended without reaching its target metric; launch the training again.

    Attributes:
        exit_status: Exit status of the interpreter if the error is not caught: 75 (``EX_TEMPFAIL``), so that a
            scheduler launches the script again, or 1 if another launch does not help.
    """

    exit_status = 75
