"""The figures of a measurement, as JSON's types, from the records of its trainings."""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from itertools import accumulate
from statistics import median
from typing import Any, TypeAlias

from benchmarks.recurrences.plan import CONTENDERS
from benchmarks.recurrences.runs import DEFAULT, REFUSED
from benchmarks.recurrences.state import Record
from benchmarks.recurrences.statistics import (
    Interval,
    SizeFigure,
    best_size,
    bootstrap,
    break_even,
    hindsight,
    median_ratio,
    regret,
    share_saved,
)
from benchmarks.recurrences.tasks import CPU, TASKS, Device
from zeus_plugins.energy import auto
from zeus_plugins.energy.estimate import cpu_model_name

Results: TypeAlias = dict[str, Any]
"""``{device, trained_on, machine, begun_at, ended_at, energy_sources, load, tasks: {NAME: …}}``; see `task_results`."""

Recurrence: TypeAlias = tuple[int, int]
"""A seed and a number."""

MEASURES = ("cost_j", "energy_j", "time_s")


def machine(device: Device = CPU) -> dict[str, str]:
    """The machine's kind, the driver's name of its GPUs where they train, and the versions that matter."""
    gpus = {} if device == CPU else {"GPU": auto().gpus().gpu_model}
    return {
        **gpus,
        "CPU": cpu_model_name(),
        "cores": str(os.cpu_count()),
        "Python": platform.python_version(),
        **{name: version(name) for name in ("torch", "lightning", "transformers", "zeus-plugins")},
    }


def results_of(records: Sequence[Record], of_machine: dict[str, str]) -> Results:
    """The figures of all tasks.

    Args:
        records: Of all trainings.
        of_machine: Where they ran, as `machine` tells.

    Raises:
        ValueError: There are none.
    """
    if not records:
        raise ValueError("nothing has been measured yet: run `python -m benchmarks.recurrences run` first")
    names = [name for name in TASKS if any(record["task"] == name for record in records)]
    devices = {TASKS[name].device for name in names}
    if len(devices) > 1:
        raise ValueError("CPU and GPU have both been measured there: collect the --state of one device")
    loads = [record["load_1"] for record in records]
    return {
        "device": devices.pop(),
        "trained_on": sorted({record["device"] for record in records if "device" in record}),
        "machine": of_machine,
        "begun_at": min(record["begun_at"] for record in records),
        "ended_at": max(record["begun_at"] for record in records),
        "energy_sources": sorted({record["energy_source"] for record in records if record["energy_source"]}),
        "load": {"median": median(loads), "highest": max(loads)},
        "trainings": len(records),
        "tasks": {name: task_results(name, [each for each in records if each["task"] == name]) for name in names},
    }


def fleet_summary(fleet: dict[str, Any]) -> dict[str, Any]:
    """The figures of `benchmarks.year` for a summary: their extent, and the share of energy saved by policy."""
    saved = {policy: found["energy_share_saved"] for policy, found in fleet["policies"].items()}
    return {"jobs": fleet["jobs"], "recurrences": fleet["recurrences"], "policies": saved}


def task_results(name: str, records: Sequence[Record]) -> dict[str, Any]:
    """The figures of one task.

    Returns:
        ``{title, default, jobs, recurrences, longest_job, contenders: {NAME: {cost_j, energy_j, time_s,
        saved: {cost_j, …}, later, break_even, regret, tries, given_up, curve}}, sizes: [{batch_size, runs, reached,
        cost_j, drifted}], best_sizes, overhead: {pairs, cpu, wall}}``. Sums are over all recurrences that every
        contender has finished; `saved` has the share saved with its interval, `later` the same of the cost of the
        later half of each job, `curve` the total cost over the default's after each recurrence. None stands for what
        was not measured.
    """
    of_stage: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        of_stage[record["stage"]].append(record)
    paid = {who: _paid(of_stage["recurrence"], who) for who in CONTENDERS}
    common = sorted(set.intersection(*(set(each) for each in paid.values())))
    drifted = {(record["seed"], record["number"]): record["drifted"] for record in of_stage["recurrence"]}
    sizes = {phase: _sizes(of_stage["size"], drifted=phase) for phase in (False, True)}
    best = {phase: best_size(of_phase) for phase, of_phase in sizes.items()}
    best_j = [None if (found := best[drifted[each]]) is None else found.cost_j for each in common]
    numbers = sorted({number for _, number in common})
    return {
        "title": TASKS[name].title,
        "default": TASKS[name].default_batch_size,
        "jobs": len({seed for seed, _ in common}),
        "recurrences": len(common),
        "longest_job": len(numbers),
        "contenders": {who: _contender(paid[who], paid[DEFAULT], common, best_j) for who in CONTENDERS if common},
        "sizes": [
            {"batch_size": each.batch_size, "runs": each.runs, "reached": each.reached, "cost_j": each.cost_j}
            | {"drifted": phase}
            for phase, of_phase in sizes.items()
            for each in of_phase
        ],
        "best_sizes": [found.batch_size for phase, found in best.items() if found is not None],
        "overhead": _overhead(of_stage["overhead"]),
    }


