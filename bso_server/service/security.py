"""Tokens and their check: the identity of callers. No SQL and no HTTP framework here.

A token reads ``zbso_<id>_<secret>``. The id finds its row; the secret is 256 random bits, of which the database keeps a
hash. A slow hash, as passwords need, would add nothing: nobody can go through 2²⁵⁶ secrets.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from functools import lru_cache
from typing import Protocol

from bso_server.core.access import UNRESTRICTED, Caller, Scope, TokenRecord
from bso_server.core.watch import CallerRefused, Listener, Refusal, nobody
from bso_server.errors import ForbiddenError, UnauthenticatedError, UntrustedHostError
from bso_server.storage.deadlines import begin_request

# Seconds for which a process trusts what it read about tokens: a revocation takes effect within them.
CACHE_S = 10.0

# Tokens that one process remembers; more than that are looked up more often.
_CACHE_SIZE = 1024

SESSION_S = 12 * 3600
"""Seconds for which somebody who has shown a token to the dashboard need not show it again."""

_SESSION = re.compile(r"([0-9a-f]{8})\.([0-9]{1,12})\.([0-9a-f]{64})")

_TOKEN = re.compile(r"zbso_([0-9a-f]{8})_([A-Za-z0-9_-]{43})")


def new_token(
    name: str, scopes: Collection[Scope], created_at: datetime, *, shares_jobs: bool = False
) -> tuple[str, TokenRecord]:
    """Make a token: that, which nothing can bring back, and what to keep of it."""
    token_id = secrets.token_hex(4)
    token, token_hash = new_secret(token_id)
    return token, TokenRecord(token_id, name, frozenset(scopes), token_hash, created_at, shares_jobs=shares_jobs)


def new_secret(token_id: str) -> tuple[str, str]:
    """The token with this id and a secret that nobody has seen, and its hash."""
    token = f"zbso_{token_id}_{secrets.token_urlsafe(32)}"
    return token, _hash(token)


def token_in(authorization: str) -> str:
    """The token in an ``Authorization`` header: after ``Bearer``, or the password of ``Basic``, whoever the user."""
    scheme, _, credentials = authorization.partition(" ")
    token = credentials.strip()
    if scheme.lower() == "basic":
        try:
            token = base64.b64decode(token, validate=True).decode().partition(":")[2]
        except ValueError:
            token = ""
    if scheme.lower() not in {"basic", "bearer"} or _TOKEN.fullmatch(token) is None:
        raise UnauthenticatedError(
            "the Authorization header holds no token of this server: send it as Bearer TOKEN, or as the password of "
            "http://user:TOKEN@host; tokens look like zbso_0123abcd_…"
        )
    return token


def token_id_in(authorization: str) -> str | None:
    """The public part of the token in an ``Authorization`` header, known or not, or None where there is no token."""
    try:
        return token_in(authorization).split("_")[1]
    except UnauthenticatedError:
        return None


@lru_cache(maxsize=1024)
def is_loopback(address: str | None) -> bool:
    """Whether a client with this address is on the server's own machine; None, an unknown address, is not."""
    try:
        ip = ipaddress.ip_address(address or "")
    except ValueError:
        return False
    # ::ffff:127.0.0.1 is how a socket for both IP versions names an IPv4 client.
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


def require_allowed_host(host: str, allowed: Collection[str]) -> None:
    """Raise `UntrustedHostError` for a request whose ``Host`` header names none of these hosts, on whatever port.

    ``*.example`` stands for all names below ``example``, and ``*`` for every host.
    """
    if not ("*" in allowed or _is_one_of(host, allowed)):
        raise UntrustedHostError(host)


def require_local_host(host: str, allowed: Collection[str]) -> None:
    """Raise `UntrustedHostError` unless the ``Host`` header names the server's own machine or one of these hosts.

    A site can have its own name lead to a loopback address, and the browser of somebody on this machine then takes this
    server for a part of that site. So `allowed` is searched for what names a host: ``*`` does not.
    """
    name = _name_of(host)
    is_local = name == "localhost" or name.endswith(".localhost") or is_loopback(name.strip("[]"))
    if not (is_local or _is_one_of(host, allowed)):
        raise UntrustedHostError(host, tokenless=True)


def refuse_other_sites(fetch_site: str) -> None:
    """Raise `ForbiddenError` where a page of another site would use this server through its reader's browser.

    The browser may well be a client of this machine, and it sends simple requests without asking the server first.
    Browsers set the ``Sec-Fetch-Site`` header, and pages cannot; it is empty from everybody else.
    """
    if fetch_site == "cross-site":
        raise ForbiddenError("a page of another site cannot use this server from a browser")


