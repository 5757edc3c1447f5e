"""The answer to ``GET /metrics``: what the processes of this server have counted, and what the database has."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from bso_server.metrics.database import DatabaseMetrics
from bso_server.metrics.instruments import Instruments
from bso_server.service.queries import version_view


class Exposition:
    """The text of all metrics, in version 0.0.4 of Prometheus's format."""

    def __init__(self, instruments: Instruments, database: DatabaseMetrics) -> None:
        self._instruments = instruments
        self._database = database

    async def __call__(self) -> bytes:
        """The text as of now."""
        registry = CollectorRegistry()
        registry.register(_Build())
        registry.register(self._instruments.collector)
        registry.register(await self._database.collector())
        # A hundred files take some milliseconds, for which nobody is to wait.
        return await asyncio.to_thread(generate_latest, registry)


class _Build(Collector):
    def collect(self) -> Iterator[Metric]:
        view = version_view()
        values = {"version": view.version, "schema": view.schema_revision, "python": platform.python_version()}
        yield InfoMetricFamily("zeus_bso_build", "The running version.", value=values)
