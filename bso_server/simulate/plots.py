"""A picture of a comparison: what each policy has wasted after each recurrence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from bso_server.simulate.results import Comparison

_COLUMNS = 3


def plot(comparisons: Sequence[Comparison], file: Path) -> None:
    """Draw total cost over the oracle's against the number of recurrences, a panel for each workload.

    Args:
        comparisons: What to draw.
        file: Where to; its ending says in which format (png, svg, pdf).

    Raises:
        ImportError: matplotlib is not installed.
    """
    # Not with the module: matplotlib takes a second to load and is an extra of its own.
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, len(comparisons))
    rows = math.ceil(len(comparisons) / columns)
    figure = Figure(figsize=(4.5 * columns, 3.2 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    for panel, comparison in zip(panels.flat, comparisons, strict=False):
        for policy, curve in comparison.curves.items():
            panel.plot(range(1, len(curve) + 1), curve, label=policy)
        default, oracle = comparison.phases[0].landscape.default, comparison.phases[0].landscape.oracle
        ratio = default.expected_cost_j / oracle.expected_cost_j
        panel.axhline(ratio, color="grey", linestyle=":", label=f"always {default.batch_size}, at full power")
        panel.set(title=comparison.workload.name, xlabel="recurrences", ylabel="total cost / oracle's", xscale="log")
        panel.legend()
    for panel in panels.flat[len(comparisons) :]:
        panel.set_visible(False)
    figure.savefig(file)
