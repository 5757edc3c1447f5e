"""Turns: of one process, one command at a time for each job.

Commands on one job wait for one another in the database anyway, each with a connection. Where somebody else keeps the
job's row locked, they would soon have taken all of them, and other jobs would wait, too. So they queue here. A SQLite
file that is worked on in threads needs no turns: all of its writers queue, without a connection each.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from bso_server.errors import DatabaseUnavailableError
from bso_server.storage.deadlines import waiting


class Turns:
    """The queue of each job; a turn is waited for `patience_s` seconds at most."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def of(self, job_id: str) -> AsyncIterator[None]:
        """Have the job's turn.

        Raises:
            DatabaseUnavailableError: Those before took too long.
        """
        lock = self._locks.get(job_id)
        if lock is None:
            lock = self._locks[job_id] = asyncio.Lock()
        if lock.locked():
            with waiting(self._patience_s) as deadline:
                try:
                    async with asyncio.timeout(deadline.left_s):
                        await lock.acquire()
                except TimeoutError:
                    raise DatabaseUnavailableError(f"other requests on job {job_id} wait for the database") from None
        else:
            await lock.acquire()
        try:
            yield
        finally:
            lock.release()
