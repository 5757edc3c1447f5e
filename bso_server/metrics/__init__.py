"""Observation of a server: metrics for Prometheus, ids of requests, logs and traces.

`prometheus` is imported only with metrics enabled: ``prometheus_client`` reads `DIRECTORY_VARIABLE` at its import, and
a server in a training's process does not need it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable with the directory in which processes share their counts."""


@contextmanager
def counted_together(processes: int) -> Iterator[None]:
    """Make the processes that the block starts share their counts; raise `OSError` without room for temporary files."""
    # An inherited directory would contain the counts of an earlier start.
    os.environ.pop(DIRECTORY_VARIABLE, None)
    if processes == 1:
        yield
        return
    directory = tempfile.mkdtemp(prefix=f"zeus-bso-metrics-{os.getpid()}-")
    os.environ[DIRECTORY_VARIABLE] = directory
    try:
        yield
    finally:
        shutil.rmtree(directory, ignore_errors=True)
