"""Access control, which runs before the body of a request is read, and the log of refused requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from http import HTTPMethod, HTTPStatus
from typing import Any, cast

from litestar import Request, route
from litestar.exceptions import ClientException, HTTPException
from litestar.handlers.http_handlers import HTTPRouteHandler
from litestar.middleware import ASGIMiddleware
from litestar.types import ASGIApp, HTTPScope, Receive, Send
from litestar.types import Scope as AsgiScope

from bso_server.api.requests import in_time
from bso_server.core.access import Caller, Scope, SingleSignOn
from bso_server.core.occurrences import CallerRefused, Listener, Refusal, nobody
from bso_server.errors import STATUS_OF, BsoError, ForbiddenError, UnauthenticatedError, UntrustedHostError
from bso_server.service.tokens import (
    Authenticator,
    refuse_other_origins,
    refuse_other_sites,
    require_allowed_host,
    token_id_in,
)

CallerRequest = Request[Caller, Any, Any]
"""A request whose `user` is the caller that `AccessControl` identified."""

readable = partial(route, http_method=["GET", "HEAD"])
"""Decorator of a route for reading: programs that look after servers ask by HEAD, and get no body."""

PAGE: dict[str, Any] = {"page": True}
"""The ``opt`` of a page, added to `needs`: other sites may link to it, and a proxy may name its reader."""

# Headers that browsers send when a user follows a link, but not for frames and scripts.
_NAVIGATION = {b"sec-fetch-mode": b"navigate", b"sec-fetch-dest": b"document"}

# If a request has one of these headers, a proxy or the client has set it, and the client's own address is unknown.
_FORWARDED = (b"forwarded", b"x-forwarded-for")

# Key in an ASGI scope of the address at the connection's other end.
_PEER = "zeus_bso_peer"

# Headers on which access depends: a request may have only one value of each.
_SINGLE = (b"host", b"authorization", b"origin", b"sec-fetch-site")

# The log names each sender once per period (seconds), and at most this number of senders per period.
PERIOD_S = 60.0
MOST_SENDERS = 100

_LOGGED = {
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
}

logger = logging.getLogger("bso_server")


def needs(scope: Scope | None) -> dict[str, Any]:
    """Return the ``opt`` of a route that requires this scope; None means that every client may call it.

    Routes without this ``opt`` require `Scope.READ` for GET, and `Scope.ADMIN` otherwise.
    """
    return {"needs": scope}


def needed_scope(handler: HTTPRouteHandler) -> Scope | None:
    """Return the scope that a route requires, or None if every client may call it."""
    reads = handler.http_methods <= {"GET", "HEAD", "OPTIONS"}
    needed: Scope | None = handler.opt.get("needs", Scope.READ if reads else Scope.ADMIN)
    return needed


class AccessControl(ASGIMiddleware):
    """Middleware that sets the caller as the request's `user`, or raises if the caller may not use the route.

    This is no Litestar guard, because Litestar copies the route handler for each call of a guard, which costs more CPU
    time than the check itself.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        allowed_hosts: Collection[str],
        *,
        read_timeout_s: float,
        sign_on: SingleSignOn | None = None,
    ) -> None:
        self._authenticator = authenticator
        self._allowed_hosts = allowed_hosts
        self._read_timeout_s = read_timeout_s
        self._sign_on = sign_on

    async def handle(self, scope: AsgiScope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        """Check the request; raise like `Authenticator.identify` and the checks of `service.tokens`."""
        # All routes of the application are HTTP routes.
        handler = cast("HTTPRouteHandler", scope["route_handler"])
        needed = needed_scope(handler)
        if needed is not None:
            headers = _headers_of(scope)
            host = _text(headers, b"host")
            require_allowed_host(host, self._allowed_hosts)
            if not _is_navigation(scope, headers):
                refuse_other_sites(_text(headers, b"sec-fetch-site"))
            if needed is not Scope.READ:
                # The scope decides, not the method, because the batch-size request is a GET that starts a trial.
                refuse_other_origins(_text(headers, b"origin"), host, self._allowed_hosts)
            authorization = headers.get(b"authorization")
            caller = await self._authenticator.identify(
                None if authorization is None else authorization.decode("latin-1"),
                _address_of(scope, headers),
                host,
                user=self._user_of(scope) if "page" in handler.opt else None,
            )
            caller.require(needed)
            scope["user"] = caller
        await next_app(scope, in_time(receive, self._read_timeout_s), send)

    def _user_of(self, scope: AsgiScope) -> Caller | None:
        # Without `with_peer`, the launcher may have taken the client's address from a header.
        peer = cast("dict[str, Any]", scope).get(_PEER)
        if self._sign_on is None or peer is None:
            return None
        header = self._sign_on.header.lower().encode()
        return self._sign_on.caller(peer[0], [value for name, value in scope["headers"] if name == header])


def with_peer(app: Any) -> Any:
    """Wrap `app`: record the address of the connection's other end, before `app` replaces it by one from a header."""

    async def noting(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await app(scope | {_PEER: scope.get("client")}, receive, send)

    return noting


def _headers_of(scope: AsgiScope) -> dict[bytes, bytes]:
    """Return the headers by name; raise `ClientException` (400) if a header on which access depends is repeated.

    A proxy may have checked another value of a repeated header.
    """
    headers: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name in headers and name in _SINGLE:
            raise ClientException(f"the request has several {name.decode().title()} headers: send one")
        headers[name] = value
    return headers


def _is_navigation(scope: AsgiScope, headers: Mapping[bytes, bytes]) -> bool:
    """Return True if a browser opens a page by a link, perhaps from another site."""
    return (
        "page" in scope["route_handler"].opt
        and cast("HTTPScope", scope)["method"] == HTTPMethod.GET
        and all(headers.get(name) == value for name, value in _NAVIGATION.items())
    )


def _text(headers: Mapping[bytes, bytes], name: bytes) -> str:
    return headers.get(name, b"").decode("latin-1")


def _address_of(scope: AsgiScope, headers: Collection[bytes]) -> str | None:
    client = scope["client"]
    return None if client is None or any(name in headers for name in _FORWARDED) else client[0]


class RefusalLog:
    """Log of refused clients, with their address and the unverified id of their token.

    Each period, further refusals of a logged sender, and of senders beyond `MOST_SENDERS`, are not logged; the metrics
    count all refusals.

    Args:
        clock: A monotonic clock, in seconds.
        listener: Receives each refusal for a missing or invalid identity, missing rights, or an untrusted host.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, listener: Listener = nobody) -> None:
        self._clock = clock
        self._listener = listener
        self._begun_at = clock()
        self._named: set[tuple[int, str, str | None]] = set()

    async def note(self, error: Exception, scope: AsgiScope) -> None:
        """Log the error with which a request is answered; an ``after_exception`` hook of Litestar."""
        reason = _reason_of(error, scope)
        if reason is not None:
            self._listener(CallerRefused(reason))
        status = STATUS_OF[type(error)] if isinstance(error, BsoError) else getattr(error, "status_code", 500)
        if status not in _LOGGED and not isinstance(error, UntrustedHostError):
            return
        now, client = self._clock(), scope["client"]
        if now - self._begun_at >= PERIOD_S:
            self._begun_at = now
            self._named.clear()
        token_id = token_id_in(dict(scope["headers"]).get(b"authorization", b"").decode("latin-1"))
        sender = (status, "an unknown address" if client is None else client[0], token_id)
        if sender in self._named or len(self._named) == MOST_SENDERS:
            return
        self._named.add(sender)
        logger.warning(
            "refused with %d: %s %.200r from %s, %s: %s",
            status,
            scope.get("method"),
            scope["path"],
            sender[1],
            "no token" if token_id is None else f"token {token_id}",
            # Without the text after the colon, which is advice to the client.
            (error.detail if isinstance(error, HTTPException) else str(error)).partition(":")[0],
        )


def _reason_of(error: Exception, scope: AsgiScope) -> Refusal | None:
    if isinstance(error, UnauthenticatedError):
        return Refusal.BAD_TOKEN if b"authorization" in dict(scope["headers"]) else Refusal.NO_TOKEN
    return {ForbiddenError: Refusal.FORBIDDEN, UntrustedHostError: Refusal.HOST}.get(type(error))