class _Paid(dict[str, float]):
    """The costs of a recurrence: the sums of its trainings by measure, its `tries`, and 1 if it was `given_up`."""


def _paid(records: Iterable[Record], who: str) -> dict[Recurrence, _Paid]:
    tries: dict[Recurrence, list[Record]] = defaultdict(list)
    for record in records:
        if record["who"] == who:
            tries[record["seed"], record["number"]].append(record)
    return {
        of: _Paid(
            {measure: sum(each[measure] for each in trained) for measure in MEASURES}
            | {
                "tries": sum(each["state"] != REFUSED for each in trained),
                "given_up": float(not any(each["reached"] for each in trained)),
            }
        )
        for of, trained in tries.items()
    }


def _contender(
    paid: dict[Recurrence, _Paid],
    default: dict[Recurrence, _Paid],
    common: Sequence[Recurrence],
    best_j: Sequence[float | None],
) -> dict[str, Any]:
    """Figures of one contender; what it has given up is finished by the default."""
    spent = {
        measure: [paid[of][measure] + paid[of]["given_up"] * default[of][measure] for of in common]
        for measure in MEASURES
    }
    needed = {measure: [default[of][measure] for of in common] for measure in MEASURES}
    numbers = sorted({number for _, number in common})
    later = [place for place, (_, number) in enumerate(common) if number >= numbers[len(numbers) // 2]]
    cost_j, default_j = spent["cost_j"], needed["cost_j"]
    by_number, default_by_number = (
        [sum(each[place] for place, of in enumerate(common) if of[1] == number) for number in numbers]
        for each in (cost_j, default_j)
    )
    known_j = [each for each in best_j if each is not None]
    return {
        **{measure: sum(spent[measure]) for measure in MEASURES},
        "saved": {measure: _saved(spent[measure], needed[measure]) for measure in MEASURES},
        "later": _saved([cost_j[place] for place in later], [default_j[place] for place in later]),
        "break_even": break_even(by_number, default_by_number),
        "regret": regret(cost_j, known_j) if len(known_j) == len(cost_j) else None,
        "tries": int(sum(paid[of]["tries"] for of in common)),
        "given_up": int(sum(paid[of]["given_up"] for of in common)),
        "curve": [
            total_j / default_total_j
            for total_j, default_total_j in zip(accumulate(by_number), accumulate(default_by_number), strict=True)
        ],
    }


def _saved(spent: Sequence[float], needed: Sequence[float]) -> Interval:
    return bootstrap(list(zip(spent, needed, strict=True)), share_saved)


def _sizes(records: Iterable[Record], *, drifted: bool) -> list[SizeFigure]:
    runs: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for record in records:
        if record["drifted"] == drifted:
            runs[record["batch_size"]].append((record["cost_j"], record["reached"]))
    return hindsight(runs)


def _overhead(records: Iterable[Record]) -> dict[str, Any] | None:
    """Ratios of whole trainings with the callback over those without, pair by pair."""
    pairs: dict[Recurrence, dict[str, Record]] = defaultdict(dict)
    for record in records:
        pairs[record["seed"], record["number"]][record["who"]] = record
    whole = [pair for pair in pairs.values() if len(pair) == 2]
    if not whole:
        return None
    ratios = {
        clock: bootstrap([(pair["with"][field], pair["without"][field]) for pair in whole], median_ratio)
        for clock, field in (("cpu", "fit_cpu_s"), ("wall", "fit_wall_s"))
    }
    seconds = {who: median(pair[who]["fit_cpu_s"] for pair in whole) for who in ("with", "without")}
    return {"pairs": len(whole), **ratios, "cpu_s": seconds}