def refuse_other_origins(origin: str, host: str, allowed: Collection[str]) -> None:
    """Raise `ForbiddenError` if a page that is neither this server's nor of one of these hosts sends a request.

    Browsers say by the ``Origin`` header which page a request that changes something comes from, also those that send
    no ``Sec-Fetch-Site``; others send none. The scheme is not compared: TLS may end at a proxy.
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


class TokenSource(Protocol):
    """The place where tokens are kept."""

    async def find(self, token_id: str) -> TokenRecord | None:
        """The token, even if it was revoked, or None."""

    async def any(self) -> bool:
        """True if there is a token, be it revoked."""


class Authenticator:
    """Finds out who makes a request.

    What is known of tokens is remembered for `CACHE_S` seconds, so that most requests cost no look at the database. For
    that long, at most, a revoked token still works, and clients of this machine need none though there is a first one.
    A new token, or a new secret of one, works at once. Only tokens that exist are remembered. An `insecure` server
    serves everybody who shows no token. While there is none, requests may be sent to names of the machine itself and to
    `allowed_hosts`. The clock is monotonic, and `now` is the present instant, aware. The listener is told of tokens
    that begin no session; of other refusals those tell who answer requests.
    """

    def __init__(
        self,
        tokens: TokenSource,
        *,
        insecure: bool = False,
        allowed_hosts: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        listener: Listener = nobody,
    ) -> None:
        self._tokens = tokens
        self._listener = listener
        self._insecure = insecure
        self._allowed_hosts = allowed_hosts
        self._clock = clock
        self._now = now
        self._known: OrderedDict[str, tuple[TokenRecord, float]] = OrderedDict()
        self._closed: tuple[bool, float] | None = None

    async def identify(
        self,
        authorization: str | None,
        address: str | None,
        host: str,
        session: str | None = None,
        *,
        administers: bool = False,
    ) -> Caller:
        """Say who makes a request.

        The request begins here: what it waits for the database from now on counts together.

        A token that is shown must be good, even where none is needed. Without one, everybody is served by an insecure
        server, clients of its own machine are as long as no token was ever made, and otherwise nobody is.

        Args:
            authorization: The ``Authorization`` header.
            address: The client's address; None: not to be trusted.
            host: The ``Host`` header.
            session: What `begin_session` gave to somebody who looks at pages. One that is over is as good as none.
            administers: True for a page for administrators: the session then allows what its token does.

        Raises:
            UnauthenticatedError: There is no token, or not a good one.
            ForbiddenError: The server has no tokens yet, and the client is on another machine.
            UntrustedHostError: It has none yet, and the request was sent to a name that may lead to any machine.
        """
        begin_request()
        if authorization is not None:
            return await self._caller_with(token_in(authorization))
        if session is not None and (caller := await self._caller_in(session, administers)) is not None:
            return caller
        if self._insecure:
            return UNRESTRICTED
        if await self._needs_token():
            raise UnauthenticatedError(
                "this server needs a token: make one by bso-server token create, and hand it to the training as "
                "ZEUS_BSO_TOKEN or as the password in http://user:TOKEN@host"
            )
        if not is_loopback(address):
            raise ForbiddenError(
                "this server has no tokens yet and serves clients of its own machine only: make a token there by "
                "bso-server token create, or start the server with --insecure to serve everybody"
            )
        require_local_host(host, self._allowed_hosts)
        return UNRESTRICTED

    async def begin_session(self, token: str) -> str:
        """A child of this token that reads for `SESSION_S` seconds and can be shown in place of it, for a cookie.

        On pages for administrators it allows what the token does.

        It ends earlier when the token is revoked or gets another secret. Nothing is kept of it: it says when it ends,
        and its signature is made with the hash of the token that the database has. Who can read that table could make
        one, and has read all that it would show.

        Raises:
            UnauthenticatedError: The token is not good.
        """
        begin_request()
        try:
            record = await self._record_of(token_in(f"Bearer {token}"))
        except UnauthenticatedError:
            self._listener(CallerRefused(Refusal.BAD_TOKEN))
            raise
        ends_at = int(self._now().timestamp()) + SESSION_S
        return f"{record.token_id}.{ends_at}.{_signature(record, ends_at)}"

    async def _caller_in(self, session: str, administers: bool) -> Caller | None:
        parts = _SESSION.fullmatch(session)
        if parts is None:
            return None
        token_id, ends_at, signature = parts[1], int(parts[2]), parts[3]

        def is_good(record: TokenRecord) -> bool:
            is_signed = hmac.compare_digest(signature, _signature(record, ends_at))
            return is_signed and record.revoked_at is None

        left_s = ends_at - self._now().timestamp()
        record = await self._found(token_id, is_good) if 0 < left_s <= SESSION_S else None
        if record is None:
            return None
        return record.caller() if administers else Caller(token_id, frozenset({Scope.READ}))

    async def _caller_with(self, token: str) -> Caller:
        return (await self._record_of(token)).caller()

    async def _record_of(self, token: str) -> TokenRecord:
        token_hash, instant = _hash(token), self._now()
        record = await self._found(token.split("_")[1], lambda record: record.is_good(token_hash, instant))
        if record is None:
            raise UnauthenticatedError(
                "the token is unknown or was revoked, or has another secret by now: ask who runs this server for it"
            )
        return record

    async def _found(self, token_id: str, is_good: Callable[[TokenRecord], bool]) -> TokenRecord | None:
        record, read_at = self._known.get(token_id, (None, 0.0))
        now = self._clock()
        # One that is not good by what is remembered may have been rotated since.
        if record is None or now - read_at >= CACHE_S or not is_good(record):
            record = await self._tokens.find(token_id)
            if record is not None:
                self._remember(record, now)
        return record if record is not None and is_good(record) else None

    def _remember(self, record: TokenRecord, now: float) -> None:
        self._known[record.token_id] = record, now
        self._known.move_to_end(record.token_id)
        if len(self._known) > _CACHE_SIZE:
            self._known.popitem(last=False)
        self._closed = True, now

    async def _needs_token(self) -> bool:
        now = self._clock()
        if self._closed is None or now - self._closed[1] >= CACHE_S:
            self._closed = await self._tokens.any(), now
        return self._closed[0]


def _signature(record: TokenRecord, ends_at: int) -> str:
    key, said = record.token_hash.encode(), f"session {record.token_id} {ends_at}".encode()
    return hmac.new(key, said, hashlib.sha256).hexdigest()


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
