"""The figures of the reports in JSON's types: of policies in simulated jobs, and of real trainings."""

from __future__ import annotations

import json
import math
import os
import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks.policies.calibration import total
from benchmarks.policies.cases import ROWS, Case
from benchmarks.policies.contest import CONTENDERS, Paid
from benchmarks.recurrences import tasks
from benchmarks.recurrences.tasks import CPU, DEFAULT, GPU, REFUSED, TASKS, Device
from bso_server.simulate.results import mean_curve
from zeus_plugins.energy import auto
from zeus_plugins.energy.estimate import cpu_model_name
from zeus_plugins.protocol import GP_VOI

RESULTS = Path(__file__).parent / "results"
"""Folder with the latest figures of each report that is in the documentation."""


def in_order(names: Iterable[str], order: Iterable[str]) -> list[str]:
    """Sort `names` by their position in `order`; names that `order` lacks come last."""
    left = set(names)
    known = [name for name in order if name in left]
    return known + sorted(left.difference(known))


# Policies and their rivals in simulated jobs

MARKS = (10, 20, 50, 100)
"""Numbers of recurrences after which costs are compared."""

MAIN_ROWS = ("traces", "mlperf", "landscapes")
"""Rows with their own table and panel, for which calibration is measured, too; all other rows share tables."""

Entry: TypeAlias = dict[str, Any]
"""Results of one contender in one row; see `entry`."""

PolicyResults: TypeAlias = dict[str, dict[str, Entry]]
"""Entries by row and contender."""


def entry(cases: Sequence[Case], jobs: Sequence[Sequence[Paid]]) -> Entry:
    """Summarise the costs of a contender in the cases of a row.

    Args:
        cases: The cases.
        jobs: Costs of the job of each seed in each case; shape (cases, seeds).

    Returns:
        ``{seeds, cases, geometric_mean: {N: …}, worst: {N: …}, worst_case, given_up, last_too_expensive, calibration:
        {KIND: [true, claims]}}``. The ratio of total cost to the oracle's after N recurrences is averaged over the
        seeds of each case; `geometric_mean` and `worst` are its geometric mean and maximum over the cases.
        `worst_case` is the worst case after all recurrences, `given_up` the number of abandoned recurrences in all
        jobs, `last_too_expensive` the share of jobs with a last size that is more than 5 % too expensive, and
        `calibration` the sums over all jobs. An infinite ratio is None.
    """
    curves = [
        mean_curve([case.ratios(job.costs_j) for job in of_case]) for case, of_case in zip(cases, jobs, strict=True)
    ]
    marks = [mark for mark in MARKS if mark <= len(curves[0])]
    columns = list(zip(*curves, strict=True))
    means = [math.exp(math.fsum(map(math.log, column)) / len(column)) for column in columns]
    last = columns[-1]
    tallies = total(job.tallies for of_case in jobs for job in of_case if job.tallies)
    too_expensive = [
        case.is_too_expensive(job.last_size) for case, of_case in zip(cases, jobs, strict=True) for job in of_case
    ]
    return {
        "seeds": len(jobs[0]),
        "cases": len(cases),
        "geometric_mean": {str(mark): _rounded(means[mark - 1]) for mark in marks},
        "worst": {str(mark): _rounded(max(columns[mark - 1])) for mark in marks},
        "worst_case": cases[last.index(max(last))].name,
        "given_up": sum(job.given_up for of_case in jobs for job in of_case),
        "last_too_expensive": round(sum(too_expensive) / len(too_expensive), 4),
        **({"calibration": tallies} if tallies else {}),
    }


def _rounded(ratio: float) -> float | None:
    return round(ratio, 4) if math.isfinite(ratio) else None


def read_policy_results(file: Path) -> PolicyResults:
    """Return earlier measurements; if the file does not exist, an empty result."""
    results: PolicyResults = json.loads(file.read_text("utf-8")) if file.exists() else {}
    return results


def write_policy_results(results: PolicyResults, file: Path) -> None:
    """Write JSON with a line for each entry, rows and contenders in the report's order."""
    rows = []
    for row in in_order(results, ROWS):
        entries = [
            f'    "{name}": {json.dumps(results[row][name], ensure_ascii=False)}'
            for name in in_order(results[row], CONTENDERS)
        ]
        rows.append(f'  "{row}": {{\n' + ",\n".join(entries) + "\n  }")
    file.write_text("{\n" + ",\n".join(rows) + "\n}\n", "utf-8")


