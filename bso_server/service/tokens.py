"""Tokens: their making, their keeping, and the identity of callers. No SQL and no HTTP framework here.

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
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Protocol

from bso_server.core.access import UNRESTRICTED, Caller, Scope, TokenRecord
from bso_server.core.occurrences import CallerRefused, Listener, Refusal, nobody
from bso_server.errors import (
    ForbiddenError,
    RevokedTokenError,
    UnauthenticatedError,
    UnknownTokenError,
    UntrustedHostError,
)
from bso_server.service.commands import utc_now
from bso_server.service.views import TokenLine, TokensPage
from bso_server.storage.deadlines import begin_request
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction

# Seconds for which a process trusts what it read about tokens: a revocation takes effect within them.
CACHE_S = 10.0

# Tokens that one process remembers; more than that are looked up more often.
_CACHE_SIZE = 1024

SESSION_S = 12 * 3600
"""Seconds for which somebody who has shown a token to the dashboard need not show it again."""

_SESSION = re.compile(r"([0-9a-f]{8})\.([0-9]{1,12})\.([0-9a-f]{64})")

_TOKEN = re.compile(r"zbso_([0-9a-f]{8})_([A-Za-z0-9_-]{43})")

DEFAULT_GRACE = timedelta(hours=24)
"""The time for which the secret before the latest rotation stays good: trainings that run have it."""

_MAX_NAME_LENGTH = 255

# Rows that one transaction hands over, so that reports on the same trials do not wait for long.
_HANDED_OVER_AT_ONCE = 1000


def new_token(
    name: str, scopes: Collection[Scope], created_at: datetime, *, shares_jobs: bool = False
) -> tuple[str, TokenRecord]:
    """Make a token; return the token, which nothing can bring back, and the record to keep of it."""
    token_id = secrets.token_hex(4)
    token, token_hash = new_secret(token_id)
    return token, TokenRecord(token_id, name, frozenset(scopes), token_hash, created_at, shares_jobs=shares_jobs)


def new_secret(token_id: str) -> tuple[str, str]:
    """Return a token with this id and a new secret, and its hash."""
    token = f"zbso_{token_id}_{secrets.token_urlsafe(32)}"
    return token, _hash(token)


def token_in(authorization: str) -> str:
    """Return the token in an ``Authorization`` header: after ``Bearer``, or the password of ``Basic``, for any user."""
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
    """Return the id of the token in an ``Authorization`` header, known or not, or None if it holds no token."""
    try:
        return token_in(authorization).split("_")[1]
    except UnauthenticatedError:
        return None


@lru_cache(maxsize=1024)
def is_loopback(address: str | None) -> bool:
    """Return whether a client with this address is on the server's own machine; an unknown address (None) is not."""
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
        """Return whether there is a token, be it revoked."""


