"""The state of this server, for people: its process, its database, and the schema of that."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import datetime

from bso_server.errors import BsoError, DatabaseNotReadyError
from bso_server.service.commands import utc_now
from bso_server.service.page_views import HealthPage
from bso_server.service.pages import Found, digest
from bso_server.service.queries import JobReader, version_view
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction


class Health:
    """Looks at the state of this process and its database.

    Args:
        store: The database.
        reader: Says whether it is ready.
        clock: The present instant, aware.
    """

    def __init__(self, store: Store, reader: JobReader, clock: Callable[[], datetime] = utc_now) -> None:
        self._store = store
        self._reader = reader
        self._started_at = clock()

    async def look(self, known: str | None = None) -> Found[HealthPage]:
        """The page, unless its reader knows this version, of which the time that the database took is no part."""
        trouble, answer_s, revision = None, None, None
        try:
            await self._reader.check_ready()
        except DatabaseNotReadyError as error:
            trouble = error.message
        try:
            revision = await self._store.current_revision()
            begin = time.perf_counter()
            await self._store.read(Transaction.any_token)
            answer_s = time.perf_counter() - begin
        except BsoError as error:
            trouble = trouble or error.message
        running = version_view()
        page = HealthPage(
            version=running.version,
            process=os.getpid(),
            started_at=self._started_at,
            database=self._store.kind,
            schema_needed=running.schema_revision,
            schema_found=revision,
            trouble=trouble,
            answer_s=answer_s,
        )
        version = digest([page.model_copy(update={"answer_s": None})])
        return version, None if version == known else page
