"""The tokens in the database: making, listing, rotating, revoking and finding them; what belongs to them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from bso_server.core.access import Scope, TokenRecord
from bso_server.errors import RevokedTokenError, UnknownTokenError
from bso_server.service.commands import utc_now
from bso_server.service.page_views import TokenLine, TokensPage
from bso_server.service.security import new_secret, new_token
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction

DEFAULT_GRACE = timedelta(hours=24)
"""The time for which the secret before the latest rotation stays good: trainings that run have it."""

_MAX_NAME_LENGTH = 255

# Rows that one transaction hands over, so that reports on the same trials do not wait for long.
_HANDED_OVER_AT_ONCE = 1000


class Tokens:
    """The use cases of tokens; the `security.TokenSource` of a server. The clock gives the present instant, aware.

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
        return TokensPage(tokens=tuple(_line_of(record, jobs) for record in await self.all()), own=own)

    async def rotate(self, token_id: str, grace: timedelta = DEFAULT_GRACE) -> tuple[str, TokenRecord]:
        """Give a token another secret, and leave it all that belongs to it: the token anew, and its record.

        The secret that it had stays good for the time of `grace`; one that it had before that ends now. Running servers
        take the new one at once, and refuse the old one within `security.CACHE_S` seconds of its end.

        Raises:
            RevokedTokenError: It was revoked, which is for good.
        """
        token, token_hash = new_secret(token_id)
        now = self._clock()
        return token, await self._store.write(_rotate, token_id, token_hash, now, now + grace)

    async def revoke(self, token_id: str) -> int:
        """Make a token worthless for good. Running servers notice within `security.CACHE_S` seconds.

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
        """True if there is a token, be it revoked."""
        return await self._store.read(Transaction.any_token)

    async def any_valid(self) -> bool:
        """Whether there is a token that was not revoked."""
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


def _line_of(record: TokenRecord, jobs: Mapping[str, int]) -> TokenLine:
    names = (name for name in TokenLine.model_fields if name not in {"scopes", "jobs"})
    shown = {name: getattr(record, name) for name in names}
    return TokenLine(**shown, scopes=tuple(sorted(record.scopes)), jobs=jobs.get(record.token_id, 0))


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
