"""The log of refused requests: enough to find out who sends them, and too little to fill a disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from http import HTTPStatus

from litestar.exceptions import HTTPException
from litestar.types import Scope

from bso_server.core.watch import CallerRefused, Listener, Refusal, nobody
from bso_server.errors import BsoError, ForbiddenError, UnauthenticatedError, UntrustedHostError
from bso_server.service.security import token_id_in
from bso_server.service.statuses import STATUS_OF

# Seconds in which each sender is named once, and senders that are named in that time.
PERIOD_S = 60.0
MOST_SENDERS = 100

_LOGGED = {
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.TOO_MANY_REQUESTS,
}

logger = logging.getLogger("bso_server")


class RefusalLog:
    """Names clients that are refused, with their address and the id of the token that they show, good or not.

    Who is refused again and again, and whoever comes when many are, is only counted. The clock is monotonic. The
    listener is told of everybody whose identity or rights are at fault.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, listener: Listener = nobody) -> None:
        self._clock = clock
        self._listener = listener
        self._begun_at = clock()
        self._named: set[tuple[int, str, str | None]] = set()
        self._unnamed = 0

    async def note(self, error: Exception, scope: Scope) -> None:
        """Take notice of an error with which a request is answered: an ``after_exception`` hook of Litestar."""
        reason = _reason_of(error, scope)
        if reason is not None:
            self._listener(CallerRefused(reason))
        status = _status_of(error)
        if status not in _LOGGED and not isinstance(error, UntrustedHostError):
            return
        self._begin_anew()
        client = scope["client"]
        token_id = token_id_in(dict(scope["headers"]).get(b"authorization", b"").decode("latin-1"))
        sender = (status, "an unknown address" if client is None else client[0], token_id)
        if sender in self._named or len(self._named) == MOST_SENDERS:
            self._unnamed += 1
            return
        self._named.add(sender)
        logger.warning(
            "refused with %d: %s %.200r from %s, %s: %s",
            status,
            scope.get("method"),
            scope["path"],
            sender[1],
            "no token" if token_id is None else f"token {token_id}",
            # What to change about it is for the client to read.
            (error.detail if isinstance(error, HTTPException) else str(error)).partition(":")[0],
        )

    def _begin_anew(self) -> None:
        """Begin another period, if this one is over."""
        now = self._clock()
        if now - self._begun_at < PERIOD_S:
            return
        if self._unnamed:
            logger.warning(
                "refused %d more requests within %.0f s, of senders that were named, or beyond %d of them",
                *(self._unnamed, PERIOD_S, MOST_SENDERS),
            )
        self._begun_at, self._unnamed = now, 0
        self._named.clear()


def _reason_of(error: Exception, scope: Scope) -> Refusal | None:
    if isinstance(error, UnauthenticatedError):
        return Refusal.BAD_TOKEN if b"authorization" in dict(scope["headers"]) else Refusal.NO_TOKEN
    if isinstance(error, ForbiddenError):
        return Refusal.FORBIDDEN
    return Refusal.HOST if isinstance(error, UntrustedHostError) else None


def _status_of(error: Exception) -> int:
    if isinstance(error, BsoError):
        return STATUS_OF[type(error)]
    return error.status_code if isinstance(error, HTTPException) else HTTPStatus.INTERNAL_SERVER_ERROR
