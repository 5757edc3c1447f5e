"""Watching: what ids, metrics and traces cost a request, without HTTP; also ``python -m benchmarks.watching WAY``."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.errors import BenchmarkError
from bso_server.core.watch import Outcome, ReportsCommitted, TransactionDone
from bso_server.metrics.processes import DIRECTORY_VARIABLE
from bso_server.metrics.watch import Watch

# The ways of a server: in one process, as one of several, with traces that nobody takes.
ALONE, SEVERAL, TRACED = "alone", "several", "traced"

_SCOPE = {
    "type": "http",
    "method": "POST",
    "path_template": "/report",
    "headers": [(b"host", b"bso.example:8000"), (b"content-type", b"application/json"), (b"content-length", b"150")],
}
_DONE = TransactionDone(writes=True, outcome=Outcome.COMMITTED, duration_s=0.001, repeats=0)
_COMMITTED = ReportsCommitted(1)


@dataclass(frozen=True, slots=True)
class WatchFigures:
    """Milliseconds of CPU time that watching adds to a report with a transaction of its own, in its least block.

    Attributes:
        blocks: Blocks of requests, each beside as many that nobody watches.
        alone_ms: Ids and metrics of a server in one process.
        several_ms: The same in one of several processes, which count together.
        traced_ms: Ids and traces without metrics; None where OpenTelemetry is not installed.
    """

    blocks: int
    alone_ms: float
    several_ms: float
    traced_ms: float | None


def run_watching(*, blocks: int) -> WatchFigures:
    """Measure each way in a process of its own.

    Raises:
        BenchmarkError: One did not end well.
    """
    with tempfile.TemporaryDirectory(prefix="bso-bench-") as directory:
        return WatchFigures(
            blocks=blocks,
            alone_ms=_measured(ALONE, blocks),
            several_ms=_measured(SEVERAL, blocks, {DIRECTORY_VARIABLE: directory}),
            traced_ms=_measured(TRACED, blocks) if _can_trace() else None,
        )


def _can_trace() -> bool:
    try:
        import bso_server.metrics.tracing  # noqa: F401 - to see whether it can be imported
    except ValueError:
        return False
    return True


def _measured(way: str, blocks: int, environment: dict[str, str] | None = None) -> float:
    kept = {name: value for name, value in os.environ.items() if name != DIRECTORY_VARIABLE}
    done = subprocess.run(  # noqa: S603 - this module
        [sys.executable, "-m", "benchmarks.watching", way, str(blocks)],
        env={**kept, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BenchmarkError(f"watching, {way}: {done.stderr.strip()}")
    return float(done.stdout)


async def _answered(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


async def _send(_message: Any) -> None:
    """Take an answer."""


def _watch(way: str) -> Watch:
    watch = Watch(counts=way != TRACED, traces=False)
    if way == TRACED:
        from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

        from bso_server.metrics.tracing import Tracing

        class _Nowhere(SpanExporter):
            def export(self, spans: Sequence[object]) -> SpanExportResult:  # noqa: ARG002 - the exporter's signature
                return SpanExportResult.SUCCESS

        watch.trace_by(Tracing(_Nowhere()))
    return watch


async def _least_ms(way: str, blocks: int, requests: int = 2000) -> float:
    watch = _watch(way)
    watched = watch.around(_answered)

    async def block(is_watched: bool) -> float:
        begun = time.process_time()
        for _ in range(requests):
            scope = dict(_SCOPE)
            if is_watched:
                watch.hear(_DONE)
                watch.hear(_COMMITTED)
                await watched(scope, None, _send)
            else:
                await _answered(scope, None, _send)
        return 1000 * (time.process_time() - begun) / requests

    await block(True)
    pairs = [(await block(True), await block(False)) for _ in range(blocks)]
    await watch.close()
    return min(with_it for with_it, _ in pairs) - min(without for _, without in pairs)


if __name__ == "__main__":
    print(asyncio.run(_least_ms(sys.argv[1], int(sys.argv[2]))))
