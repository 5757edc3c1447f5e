"""Listeners of a master, and its lines on the terminal: a table that grows with every run, or a line for each."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from zeus_plugins.master.history import MasterState, PlannedRun, Run, cheapest_size, mean_costs

_COLUMNS = ("run", "batch size", "learning rate", "epochs", "seconds", "energy J", "cost J", "outcome")


class Listener:
    """Hears what a master does; what it does not define says nothing."""

    def began(self, state: MasterState) -> None:
        """The master begins, or goes on after a resume."""

    def launched(self, run: PlannedRun) -> None:
        """A run begins."""

    def printed(self, text: str) -> None:
        """The run's script has printed whole lines; called from another thread."""

    def ended(self, run: Run) -> None:
        """The run has ended."""


class PlainListener(Listener):
    """A `Listener` that passes on what the scripts print, and says a line about each run that left no result."""

    def printed(self, text: str) -> None:
        """Passes it on."""
        print(text, end="", flush=True)

    def ended(self, run: Run) -> None:
        """Says why a run failed."""
        if not run.was_measured:
            print(f"{run.job_id}: {run.outcome}: {run.reason}", file=sys.stderr, flush=True)


class Lines(PlainListener):
    """A `Listener` that passes on what scripts print, and adds a line for each run."""

    def began(self, state: MasterState) -> None:
        """Says what there is already."""
        if state.history:
            print(f"resumed after {len(state.history)} runs", flush=True)

    def launched(self, run: PlannedRun) -> None:
        """Says what begins."""
        bound = "" if math.isinf(run.cost_ub) else f", at most {run.cost_ub:.4g} J"
        print(f"{run.job_id}: batch size {run.bs}, learning rate {run.learning_rate:.4g}{bound}", flush=True)

    def ended(self, run: Run) -> None:
        """Says what it came to."""
        print(f"{run.job_id}: {_outcome(run)}; {run.time:.1f} s, {run.energy:.4g} J, cost {run.cost:.4g} J", flush=True)


class LiveTable(Listener):
    """A `Listener` that keeps a table of all runs below what the scripts print; needs rich."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._history: list[Run] = []
        self._under_way: PlannedRun | None = None
        self.live = Live(console=self._console, auto_refresh=False, vertical_overflow="visible")

    def began(self, state: MasterState) -> None:
        """Shows what there is already."""
        self._history = list(state.history)
        self._show()

    def launched(self, run: PlannedRun) -> None:
        """Adds a row."""
        self._under_way = run
        self._show()

    def printed(self, text: str) -> None:
        """Shows it above the table."""
        self._console.out(text.removesuffix("\n"), highlight=False)

    def ended(self, run: Run) -> None:
        """Fills the row."""
        self._history.append(run)
        self._under_way = None
        self._show()

    def _show(self) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table()
        for name in _COLUMNS:
            table.add_column(name, justify="left" if name == "outcome" else "right")
        for run in self._history:
            measured = [str(run.end_epoch or ""), f"{run.time:.1f}", f"{run.energy:.4g}", f"{run.cost:.4g}"]
            # What a script has said last is no markup.
            table.add_row(
                *_planned_cells(run), *measured, Text(_outcome(run), style="green" if run.reached else "yellow")
            )
        if self._under_way is not None:
            table.add_row(*_planned_cells(self._under_way), "", "", "", "", "training …")
        self.live.update(table, refresh=True)


@contextmanager
def display() -> Iterator[Listener]:
    """A `Listener` for this terminal: a live table, or lines where there is no terminal or rich is not installed."""
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        yield Lines()
        return
    table = LiveTable()
    with table.live:
        yield table


def conclusion(history: list[Run] | tuple[Run, ...], default_bs: int) -> str:
    """The conclusion of the runs: the cheapest size beside the default, and where time and energy went."""
    means = mean_costs(history)
    cheapest = cheapest_size(history)
    if cheapest is None:
        compared = "No run has reached the target yet."
    else:
        name = f"the default, {cheapest}" if cheapest == default_bs else cheapest
        runs = sum(run.reached and run.bs == cheapest for run in history)
        compared = f"Cheapest batch size: {name}, {means[cheapest]:.4g} J a run, the mean of {runs}."
        if default_bs not in means:
            compared += f" The default, {default_bs}, has not reached the target."
        elif cheapest != default_bs:
            saved = 1 - means[cheapest] / means[default_bs]
            compared += (
                f" The default, {default_bs}, costs {means[default_bs]:.4g} J: {saved:.0%} saved with every run from "
                "now on."
            )
    reached = [run for run in history if run.reached]
    lines = [
        compared,
        f"{len(reached)} of {len(history)} runs reached the target, in {sum(run.time for run in reached):.1f} s and "
        f"{sum(run.energy for run in reached):.4g} J; all runs took {sum(run.time for run in history):.1f} s and "
        f"{sum(run.energy for run in history):.4g} J.",
        f"Energy: {', '.join(sorted({run.energy_source or 'as the script says' for run in history})) or 'none'}.",
    ]
    return "\n".join(lines)


def _planned_cells(run: PlannedRun) -> list[str]:
    return [run.job_id, str(run.bs), f"{run.learning_rate:.4g}"]


def _outcome(run: Run) -> str:
    return run.reason if run.was_measured else f"{run.outcome}: {run.reason}"
