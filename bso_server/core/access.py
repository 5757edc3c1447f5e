"""Callers and what their tokens allow; pure."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, replace
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
    """The sender of a request: the token that was shown, or None where the server asks for none, and all it allows.

    `shares_jobs` says whether other tokens may use the jobs that it registers.
    """

    token_id: str | None
    scopes: frozenset[Scope]
    shares_jobs: bool = False

    def owns(self, owner: str) -> bool:
        """True if what belongs to this token is the caller's. Without tokens, nobody is told from anybody else."""
        return self.token_id in (None, owner)

    @property
    def is_admin(self) -> bool:
        """True if it may do everything."""
        return Scope.ADMIN in self.scopes

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
        created_at: When it was made (UTC); `revoked_at` and `rotated_at`, when it got its latest secret, likewise.
        shares_jobs: Whether other tokens may use the jobs that it registers.
        previous_hash: That of the token with its secret before, which is good until `previous_until`, too.
    """

    token_id: str
    name: str
    scopes: frozenset[Scope]
    token_hash: str
    created_at: datetime
    revoked_at: datetime | None = None
    shares_jobs: bool = False
    rotated_at: datetime | None = None
    previous_hash: str | None = None
    previous_until: datetime | None = None

    def caller(self) -> Caller:
        """The caller that shows this token."""
        scopes = frozenset[Scope]().union(*(_IMPLIED[scope] for scope in self.scopes))
        return Caller(self.token_id, scopes, self.shares_jobs)

    def is_good(self, token_hash: str, now: datetime) -> bool:
        """True if the token with this hash is this one, and good: with its secret, or for a while the one before."""
        if self.revoked_at is not None:
            return False
        previous = self.previous_hash
        if previous is None or self.previous_until is None or now >= self.previous_until:
            return hmac.compare_digest(self.token_hash, token_hash)
        return hmac.compare_digest(self.token_hash, token_hash) | hmac.compare_digest(previous, token_hash)

    def rotated(self, token_hash: str, now: datetime, previous_until: datetime) -> TokenRecord:
        """The same token with another secret, and the present one good until then."""
        if self.token_hash == token_hash:  # It is done already.
            return self
        return replace(
            self,
            token_hash=token_hash,
            rotated_at=now,
            previous_hash=self.token_hash,
            previous_until=previous_until,
        )
