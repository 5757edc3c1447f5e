"""Turns of the requests of this process on each job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from bso_server.errors import DatabaseUnavailableError
from bso_server.storage.deadlines import waiting


class Turns:
    """One request at a time on each job; the others wait, up to `patience_s` seconds in all."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def of(self, job_id: str) -> AsyncIterator[None]:
        """Wait for the job's turn, and keep later requests waiting.

        Raises:
            DatabaseUnavailableError: Earlier requests took too long.
        """
        lock = self._locks.setdefault(job_id, asyncio.Lock())
        with waiting(self._patience_s) as deadline:
            try:
                async with asyncio.timeout(deadline.left_s):
                    await lock.acquire()
            except TimeoutError:
                raise DatabaseUnavailableError(f"earlier requests on job {job_id} have not been answered") from None
        try:
            yield
        finally:
            lock.release()