class Authenticator:
    """Finds out who makes a request.

    Tokens that exist are remembered for `CACHE_S` seconds, so that most requests read nothing from the database. For so
    long at most, a revoked token still works, and clients of this machine need no token although there is a first one.
    A new token, or a new secret of one, works at once.

    Args:
        tokens: The tokens.
        insecure: Serve everybody who shows no token.
        allowed_hosts: Names, beside those of the machine itself, to which requests may be sent while there is no token.
        clock: Monotonic seconds.
        now: Gives the present instant, aware.
        listener: Told of tokens that begin no session. Whoever answers requests tells of other refusals.
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
            return (await self._record_of(token_in(authorization))).caller()
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


class Tokens:
    """The use cases of tokens; the `TokenSource` of a server. The clock gives the present instant, aware.

    Those that take the id of a token raise `UnknownTokenError` if there is none.
    """

    def __init__(self, store: Store, *, clock: Callable[[], datetime] = utc_now) -> None:
        self._store = store
        self._clock = clock

    async def create(
        self, name: str, scopes: Collection[Scope], *, shares_jobs: bool = False
    ) -> tuple[str, TokenRecord]:
        """Make a token: that, which is kept nowhere, and its record. Several tokens may have the same name.

        Args:
            name: What or whom it is for.
            scopes: What it allows.
            shares_jobs: Whether other tokens may use the jobs that it registers.

        Raises:
            ValueError: The name is empty, too long, or cannot be printed.
        """
        if not name.strip() or len(name) > _MAX_NAME_LENGTH or not name.isprintable():
            raise ValueError(f"a token's name has 1 to {_MAX_NAME_LENGTH} printable characters, unlike {name!r}")
        token, record = new_token(name, scopes, self._clock(), shares_jobs=shares_jobs)
        await self._store.write(_insert_once, record)
        return token, record

    async def all(self) -> list[TokenRecord]:
        """Every token, oldest first."""
        return await self._store.read(Transaction.all_tokens)

    async def jobs_per_owner(self) -> dict[str, int]:
        """The number of jobs that belong to each token that has any, by its id."""
        return await self._store.read(Transaction.jobs_per_owner)

    async def page(self, own: str | None) -> TokensPage:
        """Every token without its secret, for an administrator whose own one has this id."""
        jobs = await self.jobs_per_owner()
        lines = [
            TokenLine.model_validate(
                asdict(record) | {"scopes": sorted(record.scopes), "jobs": jobs.get(record.token_id, 0)}
            )
            for record in await self.all()
        ]
        return TokensPage(tokens=tuple(lines), own=own)

    async def rotate(self, token_id: str, grace: timedelta = DEFAULT_GRACE) -> tuple[str, TokenRecord]:
        """Give a token another secret, and leave it all that belongs to it: the token anew, and its record.

        The secret that it had stays good for the time of `grace`; one that it had before that ends now. Running servers
        take the new one at once, and refuse the old one within `CACHE_S` seconds of its end.

        Raises:
            RevokedTokenError: It was revoked, which is for good.
        """
        token, token_hash = new_secret(token_id)
        now = self._clock()
        return token, await self._store.write(_rotate, token_id, token_hash, now, now + grace)

    async def revoke(self, token_id: str) -> int:
        """Make a token worthless for good. Running servers notice within `CACHE_S` seconds.

        Returns:
            The number of its trials that may still go on, which nobody but administrators may report on any more.
        """
        return await self._store.write(_revoke, token_id, self._clock())

    async def transfer(self, token_id: str, successor_id: str) -> tuple[int, int]:
        """Give another token the jobs and trials of this one, which may have been revoked; their numbers.

        Raises:
            RevokedTokenError: The successor was revoked.
        """
        await self._store.write(_check_transfer, token_id, successor_id)
        # Jobs first: from then on the token begins no more trials of them.
        return (
            await self._handed_over(Transaction.hand_over_jobs, token_id, successor_id),
            await self._handed_over(Transaction.hand_over_trials, token_id, successor_id),
        )

    async def find(self, token_id: str) -> TokenRecord | None:
        """The token, even if it was revoked, or None."""
        return await self._store.read(Transaction.token, token_id)

    async def any(self) -> bool:
        """Return whether there is a token, be it revoked."""
        return await self._store.read(Transaction.any_token)

    async def any_valid(self) -> bool:
        """Return whether there is a token that was not revoked."""
        return await self._store.read(Transaction.any_token, valid=True)

    async def _handed_over(
        self, hand_over: Callable[..., Collection[tuple[Any, ...]]], token_id: str, successor_id: str
    ) -> int:
        handed_over: set[tuple[Any, ...]] = set()

        def some(transaction: Transaction) -> int:
            keys = hand_over(transaction, token_id, successor_id, limit=_HANDED_OVER_AT_ONCE)
            # Also those of a try that is in force though the connection was lost before it said so.
            handed_over.update(keys)
            return len(keys)

        # A transaction for each few: between two of them, others get their turn.
        while await self._store.write(some):
            pass
        return len(handed_over)


def _insert_once(transaction: Transaction, record: TokenRecord) -> None:
    """Add a token, unless the try before was committed and the connection lost before it said so."""
    if transaction.token(record.token_id) != record:
        transaction.insert_token(record)


def _rotate(
    transaction: Transaction, token_id: str, token_hash: str, now: datetime, previous_until: datetime
) -> TokenRecord:
    record = _locked(transaction, token_id).rotated(token_hash, now, previous_until)
    _refuse_revoked(record)
    transaction.update_token(record)
    return record


def _revoke(transaction: Transaction, token_id: str, now: datetime) -> int:
    record = _locked(transaction, token_id)
    if record.revoked_at is None:
        transaction.update_token(replace(record, revoked_at=now))
    return transaction.alive_trials_of(token_id)


def _check_transfer(transaction: Transaction, token_id: str, successor_id: str) -> None:
    if token_id == successor_id:
        raise ValueError(f"token {token_id} has its own jobs and trials already: name another token")
    _locked(transaction, token_id)
    _refuse_revoked(_locked(transaction, successor_id))


def _locked(transaction: Transaction, token_id: str) -> TokenRecord:
    record = transaction.locked_token(token_id)
    if record is None:
        raise UnknownTokenError(token_id)
    return record


def _refuse_revoked(record: TokenRecord) -> None:
    if record.revoked_at is not None:
        raise RevokedTokenError(record.token_id)
