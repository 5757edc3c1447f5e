"""The tokens in the database: making, listing, revoking and finding them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import datetime

from bso_server.core.access import Scope, TokenRecord
from bso_server.errors import UnknownTokenError
from bso_server.service.commands import utc_now
from bso_server.service.security import new_token
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction

_MAX_NAME_LENGTH = 255


class Tokens:
    """The use cases of tokens; the `security.TokenSource` of a server. The clock gives the present instant, aware."""

    def __init__(self, store: Store, *, clock: Callable[[], datetime] = utc_now) -> None:
        self._store = store
        self._clock = clock

    async def create(self, name: str, scopes: Collection[Scope]) -> tuple[str, TokenRecord]:
        """Make a token: that, which is kept nowhere, and its record. Several tokens may have the same name.

        Raises:
            ValueError: The name is empty, too long, or cannot be printed.
        """
        if not name.strip() or len(name) > _MAX_NAME_LENGTH or not name.isprintable():
            raise ValueError(f"a token's name has 1 to {_MAX_NAME_LENGTH} printable characters, unlike {name!r}")
        token, record = new_token(name, scopes, self._clock())
        await self._store.write(_insert_once, record)
        return token, record

    async def all(self) -> list[TokenRecord]:
        """Every token, oldest first."""
        return await self._store.read(Transaction.all_tokens)

    async def revoke(self, token_id: str) -> None:
        """Make a token worthless for good. Running servers notice within `security.CACHE_S` seconds.

        Raises:
            UnknownTokenError: No such token.
        """
        if await self.find(token_id) is None:
            raise UnknownTokenError(token_id)
        await self._store.write(Transaction.revoke_token, token_id, self._clock())

    async def find(self, token_id: str) -> TokenRecord | None:
        """The token, even if it was revoked, or None."""
        return await self._store.read(Transaction.token, token_id)

    async def any(self) -> bool:
        """Whether there is a token, be it revoked."""
        return await self._store.read(Transaction.any_token)

    async def any_valid(self) -> bool:
        """Whether there is a token that was not revoked."""
        return await self._store.read(Transaction.any_token, valid=True)


def _insert_once(transaction: Transaction, record: TokenRecord) -> None:
    """Add a token, unless the try before was committed and the connection lost before it said so."""
    if transaction.token(record.token_id) != record:
        transaction.insert_token(record)
