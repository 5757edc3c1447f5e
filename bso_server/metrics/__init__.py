"""Watching a server: metrics for Prometheus, ids of requests, logs and traces.

`create_app` imports what needs ``prometheus_client``, and not before it is needed: a server in a training's process
never does, and whether several processes add up is read from the environment at that import.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""The environment variable by which ``prometheus_client`` finds it; it is read when that is imported."""


@contextmanager
def counted_together(processes: int) -> Iterator[None]:
    """Have the processes that are started meanwhile add up what they count, from nothing on.

    A directory of an earlier start would bring along its counts, so that an inherited one is not used.

    Raises:
        OSError: There is no place for temporary files.
    """
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
