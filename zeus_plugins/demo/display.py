"""The demo on the terminal: a table that grows with every trial, and what it comes to."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from zeus_plugins.demo.outcome import Outcome
from zeus_plugins.protocol import GP_VOI, ZEUS, JobSpec, TrialState, TrialView

_OUTCOMES = {
    TrialState.RUNNING: "training …",
    TrialState.COMPLETED: "[green]target reached[/]",
    TrialState.EARLY_STOPPED: "[yellow]too costly[/]",
    TrialState.EXHAUSTED: "[yellow]out of epochs[/]",
}

_HOW_SIZES_ARE_CHOSEN = {
    GP_VOI: (
        "The server tries a size when that is expected to save later runs more than the try costs. Otherwise it takes "
        "the best size so far."
    ),
    ZEUS: "First the server explores the sizes. Then it plays the cheap ones more and more.",
}

# Where the output is no terminal: a trial a line.
_WIDTH = 140


class Display:
    """Shows trials as they come in, a row of a table each; in a terminal also the one under way."""

    def __init__(self, job: JobSpec, recurrences: int, *, console: Console | None = None) -> None:
        self._job = job
        self._recurrences = recurrences
        self._console = console or Console(width=None if sys.stdout.isatty() else _WIDTH)
        self._live: Live | None = None
        self.shown_trials = 0

    @contextmanager
    def live(self, dashboard_url: str) -> Iterator[None]:
        """Introduce the job, say where the server shows it, and show the table."""
        self._introduce()
        self._console.print(f"Watch it meanwhile: {dashboard_url}", end="\n\n", soft_wrap=True)
        self._console.print(_row(_COLUMNS, style="bold"))
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as self._live:
            yield

    def show(self, recurrence: int, trial: TrialView | None) -> None:
        """Show a trial that is under way; None before it has a batch size."""
        if self._live is None:
            return
        waiting = [str(recurrence), "", "", "", "", "starting …", ""]
        self._live.update(_row(waiting if trial is None else self._cells(recurrence, trial)), refresh=True)

    def settle(self, recurrence: int, trial: TrialView | None) -> None:
        """Show a trial that has ended."""
        if trial is None:
            return
        self.shown_trials += 1
        self._console.print(_row(self._cells(recurrence, trial)))

    def conclude(self, outcome: Outcome) -> None:
        """Print the best size, its saving, and the use of the time."""
        job, trials = outcome.job, outcome.job.trials
        best, default = outcome.best, outcome.default
        say = self._console.print
        say()
        if best is None or outcome.cost_ratio is None:
            say("No batch size can be compared with the default yet: let the job recur more often.")
        elif best == default:
            say(f"[bold]Best batch size: {best.batch_size}[/], the default: none that was tried is cheaper.")
        else:
            say(
                f"[bold]Best batch size: {best.batch_size}[/], {best.expected_cost} J a run expected. Its runs cost "
                f"{best.mean_cost_j:.0f} J on average, those at the default, {default.batch_size}, "
                f"{default.mean_cost_j:.0f} J: [bold]{1 - outcome.cost_ratio:.0%} less[/]."
            )
            if job.savings is not None:
                say(f"Until now: cost {job.savings.cost_j.in_words} against always {default.batch_size}, tries paid.")
        reached_s = sum(trial.time_s or 0 for trial in trials if trial.state is TrialState.COMPLETED)
        stopped_s = sum(trial.time_s or 0 for trial in trials if trial.state is not TrialState.COMPLETED)
        say(
            f"Where the {outcome.wall_s:.0f} s went: {reached_s:.0f} s in trainings that reached the target, "
            f"{stopped_s:.0f} s in trainings that were stopped, {outcome.wall_s - reached_s - stopped_s:.0f} s in "
            "starting the server and the processes."
        )
        sources = sorted({trial.energy_source or "not measured" for trial in trials})
        estimated = all(source.startswith("estimate") for source in sources)
        meaning = ". No energy counter was found here: the costs only say what takes less time" if estimated else ""
        say(f"Energy: {', '.join(sources)}{meaning}.")
        say(f"Written: {outcome.directory / 'summary.json'}, {outcome.directory / 'costs.png'}", soft_wrap=True)
        show = f"jobs show {job.job.job_id} --database-url {outcome.database_url}"
        say(f"Look again: {_command('bso-server')} {show}", soft_wrap=True)
        serve = f"{_command('bso-server')} serve --database-url {outcome.database_url}"
        say(f"Look at it: {serve}, then open http://127.0.0.1:8000/ui/jobs/{job.job.job_id}", soft_wrap=True)

    def _introduce(self) -> None:
        job = self._job
        for paragraph in (
            f"A network learns handwritten digits until {job.target_metric:.0%} of the validation images are right. "
            f"This training recurs {self._recurrences} times, each time in a new process.",
            f"Each run asks a server for its batch size, one of {', '.join(map(str, job.batch_sizes))}. The default, "
            f"which it would have without the server, is {job.default_batch_size}. At the end it reports its cost in "
            "joules: half the energy plus half of maximum power × time.",
            _HOW_SIZES_ARE_CHOSEN[job.policy],
        ):
            self._console.print(paragraph, end="\n\n")

    def _cells(self, recurrence: int, trial: TrialView) -> list[str]:
        return [
            str(recurrence),
            str(trial.batch_size),
            _number(trial.epochs, 0),
            _number(trial.time_s, 1),
            _number(trial.cost_j, 0),
            _OUTCOMES.get(trial.state, trial.state),
            escape(trial.reason),
        ]


_COLUMNS = ("run", "batch size", "epochs", "seconds", "cost J", "outcome", "why this size")
_WIDTHS = (3, 10, 6, 7, 6, 14)


def _row(cells: Sequence[str], style: str = "") -> Table:
    """A row of the table, by itself: one table that grows past the screen cannot be drawn anew."""
    table = Table(box=None, show_header=False, expand=True, padding=(0, 2, 0, 0), style=style)
    for width in _WIDTHS:
        table.add_column(width=width, justify="left" if width == _WIDTHS[-1] else "right")
    table.add_column(ratio=1)
    table.add_row(*cells)
    return table


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _command(name: str) -> str:
    """The command as it can be called here: by its path where it is not on the PATH."""
    beside = Path(sys.executable).with_name(name)
    return name if shutil.which(name) or not beside.exists() else os.path.relpath(beside)
