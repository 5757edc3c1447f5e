"""The listeners of a master, which hear what its runs do."""

from __future__ import annotations

import sys
from typing import Protocol

from zeus_plugins.master.history import MasterState, PlannedRun, Run

__all__ = ["Listener", "PlainListener"]


class Listener(Protocol):
    """Hears what a master does."""

    def began(self, state: MasterState) -> None:
        """The master begins, or goes on after a resume."""

    def launched(self, run: PlannedRun) -> None:
        """A run begins."""

    def printed(self, text: str) -> None:
        """The run's script has printed whole lines; called from another thread."""

    def ended(self, run: Run) -> None:
        """The run has ended."""


class PlainListener:
    """A `Listener` that passes on what the scripts print, and says a line about each run that left no result."""

    def began(self, state: MasterState) -> None:
        """Says nothing."""

    def launched(self, run: PlannedRun) -> None:
        """Says nothing."""

    def printed(self, text: str) -> None:
        """Passes it on."""
        print(text, end="", flush=True)

    def ended(self, run: Run) -> None:
        """Says why a run failed."""
        if not run.was_measured:
            print(f"{run.job_id}: {run.outcome}: {run.reason}", file=sys.stderr, flush=True)
