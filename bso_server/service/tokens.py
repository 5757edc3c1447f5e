"""Tokens: use cases, and the identity of callers. No SQL and no HTTP framework here.

A token has the form ``zbso_<id>_<secret>``, and the id finds its row. The database keeps only a hash of the token; a
slow hash, as passwords need, would not add security, because the secret has 256 random bits.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from bso_server.core.access import UNRESTRICTED, Caller, Scope, TokenRecord, ip_of
from bso_server.errors import (
    ForbiddenError,
    UnauthenticatedError,
    UntrustedHostError,
)
from bso_server.service.cache import Cache
from bso_server.service.commands import utc_now
from bso_server.storage.deadlines import begin_request
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction

# Seconds for which a process caches tokens: a revocation takes effect within this time.
CACHE_S = 10.0

# Largest number of tokens in the cache.
_CACHE_SIZE = 1024

_TOKEN = re.compile(r"zbso_([0-9a-f]{8})_([A-Za-z0-9_-]{43})")

DEFAULT_GRACE = timedelta(hours=24)
"""Time for which a rotated secret stays valid, because running trainings use it."""

_MAX_NAME_LENGTH = 255


def new_token(
    name: str, scopes: Collection[Scope], created_at: datetime, *, shares_jobs: bool = False
) -> tuple[str, TokenRecord]:
    """Make a token; return the token, which is stored nowhere, and its record."""
    token_id = secrets.token_hex(4)
    token, token_hash = new_secret(token_id)
    return token, TokenRecord(token_id, name, frozenset(scopes), token_hash, created_at, shares_jobs=shares_jobs)


def new_secret(token_id: str) -> tuple[str, str]:
    """Return a token with this id and a new secret, and its hash."""
    token = f"zbso_{token_id}_{secrets.token_urlsafe(32)}"
    return token, _hash(token)


def token_in(authorization: str) -> str:
    """Return the token in an ``Authorization`` header: after ``Bearer``, or the password of ``Basic`` for any user."""
    scheme, _, credentials = authorization.partition(" ")
    token = credentials.strip()
    if scheme.lower() == "basic":
        try:
            token = base64.b64decode(token, validate=True).decode().partition(":")[2]
        except ValueError:
            token = ""  # nosec B105  # no token, refused below
    if scheme.lower() not in {"basic", "bearer"} or _TOKEN.fullmatch(token) is None:
        raise UnauthenticatedError(
            "the Authorization header holds no token of this server: send it as Bearer TOKEN, or as the password of "
            "http://user:TOKEN@host; tokens look like zbso_0123abcd_…"
        )
    return token


def token_id_in(authorization: str) -> str | None:
    """Return the id of the token in an ``Authorization`` header, valid or not, or None without a token."""
    try:
        return token_in(authorization).split("_")[1]
    except UnauthenticatedError:
        return None


def is_loopback(address: str | None) -> bool:
    """Return True for an address of the server's own machine, and False for an unknown one (None)."""
    ip = ip_of(address)
    return ip is not None and ip.is_loopback


def require_allowed_host(host: str, allowed: Collection[str]) -> None:
    """Raise `UntrustedHostError` if a ``Host`` header names none of these hosts, on any port.

    ``*.example`` means all names below ``example``, and ``*`` means every host.
    """
    if not ("*" in allowed or _is_one_of(host, allowed)):
        raise UntrustedHostError(host)


def require_local_host(host: str, allowed: Collection[str]) -> None:
    """Raise `UntrustedHostError` unless the ``Host`` header names the server's own machine or one of these hosts.

    A site can resolve its own name to a loopback address, so that a browser on this machine takes this server for a
    part of that site. Therefore ``*`` in `allowed` does not count here.
    """
    name = _name_of(host)
    is_local = name == "localhost" or name.endswith(".localhost") or is_loopback(name.strip("[]"))
    if not (is_local or _is_one_of(host, allowed)):
        raise UntrustedHostError(host, tokenless=True)


