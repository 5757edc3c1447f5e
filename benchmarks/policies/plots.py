"""Pictures of studies: costs over recurrences, predictions beside the truth, and the trials of one job."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from benchmarks.policies.predictions import predicted_costs
from benchmarks.policies.study import Study
from bso_server.cli.common import CommandError
from bso_server.simulate.play import PlayedTrial
from zeus_plugins.protocol import GP_VOI, TrialState

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("png", "svg", "pdf")
"""Endings of a picture's name."""

# How trials look that ended so: in words, marker, colour.
_LOOKS = {
    TrialState.COMPLETED: ("reached the target", "o", "tab:green"),
    TrialState.EARLY_STOPPED: ("stopped", "x", "tab:red"),
    TrialState.EXHAUSTED: ("missed the target", "s", "tab:orange"),
}

_Draw: TypeAlias = "Callable[[Axes], None]"


def require_matplotlib(option: str) -> None:
    """Raise `CommandError` if matplotlib, which this option needs, is not installed: before anything is simulated."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise CommandError(f"{option} needs matplotlib ({error}): pip install 'zeus-plugins[plot]'") from error


def plot(studies: Sequence[Study], file: Path) -> None:
    """Draw the panels of each study, in a row for each if there are several.

    Args:
        studies: Studies of the same policies.
        file: The picture; its ending is one of `FORMATS`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # Not with the module: matplotlib takes a second to load and is an extra of its own.
    from matplotlib.figure import Figure

    draws = [draw for each in studies for draw in _panels(each)]
    columns = len(draws) // len(studies) if len(studies) > 1 else math.ceil(len(draws) / 2)
    rows = math.ceil(len(draws) / columns)
    figure = Figure(figsize=(5.0 * columns, 3.6 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel, draw in zip(panels, draws, strict=False):
        draw(panel)
        panel.legend(fontsize="small")
    for panel in panels[len(draws) :]:
        panel.set_visible(False)
    figure.savefig(file)


def _panels(study: Study) -> list[_Draw]:
    draws: list[_Draw] = [partial(_draw_ratios, study), partial(_draw_regrets, study)]
    if GP_VOI in study.first_jobs:
        draws.append(partial(_draw_costs, study))
    return draws + [partial(_draw_trials, study, policy) for policy in study.first_jobs]


def _title(study: Study) -> str:
    return f"{study.comparison.workload.name}, η = {study.comparison.eta:g}"


def _draw_ratios(study: Study, panel: Axes) -> None:
    """Total cost over the oracle's, after each recurrence."""
    for policy, curve in study.curves.items():
        panel.plot(range(1, len(curve) + 1), curve, label=policy)
    if study.comparison.default_ratio is not None:
        default = study.comparison.conditions.landscape.default.batch_size
        label = f"always {default}, at full power"
        panel.axhline(study.comparison.default_ratio, color="grey", linestyle=":", label=label)
    panel.set(title=_title(study), xlabel="recurrences", ylabel="total cost / oracle's", xscale="log")


def _draw_regrets(study: Study, panel: Axes) -> None:
    """Sum of the costs above the oracle's, after each recurrence."""
    for policy, regret in study.regrets.items():
        panel.plot(range(1, len(regret) + 1), regret, label=policy)
    panel.set(title=_title(study), xlabel="recurrences", ylabel="regret, in runs of the oracle")


def _draw_costs(study: Study, panel: Axes) -> None:
    """Cost of a run by batch size: predicted by `gp_voi` in the end, true, and of each trial of the first job."""
    job = study.first_jobs[GP_VOI]
    sizes = job.history.job.batch_sizes
    if predicted := predicted_costs(job.history):
        low, high = [each.low_j for each in predicted], [each.high_j for each in predicted]
        panel.fill_between(sizes, low, high, alpha=0.2, label="90 % of runs, as predicted")
        panel.plot(sizes, [each.expected_j for each in predicted], label="expected, as predicted")
    truth = [
        profile.expected_cost_j
        for profile in study.comparison.conditions.landscape_at(study.comparison.recurrences - 1).profiles.values()
    ]
    # What is infinite is left out.
    panel.plot(sizes, [cost if math.isfinite(cost) else math.nan for cost in truth], "k--", label="expected, in truth")
    _mark(panel, job.trials, lambda trial: (trial.record.batch_size, trial.cost_j))
    panel.set(title=f"{_title(study)}: gp_voi", xlabel="batch size", ylabel="cost of a run (J)", yscale="log")
    panel.set_xscale("log", base=2)
    panel.set_xticks(sizes, labels=[str(size) for size in sizes], rotation=90, fontsize="small")
    panel.set_xticks([], minor=True)


def _draw_trials(study: Study, policy: str, panel: Axes) -> None:
    """Epochs that each trial of the first job ran, might have run, and would have needed; the stopped with size."""
    trials = study.first_jobs[policy].trials
    stopped = [trial for trial in trials if trial.record.state is TrialState.EARLY_STOPPED]
    if stopped:
        needed = [min(trial.epochs_to_target, study.comparison.workload.max_epochs) for trial in stopped]
        numbers, epochs = [each.record.trial_number for each in stopped], [each.record.epoch for each in stopped]
        panel.vlines(numbers, epochs, needed, color="grey", linewidth=0.8, label="what it would still have needed")
    for trial in stopped:
        place = (trial.record.trial_number, trial.record.epoch)
        panel.annotate(
            str(trial.record.batch_size), place, xytext=(3, 0), textcoords="offset points", fontsize="x-small"
        )
    bounds = [(trial.record.trial_number, trial.record.bound.epochs) for trial in trials if trial.record.bound]
    _scatter(panel, bounds, marker="_", color="grey", label="its bound")
    _mark(panel, trials, lambda trial: (trial.record.trial_number, trial.record.epoch))
    panel.set(title=f"{_title(study)}: {policy}", xlabel="trial", ylabel="epochs")
    panel.set_ylim(0, 1.05 * panel.get_ylim()[1])


def _mark(panel: Axes, trials: Sequence[PlayedTrial], place: Callable[[PlayedTrial], tuple[float, float]]) -> None:
    """A marker for each trial that says how it ended."""
    for state, (words, marker, colour) in _LOOKS.items():
        places = [place(trial) for trial in trials if trial.record.state is state]
        _scatter(panel, places, marker=marker, color=colour, label=words)


def _scatter(panel: Axes, places: Sequence[tuple[float, float]], *, marker: str, color: str, label: str) -> None:
    """Markers above all lines; nothing, and nothing in the legend, where there are none."""
    if places:
        across, up = zip(*places, strict=True)
        panel.scatter(across, up, marker=marker, color=color, s=12, label=label, zorder=3)
