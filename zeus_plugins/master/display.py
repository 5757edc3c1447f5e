"""Lines on the terminal about a master's runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zeus_plugins.master.history import MasterState, PlannedRun, Run, mean_costs
from zeus_plugins.protocol import SavingsView, printable


class Listener:
    """Prints the scripts' output as it comes, a line when a run begins, and a line with its cost when it ends."""

    def began(self, state: MasterState) -> None:
        """Print the number of earlier runs, if any."""
        if state.history:
            print(f"resumed after {len(state.history)} runs", flush=True)

    def launched(self, run: PlannedRun) -> None:
        """Print the run's settings."""
        bound = "" if math.isinf(run.cost_ub) else f", at most {run.cost_ub:.4g} J"
        print(f"{run.job_id}: batch size {run.bs}, learning rate {run.learning_rate:.4g}{bound}", flush=True)

    def printed(self, text: str) -> None:
        """Print whole lines of a script's output; called from another thread."""
        print(text, end="", flush=True)

    def ended(self, run: Run) -> None:
        """Print outcome and costs."""
        outcome = printable(run.reason if run.was_measured else f"{run.outcome}: {run.reason}")
        print(f"{run.job_id}: {outcome}; {run.time:.1f} s, {run.energy:.4g} J, cost {run.cost:.4g} J", flush=True)


def conclusion(history: Sequence[Run], default_bs: int, savings: SavingsView | None) -> str:
    """Return a text with the verdict on the job's saving, if known, the mean costs, and total time and energy."""
    means = mean_costs(history)
    told = [] if savings is None else [savings.in_words]
    if means:
        costs = [
            f"{bs}{', your default' if bs == default_bs else ''}: {mean_j:.4g} J "
            f"({'1 run' if runs == 1 else f'{runs} runs'})"
            for bs, mean_j in means.items()
            for runs in [sum(run.reached and run.bs == bs for run in history)]
        ]
        told.append(f"Mean cost of the runs that reached the target: {'; '.join(costs)}.")
    elif savings is None:
        told.append("No run has reached the target yet.")
    reached = [run for run in history if run.reached]
    lines = [
        *told,
        f"{len(reached)} of {len(history)} runs reached the target, in {sum(run.time for run in reached):.1f} s and "
        f"{sum(run.energy for run in reached):.4g} J; all runs took {sum(run.time for run in history):.1f} s and "
        f"{sum(run.energy for run in history):.4g} J.",
        f"Energy: {', '.join(sorted({run.energy_source or 'as the script says' for run in history})) or 'none'}.",
    ]
    return "\n".join(lines)
