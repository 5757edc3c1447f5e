"""Simulated jobs in parallel processes, with the same results whatever their number."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TypeAlias

from benchmarks.policies.cases import Case
from benchmarks.policies.contest import Paid, paid

# Threads of numerical libraries would compete with the processes for the same cores.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


Progress: TypeAlias = Callable[[int, int], None]
"""Takes note of the number of tasks that are done, of so many."""


@dataclass(frozen=True, slots=True)
class Task:
    """The jobs of some seeds, in one case, with one contender."""

    case: Case
    name: str
    seeds: range


def simulate(tasks: Sequence[Task], workers: int, progress: Progress) -> list[list[Paid]]:
    """Play all tasks.

    Args:
        tasks: What to play; each is played in one process.
        workers: Processes; with 1 there is only this one.
        progress: Called after each task.

    Returns:
        In the order of the tasks, what the job of each seed has cost.
    """
    results: list[list[Paid]] = [[] for _ in tasks]
    for done, (index, jobs) in enumerate(_played(tasks, workers), start=1):
        results[index] = jobs
        progress(done, len(tasks))
    return results


def _played(tasks: Sequence[Task], workers: int) -> Iterator[tuple[int, list[Paid]]]:
    """The index and result of each task, in the order in which they end."""
    if workers == 1:
        yield from enumerate(map(_jobs, tasks))
        return
    # Forking a process that may have threads is unsafe; other systems than Linux do not even offer it.
    with _single_threaded(), ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(_jobs, task): index for index, task in enumerate(tasks)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            # Else the pool would finish all that is left first.
            pool.shutdown(cancel_futures=True)
            raise


def _jobs(task: Task) -> list[Paid]:
    return [paid(task.case, task.name, seed) for seed in task.seeds]


@contextmanager
def _single_threaded() -> Iterator[None]:
    """Let processes that are started meanwhile compute in one thread each."""
    before = {name: os.environ.get(name) for name in _THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
