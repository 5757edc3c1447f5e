"""The contenders of the report (the server's policies and their rivals), and what a job costs with each.

Rivals learn only from finished runs, and never stop a run. Every rival except `Default` uses the power limits that the
server's policies use, and tries them out in the same way.
"""

from __future__ import annotations

import heapq
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np

from benchmarks.policies.calibration import Calibration, Tallies
from benchmarks.policies.cases import Case
from bso_server.simulate.play import half_way
from bso_server.simulate.workload import Epoch
from zeus_plugins.protocol import GP_VOI, OWN_POLICIES, TrialState, cost


class Rival(ABC):
    """A strategy for one job.

    Attributes:
        full_power: True if all runs have the maximum power limit; otherwise each size has its best limit.
    """

    full_power = False

    @abstractmethod
    def next_size(self) -> int:
        """Return the batch size of the next recurrence."""

    def learn(self, batch_size: int, cost_j: float) -> None:  # noqa: B027 - some learn nothing
        """Take note of a finished recurrence.

        Args:
            batch_size: The size with which it began.
            cost_j: Its cost in joules. If the run missed the target, the following runs at the default are included.
        """


class Default(Rival):
    """The default in every run, at the maximum power limit: the cost of a job that is not optimized."""

    full_power = True

    def __init__(self, default: int) -> None:
        self._default = default

    def next_size(self) -> int:
        """Return the default."""
        return self._default


class Clairvoyant(Rival):
    """The default once, then the size with the least expected cost at each recurrence: a lower bound for policies."""

    def __init__(self, case: Case) -> None:
        self._case, self._started = case, 0

    def next_size(self) -> int:
        """Return the default in the first recurrence, then the oracle's size."""
        recurrence, self._started = self._started, self._started + 1
        if recurrence == 0:
            return self._case.workload.default_batch_size
        return self._case.conditions.landscape_at(recurrence).oracle.batch_size


class Grid(Rival):
    """A grid search: each size once, the default first; afterwards, the cheapest size in every run."""

    def __init__(self, sizes: Sequence[int], default: int) -> None:
        self._sizes = sorted(sizes, key=lambda size: (size != default, size))
        self._queue = list(self._sizes)
        # Cost (J) of the first finished run of each size.
        self._costs_j: dict[int, float] = {}

    def next_size(self) -> int:
        """Return the next size of the search; afterwards, the cheapest of the sizes whose runs have ended."""
        if self._queue:
            return self._queue.pop(0)
        return min(self._sizes, key=lambda size: self._costs_j.get(size, math.inf))

    def learn(self, batch_size: int, cost_j: float) -> None:
        """Take note of a finished recurrence."""
        self._costs_j.setdefault(batch_size, cost_j)


# After this number of runs without the target, a recurrence has infinite cost.
_PATIENCE = 100

FLOOR = "floor"

RIVALS: dict[str, Callable[[Case, int], Rival]] = {
    "default": lambda case, _: Default(case.workload.default_batch_size),
    "grid": lambda case, _: Grid(*_sizes(case)),
    FLOOR: lambda case, _: Clairvoyant(case),
}
"""Functions that return a rival for a case and a seed, by the rival's name."""

WARM = "warm"
"""Policy `gp_voi` that begins with the epochs of the case's job on another GPU."""

CONTENDERS = [*OWN_POLICIES, *RIVALS, WARM]
"""Names of all contenders, the server's own policies first. Policies of other packages can be played, too."""


class Paid(NamedTuple):
    """The costs of one job.

    Attributes:
        costs_j: Cost of each recurrence, joules, shape (recurrences,); infinite if no run reaches the target.
        given_up: Number of recurrences that a policy gave up, so that the default had to finish them.
        last_size: Batch size of the last recurrence that reached the target; None if none did.
        tallies: Calibration of the policy; None if it was not requested.
    """

    costs_j: list[float]
    given_up: int = 0
    last_size: int | None = None
    tallies: Tallies | None = None


def paid(case: Case, name: str, seed: int, *, calibrates: bool = False) -> Paid:
    """Play one seed's job with a contender, or with another installed policy, and return its costs.

    If `calibrates`, also compare the policy's expectations with the truth.
    """
    if name in RIVALS:
        contest = _Contest(case, RIVALS[name](case, seed), seed)
        return Paid(contest.play(), last_size=contest.last_size)
    calibration = Calibration(case.conditions) if calibrates else None
    look = None if calibration is None else calibration.look
    job = case.play(GP_VOI if name == WARM else name, seed, look, is_warm=name == WARM)
    completed = [trial for trial in job.trials if trial.record.state is TrialState.COMPLETED]
    last = max(completed, key=lambda trial: trial.recurrence, default=None)
    return Paid(
        job.costs_j,
        job.unfinished,
        last_size=None if last is None else last.record.batch_size,
        tallies=None if calibration is None else calibration.tallies(),
    )


def _sizes(case: Case) -> tuple[list[int], int]:
    return [size.batch_size for size in case.workload.sizes], case.workload.default_batch_size


