"""Pictures of the report: costs over recurrences, and robustness."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.policies.cases import ROWS
from benchmarks.policies.contest import CONTENDERS, FLOOR
from benchmarks.policies.report import MAIN_ROWS, Entry, Results, label, robustness

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Whoever costs more than this is off the scale: a grid search may cost a thousand times the oracle.
_HIGHEST = 2.5
_TICKS = [1, 2, 5, 10, 20, 50, 100]
_MARKERS = "osD^vP*Xh"


def plot_report(results: Results, folder: Path) -> None:
    """Draw ``policies-costs.svg`` and ``policies-robustness.svg``, as far as there are results for them.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # Not with the module: matplotlib takes a second to load and is an extra of its own.
    import matplotlib as mpl
    from matplotlib.figure import Figure

    main, robust = [row for row in MAIN_ROWS if row in results], robustness(results)
    # The same numbers give the same file, which is a third as large with letters as letters.
    with mpl.rc_context({"svg.hashsalt": "zeus-plugins", "svg.fonttype": "none"}):
        if main:
            figure = Figure(figsize=(5.6 * len(main), 4.8), layout="constrained")
            panels = figure.subplots(1, len(main), squeeze=False).flat
            for panel, row in zip(panels, main, strict=True):
                _draw_curves(panel, row, results[row])
            figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
            figure.savefig(folder / "policies-costs.svg", metadata={"Date": None})
        if robust:
            figure = Figure(figsize=(11.0, 1.8 + 0.5 * len(robust)), layout="constrained")
            panel = figure.subplots()
            _draw_robustness(panel, robust)
            figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=3)
            figure.savefig(folder / "policies-robustness.svg", metadata={"Date": None})


def _draw_curves(panel: Axes, row: str, entries: Mapping[str, Entry]) -> None:
    """Geometric mean of the total cost over the oracle's, after each recurrence."""
    for name, colour in _colours(entries).items():
        curve = [math.nan if ratio is None else ratio for ratio in entries[name]["curve"]]
        style = ":" if name == FLOOR else "-"
        panel.plot(range(1, len(curve) + 1), curve, style, color=colour, label=label(name).strip("`"))
    panel.set(title=ROWS[row].title, xlabel="recurrences", ylabel="total cost / oracle's", xscale="log")
    panel.set_xticks(_TICKS, labels=map(str, _TICKS))
    panel.set_xticks([], minor=True)
    panel.set_ylim(1.0, _HIGHEST)


def _draw_robustness(panel: Axes, rows: Mapping[str, Mapping[str, Entry]]) -> None:
    """The same after a hundred recurrences, a line for each row and a marker for each contender."""
    colours = _colours({name: found for entries in rows.values() for name, found in entries.items()})
    for number, (name, colour) in enumerate(colours.items()):
        places = [
            (min(ratio, _HIGHEST), height)
            for height, entries in enumerate(rows.values())
            if name in entries and (ratio := entries[name]["geometric_mean"]["100"]) is not None
        ]
        if places:
            across, up = zip(*places, strict=True)
            marker = _MARKERS[number % len(_MARKERS)]
            panel.scatter(
                across, up, color=colour, marker=marker, label=label(name).strip("`"), clip_on=False, zorder=3
            )
    panel.set_yticks(range(len(rows)), labels=[ROWS[row].title for row in rows])
    panel.invert_yaxis()
    panel.grid(axis="y", alpha=0.4)
    panel.set(xlabel=f"total cost / oracle's, N = 100 ({_HIGHEST:g} and more at the edge)")
    panel.set_xlim(1.0, _HIGHEST)


def _colours(names: Mapping[str, Entry]) -> dict[str, str]:
    """A colour for each contender, in the order of the report, the same in every picture."""
    known = [*CONTENDERS, *sorted(names.keys() - set(CONTENDERS))]
    return {name: f"C{known.index(name) % 10}" for name in known if name in names}
