"""Every error that the training side raises on purpose.

::

    ZeusBSOError
    ├── ZeusBSORuntimeError              the server could not do what was asked (Zeus's spelling: ZeusBSORuntimError)
    │   └── ZeusBSOServerUnreachableError   no answer from the server at all
    ├── ZeusBSOConfigError              the job or the training script says something that cannot work
    │   └── ZeusBSOTokenError               the server does not accept the token, or not for this
    ├── ZeusBSOOperationOrderError      a method was called before the one it needs
    ├── ZeusBSOBadOperationError        a method was called with something it cannot use
    └── ZeusBSOTrainFailError           the trial ended without reaching its target: relaunch the training

``except`` clauses written for Zeus 0.16 work: five of the names are its own, and `ZeusBSORuntimError`, as Zeus spells
it, is a second name of `ZeusBSORuntimeError`.
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

# Request timeout, too early, too many requests.
_LATER = frozenset({408, 425, 429})


class ZeusBSOError(Exception):
    """Base of every error in this module; catch it to catch them all."""


class ZeusBSORuntimeError(ZeusBSOError):
    """The server refused or failed a request.

    Attributes:
        status: HTTP status of the answer, or None when there was none.
        is_foreign: Whether the answer does not look like one of a batch size optimization server: a wrong URL, or a
            proxy that answers in its place.
        reason: Why the server refused, where a program acts on it (`zeus_plugins.protocol.RefusalReason`); else None.
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
        """True when the same request may succeed later: no answer, a failing server, or one that asks for patience."""
        return self.status is None or self.status >= 500 or self.status in _LATER


# The spelling of Zeus 0.16, for programs written for it.
ZeusBSORuntimError = ZeusBSORuntimeError


class ZeusBSOServerUnreachableError(ZeusBSORuntimeError):
    """The server gave no answer: wrong URL, not running, or timed out."""


class ZeusBSOConfigError(ZeusBSOError):
    """The job, the environment or the training script says something that cannot work.

    Attributes:
        status: HTTP status by which the server said so, or None when it was found on this side.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ZeusBSOTokenError(ZeusBSOConfigError):
    """The server does not accept the token, or not for this."""


class ZeusBSOOperationOrderError(ZeusBSOError):
    """A method was called before the one that it depends on."""


class ZeusBSOBadOperationError(ZeusBSOError):
    """A method was called with something that it cannot use, or where it has no meaning."""


class ZeusBSOTrainFailError(ZeusBSOError):
    """The trial ended without reaching its target metric; the training should be launched again.

    Attributes:
        exit_status: The status with which the interpreter ends if nobody catches the error: 75, for schedulers that
            launch again by status (``EX_TEMPFAIL`` of sysexits.h), or 1 where launching again does not help.
    """

    exit_status = 75
