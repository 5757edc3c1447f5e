"""Listeners of a master, which show its runs on the terminal as a live table or as lines."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from zeus_plugins.master.history import MasterState, PlannedRun, Run, mean_costs
from zeus_plugins.protocol import SavingsView, printable

_COLUMNS = ("run", "batch size", "learning rate", "epochs", "seconds", "energy J", "cost J", "outcome")


class Listener:
    """Hears of a master's events, and ignores them unless a subclass overrides the method."""

    def began(self, state: MasterState) -> None:
        """Hear that the master begins or resumes."""

    def launched(self, run: PlannedRun) -> None:
        """Hear that a run begins."""

    def printed(self, text: str) -> None:
        """Hear whole lines of the script's output; called from another thread."""

    def ended(self, run: Run) -> None:
        """Hear that the run has ended."""


class PlainListener(Listener):
    """A `Listener` that prints the scripts' output, and a line for each run without a result."""

    def printed(self, text: str) -> None:
        """Print the output."""
        print(text, end="", flush=True)

    def ended(self, run: Run) -> None:
        """Print why the run failed, if it did."""
        if not run.was_measured:
            print(f"{run.job_id}: {_outcome(run)}", file=sys.stderr, flush=True)


class Lines(PlainListener):
    """A `Listener` that prints the scripts' output, and two lines for each run."""

    def began(self, state: MasterState) -> None:
        """Print the number of earlier runs, if any."""
        if state.history:
            print(f"resumed after {len(state.history)} runs", flush=True)

    def launched(self, run: PlannedRun) -> None:
        """Print the run's settings."""
        bound = "" if math.isinf(run.cost_ub) else f", at most {run.cost_ub:.4g} J"
        print(f"{run.job_id}: batch size {run.bs}, learning rate {run.learning_rate:.4g}{bound}", flush=True)

    def ended(self, run: Run) -> None:
        """Print outcome and costs."""
        print(f"{run.job_id}: {_outcome(run)}; {run.time:.1f} s, {run.energy:.4g} J, cost {run.cost:.4g} J", flush=True)


class LiveTable(Listener):
    """A `Listener` that shows a table of all runs below the scripts' output; needs rich."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._history: list[Run] = []
        self.live = Live(console=self._console, auto_refresh=False, vertical_overflow="visible")

    def began(self, state: MasterState) -> None:
        """Show the earlier runs."""
        self._history = list(state.history)
        self._show()

    def launched(self, run: PlannedRun) -> None:
        """Add a row."""
        self._show(run)

    def printed(self, text: str) -> None:
        """Print the output above the table."""
        self._console.out(text.removesuffix("\n"), highlight=False)

    def ended(self, run: Run) -> None:
        """Complete the row."""
        self._history.append(run)
        self._show()

    def _show(self, running: PlannedRun | None = None) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table()
        for name in _COLUMNS:
            table.add_column(name, justify="left" if name == "outcome" else "right")
        for run in self._history:
            measured = (str(run.end_epoch or ""), f"{run.time:.1f}", f"{run.energy:.4g}", f"{run.cost:.4g}")
            # Text(), because rich must not parse a script's output as markup.
            outcome = Text(_outcome(run), style="green" if run.reached else "yellow")
            table.add_row(run.job_id, str(run.bs), f"{run.learning_rate:.4g}", *measured, outcome)
        if running is not None:
            rate = f"{running.learning_rate:.4g}"
            table.add_row(running.job_id, str(running.bs), rate, "", "", "", "", "training …")
        self.live.update(table, refresh=True)


@contextmanager
def display() -> Iterator[Listener]:
    """Provide a `Listener` for this terminal: a live table, or lines without a terminal or without rich."""
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        yield Lines()
        return
    table = LiveTable()
    with table.live:
        yield table


def conclusion(history: Sequence[Run], default_bs: int, savings: SavingsView | None) -> str:
    """Say what is claimed of the job's saving, if it is known; list the mean costs; sum up time and energy."""
    means = mean_costs(history)
    told = [] if savings is None else [savings.in_words]
    if means:
        costs = [
            f"{bs}{', your default' if bs == default_bs else ''}: {mean_j:.4g} J "
            f"({'1 run' if runs == 1 else f'{runs} runs'})"
            for bs, mean_j in means.items()
            for runs in [sum(run.reached and run.bs == bs for run in history)]
        ]
        told.append(f"Mean cost of the runs that reached the target: {'; '.join(costs)}.")
    elif savings is None:
        told.append("No run has reached the target yet.")
    reached = [run for run in history if run.reached]
    lines = [
        *told,
        f"{len(reached)} of {len(history)} runs reached the target, in {sum(run.time for run in reached):.1f} s and "
        f"{sum(run.energy for run in reached):.4g} J; all runs took {sum(run.time for run in history):.1f} s and "
        f"{sum(run.energy for run in history):.4g} J.",
        f"Energy: {', '.join(sorted({run.energy_source or 'as the script says' for run in history})) or 'none'}.",
    ]
    return "\n".join(lines)


def _outcome(run: Run) -> str:
    return printable(run.reason if run.was_measured else f"{run.outcome}: {run.reason}")
