"""Cost per trial, coloured by batch size."""

from __future__ import annotations

from pathlib import Path

from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from zeus_plugins.protocol import JobView, TrialState


def plot_costs(job: JobView, path: Path) -> None:
    """Draw every trial that was measured as a PNG: filled where it reached the target, a cross where it was stopped."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    sizes = [arm.batch_size for arm in job.arms if arm.trials]
    colours = _colours(len(sizes))
    for batch_size, colour in zip(sizes, colours, strict=True):
        measured = [trial for trial in job.trials if trial.batch_size == batch_size and trial.cost_j is not None]
        for reached, marker in ((True, "o"), (False, "x")):
            trials = [trial for trial in measured if (trial.state is TrialState.COMPLETED) == reached]
            axes.scatter(
                [trial.trial_number for trial in trials],
                [trial.cost_j or 0 for trial in trials],
                color=[colour],
                marker=marker,
                s=60,
                label=f"{batch_size}" + (" (default)" if batch_size == job.job.default_batch_size else "")
                if reached
                else None,
            )
    axes.set_xlabel("trial")
    axes.set_ylabel("cost (J)")
    axes.set_ylim(bottom=0)
    axes.set_title(f"Cost of each run of job {job.job.job_id} (○ reached the target, × stopped)")
    axes.legend(title="batch size", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)


def _colours(count: int) -> list[tuple[float, float, float, float]]:
    """Small sizes dark, large ones light."""
    scale = colormaps["viridis"]
    return [scale(index / max(count - 1, 1)) for index in range(count)]
