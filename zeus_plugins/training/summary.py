"""Summary of a run as Markdown, appended to a file that a CI system shows beside the job."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from zeus_plugins.environment import GITHUB_STEP_SUMMARY, SUMMARY_FILE
from zeus_plugins.protocol import JobView, TrialView, printable
from zeus_plugins.training.trial import TrialInfo

_logger = logging.getLogger("zeus_plugins")

# Latest runs in the chart, and the width of its longest bar in characters.
_RUNS, _WIDTH = 20, 40


def append_summary(trial: TrialInfo, outcome: str, monitor: str, view: JobView | None) -> None:
    """Append the summary of a run to the file of `ZEUS_SUMMARY_FILE`, or of ``$GITHUB_STEP_SUMMARY``, if one is set.

    If the file cannot be written, log a warning: a summary never ends a training.
    """
    name = SUMMARY_FILE.text() or GITHUB_STEP_SUMMARY.text()
    if not name:
        return
    try:
        with Path(name).open("a", encoding="utf-8") as file:
            file.write(run_summary(trial, outcome, monitor, view))
    except OSError as error:
        _logger.warning("the summary of the run could not be written to %s: %s", name, error)


def run_summary(trial: TrialInfo, outcome: str, monitor: str, view: JobView | None) -> str:
    """Return a Markdown table of one run; with the job's `view`, also the verdict and a chart of the latest runs."""
    rows = [("batch size", f"{trial.batch_size}: {trial.reason or 'chosen by the server'}"), ("outcome", outcome)]
    if trial.metric is not None:
        rows.append((monitor or "metric", f"{trial.metric:.4g} after {trial.epoch or 0:g} epochs"))
    rows.append(("time and energy", trial.spent))
    if trial.cost_j is not None:
        rows.append(("cost", f"{trial.cost_j:.4g} J"))
    if view is not None:
        rows.append(("savings", f"{view.savings.claim}. {view.savings.evidence}".strip()))
    lines = [f"### Batch size of job {trial.job_id}, {trial.name}", "", "| run |  |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in rows]
    if view is not None and (chart := list(_chart(view.trials))):
        lines += ["", "```text", *chart, "```"]
    return "\n".join(lines) + "\n\n"


def _cell(text: str) -> str:
    return printable(text).replace("|", "\\|").replace("\n", " ")


def _chart(trials: Iterable[TrialView]) -> Iterable[str]:
    """Yield one bar per run that has a cost, for the latest runs in order of dispatch."""
    ended = [(each, each.cost_j) for each in trials if each.cost_j][-_RUNS:]
    largest = max((cost_j for _, cost_j in ended), default=0.0)
    if ended:
        yield "run   size  cost, J"
    for trial, cost_j in ended:
        bar = "█" * max(1, round(_WIDTH * cost_j / largest))
        yield f"{trial.trial_number:>3} {trial.batch_size:>6}  {bar} {cost_j:.3g} {trial.state}"
