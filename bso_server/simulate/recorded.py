"""A job's own trials as a workload, on which the simulator plays other policies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

from bso_server.core.model import OBSERVED
from bso_server.simulate.savings import Consumption, Savings
from bso_server.simulate.workload import Epoch, SizeTrace, Workload, landscape
from zeus_plugins.protocol import JobRegistration, JobView, TrialState


class Run(Protocol):
    """The part of a trial that counts here; totals are None before its first report."""

    @property
    def batch_size(self) -> int:
        """Its batch size."""

    @property
    def state(self) -> TrialState:
        """The outcome of it."""

    @property
    def epochs(self) -> float | None:
        """Epochs trained."""

    @property
    def time_s(self) -> float | None:
        """Time of all of them, seconds."""

    @property
    def energy_j(self) -> float | None:
        """Energy of all of them, joules."""


def recorded_workload(job: JobRegistration, runs: Iterable[Run]) -> Workload:
    """The batch sizes that a job has tried, at what their epochs took on average in these of its trials.

    A trial that was stopped after k epochs would have needed more: it is taken for the quickest run of its size that
    did, and for one that never reaches the target where there is none. (Its share of the runs goes to the next larger
    observation, as a whole; compare Efron's redistribution to the right, 1967.) Trials that crashed, ran out of memory
    or were given up tell nothing. Power limits are those that the trials had.

    Raises:
        ValueError: No trial has reached the target yet, of those whose epochs are known: Zeus keeps none.
    """
    by_size: dict[int, list[Run]] = {}
    for run in runs:
        if run.state in OBSERVED and run.epochs and run.time_s:
            by_size.setdefault(run.batch_size, []).append(run)
    if not any(run.state is TrialState.COMPLETED for own in by_size.values() for run in own):
        raise ValueError(
            f"job {job.job_id}: no trial has reached the target yet, of those whose epochs are known, so that there is "
            "nothing to compare"
        )
    sizes = sorted(by_size)
    default = job.default_batch_size
    return Workload(
        name=job.job_id or job.job_id_prefix,
        sizes=tuple(
            SizeTrace(size, _epochs_to_target(by_size[size]), {job.max_power: _mean_epoch(by_size[size])})
            for size in sizes
        ),
        default_batch_size=min(sizes, key=lambda size: (abs(math.log2(size / default)), size)),
        max_epochs=job.max_epochs,
        max_power_w=job.max_power,
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


def _epochs_to_target(runs: Sequence[Run]) -> tuple[float, ...]:
    reached = sorted(math.ceil(run.epochs or 0) for run in runs if run.state is TrialState.COMPLETED)

    def needed(run: Run) -> float:
        epochs = math.ceil(run.epochs or 0)
        if run.state is TrialState.COMPLETED:
            return epochs
        if run.state is TrialState.EXHAUSTED:
            return math.inf
        return next((each for each in reached if each > epochs), math.inf)

    return tuple(map(needed, runs))


def _mean_epoch(runs: Sequence[Run]) -> Epoch:
    epochs = sum(run.epochs or 0 for run in runs)
    return Epoch(
        time_s=sum(run.time_s or 0 for run in runs) / epochs,
        energy_j=sum(run.energy_j or 0 for run in runs) / epochs,
    )