def made_conditions(results: PolicyResults) -> PolicyResults:
    """Return the results on generated landscapes under difficult conditions, in the report's order."""
    return {name: results[name] for name in ROWS if name in results and name not in MAIN_ROWS}


# Real trainings

Record: TypeAlias = dict[str, Any]
"""One training: the fields of its step and outcome, its time, and the load of the machine while it ran."""

ProofResults: TypeAlias = dict[str, Any]
"""``{device, trained_on, machine, begun_at, ended_at, energy_sources, load, tasks, total}``; see `_task_results`."""

Recurrence: TypeAlias = tuple[int, int]
"""Seed of a job, and number of a recurrence in it."""

Numbers: TypeAlias = npt.NDArray[np.float64]

MEASURES = ("cost_j", "energy_j", "time_s")

_EARLY = 5
"""The share saved is also computed for this number of first recurrences of each job."""

_RESAMPLES = 2000
_TAILS = (2.5, 97.5)


class Interval(NamedTuple):
    """A value and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class SizeFigure:
    """The cost of one size in hindsight.

    Attributes:
        batch_size: The size.
        runs: Number of measured runs.
        reached: Number of runs that reached the target.
        cost_j: Mean cost until a run reaches the target, including repeated runs after misses; None if all runs missed.
    """

    batch_size: int
    runs: int
    reached: int
    cost_j: float | None


def machine(device: Device = CPU) -> dict[str, str]:
    """Return the machine's kind, the names of its GPUs if they train, and the versions of relevant packages."""
    gpus = {} if device == CPU else {"GPU": auto().gpus().gpu_model}
    return {
        **gpus,
        "CPU": cpu_model_name(),
        "cores": str(os.cpu_count()),
        "Python": platform.python_version(),
        **{name: version(name) for name in ("torch", "lightning", "transformers", "zeus-plugins")},
    }


def proof_results(records: Sequence[Record], of_machine: dict[str, str]) -> ProofResults:
    """Return the figures of all tasks.

    Args:
        records: Records of all trainings.
        of_machine: Result of `machine` where the trainings ran.

    Raises:
        ValueError: There are no records, or the records come from two kinds of devices.
    """
    if not records:
        raise ValueError("nothing has been measured yet: run `python -m benchmarks.recurrences run` first")
    broken = [record for record in records if record["state"] == "broken"]
    records = [record for record in records if record["state"] != "broken"]
    if not records:
        raise ValueError(f"all trainings broke: {broken[-1]['detail']}")
    names = [name for name in TASKS if any(record["task"] == name for record in records)]
    devices = {TASKS[name].device for name in names}
    if len(devices) > 1:
        raise ValueError("CPU and GPU have both been measured there: collect the --state of one device")
    loads = [record["load_1"] for record in records]
    found = {name: _task_results(name, [each for each in records if each["task"] == name]) for name in names}
    return {
        "device": devices.pop(),
        "trained_on": sorted({record["device"] for record in records if "device" in record}),
        "machine": of_machine,
        "begun_at": min(record["begun_at"] for record in records),
        "ended_at": max(record["begun_at"] for record in records),
        "energy_sources": sorted({record["energy_source"] for record in records if record["energy_source"]}),
        "load": {"median": median(loads), "highest": max(loads)},
        "trainings": len(records),
        "broken": sorted({f"{record['key']}: {record['detail'].splitlines()[-1]}" for record in broken}),
        "tasks": found,
        "total": _total(found),
    }