def refuse_other_sites(fetch_site: str) -> None:
    """Raise `ForbiddenError` if a page of another site sends a request through its reader's browser.

    The browser may run on this machine, and sends simple requests without a preflight. Only browsers set the
    ``Sec-Fetch-Site`` header; pages cannot.
    """
    if fetch_site == "cross-site":
        raise ForbiddenError("a page of another site cannot use this server from a browser")


def refuse_other_origins(origin: str, host: str, allowed: Collection[str]) -> None:
    """Raise `ForbiddenError` if the ``Origin`` header names a page of neither this server nor one of these hosts.

    All browsers send ``Origin`` with a request that changes something, also those without ``Sec-Fetch-Site``; other
    clients do not. The scheme is not compared, because TLS may end at a proxy.
    """
    if not origin:
        return
    scheme, _, authority = origin.lower().partition("://")
    default_port = {"http": ":80", "https": ":443"}.get(scheme, "")
    is_same = authority.removesuffix(default_port) == host.lower().removesuffix(default_port)
    if not (authority and (is_same or _is_one_of(authority, allowed))):
        raise ForbiddenError(
            f"a page of another site (origin {origin!r}) cannot change anything on this server from a browser; if the "
            "page is yours, add its host to the server's setting ZEUS_BSO_ALLOWED_HOSTS"
        )


def _is_one_of(host: str, patterns: Collection[str]) -> bool:
    name = _name_of(host)
    return any(
        pattern == name or (pattern.startswith("*.") and name.endswith(pattern[1:]))
        for pattern in map(str.lower, patterns)
    )


@lru_cache(maxsize=1024)
def _name_of(host: str) -> str:
    return re.sub(r":\d*$", "", host).lower()