class _Contest:
    """One job, played by a rival; each trial draws a recorded run, like `simulate.play.Simulation`."""

    def __init__(self, case: Case, rival: Rival, seed: int) -> None:
        self._case, self._rival = case, rival
        self._draws = np.random.default_rng([seed, len(case.workload.sizes)])
        self._profiled: set[int] = set()
        self._trials = 0
        self.last_size: int | None = None
        """Batch size of the latest recurrence that reached the target."""

    def play(self) -> list[float]:
        setting = self._case.setting
        costs_j: list[float] = []
        # Heap of the recurrences under way: end (s), number, size.
        under_way: list[tuple[float, int, int]] = []
        now_s = 0.0
        while len(costs_j) < setting.recurrences:
            if len(under_way) == setting.concurrency:
                now_s, number, batch_size = heapq.heappop(under_way)
                self._rival.learn(batch_size, costs_j[number])
            batch_size = self._rival.next_size()
            consumed = self._recur(batch_size, len(costs_j))
            heapq.heappush(under_way, (now_s + consumed.time_s, len(costs_j), batch_size))
            costs_j.append(self._cost_j(consumed))
        return costs_j

    def _recur(self, batch_size: int, recurrence: int) -> Epoch:
        """Simulate a recurrence: a run at a size, then runs at the default until one reaches the target.

        A crashed run is repeated at its size. The result is the time and energy of all runs together.
        """
        time_s = energy_j = 0.0
        for _ in range(_PATIENCE):
            run, next_size = self._run(batch_size, recurrence)
            time_s, energy_j = time_s + run.time_s, energy_j + run.energy_j
            if next_size is None:
                self.last_size = batch_size
                return Epoch(time_s, energy_j)
            batch_size = next_size
        return Epoch(math.inf, math.inf)

    def _run(self, batch_size: int, recurrence: int) -> tuple[Epoch, int | None]:
        """Simulate one run.

        Returns:
            Its time and energy, and the size of the recurrence's next run; None if this run reached the target.
        """
        sizes = self._case.conditions.landscape_at(recurrence)
        profile = sizes.default if self._rival.full_power else sizes.profiles[batch_size]
        first = profile.epoch
        if profile.profiling and batch_size not in self._profiled:
            first = profile.profiling
        self._profiled.add(batch_size)
        self._trials += 1
        needed = profile.epochs_to_target[int(self._draws.integers(len(profile.epochs_to_target)))]
        slowness = self._case.conditions.slowness(self._trials, self._draws)
        slowness /= 1 - self._case.conditions.waited_share(recurrence)
        max_epochs = self._case.workload.max_epochs
        epochs = math.ceil(min(needed, max_epochs))
        crashes = self._case.conditions.crashes(self._draws) and half_way(needed, max_epochs) < epochs
        if crashes:
            epochs = half_way(needed, max_epochs)
        run = Epoch(
            (first.time_s + (epochs - 1) * profile.epoch.time_s) * slowness,
            (first.energy_j + (epochs - 1) * profile.epoch.energy_j) * slowness,
        )
        if crashes:
            return run, batch_size
        return run, None if math.isfinite(needed) else self._case.workload.default_batch_size

    def _cost_j(self, consumed: Epoch) -> float:
        if math.isinf(consumed.time_s):
            return math.inf
        max_power_w, eta = self._case.workload.max_power_w, self._case.setting.eta
        return cost(energy_j=consumed.energy_j, time_s=consumed.time_s, max_power_w=max_power_w, eta=eta)


# Threads of numerical libraries would compete with the processes for the same cores.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Task:
    """The jobs of some seeds in one case with one contender; `paid` documents `calibrates`."""

    case: Case
    name: str
    seeds: range
    calibrates: bool = False


def simulate(tasks: Sequence[Task], workers: int, progress: Callable[[int, int], None]) -> list[list[Paid]]:
    """Play all tasks, each in one process.

    Args:
        tasks: The tasks.
        workers: Number of processes; with 1, the tasks run in the calling process.
        progress: Called after each task with the number of finished tasks, and the number of all tasks.

    Returns:
        For each task, in the same order, the costs of each seed's job.
    """
    results: list[list[Paid]] = []
    with ExitStack() as stack:
        played: Iterable[list[Paid]] = map(_jobs, tasks)
        if workers > 1:
            stack.enter_context(_single_threaded())
            # Forking a process that may have threads is unsafe, and Windows cannot fork.
            pool = stack.enter_context(ProcessPoolExecutor(workers, mp_context=get_context("spawn")))
            played = pool.map(_jobs, tasks)
        for jobs in played:
            results.append(jobs)
            progress(len(results), len(tasks))
    return results


def _jobs(task: Task) -> list[Paid]:
    return [paid(task.case, task.name, seed, calibrates=task.calibrates) for seed in task.seeds]


@contextmanager
def _single_threaded() -> Iterator[None]:
    """Limit numerical libraries to one thread in each process that starts inside the `with` block."""
    before = dict(os.environ)
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
