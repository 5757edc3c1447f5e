"""Pictures of real trainings.

matplotlib, which takes a second to load and is an extra of its own, is imported where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.recurrences.tasks import DEFAULT
from benchmarks.reports import ProofResults
from benchmarks.tables import energy_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@contextmanager
def _written(file: Path, width: float, height: float) -> Iterator[Figure]:
    """Open a figure (size in inches) that is written at the end of the `with` block; same data, same file."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    yield figure
    # Text as text instead of paths makes the file a third as large.
    with mpl.rc_context({"svg.hashsalt": "zeus-plugins", "svg.fonttype": "none"}):
        figure.savefig(file, metadata={"Date": None})


# Real trainings

_COLUMNS = 3


def plot_trainings(results: ProofResults, folder: Path) -> None:
    """Draw ``proof-DEVICE-recurrences.svg``.

    Raises:
        ImportError: matplotlib is not installed.
    """
    tasks = results["tasks"]
    columns = min(_COLUMNS, len(tasks))
    rows = math.ceil(len(tasks) / columns)
    with _written(folder / f"proof-{results['device']}-recurrences.svg", 4.4 * columns, 3.4 * rows) as figure:
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        for panel, (name, task) in zip(panels, tasks.items(), strict=False):
            _draw_totals(panel, task)
            panel.set_title(name)
            panel.legend(fontsize="small")
        for panel in panels[len(tasks) :]:
            panel.set_visible(False)
        figure.suptitle(f"energy: {energy_of(results)}", fontsize="small")


def _draw_totals(panel: Axes, task: dict[str, Any]) -> None:
    """Draw the ratio of total cost to the total cost of always using the default."""
    from matplotlib.ticker import MaxNLocator

    for who, found in task["contenders"].items():
        if who != DEFAULT:
            panel.plot(range(1, len(found["curve"]) + 1), found["curve"], marker=".", label=who)
    panel.axhline(1.0, color="grey", linestyle=":", label=f"always {task['default']}")
    panel.set(xlabel="recurrences", ylabel="total cost / the default's")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