class Authenticator:
    """Authentication of callers, with a cache of tokens.

    The cache keeps tokens for `CACHE_S` seconds, so that most requests need no database. During that time a revoked
    token still works, and after the first token was made, clients of this machine still need none. A new token or
    secret works at once.

    Args:
        tokens: The tokens.
        insecure: Serve every caller without a token.
        allowed_hosts: Names that requests may use beside the machine's own names while no token exists.
        clock: Monotonic seconds.
        now: Returns the present instant, aware.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        insecure: bool = False,
        allowed_hosts: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._tokens = tokens
        self._insecure = insecure
        self._allowed_hosts = allowed_hosts
        self._clock = clock
        self._now = now
        self._known = Cache[str, tuple[TokenRecord, float]](_CACHE_SIZE)
        self._closed: tuple[bool, float] | None = None

    async def identify(
        self,
        authorization: str | None,
        address: str | None,
        host: str,
        *,
        user: Caller | None = None,
    ) -> Caller:
        """Return the caller of a request, and begin the request's deadline for waiting on the database.

        A token in the request must be valid, even if none is needed. Without a token, an insecure server serves every
        caller, and a server for which no token was ever made serves clients of its own machine.

        Args:
            authorization: The ``Authorization`` header.
            address: The client's address; None if it cannot be trusted.
            host: The ``Host`` header.
            user: The user of a page that a proxy has authenticated (`SingleSignOn`).

        Raises:
            UnauthenticatedError: The request has no valid token.
            ForbiddenError: No token exists yet, and the client is on another machine.
            UntrustedHostError: No token exists yet, and the ``Host`` header is not allowed (`require_local_host`).
        """
        begin_request()
        if authorization is not None:
            return (await self._record_of(token_in(authorization))).caller()
        if user is not None:
            return user
        if self._insecure:
            return UNRESTRICTED
        if await self._needs_token():
            raise UnauthenticatedError(
                "this server needs a token: make one by bso-server token create, and hand it to the training as "
                "ZEUS_BSO_TOKEN or as the password in http://user:TOKEN@host"
            )
        if not is_loopback(address):
            raise ForbiddenError(
                "this server has no tokens yet and serves only clients of its own machine: make a token there "
                "with bso-server token create, or start the server with --insecure to serve every client"
            )
        require_local_host(host, self._allowed_hosts)
        return UNRESTRICTED

    async def _record_of(self, token: str) -> TokenRecord:
        token_hash, instant = _hash(token), self._now()
        record = await self._found(token.split("_")[1], lambda record: record.is_good(token_hash, instant))
        if record is None:
            raise UnauthenticatedError(
                "the token is unknown, revoked or replaced: ask the server's operator for a valid token"
            )
        return record

    async def _found(self, token_id: str, is_good: Callable[[TokenRecord], bool]) -> TokenRecord | None:
        record, read_at = self._known.get(token_id) or (None, 0.0)
        now = self._clock()
        # A token that is not valid by the cache may have been rotated since.
        if record is None or now - read_at >= CACHE_S or not is_good(record):
            record = await self._tokens.find(token_id)
            if record is not None:
                self._known.put(token_id, (record, now))
                self._closed = True, now
        return record if record is not None and is_good(record) else None

    async def _needs_token(self) -> bool:
        now = self._clock()
        if self._closed is None or now - self._closed[1] >= CACHE_S:
            self._closed = await self._tokens.any(), now
        return self._closed[0]


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


class Tokens:
    """The use cases of tokens; methods that change a token raise `ValueError` for an unknown id."""

    def __init__(self, store: Store, *, clock: Callable[[], datetime] = utc_now) -> None:
        self._store = store
        self._clock = clock

    async def create(
        self, name: str, scopes: Collection[Scope], *, shares_jobs: bool = False
    ) -> tuple[str, TokenRecord]:
        """Make a token with any name, see `new_token`; `shares_jobs` lets other tokens use the jobs that it registers.

        Raises:
            ValueError: The name is empty, too long, or cannot be printed.
        """
        if not name.strip() or len(name) > _MAX_NAME_LENGTH or not name.isprintable():
            raise ValueError(f"a token's name has 1 to {_MAX_NAME_LENGTH} printable characters, unlike {name!r}")
        token, record = new_token(name, scopes, self._clock(), shares_jobs=shares_jobs)
        await self._store.write(_insert_once, record)
        return token, record

    async def all(self) -> list[TokenRecord]:
        """Return every token, oldest first."""
        return await self._store.read(Transaction.all_tokens)

    async def rotate(self, token_id: str, grace: timedelta = DEFAULT_GRACE) -> tuple[str, TokenRecord]:
        """Give a token another secret; return the token with it, and the record. Jobs and trials stay the token's.

        The present secret stays valid for `grace`, and an earlier one ends now. Running servers accept the new secret
        at once, and refuse the old one within `CACHE_S` seconds of its end.

        Raises:
            ValueError: The token was revoked, which is final.
        """
        token, token_hash = new_secret(token_id)
        now = self._clock()
        return token, await self._store.write(_rotate, token_id, token_hash, now, now + grace)

    async def revoke(self, token_id: str) -> None:
        """Revoke a token for good, in running servers within `CACHE_S` seconds."""
        await self._store.write(_revoke, token_id, self._clock())

    async def find(self, token_id: str) -> TokenRecord | None:
        """Return the token, valid or revoked, or None."""
        return await self._store.read(Transaction.token, token_id)

    async def any(self) -> bool:
        """Return True if a token exists, valid or revoked."""
        return await self._store.read(Transaction.any_token)


def _insert_once(transaction: Transaction, record: TokenRecord) -> None:
    """Add a token, unless an earlier attempt has committed it before its connection was lost."""
    if transaction.token(record.token_id) != record:
        transaction.insert_token(record)


def _rotate(
    transaction: Transaction, token_id: str, token_hash: str, now: datetime, previous_until: datetime
) -> TokenRecord:
    record = _locked(transaction, token_id).rotated(token_hash, now, previous_until)
    if record.revoked_at is not None:
        raise ValueError(
            f"token {token_id} was revoked, which is for good: make another one by bso-server token create, and move "
            "the jobs of this one (docs/tokens.md)"
        )
    transaction.update_token(record)
    return record


def _revoke(transaction: Transaction, token_id: str, now: datetime) -> None:
    record = _locked(transaction, token_id)
    if record.revoked_at is None:
        transaction.update_token(replace(record, revoked_at=now))


def _locked(transaction: Transaction, token_id: str) -> TokenRecord:
    record = transaction.locked_token(token_id)
    if record is None:
        raise ValueError(f"unknown token {token_id!r}: bso-server token list shows the ids")
    return record
