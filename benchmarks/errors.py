"""The error of a benchmark that could not be run."""

from __future__ import annotations


class BenchmarkError(Exception):
    """The run is of no use: a server did not start, did not answer, or answered something else than planned."""
