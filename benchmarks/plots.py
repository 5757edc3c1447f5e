"""All pictures: of policies and their rivals, and of real trainings.

matplotlib, which takes a second to load and is an extra of its own, is imported where it is used.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.policies.cases import ROWS
from benchmarks.policies.contest import CONTENDERS, FLOOR
from benchmarks.recurrences.tasks import DEFAULT
from benchmarks.reports import MAIN_ROWS, Entry, PolicyResults, ProofResults
from benchmarks.tables import energy_of, label
from bso_server.cli.common import CommandError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def require_matplotlib(option: str) -> None:
    """Raise `CommandError` if matplotlib, which this option needs, is missing; call this before a simulation."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise CommandError(f"{option} needs matplotlib ({error}): pip install 'zeus-plugins[plot]'") from error


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


# Policies and their rivals

# Larger ratios are drawn at the edge, because a grid search may cost a thousand times as much as the oracle.
_HIGHEST = 2.5
_TICKS = [1, 2, 5, 10, 20, 50, 100]


def plot_policies(results: PolicyResults, folder: Path) -> None:
    """Draw ``policies-costs.svg``, if the results contain a main row.

    Raises:
        ImportError: matplotlib is not installed.
    """
    if main := [row for row in MAIN_ROWS if row in results]:
        with _written(folder / "policies-costs.svg", 5.6 * len(main), 4.8) as figure:
            panels = figure.subplots(1, len(main), squeeze=False).flat
            for panel, row in zip(panels, main, strict=True):
                _draw_curves(panel, row, results[row])
            figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)


def _draw_curves(panel: Axes, row: str, entries: Mapping[str, Entry]) -> None:
    """Draw the geometric mean of the ratio of total cost to the oracle's, after each recurrence."""
    for name, colour in _colours(entries).items():
        curve = [math.nan if ratio is None else ratio for ratio in entries[name]["curve"]]
        style = ":" if name == FLOOR else "-"
        panel.plot(range(1, len(curve) + 1), curve, style, color=colour, label=label(name).strip("`"))
    panel.set(title=ROWS[row].title, xlabel="recurrences", ylabel="total cost / oracle's", xscale="log")
    panel.set_xticks(_TICKS, labels=map(str, _TICKS))
    panel.set_xticks([], minor=True)
    panel.set_ylim(1.0, _HIGHEST)


def _colours(names: Mapping[str, Entry]) -> dict[str, str]:
    """Return a colour for each contender, in the order of the report; it is the same in every picture."""
    known = [*CONTENDERS, *sorted(names.keys() - set(CONTENDERS))]
    return {name: f"C{known.index(name) % 10}" for name in known if name in names}


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
