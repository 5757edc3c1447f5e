"""The steps of a measurement, ordered so that trainings to be compared run close together in time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from benchmarks.recurrences.runs import Order
from benchmarks.recurrences.tasks import CONTENDERS, DEFAULT, UNSCALED, Task

T = TypeVar("T")

Stage = Literal["recurrence", "size", "overhead", "warm-up", "calibrate"]

OVERHEAD_EPOCHS = 3


@dataclass(frozen=True, slots=True)
class Extent:
    """The extent of a measurement.

    Attributes:
        seeds: Jobs of each task and contender, each with models and data of its own.
        recurrences: Recurrences of each job.
        repeats: Runs of each size, for each seed; they show which size was best in hindsight.
        pairs: Pairs of trainings, with and without the callback, for each seed.
        contenders: Names of those that train in turn in each recurrence.
    """

    seeds: int = 3
    recurrences: int = 20
    repeats: int = 2
    pairs: int = 3
    contenders: tuple[str, ...] = CONTENDERS


QUICK = Extent(seeds=1, recurrences=3, repeats=1, pairs=1)
"""The smallest extent, to show that everything works; its few trainings say little about the policies."""


@dataclass(frozen=True, slots=True)
class Step:
    """One training; a recurrence repeats the training until a run reaches the target.

    Attributes:
        stage: ``recurrence``: one recurrence of a job; ``size``: a run of one size; ``overhead``: a training with or
            without the callback; ``warm-up``, ``calibrate``: a run of one size without the callback.
        task: Name of the task.
        seed: Number of the job among the jobs of the task and contender.
        number: Number, from 0, of the recurrence, repeat or pair within this seed.
        who: The contender; the size; or ``with`` or ``without`` (the callback).
        order: Order for the first training. Each further training of a recurrence uses the next seed.
    """

    stage: Stage
    task: str
    seed: int
    number: int
    who: str
    order: Order

    @property
    def key(self) -> str:
        """Name of the step in the records."""
        drifted = " drifted" if self.order.drifted else ""
        return f"{self.stage} {self.task} seed {self.seed} number {self.number} {self.who}{drifted}"


def steps(tasks: Sequence[Task], extent: Extent) -> Iterator[Step]:
    """Yield all steps, seed by seed: the recurrences, the runs of each size, and the pairs, in this order.

    In each recurrence, all contenders of a task train in turn, and each recurrence begins with another contender. The
    order of the sizes, and the order of the two trainings of a pair, rotate in the same way.
    """
    for seed in range(extent.seeds):
        for number in range(extent.recurrences):
            for task in tasks:
                yield from _recurrence(task, seed, number, extent)
        for number in range(extent.repeats):
            for task in tasks:
                yield from _sizes(task, seed, number)
        for number in range(extent.pairs):
            for task in tasks:
                yield from _pair(task, seed, number)


def order_of(task: Task, job_id: str, seed: int, **fields: Any) -> Order:
    """Return the order for one training of `task`, with the task's target, `max_epochs` and `shrink`."""
    return Order(
        task=task.name,
        job_id=job_id,
        seed=seed,
        target=task.target,
        max_epochs=task.max_epochs,
        shrink=task.shrink,
        **fields,
    )


def _recurrence(task: Task, seed: int, number: int, extent: Extent) -> Iterator[Step]:
    for who in _in_turn(extent.contenders, number):
        order = order_of(
            task,
            job_id=f"{task.name}-{who}-{seed}",
            seed=_seed(seed, number),
            batch_size=task.default_batch_size if who == DEFAULT else None,
            drifted=task.drifted_at(number, extent.recurrences),
            lr_scaling="none" if who == UNSCALED else None,
        )
        yield Step("recurrence", task.name, seed, number, who, order)


def _sizes(task: Task, seed: int, number: int) -> Iterator[Step]:
    for drifted in (False, True) if task.drifts else (False,):
        for size in _in_turn(task.batch_sizes, number):
            order = order_of(
                task,
                job_id=f"{task.name}-size-{size}",
                seed=_seed(seed, 1000 + number),
                batch_size=size,
                drifted=drifted,
            )
            yield Step("size", task.name, seed, number, str(size), order)


def _pair(task: Task, seed: int, number: int) -> Iterator[Step]:
    for who in _in_turn(("with", "without"), number):
        order = order_of(
            task,
            job_id=f"{task.name}-overhead",
            seed=_seed(seed, 2000 + number),
            batch_size=task.default_batch_size,
            with_callback=who == "with",
            epochs=OVERHEAD_EPOCHS,
        )
        yield Step("overhead", task.name, seed, number, who, order)


def _in_turn(names: Sequence[T], number: int) -> list[T]:
    """Return `names`, rotated to the left by `number` places."""
    shift = number % len(names)
    return [*names[shift:], *names[:shift]]


def _seed(seed: int, number: int) -> int:
    return 100_000 * seed + 10 * number
