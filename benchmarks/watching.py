"""``python -m benchmarks.watching``: CPU time that ids and metrics add to a request, without HTTP.

An application that does nothing answers blocks of 2,000 requests. Blocks with and without monitoring alternate; each
monitored request also records one transaction and one group of reports. The metrics of a server with one process differ
from the shared metrics of several processes, and are chosen at import: each variant is measured in its own process.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from bso_server.core.occurrences import Outcome, ReportsCommitted, TransactionDone
from bso_server.metrics import DIRECTORY_VARIABLE
from bso_server.metrics.prometheus import Metrics
from bso_server.metrics.requests import RequestWatch
from bso_server.service.health import JobTotals

WAYS = {
    "alone": "ids and metrics of a server in one process",
    "several": "ids and metrics of one of several processes",
}
_BLOCKS = 10
_REQUESTS = 2000

_SCOPE = {
    "type": "http",
    "method": "POST",
    "path_template": "/report",
    "headers": [(b"host", b"bso.example:8000"), (b"content-type", b"application/json"), (b"content-length", b"150")],
}
_DONE = TransactionDone(writes=True, outcome=Outcome.COMMITTED, duration_s=0.001, repeats=0)
_COMMITTED = ReportsCommitted(1)


def main() -> int:
    """Print ms per request: of the way named by the argument, or of every way, each in a new process."""
    if sys.argv[1:]:
        print(f"{asyncio.run(_least_ms()):.4f} ms: {WAYS[sys.argv[1]]}")
        return 0
    with tempfile.TemporaryDirectory(prefix="bso-bench-") as directory:
        for way in WAYS:
            environ = {name: value for name, value in os.environ.items() if name != DIRECTORY_VARIABLE}
            environ |= {DIRECTORY_VARIABLE: directory} if way == "several" else {}
            command = [sys.executable, "-m", "benchmarks.watching", way]
            subprocess.run(command, env=environ, check=True)  # noqa: S603 - this module
    return 0


async def _answer(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


async def _send(_message: Any) -> None:
    """Discard an answer."""


async def _least_ms() -> float:
    """Return the ms that monitoring adds to a request: fastest block with it, less fastest block without."""

    async def no_jobs() -> dict[str, JobTotals]:
        return {}

    metrics = Metrics(no_jobs, None)
    watched = RequestWatch(_answer, request_done=metrics.request_done)

    async def block_ms(is_watched: bool) -> float:
        begun = time.process_time()
        for _ in range(_REQUESTS):
            scope = dict(_SCOPE)
            if is_watched:
                metrics.hear(_DONE)
                metrics.hear(_COMMITTED)
                await watched(scope, None, _send)
            else:
                await _answer(scope, None, _send)
        return 1000 * (time.process_time() - begun) / _REQUESTS

    await block_ms(True)
    pairs = [(await block_ms(True), await block_ms(False)) for _ in range(_BLOCKS)]
    return min(with_it for with_it, _ in pairs) - min(without for _, without in pairs)


if __name__ == "__main__":
    sys.exit(main())
