"""Who may call which route, asked before a request's body is read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Any

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.handlers.base import BaseRouteHandler
from litestar.handlers.http_handlers import HTTPRouteHandler

from bso_server.security import Authenticator, Caller, Scope, require_allowed_host

AnyConnection = ASGIConnection[Any, Any, Any, Any]

_NEEDS = "needs"

# Whoever set these, a proxy or the client itself, the address beside them may be anything.
_FORWARDED = ("forwarded", "x-forwarded-for")


def needs(scope: Scope | None) -> dict[str, Any]:
    """The ``opt`` of a route that callers with this scope may use, or, with None, anybody.

    Routes that say nothing need `Scope.READ` where they only read (GET), and `Scope.ADMIN` otherwise.
    """
    return {_NEEDS: scope}


def needed_scope(handler: BaseRouteHandler) -> Scope | None:
    """The scope that a route asks for, or None where it asks for nothing."""
    if _NEEDS in handler.opt:
        stated: Scope | None = handler.opt[_NEEDS]
        return stated
    reads = isinstance(handler, HTTPRouteHandler) and handler.http_methods <= {"GET", "HEAD", "OPTIONS"}
    return Scope.READ if reads else Scope.ADMIN


def guard_by(
    authenticator: Authenticator, allowed_hosts: Collection[str]
) -> Callable[[AnyConnection, BaseRouteHandler], Awaitable[None]]:
    """The guard of every route; it notes the caller for `caller_of`.

    Args:
        authenticator: Knows callers.
        allowed_hosts: Host names that the server answers to, as `security.require_allowed_host` takes them.
    """

    async def guard(connection: AnyConnection, handler: BaseRouteHandler) -> None:
        scope = needed_scope(handler)
        if scope is None:
            return
        require_allowed_host(connection.headers.get("host", ""), allowed_hosts)
        caller = await authenticator.identify(connection.headers.get("authorization"), _address_of(connection))
        caller.require(scope)
        connection.scope["user"] = caller

    return guard


def caller_of(request: Request[Caller, Any, Any]) -> Caller:
    """Whom the guard let through."""
    return request.user


def _address_of(connection: AnyConnection) -> str | None:
    if connection.client is None or any(name in connection.headers for name in _FORWARDED):
        return None
    return connection.client.host
