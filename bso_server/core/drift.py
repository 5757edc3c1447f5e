"""Detection of a change in the cost of a job's runs, for example by more data, longer texts or another machine."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bso_server.core.gp_voi.run_costs import CostRun, change_of
from bso_server.core.verdict import CompletedRun
from zeus_plugins.protocol import CreatedJob, is_busy

# Number of the latest runs that are compared.
_RUNS = 20


def drift_of(job: CreatedJob, runs: Sequence[CompletedRun]) -> float | None:
    """Return the share by which the last two runs cost more (negative: less) than the runs before them, or None.

    Only runs at the batch size of the last run count, and no runs on busy machines. None means that the change may be
    chance: `change_of` reports a change only if each of the last two runs deviates as far as a slowed run would.
    """
    if not runs or is_busy(runs[-1].waited_share):
        return None
    alike = [run for run in runs if run.batch_size == runs[-1].batch_size and not is_busy(run.waited_share)]
    costs_j = [job.cost_j(time_s=run.time_s, energy_j=run.energy_j) for run in alike[-_RUNS:]]
    if min(costs_j) <= 0:
        return None
    change = change_of([tuple(CostRun(math.log(cost_j), 1.0) for cost_j in costs_j)], 0)
    return None if change is None else math.expm1(change)
