"""The pruning stage of policy `zeus`: try every batch size in rounds and keep those that reach the target.

A round starts at a default size and goes downwards from it (the default included), then upwards from the next larger
size; a size that does not reach the target ends its direction, for what fails at one size rarely works beyond it. The
sizes that reached the target survive into the next round, which starts at the cheapest of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from bso_server.core.history import History, cost_of
from bso_server.core.model import TrialRecord
from bso_server.errors import NoSurvivorError
from zeus_plugins.protocol import ALIVE, TrialState


@dataclass(frozen=True, slots=True)
class Explore:
    """The round owes `batch_size` a trial."""

    batch_size: int
    round_number: int
    start: int


@dataclass(frozen=True, slots=True)
class Wait:
    """The exploration that the round needs next, `trial`, is still running."""

    trial: TrialRecord


@dataclass(frozen=True, slots=True)
class Survivors:
    """All rounds are over; these sizes reached the target in each, ascending."""

    batch_sizes: tuple[int, ...]


def explore(history: History) -> Explore | Wait | Survivors:
    """The next need of exploration, replayed from the job's trials.

    Crashed and abandoned trials do not count: their size is owed another one, unless it was given up, which ends its
    direction. Sizes that do not fit into memory are as if the job did not have them.

    Raises:
        NoSurvivorError: A round ended without any size that reached the target, or no size fits into memory.
    """
    job = history.job
    survivors, start = history.fitting_sizes, history.start_size
    if start is None:
        raise NoSurvivorError(
            f"job {job.job_id!r}: even batch size {min(job.batch_sizes)} ran out of memory; register the job anew with "
            "smaller batch_sizes or larger GPUs"
        )
    explorations: dict[int, list[TrialRecord]] = {size: [] for size in job.batch_sizes}
    for trial in history.explorations:
        explorations[trial.batch_size].append(trial)
    for round_number in range(1, job.num_pruning_rounds + 1):
        reached: list[TrialRecord] = []
        downwards = [size for size in reversed(survivors) if size <= start]
        upwards = [size for size in survivors if size > start]
        for direction in (downwards, upwards):
            for batch_size in direction:
                if len(explorations[batch_size]) < round_number:
                    if batch_size not in history.runnable_sizes:
                        break
                    return Explore(batch_size, round_number, start)
                trial = explorations[batch_size][round_number - 1]
                if trial.state in ALIVE:
                    return Wait(trial)
                if trial.state is not TrialState.COMPLETED:
                    break
                reached.append(trial)
        if not reached:
            raise NoSurvivorError(
                f"job {job.job_id!r}: no batch size reached the target metric {job.target_metric:g} in exploration "
                f"round {round_number} of {job.num_pruning_rounds}, starting from {start}; register the job anew "
                "with other batch_sizes, a target it can reach, more max_epochs or a larger beta_knob"
            )
        survivors = tuple(sorted(trial.batch_size for trial in reached))
        start = min(reached, key=lambda trial: cost_of(job, trial)).batch_size
    return Survivors(survivors)
