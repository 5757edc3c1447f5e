"""Callers, tokens and their scopes."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from bso_server.errors import ForbiddenError


class Scope(StrEnum):
    """Rights of a token: read; read and run trials; or everything."""

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
    """Sender of a request: its token, and all scopes that the token implies.

    `token_id` is None for a proxy's user, and if the server requires no token. If `shares_jobs` is True, other tokens
    may use the jobs that the caller registers.
    """

    token_id: str | None
    scopes: frozenset[Scope]
    shares_jobs: bool = False

    def __str__(self) -> str:
        return "a caller without a token" if self.token_id is None else f"token {self.token_id}"

    def owns(self, owner: str) -> bool:
        """Return True if the caller has the token `owner`; a caller without a token owns everything."""
        return self.token_id in (None, owner)

    @property
    def is_admin(self) -> bool:
        """True if the caller may do everything."""
        return Scope.ADMIN in self.scopes

    def require(self, scope: Scope) -> None:
        """Raise `ForbiddenError` if the caller lacks this scope."""
        if scope not in self.scopes:
            raise ForbiddenError(
                f"{self} has no scope {scope}, which this request needs; make another one: "
                f"bso-server token create --name NAME --scope {scope}"
            )


UNRESTRICTED = Caller(None, frozenset(Scope))
"""A caller that needs no token: another part of this process, or a client of a server that requires none."""


@lru_cache(maxsize=1024)
def ip_of(address: str | None) -> IPv4Address | IPv6Address | None:
    """Return the IP address of a client, or None if it is unknown."""
    try:
        ip = ip_address(address or "")
    except ValueError:
        return None
    # A dual-stack socket gives an IPv4 client an IPv4-mapped address, such as ::ffff:127.0.0.1.
    return (ip.ipv4_mapped if isinstance(ip, IPv6Address) else None) or ip


@dataclass(frozen=True, slots=True)
class SingleSignOn:
    """Single sign-on: authenticating `proxies` name the user, who may read the pages, in a header."""

    proxies: tuple[IPv4Network | IPv6Network, ...]
    header: str

    def caller(self, address: str | None, values: Sequence[bytes]) -> Caller | None:
        """Return a reader of the pages; None unless the peer at `address` is a proxy and names one user in `values`."""
        ip = ip_of(address)
        if ip is None or len(values) != 1 or not any(ip in proxy for proxy in self.proxies):
            return None
        user = values[0].decode(errors="backslashreplace").strip()
        return Caller(None, _IMPLIED[Scope.READ]) if user else None


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """Token as stored in the database; instants are UTC.

    Attributes:
        token_id: Public part of the token.
        name: Purpose or owner, in words.
        token_hash: SHA-256 of the whole token, in hex digits.
        shares_jobs: True if other tokens may use the jobs that this token registers.
        previous_hash: Hash of the token with its previous secret, which is valid until `previous_until`.
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
        """Return the caller with this token."""
        scopes = frozenset[Scope]().union(*(_IMPLIED[scope] for scope in self.scopes))
        return Caller(self.token_id, scopes, self.shares_jobs)

    def is_good(self, token_hash: str, now: datetime) -> bool:
        """Return True if the hash belongs to the current secret or to a previous secret that is still valid."""
        if self.revoked_at is not None:
            return False
        previous = self.previous_hash
        if previous is None or self.previous_until is None or now >= self.previous_until:
            return hmac.compare_digest(self.token_hash, token_hash)
        return hmac.compare_digest(self.token_hash, token_hash) | hmac.compare_digest(previous, token_hash)

    def rotated(self, token_hash: str, now: datetime, previous_until: datetime) -> TokenRecord:
        """Change the secret; the current one stays valid until `previous_until`."""
        if self.token_hash == token_hash:  # A repeated rotation has no effect.
            return self
        return replace(
            self,
            token_hash=token_hash,
            rotated_at=now,
            previous_hash=self.token_hash,
            previous_until=previous_until,
        )
