"""Pictures of a measurement: total costs over recurrences, and costs by size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.recurrences.report import Results
from benchmarks.recurrences.runs import DEFAULT
from benchmarks.recurrences.tables import energy_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes

_COLUMNS = 3


def plot(results: Results, folder: Path) -> None:
    """Draw ``DEVICE-recurrences.svg`` and ``DEVICE-sizes.svg``.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # Not with the module: matplotlib takes a second to load and is an extra of its own.
    import matplotlib as mpl

    # The same numbers give the same file, which is a third as large with letters as letters.
    with mpl.rc_context({"svg.hashsalt": "zeus-plugins", "svg.fonttype": "none"}):
        _draw(results, folder / f"proof-{results['device']}-recurrences.svg", _draw_curves)
        _draw(results, folder / f"proof-{results['device']}-sizes.svg", _draw_sizes)


def _draw(results: Results, file: Path, draw: Callable[[Axes, dict[str, Any]], None]) -> None:
    from matplotlib.figure import Figure

    tasks = results["tasks"]
    rows = math.ceil(len(tasks) / _COLUMNS)
    figure = Figure(figsize=(4.4 * min(_COLUMNS, len(tasks)), 3.4 * rows), layout="constrained")
    panels = list(figure.subplots(rows, min(_COLUMNS, len(tasks)), squeeze=False).flat)
    for panel, (name, task) in zip(panels, tasks.items(), strict=False):
        draw(panel, task)
        panel.set_title(name)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize="small")
    for panel in panels[len(tasks) :]:
        panel.set_visible(False)
    figure.suptitle(f"energy: {energy_of(results)}", fontsize="small")
    figure.savefig(file, metadata={"Date": None})


def _draw_curves(panel: Axes, task: dict[str, Any]) -> None:
    """Total cost over that of always the default."""
    from matplotlib.ticker import MaxNLocator

    for who, found in task["contenders"].items():
        if who != DEFAULT:
            panel.plot(range(1, len(found["curve"]) + 1), found["curve"], marker=".", label=who)
    panel.axhline(1.0, color="grey", linestyle=":", label=f"always {task['default']}")
    panel.set(xlabel="recurrences", ylabel="total cost / the default's")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_sizes(panel: Axes, task: dict[str, Any]) -> None:
    """Cost of a run until the target, by size."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    for drifted, label in ((False, "cost"), (True, "after the drift")):
        known = [each for each in task["sizes"] if each["drifted"] == drifted and each["cost_j"] is not None]
        if known:
            sizes, costs_j = [each["batch_size"] for each in known], [each["cost_j"] for each in known]
            panel.plot(sizes, costs_j, marker="o", label=label)
    panel.axvline(task["default"], color="grey", linestyle=":", label=f"default {task['default']}")
    panel.set(xlabel="batch size", ylabel="cost until the target (J)", yscale="log")
    panel.set_xscale("log", base=2)
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_minor_formatter(NullFormatter())
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(ScalarFormatter())
