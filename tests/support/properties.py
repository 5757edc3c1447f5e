"""The number of examples of a property."""

from __future__ import annotations

from hypothesis import settings

THOROUGH = 100


def examples(number: int) -> int:
    """So many in a thorough run, and as much fewer in `make test` as its profile says; at least four."""
    return max(4, number * settings().max_examples // THOROUGH)
