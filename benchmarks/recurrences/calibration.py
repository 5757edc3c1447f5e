"""Calibration of the targets for the hour on a GPU, by trainings at the default, smallest and largest size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from benchmarks.recurrences.plan import Step, order_of
from benchmarks.recurrences.tasks import Task
from benchmarks.reports import Record

SECONDS = (40.0, 60.0)
"""Least and most seconds of training that the default size should need to reach the target."""

ENOUGH_SIZES = 3
"""Number of sizes that should reach the target."""

ENOUGH_EVALUATIONS = 20
"""Number of evaluations that a run at the default size should have until the target."""

LEAST_LOAD = 0.7
"""Least mean power at the default size, as a share of the power limit, unless a task is launch-bound."""

IDLE_S = 10.0
"""Seconds for which the idle power is measured: before CUDA starts in the process, and after."""

_LONGEST_RUN = 4.0
"""Limit of the seconds of a run at the slowest calibrated size, as a multiple of the upper limit in `seconds`."""


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


def calibration_steps(task: Task, seconds: float) -> list[Step]:
    """Return a task's trainings before its target is known, each of `seconds`.

    They are the warm-up run, which shows the idle power and the load and is discarded, and the default, the smallest
    and the largest size.
    """
    sizes = [task.default_batch_size] * 2 + [task.batch_sizes[0], task.batch_sizes[-1]]
    orders = [
        order_of(task, job_id="", seed=7, batch_size=size, with_callback=False, seconds=seconds, idle_s=idle_s)
        for size, idle_s in zip(sizes, [IDLE_S / task.shrink, None, None, None], strict=True)
    ]
    return [
        Step("warm-up" if order.idle_s else "calibrate", task.name, 0, 0, str(order.batch_size), order)
        for order in orders
    ]


def load_problem(task: Task, warm_up: Record) -> str:
    """Return the remedy if the warm-up run drew too little power for the task to count, else "".

    The mean power is that between the first and the last evaluation, without the start of the training.
    """
    curve, limit_w = warm_up["curve"], warm_up.get("limit_w")
    if task.is_launch_bound or not curve or not limit_w:
        return ""
    (begun_s, begun_j, _), (ended_s, ended_j, _) = curve[0] if len(curve) > 1 else (0.0, 0.0, 0.0), curve[-1]
    mean_w = (ended_j - begun_j) / (ended_s - begun_s)
    if mean_w >= LEAST_LOAD * limit_w:
        return ""
    return (
        f"{task.name} draws {mean_w:.0f} W of {limit_w:.0f} W at its default size {task.default_batch_size}, less than"
        f" {LEAST_LOAD:.0%}: mostly idle energy would be compared. Raise the default size, or the width or the input of"
        " the model, in benchmarks/recurrences, or measure on a smaller GPU"
    )


def drift_problem(task: Task, records: Sequence[Record], seconds: tuple[float, float]) -> str:
    """Return the reason, if the first two recurrences at the default (`records`) do not fit the target, else ""."""
    first = [record for record in records if record["number"] < 2]
    missed = sum(not record["reached"] for record in first)
    times_s = [record["time_s"] for record in first if record["reached"]]
    fits = all(seconds[0] / 2 <= time_s <= 2 * seconds[1] for time_s in times_s)
    if len(first) < 2 or (fits and not missed):
        return ""
    told = ", ".join(f"{time_s:.0f} s" for time_s in times_s) or "no run"
    return (
        f"the target {task.target:g} of {task.name} does not fit any more: of {len(first)} runs at the default,"
        f" {missed} missed it, and the others took {told}. Calibrate anew: remove gpu-state.tgz, without --targets"
    )


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
    evaluations = next(place for place, (_, best) in enumerate(default, start=1) if best >= value)
    if evaluations < ENOUGH_EVALUATIONS:
        problems.append(f"the default size evaluates only {evaluations} times")
    epochs = math.ceil(evaluations / task.evaluations)
    slowest_s = task.evaluations * max(curve[-1][0] / len(curve) for curve in curves.values())
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
