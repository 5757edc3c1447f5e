"""Turns of the requests of this process on each job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from weakref import WeakValueDictionary

from bso_server.errors import DatabaseUnavailableError
from bso_server.storage.deadlines import waiting


@asynccontextmanager
async def turn(queue: asyncio.Lock | asyncio.Semaphore, patience_s: float, others: str) -> AsyncIterator[None]:
    """Wait up to `patience_s` seconds for a turn, and keep later requests waiting until the block ends.

    Raises:
        DatabaseUnavailableError: The `others`, which came earlier, took too long.
    """
    with waiting(patience_s) as deadline:
        try:
            async with asyncio.timeout(deadline.left_s):
                await queue.acquire()
        except TimeoutError:
            raise DatabaseUnavailableError(f"{others} have not been answered") from None
    try:
        yield
    finally:
        queue.release()


class Turns:
    """One request at a time on each job; the others wait, up to `patience_s` seconds each."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, job_id: str) -> AbstractAsyncContextManager[None]:
        """Wait for the job's turn; raise as `turn`."""
        lock = self._locks.setdefault(job_id, asyncio.Lock())
        return turn(lock, self._patience_s, f"earlier requests on job {job_id}")
