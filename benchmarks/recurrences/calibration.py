"""Calibration of the targets for the hour on a GPU, by trainings at the default, smallest and largest size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from benchmarks.recurrences.harness import BROKEN, MAX_BROKEN
from benchmarks.recurrences.plan import Step, order_of
from benchmarks.recurrences.tasks import Task
from benchmarks.reports import Record

SECONDS = (20.0, 60.0)
"""Least and most seconds of training that the default size should need to reach the target."""

ENOUGH_SIZES = 3
"""Number of sizes that should reach the target."""

_LONGEST_RUN = 4.0
"""Limit of the seconds of a run at the slowest calibrated size, as a multiple of the upper limit in `seconds`."""

_NEIGHBOURS = (2.0, 0.5, 4.0, 0.25)
"""Further sizes to train if too few sizes reach the target, as multiples of the default."""


@dataclass(frozen=True, slots=True)
class Target:
    """The target of a task.

    Attributes:
        metric: Value of the metric at which a run ends with success.
        max_epochs: Maximum of epochs of a run.
        reached_s: Seconds of training until the target, by size; sizes that missed it are absent.
        problem: Requirement that the target does not meet, or "".
    """

    metric: float
    max_epochs: int
    reached_s: dict[int, float]
    problem: str = ""


def next_step(task: Task, records: Sequence[Record], seconds: tuple[float, float]) -> Step | None:
    """Return the next training of a task's calibration, or None if the calibration is complete.

    Args:
        task: The task.
        records: Records of this task's calibration trainings.
        seconds: Least and most seconds of training that the default size should need to reach the target.
    """
    tried = Counter(record["batch_size"] for record in records)
    broken = Counter(record["batch_size"] for record in records if record["state"] == BROKEN)
    done = {size for size in tried if tried[size] > broken[size] or broken[size] >= MAX_BROKEN}
    sizes = [task.default_batch_size, task.batch_sizes[0], task.batch_sizes[-1]]
    if all(size in done for size in sizes) and len(target(task, records, seconds).reached_s) < ENOUGH_SIZES:
        sizes += [size for each in _NEIGHBOURS if (size := round(each * task.default_batch_size)) in task.batch_sizes]
    missing = [size for size in sizes if size not in done]
    if not missing or (len(done) > ENOUGH_SIZES and len(target(task, records, seconds).reached_s) >= ENOUGH_SIZES):
        return None
    size = missing[0]
    order = order_of(
        task,
        job_id=f"{task.name}-calibrate",
        seed=7,
        batch_size=size,
        with_callback=False,
        seconds=seconds[1],
    )
    return Step("calibrate", task.name, 0, 0, str(size), order)


def target(task: Task, records: Sequence[Record], seconds: tuple[float, float]) -> Target:
    """Return a task's target, derived from its calibration trainings.

    A candidate lies midway between the best metrics after two adjacent epochs at the default size. It fits if the
    default size reaches it after at least `seconds[0]` and little more than `seconds[1]`; if none fits, only the last
    is considered. The target is the first fitting candidate that `ENOUGH_SIZES` sizes reach in the calibration. If no
    fitting candidate is reached by enough sizes, the target is the first that the largest number of sizes reaches.
    """
    curves = {record["batch_size"]: _rising(task, record["curve"]) for record in records if record["curve"]}
    default = curves.get(task.default_batch_size, [])
    if len(default) < 2:
        return Target(task.target, task.max_epochs, {}, "the default size has trained fewer than two epochs")
    found: list[tuple[bool, int, float, dict[int, float]]] = []
    for (_, before), (at_s, after) in pairwise(default):
        if after > before:
            value = (before + after) / 2
            reached_s = {
                size: reached for size, curve in curves.items() if (reached := _reached_s(curve, value)) is not None
            }
            found.append((seconds[0] <= at_s <= 1.2 * seconds[1], len(reached_s), value, reached_s))
    if not found:
        return Target(task.target, task.max_epochs, {}, "the metric does not improve at the default size")
    fitting = [each for each in found if each[0]] or found[-1:]
    most = max(each[1] for each in fitting)
    is_in_time, count, value, reached_s = next(each for each in fitting if each[1] >= min(most, ENOUGH_SIZES))
    problems = [] if is_in_time else [f"the default size reaches it outside of {seconds[0]:g} to {seconds[1]:g} s"]
    if count < ENOUGH_SIZES:
        problems.append(f"only {count} of {len(curves)} sizes reach it")
    epochs = next(place for place, (_, best) in enumerate(default, start=1) if best >= value)
    slowest_s = max(curve[-1][0] / len(curve) for curve in curves.values())
    max_epochs = max(epochs + 2, min(3 * epochs, int(_LONGEST_RUN * seconds[1] / slowest_s)))
    metric = value if task.higher_is_better else -value
    return Target(float(f"{metric:.3g}"), max_epochs, reached_s, "; ".join(problems))


def calibrated(task: Task, found: Target) -> Task:
    """Return the task with its calibrated target."""
    return replace(task, target=found.metric, max_epochs=found.max_epochs)


def _rising(task: Task, curve: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Return seconds and best metric so far at the end of each epoch; negate metrics for which lower is better."""
    best, found = float("-inf"), []
    for at_s, _, metric in curve:
        best = max(best, metric if task.higher_is_better else -metric)
        found.append((at_s, best))
    return found


def _reached_s(curve: Sequence[tuple[float, float]], value: float) -> float | None:
    return next((at_s for at_s, best in curve if best >= value), None)
