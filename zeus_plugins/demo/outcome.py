"""The findings of a demo, their file, and a plot of the cost of each run beside that of the default batch size."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from zeus_plugins.protocol import ArmView, JobView, TrialState, TrialView

_BLUE, _ORANGE, _GREY = "#1f6fb2", "#c8621b", "#777777"

_TRIAL_FIELDS = {
    "trial_number",
    "batch_size",
    "state",
    "time_s",
    "energy_j",
    "energy_source",
    "cost_j",
    "epochs",
    "metric",
}


@dataclass(frozen=True)
class Outcome:
    """The findings of a demo, for its directory: the job with all its trials, as the server tells it.

    The seconds include the starts of the server and of the processes. `bso-server` can show the database again.
    """

    job: JobView
    recurrences: int
    wall_s: float
    database_url: str
    directory: Path

    @property
    def best(self) -> ArmView | None:
        """The batch size that is expected to cost least, or None."""
        return self.job.arm_of(self.job.best_batch_size)

    @property
    def default(self) -> ArmView:
        """The default batch size."""
        (arm,) = (arm for arm in self.job.arms if arm.batch_size == self.job.job.default_batch_size)
        return arm

    @property
    def cost_ratio(self) -> float | None:
        """Mean cost at the best batch size over that at the default one; None where one of them is not known."""
        default_j, best_j = self.default.mean_cost_j, None if self.best is None else self.best.mean_cost_j
        return None if default_j is None or best_j is None else best_j / default_j

    def write_summary(self) -> None:
        """Write `summary.json`."""
        summary = {
            "policy": self.job.job.policy,
            "recurrences": self.recurrences,
            "trials": [trial.model_dump(mode="json", include=_TRIAL_FIELDS) for trial in self.job.trials],
            "best_batch_size": self.job.best_batch_size,
            "default_batch_size": self.job.job.default_batch_size,
            "cost_ratio_best_to_default": self.cost_ratio,
            "database": self.database_url,
            "wall_s": round(self.wall_s, 1),
        }
        (self.directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


def plot_costs(outcome: Outcome, path: Path) -> None:
    """Draw as a PNG the cost of every trial with its batch size, and as a line the mean cost at the default size."""
    job = outcome.job
    default, default_j = outcome.default.batch_size, outcome.default.mean_cost_j
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
    if default_j is not None:
        axes.axhline(default_j, color=_GREY, linestyle="--", label=f"mean of {default}, the default: {default_j:.0f} J")
    axes.set_xlabel("run (the number above each point is its batch size)")
    axes.set_ylabel("cost of the run (J)")
    axes.set_ylim(0, 1.15 * max([_cost_j(trial) for trial in measured], default=1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    title, best, ratio = "Cost of each run", job.best_batch_size, outcome.cost_ratio
    if best is not None and ratio is not None:
        title = f"Runs at batch size {best} have cost {1 - ratio:.0%} less than those at the default, {default}"
    axes.set_title(title, loc="left", fontsize=11)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def _cost_j(trial: TrialView) -> float:
    return trial.cost_j or 0.0
