"""Callers and what their tokens allow; pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from bso_server.errors import ForbiddenError


class Scope(StrEnum):
    """The rights of a token: to read, also to run trials, or everything."""

    READ = "read"
    REPORT = "report"
    ADMIN = "admin"


_IMPLIED = {
    Scope.READ: frozenset({Scope.READ}),
    Scope.REPORT: frozenset({Scope.READ, Scope.REPORT}),
    Scope.ADMIN: frozenset(Scope),
}


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request: the token that was shown, or None where the server asks for none, and all it allows."""

    token_id: str | None
    scopes: frozenset[Scope]

    def require(self, scope: Scope) -> None:
        """Raise `ForbiddenError` if the caller's token lacks this scope."""
        if scope not in self.scopes:
            raise ForbiddenError(
                f"token {self.token_id} has no scope {scope}, which this request needs; "
                f"make another one: bso-server token create --name NAME --scope {scope}"
            )


UNRESTRICTED = Caller(None, frozenset(Scope))
"""Who asks without a token where none is needed: another part of this process, or a client of an open server."""


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A token as the database keeps it.

    Attributes:
        token_id: Its public part.
        name: What or whom it is for, in words.
        scopes: What it allows, as given when it was made.
        token_hash: SHA-256 of the whole token, in hex digits.
        created_at: When it was made (UTC); `revoked_at` likewise.
    """

    token_id: str
    name: str
    scopes: frozenset[Scope]
    token_hash: str
    created_at: datetime
    revoked_at: datetime | None = None

    def caller(self) -> Caller:
        """The caller that shows this token."""
        return Caller(self.token_id, frozenset[Scope]().union(*(_IMPLIED[scope] for scope in self.scopes)))
