"""A job's own trials as a workload, on which the simulator plays other policies."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bso_server.core.model import OBSERVED
from bso_server.simulate.savings import Consumption, Savings
from bso_server.simulate.workload import Epoch, SizeTrace, Workload, landscape
from zeus_plugins.protocol import JobView, TrialState, TrialView


def recorded_workload(view: JobView) -> Workload:
    """The batch sizes that the job has tried, at what their epochs took on average.

    A trial that was stopped after k epochs would have needed more: it is taken for the quickest run of its size that
    did, and for one that never reaches the target where there is none. (Its share of the runs goes to the next larger
    observation, as a whole; compare Efron's redistribution to the right, 1967.) Trials that crashed, ran out of memory
    or were given up tell nothing. Power limits are those that the trials had.

    Raises:
        ValueError: No trial has reached the target yet.
    """
    by_size: dict[int, list[TrialView]] = {}
    for trial in view.trials:
        if trial.state in OBSERVED and trial.epochs and trial.time_s:
            by_size.setdefault(trial.batch_size, []).append(trial)
    if not any(trial.state is TrialState.COMPLETED for trials in by_size.values() for trial in trials):
        raise ValueError(
            f"job {view.job.job_id}: no trial has reached the target yet, so that there is nothing to compare"
        )
    sizes = sorted(by_size)
    default = view.job.default_batch_size
    return Workload(
        name=view.job.job_id or view.job.job_id_prefix,
        sizes=tuple(
            SizeTrace(size, _epochs_to_target(by_size[size]), {view.job.max_power: _mean_epoch(by_size[size])})
            for size in sizes
        ),
        default_batch_size=min(sizes, key=lambda size: (abs(math.log2(size / default)), size)),
        max_epochs=view.job.max_epochs,
        max_power_w=view.job.max_power,
    )


def recorded_savings(view: JobView, workload: Workload) -> Savings:
    """Savings of all trials of a job until now, however they ended, over as many runs of the workload's default size.

    A trial that reached the target is a recurrence.

    Raises:
        ValueError: No trial has reached the target within `max_epochs`.
    """
    recurrences = sum(trial.state is TrialState.COMPLETED for trial in view.trials)
    consumed = sum((Consumption(trial.energy_j or 0.0, trial.time_s or 0.0) for trial in view.trials), Consumption())
    # Energy and time of the default are the same for each η.
    expected = landscape(workload, eta=view.job.eta_knob, optimal_power_limits=False).default.expected_consumption
    return Savings(recurrences, consumed, None if expected is None else expected * recurrences)


def _epochs_to_target(trials: Sequence[TrialView]) -> tuple[float, ...]:
    reached = sorted(math.ceil(trial.epochs or 0) for trial in trials if trial.state is TrialState.COMPLETED)

    def needed(trial: TrialView) -> float:
        epochs = math.ceil(trial.epochs or 0)
        if trial.state is TrialState.COMPLETED:
            return epochs
        if trial.state is TrialState.EXHAUSTED:
            return math.inf
        return next((each for each in reached if each > epochs), math.inf)

    return tuple(map(needed, trials))


def _mean_epoch(trials: Sequence[TrialView]) -> Epoch:
    epochs = sum(trial.epochs or 0 for trial in trials)
    return Epoch(
        time_s=sum(trial.time_s or 0 for trial in trials) / epochs,
        energy_j=sum(trial.energy_j or 0 for trial in trials) / epochs,
    )
