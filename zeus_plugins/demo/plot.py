"""The cost of each run, beside that of the default batch size."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from zeus_plugins.demo.outcome import Outcome
from zeus_plugins.protocol import TrialState, TrialView

_BLUE, _ORANGE, _GREY = "#1f6fb2", "#c8621b", "#777777"


def plot_costs(outcome: Outcome, path: Path) -> None:
    """Draw the cost of every trial with its batch size as a PNG, and the mean cost at the default size as a line."""
    job = outcome.job
    default = job.job.default_batch_size
    measured = [trial for trial in job.trials if trial.cost_j is not None]
    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for reached, marker, colour, label in (
        (True, "o", _BLUE, "reached the target"),
        (False, "X", _ORANGE, "stopped before the target"),
    ):
        trials = [trial for trial in measured if (trial.state is TrialState.COMPLETED) == reached]
        if trials:
            numbers, costs = [trial.trial_number for trial in trials], [_cost_j(trial) for trial in trials]
            axes.scatter(numbers, costs, color=colour, marker=marker, s=45, label=label, zorder=3)
    for trial in measured:
        place = (trial.trial_number, _cost_j(trial))
        axes.annotate(str(trial.batch_size), place, (0, 7), textcoords="offset points", ha="center", fontsize=9)
    default_j = outcome.mean_cost_j[default]
    if default_j is not None:
        axes.axhline(default_j, color=_GREY, linestyle="--", label=f"default batch size, {default}: {default_j:.0f} J")
    axes.set_xlabel("run (the number above each point is its batch size)")
    axes.set_ylabel("cost of the run (J)")
    axes.set_ylim(0, 1.15 * max([_cost_j(trial) for trial in measured], default=1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(_title(outcome), loc="left", fontsize=11)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def _cost_j(trial: TrialView) -> float:
    return trial.cost_j or 0.0


def _title(outcome: Outcome) -> str:
    best, ratio = outcome.job.best_batch_size, outcome.cost_ratio
    if best is None or ratio is None:
        return "Cost of each run"
    return f"Batch size {best} costs {1 - ratio:.0%} less than the default, {outcome.job.job.default_batch_size}"