def _total(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the energy that each contender saved over all tasks: in all recurrences, and in the first five.

    Returns:
        ``{NAME: {saved, early, worst}}``: two shares with their intervals, and the name of the task that saved least.
    """
    of_tasks = {name: task["contenders"] for name, task in found.items() if task["contenders"]}
    names = [] if not of_tasks else [who for who in tasks.CONTENDERS if all(who in of for of in of_tasks.values())]
    totals: dict[str, Any] = {}
    for who in names:
        # Whether the recurrence is an early one, its task, and its joules with the contender and at the default.
        rows = [
            (number < _EARLY, place, spent_j, default_j)
            for place, of in enumerate(of_tasks.values())
            for (_, number, spent_j), (*_, default_j) in zip(
                of[who]["energies_j"], of[DEFAULT]["energies_j"], strict=True
            )
        ]
        shares = {name: of[who]["saved"]["energy_j"][0] for name, of in of_tasks.items()}
        totals[who] = {"worst": min(shares, key=shares.__getitem__)}
        for name, part in (("saved", rows), ("early", [row for row in rows if row[0]])):
            totals[who][name] = bootstrap([row[2:] for row in part], share_saved, [row[1] for row in part])
    return totals


def _task_results(name: str, records: Sequence[Record]) -> dict[str, Any]:
    """Return the figures of one task.

    Returns:
        ``{title, default, jobs, recurrences, longest_job, contenders: {NAME: {cost_j, energy_j, time_s,
        energies_j: [[seed, number, joules]], saved: {cost_j, …}, early, later, break_even, regret, tries, given_up,
        curve}}, sizes: [{batch_size, runs, reached, cost_j, drifted}], best_sizes, overhead: {pairs, cpu, wall}}``.
        Sums are over all recurrences that every contender has finished. `saved` has the share saved with its interval;
        `early` and `later` have the share of cost saved in the first five recurrences and in the later half of each
        job. `curve` is the ratio of total cost to the default's after each recurrence. None means not measured.
    """
    of_stage: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        of_stage[record["stage"]].append(record)
    paid = {who: found for who in tasks.CONTENDERS if (found := _paid(of_stage["recurrence"], who))}
    common = sorted(set.intersection(*map(set, paid.values()))) if tasks.DEFAULT in paid else []
    drifted = {(record["seed"], record["number"]): record["drifted"] for record in of_stage["recurrence"]}
    sizes = {phase: _sizes(of_stage["size"], drifted=phase) for phase in (False, True)}
    best = {phase: best_size(of_phase) for phase, of_phase in sizes.items()}
    best_j = [None if (best_of := best[drifted[each]]) is None else best_of.cost_j for each in common]
    return {
        "title": TASKS[name].title,
        "default": TASKS[name].default_batch_size,
        "jobs": len({seed for seed, _ in common}),
        "recurrences": len(common),
        "longest_job": len({number for _, number in common}),
        "contenders": {who: _contender(each, paid[DEFAULT], common, best_j) for who, each in paid.items() if common},
        "limit_w": max(
            (limit_w for each in of_stage["calibrate"] + of_stage["warm-up"] if (limit_w := each.get("limit_w"))),
            default=None,
        ),
        "calibration": [_calibration(each) for each in of_stage["calibrate"]],
        "sizes": [{**asdict(each), "drifted": phase} for phase, of_phase in sizes.items() for each in of_phase],
        "best_sizes": [found.batch_size for found in best.values() if found is not None],
        "overhead": _overhead(of_stage["overhead"]),
        "hour": _hour(paid, common, of_stage) if TASKS[name].device == GPU else None,
    }


def _hour(
    paid: Mapping[str, Mapping[Recurrence, Mapping[str, float]]],
    common: Sequence[Recurrence],
    of_stage: Mapping[str, Sequence[Record]],
) -> dict[str, Any] | None:
    """Return the energies of the policy and the default on a GPU; None if one of them has no recurrence.

    Returns:
        ``{jobs, recurrences, idle_w, context_w, counted: [{name, default_j, policy_j, saved, last, wins}], sample_j:
        {NAME: joules}, to_best, to_largest}``. `last` is the share saved in the last five recurrences of each job, and
        `wins` the number of recurrences in which the policy took less energy. `to_best` and `to_largest` are the mean
        energy of a recurrence of the policy, divided by the energy of a run at the best size, and at the largest size
        that fits into the memory; None if it was not measured or missed the target.
    """
    if GP_VOI not in paid or not common:
        return None
    names = ("energy_j", "time_s", "process_j", "samples")
    spent = {
        who: {
            name: np.array([paid[who][of][name] + paid[who][of]["given_up"] * paid[DEFAULT][of][name] for of in common])
            for name in names
        }
        for who in (GP_VOI, DEFAULT)
    }
    idle = next(iter(of_stage["warm-up"]), {})
    idle_w = {name: idle.get(name) for name in ("idle_w", "context_w")}
    counted = {
        "all": {who: of["energy_j"] for who, of in spent.items()},
        **{
            f"above {power_w:.0f} W, idle {words}": {
                who: of["energy_j"] - power_w * of["time_s"] for who, of in spent.items()
            }
            for words, power_w in zip(("before CUDA starts", "with a CUDA context"), idle_w.values(), strict=True)
            if power_w is not None
        },
        "all of the processes, with their start": {who: of["process_j"] for who, of in spent.items()},
    }
    jobs = [seed for seed, _ in common]
    is_last = np.array([number >= max(other for of, other in common if of == seed) - 4 for seed, number in common])
    sizes = {each["batch_size"]: each for each in of_stage["size"] if each["state"] != "out_of_memory"}
    reached = {size: each["energy_j"] for size, each in sizes.items() if each["reached"]}
    mean_j = float(spent[GP_VOI]["energy_j"].mean())
    largest_j = reached.get(max(sizes, default=0))
    return {
        "jobs": len(set(jobs)),
        "recurrences": len(common),
        **idle_w,
        "counted": [
            {
                "name": name,
                "default_j": float(of[DEFAULT].sum()),
                "policy_j": float(of[GP_VOI].sum()),
                "saved": _saved_by_job(of[GP_VOI], of[DEFAULT], jobs),
                "last": float(1 - of[GP_VOI][is_last].sum() / of[DEFAULT][is_last].sum()),
                "wins": int((of[GP_VOI] < of[DEFAULT]).sum()),
            }
            for name, of in counted.items()
            if of[DEFAULT].all()
        ],
        "sample_j": {
            who: float(of["energy_j"].sum() / of["samples"].sum()) for who, of in spent.items() if of["samples"].all()
        },
        "to_best": mean_j / min(reached.values()) if reached else None,
        "to_largest": mean_j / largest_j if largest_j else None,
    }


def _saved_by_job(spent: Numbers, needed: Numbers, jobs: Sequence[int]) -> Interval:
    """Return the share saved; its interval resamples whole jobs or, of one job, its recurrences."""
    if len(set(jobs)) == 1:
        return _saved(list(spent), list(needed))
    of_jobs = [np.array(jobs) == job for job in sorted(set(jobs))]
    return _saved([spent[of].sum() for of in of_jobs], [needed[of].sum() for of in of_jobs])


def _paid(records: Iterable[Record], who: str) -> dict[Recurrence, dict[str, float]]:
    """Return for each recurrence the sums of each measure over its trainings, `tries`, and `given_up` (1 or 0)."""
    tries: dict[Recurrence, list[Record]] = defaultdict(list)
    for record in records:
        if record["who"] == who:
            tries[record["seed"], record["number"]].append(record)
    return {
        of: {measure: sum(each[measure] for each in trained) for measure in MEASURES}
        | {measure: sum(each.get(measure) or 0.0 for each in trained) for measure in ("process_j", "samples")}
        | {
            "tries": sum(each["state"] != REFUSED for each in trained),
            "given_up": float(not any(each["reached"] for each in trained)),
        }
        for of, trained in tries.items()
    }


def _contender(
    paid: Mapping[Recurrence, Mapping[str, float]],
    default: Mapping[Recurrence, Mapping[str, float]],
    common: Sequence[Recurrence],
    best_j: Sequence[float | None],
) -> dict[str, Any]:
    """Return the figures of one contender; a recurrence that it gave up includes the cost of a run at the default."""
    spent = {
        measure: [paid[of][measure] + paid[of]["given_up"] * default[of][measure] for of in common]
        for measure in MEASURES
    }
    needed = {measure: [default[of][measure] for of in common] for measure in MEASURES}
    numbers = sorted({number for _, number in common})
    early = [place for place, (_, number) in enumerate(common) if number in numbers[:_EARLY]]
    later = [place for place, (_, number) in enumerate(common) if number >= numbers[len(numbers) // 2]]
    cost_j, default_j = spent["cost_j"], needed["cost_j"]
    by_number, default_by_number = (
        [sum(each[place] for place, of in enumerate(common) if of[1] == number) for number in numbers]
        for each in (cost_j, default_j)
    )
    known_j = [each for each in best_j if each is not None]
    return {
        **{measure: sum(spent[measure]) for measure in MEASURES},
        "energies_j": [[*of, energy_j] for of, energy_j in zip(common, spent["energy_j"], strict=True)],
        "saved": {measure: _saved(spent[measure], needed[measure]) for measure in MEASURES},
        "early": _saved([cost_j[place] for place in early], [default_j[place] for place in early]),
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
    of_size: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        if record["drifted"] == drifted:
            of_size[record["batch_size"]].append(record)
    return hindsight({size: [(each["cost_j"], each["reached"]) for each in runs] for size, runs in of_size.items()})


def _calibration(record: Record) -> dict[str, Any]:
    """Return the figures of a calibration's training: the metric of each epoch, times, powers and memory."""
    curve = record["curve"]
    return {
        "batch_size": record["batch_size"],
        "state": record["state"],
        "metrics": [metric for _, _, metric in curve],
        "time_s": curve[-1][0] if curve else None,
        "mean_w": curve[-1][1] / curve[-1][0] if curve else None,
        **{name: record[name] for name in ("peak_w", "memory_gib")},
    }


def _overhead(records: Iterable[Record]) -> dict[str, Any] | None:
    """Return the median ratios, over pairs of trainings, of trainings with the callback to trainings without it."""
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


def bootstrap(
    samples: Sequence[Sequence[float]], statistic: Callable[[Numbers], float], groups: Sequence[int] = ()
) -> Interval:
    """Return a statistic of samples, and its 2.5th and 97.5th percentile when samples are drawn with replacement.

    Args:
        samples: Shape (samples, values): rows are drawn whole. The draws are the same at each call.
        statistic: Function that computes the statistic from an array like `samples`.
        groups: Group of each sample, if each draw is to contain as many samples of each group as there are.

    Raises:
        ValueError: There is no sample.
    """
    values = np.asarray(samples, dtype=np.float64)
    if not len(values):
        raise ValueError("there are no samples")
    rng = np.random.default_rng(0)
    labels = np.asarray(groups or [0] * len(values))
    places = [np.flatnonzero(labels == group) for group in np.unique(labels)]
    drawn = [
        statistic(values[np.concatenate([of[rng.integers(0, len(of), len(of))] for of in places])])
        for _ in range(_RESAMPLES)
    ]
    low, high = np.percentile(drawn, _TAILS)
    return Interval(statistic(values), float(low), float(high))


def share_saved(pairs: Numbers) -> float:
    """Return 1 minus the ratio of the first column's sum to the second column's sum."""
    return float(1 - pairs[:, 0].sum() / pairs[:, 1].sum())


def median_ratio(pairs: Numbers) -> float:
    """Return the median of the ratios of the first column to the second, row by row."""
    return float(np.median(pairs[:, 0] / pairs[:, 1]))


def break_even(costs_j: Sequence[float], default_j: Sequence[float]) -> int | None:
    """Return the first recurrence (from 1) from which on the total cost never exceeds the default's, or None.

    Args:
        costs_j: Cost of each recurrence.
        default_j: Cost of the same recurrences at the default size.
    """
    totals = zip(accumulate(costs_j), accumulate(default_j), strict=True)
    behind = [number for number, (spent_j, needed_j) in enumerate(totals, start=1) if spent_j > needed_j]
    last = behind[-1] if behind else 0
    return last + 1 if last < len(costs_j) else None


def hindsight(runs: Mapping[int, Sequence[tuple[float, bool]]]) -> list[SizeFigure]:
    """Return the cost of each size, by ascending size; `runs` has each run's cost (J) and whether it succeeded."""
    figures = []
    for size, of_size in sorted(runs.items()):
        reached = sum(is_reached for _, is_reached in of_size)
        cost_j = sum(cost_j for cost_j, _ in of_size) / reached if reached else None
        figures.append(SizeFigure(size, len(of_size), reached, cost_j))
    return figures


def best_size(figures: Sequence[SizeFigure]) -> SizeFigure | None:
    """Return the cheapest size in hindsight; None if none has reached the target."""
    known = [(figure.cost_j, figure) for figure in figures if figure.cost_j is not None]
    return min(known, key=lambda pair: pair[0])[1] if known else None


def regret(costs_j: Sequence[float], best_j: Sequence[float]) -> float:
    """Return the extra cost of recurrences, compared with the best size, as a share of the best size's cost."""
    return sum(costs_j) / sum(best_j) - 1
