"""The pruning stage of policy `zeus`: try every batch size in rounds and keep those that reach the target.

A round starts at a default size and goes downwards from it (the default included), then upwards from the next larger
size; a size that does not reach the target ends its direction, for what fails at one size rarely works beyond it. The
sizes that reached the target survive into the next round, which starts at the cheapest of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from bso_server.core.model import UNCOUNTED, History, TrialRecord
from bso_server.errors import NoSurvivorError
from zeus_plugins.protocol import Origin, TrialState


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
    """What exploration needs next, replayed from the job's trials.

    Crashed and abandoned trials do not count: their size is owed another one.

    Raises:
        NoSurvivorError: A round ended without any size that reached the target.
    """
    job = history.job
    survivors, start = job.batch_sizes, job.default_batch_size
    for round_number in range(1, job.num_pruning_rounds + 1):
        reached: list[TrialRecord] = []
        for direction in _directions(survivors, start):
            for batch_size in direction:
                trial = _nth_exploration(history, batch_size, round_number)
                if trial is None:
                    return Explore(batch_size, round_number, start)
                if trial.state in {TrialState.RUNNING, TrialState.SUSPENDED}:
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
        start = min(reached, key=history.cost_of).batch_size
    return Survivors(survivors)


def _directions(sizes: tuple[int, ...], start: int) -> tuple[list[int], list[int]]:
    downwards = [size for size in reversed(sizes) if size <= start]
    upwards = [size for size in sizes if size > start]
    return downwards, upwards


def _nth_exploration(history: History, batch_size: int, n: int) -> TrialRecord | None:
    counted: Iterator[TrialRecord] = (
        trial
        for trial in history.of_size(batch_size)
        if trial.origin is Origin.EXPLORATION and trial.state not in UNCOUNTED
    )
    return next(islice(counted, n - 1, None), None)
