"""The demo on the terminal: a table that grows with every trial, and what it comes to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from zeus_plugins.protocol import JobSpec, PolicyName, TrialState, TrialView

if TYPE_CHECKING:
    from zeus_plugins.demo.runner import Outcome

_OUTCOMES = {
    TrialState.RUNNING: "training …",
    TrialState.COMPLETED: "[green]reached the target[/]",
    TrialState.EARLY_STOPPED: "[yellow]stopped: too costly[/]",
    TrialState.EXHAUSTED: "[yellow]stopped: out of epochs[/]",
}

_HOW_SIZES_ARE_CHOSEN = {
    PolicyName.GP_VOI: (
        "A size is tried when what it may teach the later runs is worth more than the try, and the cheapest size known "
        "is played when none is."
    ),
    PolicyName.ZEUS: "First the server explores the sizes. Then it plays the cheap ones more and more.",
}


class Display:
    """Shows trials as they come in; in a terminal as one live table, elsewhere as a line each.

    Args:
        job: The recurring job.
        recurrences: How many are to come.
        verbose: Show the numbers behind each decision, too.
        console: Where to write.
    """

    def __init__(
        self, job: JobSpec, recurrences: int, *, verbose: bool = False, console: Console | None = None
    ) -> None:
        self._job = job
        self._recurrences = recurrences
        self._verbose = verbose
        self._console = console or Console()
        self._settled: list[tuple[int, TrialView]] = []
        self._live: Live | None = None

    @property
    def shown_trials(self) -> int:
        """How many trials have ended."""
        return len(self._settled)

    @contextmanager
    def live(self) -> Iterator[None]:
        """Introduce the job and keep the table on the screen."""
        self._introduce()
        if not self._console.is_terminal:
            yield
            return
        with Live(self._table(), console=self._console, auto_refresh=False, vertical_overflow="visible") as self._live:
            yield

    def show(self, recurrence: int, trial: TrialView | None) -> None:
        """Show a trial that is under way; None before it has a batch size."""
        if self._live is not None:
            self._live.update(self._table((recurrence, trial)), refresh=True)

    def settle(self, recurrence: int, trial: TrialView | None) -> None:
        """Show a trial that has ended."""
        if trial is None:
            return
        self._settled.append((recurrence, trial))
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        else:
            cells = [name + " " + cell for name, cell in zip(_COLUMNS, self._cells(recurrence, trial), strict=True)]
            self._console.print(" | ".join(cells), soft_wrap=True)

    def conclude(self, outcome: Outcome) -> None:
        """Say what was found, what it saves, and where the time went."""
        job, trials = outcome.job, outcome.job.trials
        mean_cost_j = {arm.batch_size: arm.mean_cost_j for arm in job.arms}
        say = self._console.print
        say()
        if outcome.best_batch_size is None or outcome.cost_ratio is None:
            say("No batch size can be compared with the default yet: let the job recur more often.")
        else:
            default = job.job.default_batch_size
            say(
                f"[bold]Best batch size: {outcome.best_batch_size}[/], {mean_cost_j[outcome.best_batch_size]:.0f} J a "
                f"run on average. The default, {default}, costs {mean_cost_j[default]:.0f} J: "
                f"[bold]{1 - outcome.cost_ratio:.0%} saved[/] with every run from now on."
            )
        reached_s = sum(trial.time_s or 0 for trial in trials if trial.state is TrialState.COMPLETED)
        stopped_s = sum(trial.time_s or 0 for trial in trials if trial.state is not TrialState.COMPLETED)
        say(
            f"Where the {outcome.wall_s:.0f} s went: {reached_s:.0f} s in trainings that reached the target, "
            f"{stopped_s:.0f} s in trainings that were stopped, {outcome.wall_s - reached_s - stopped_s:.0f} s in "
            "starting processes."
        )
        say(f"Energy: {', '.join(sorted({trial.energy_source or 'not measured' for trial in trials}))}.")
        say(f"Written: {outcome.directory / 'summary.json'}, {outcome.directory / 'costs.png'}", soft_wrap=True)
        say(f"Look again: bso-server jobs show {job.job.job_id} --database-url {outcome.database_url}", soft_wrap=True)

    def _introduce(self) -> None:
        job = self._job
        for paragraph in (
            f"A network learns handwritten digits until {job.target_metric:.0%} of the validation images are right. "
            f"This training recurs {self._recurrences} times, each time in a new process.",
            f"Each run asks a server for its batch size, one of {', '.join(map(str, job.batch_sizes))}. (Its owner "
            f"would use {job.default_batch_size}.) At the end it reports what it cost: half the energy plus half of "
            "maximum power × time, in joules.",
            _HOW_SIZES_ARE_CHOSEN[job.policy],
        ):
            self._console.print(paragraph, end="\n\n")

    def _table(self, under_way: tuple[int, TrialView | None] | None = None) -> Table:
        sources = sorted({trial.energy_source for _, trial in self._settled if trial.energy_source})
        table = Table(caption=f"energy: {', '.join(sources)}" if sources else None)
        for name in _COLUMNS:
            table.add_column(name, justify="left" if name in {"why this size", "outcome"} else "right")
        for recurrence, trial in self._settled:
            table.add_row(*self._cells(recurrence, trial))
        if under_way is not None:
            recurrence, present = under_way
            waiting = [str(recurrence), *[""] * (len(_COLUMNS) - 2), "starting …"]
            table.add_row(*(waiting if present is None else self._cells(recurrence, present)))
        return table

    def _cells(self, recurrence: int, trial: TrialView) -> list[str]:
        return [
            str(recurrence),
            str(trial.batch_size),
            escape(trial.reason if self._verbose else trial.reason_in_words),
            _number(trial.epochs, 0),
            _number(trial.time_s, 1),
            _number(trial.energy_j, 0),
            _number(trial.cost_j, 0),
            _OUTCOMES.get(trial.state, trial.state),
        ]


_COLUMNS = ("run", "batch size", "why this size", "epochs", "seconds", "energy J", "cost J", "outcome")


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
