"""Everything that watches one server, put together as its settings ask for it."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from bso_server.core.watch import Listener, Occurrence
from bso_server.metrics.requests import Application, RequestWatch
from bso_server.service.totals import JobTotals

if TYPE_CHECKING:
    from bso_server.metrics.database import DatabaseMetrics
    from bso_server.metrics.instruments import Instruments
    from bso_server.metrics.tracing import Tracing


class Watch:
    """The watch over one server. Its libraries are imported here, and only those that are needed.

    Args:
        counts: True if there are metrics.
        traces: True if requests are traced.

    Raises:
        ValueError: What is needed for traces is not installed.
    """

    def __init__(self, *, counts: bool, traces: bool) -> None:
        self._instruments: Instruments | None = None
        self._tracing: Tracing | None = None
        self._database: DatabaseMetrics | None = None
        self._listeners: list[Listener] = []
        if counts:
            from bso_server.metrics.instruments import Instruments

            self._instruments = Instruments()
            self._listeners.append(self._instruments.hear)
        if traces:
            from bso_server.metrics.tracing import Tracing

            self.trace_by(Tracing())

    def trace_by(self, tracing: Tracing) -> None:
        """Trace requests and transactions so."""
        self._tracing = tracing
        self._listeners.append(tracing.hear)

    def hear(self, occurrence: Occurrence) -> None:
        """Take notice of an occurrence: a `core.watch.Listener`."""
        for listener in self._listeners:
            listener(occurrence)

    def exposition(
        self, read_totals: Callable[[], Awaitable[Mapping[str, JobTotals]]], named: str | None
    ) -> Callable[[], Awaitable[bytes]] | None:
        """The text of all metrics, as `metrics.exposition.Exposition` gives it; None where there are none.

        Args:
            read_totals: Reads the totals of all jobs by their ids.
            named: Pattern of the ids of jobs that are told of by name, or None.
        """
        if self._instruments is None:
            return None
        from bso_server.metrics.database import DatabaseMetrics
        from bso_server.metrics.exposition import Exposition

        instruments = self._instruments
        self._database = DatabaseMetrics(
            read_totals, instruments.totals_errors, named=named, directory=instruments.directory
        )
        return Exposition(instruments, self._database)

    def around(self, app: Application) -> Application:
        """The application with its requests watched."""
        watched = RequestWatch(app)
        if self._instruments is not None:
            watched.request_done = self._instruments.request_done
        if self._tracing is not None:
            watched.span_of = self._tracing.span_of
        return watched

    async def close(self) -> None:
        """End what goes on by itself, and hand over the traces that are left."""
        if self._database is not None:
            await self._database.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)


def require_tracing() -> None:
    """Raise `ValueError` unless what is needed for traces is installed."""
    importlib.import_module("bso_server.metrics.tracing")
