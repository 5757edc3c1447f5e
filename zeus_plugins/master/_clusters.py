"""Shared by the executors of clusters: patience with a control plane, and a line in the log about a lost run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from zeus_plugins.errors import ZeusBSOConfigError

LOST = 1
"""The exit status of a run that left none: it was stopped, or its node is gone."""

POLL_S = 1.0

# Seconds without any answer after which a cluster counts as gone: more than an upgrade of its control plane takes.
_PATIENCE_S = 300.0

T = TypeVar("T")


def answered(question: Callable[[], T], cluster: str, failures: tuple[type[Exception], ...]) -> T:
    """The cluster's answer, which may take a while.

    Args:
        question: Asks it.
        cluster: The cluster, as an error names it.
        failures: Errors that `question` raises while there is no answer.

    Raises:
        ZeusBSOConfigError: There was none for five minutes.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return question()
        except failures as error:
            if time.monotonic() > deadline:
                raise ZeusBSOConfigError(f"{cluster} has not answered for {_PATIENCE_S:g} s: {error}") from None
            time.sleep(POLL_S)


def note_loss(log: Path, text: str) -> int:
    """Append a line to a run's log; `LOST`."""
    with log.open("a") as file:
        file.write(f"\n{text}\n")
    return LOST
