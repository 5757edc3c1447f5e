"""The tables of a measurement, by the names of their marks in documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.documents import mark_of, markdown_table, replace_tables
from benchmarks.recurrences.report import Results
from benchmarks.recurrences.runs import DEFAULT, SIMULATED
from benchmarks.recurrences.tasks import GPU
from zeus_plugins.protocol import GP_VOI, ZEUS

Interval = Sequence[float]

_ENOUGH = 10


def tables(results: Results) -> dict[str, str]:
    """The tables of a measurement, as Markdown."""
    prefix = "gpu" if results["device"] == GPU else "proof"
    made = {"": _savings(results), "-sizes": _sizes(results), "-overhead": _overhead(results)}
    if results.get("parts"):
        made["-parts"] = _parts(results)
    made["-conditions"] = _conditions(results)
    if results["device"] == GPU:
        made["-status"] = _status(results)
    if not _is_simulated(results):
        made["-summary"] = _summary(results)
    return {f"{prefix}{name}": table for name, table in made.items()}


def write_tables(results: Results, files: Sequence[Path]) -> None:
    """Put the tables into documents, each where a document has marks for it.

    Raises:
        ValueError: A document has marks for none of them.
    """
    for file in files:
        shown = file.read_text("utf-8")
        wanted = {name: table for name, table in tables(results).items() if mark_of(name) in shown}
        if not wanted:
            raise ValueError(f"{file} has no line such as {mark_of(next(iter(tables(results))))} for a table")
        replace_tables(wanted, file)


def text(results: Results) -> str:
    """All tables, for the terminal."""
    return "\n\n".join(tables(results).values())


def _savings(results: Results) -> str:
    head = [
        "task",
        "jobs, recurrences",
        "contender",
        f"energy, kJ ({energy_of(results)})",
        "energy saved",
        "time saved",
    ]
    lines = [[*head, "cost saved (95 %)", "in the later half", "break-even at", "regret", "trainings", "given up"]]
    for name, task in results["tasks"].items():
        extent = [name, f"{task['jobs']}, {task['recurrences']}"]
        for who in (GP_VOI, ZEUS, DEFAULT):
            found = task["contenders"].get(who)
            if found is None:
                continue
            energy = _three_digits(found["energy_j"] / 1000)
            regret = "–" if found["regret"] is None else _share(found["regret"], signed=True)
            counts = [regret, str(found["tries"]), str(found["given_up"])]
            if who == DEFAULT:
                lines.append([*extent, f"always {task['default']}", energy, *["–"] * 5, *counts])
                continue
            saved = [_share(found["saved"][measure][0]) for measure in ("energy_j", "time_s")]
            intervals = [_interval(found["saved"]["cost_j"]), _interval(found["later"])]
            even = "not yet" if found["break_even"] is None else str(found["break_even"])
            lines.append([*extent, f"`{who}`", energy, *saved, *intervals, even, *counts])
    return markdown_table(lines)


def _summary(results: Results) -> str:
    """For the README: means over the tasks with the extremes of them, and a fleet's figures where there are some.

    Of tasks that recurred less than `_ENOUGH` times nothing is said, unless all have.
    """
    enough = [task for task in results["tasks"].values() if task["longest_job"] >= _ENOUGH]
    tasks = enough or list(results["tasks"].values())
    recurrences = sum(task["recurrences"] for task in tasks)
    which = f" that recurred {_ENOUGH} times or more" if enough else ""
    lines = [["measured: [docs/proof.md](docs/proof.md)", "against always the default size, tries paid", ""]]
    for policy in (GP_VOI, ZEUS):
        found = [task["contenders"][policy] for task in tasks if policy in task["contenders"]]
        if found:
            what = (
                f"{len(found)} kinds of real trainings{which}, {recurrences} recurrences"
                if policy == GP_VOI
                else "the same"
            )
            command = "python -m benchmarks.recurrences run --device gpu" if results["device"] == GPU else "make proof"
            where = f" (`{command}`; {_device(results)}; energy is {energy_of(results)})" if policy == GP_VOI else ""
            saved = _spread([each["saved"]["energy_j"][0] for each in found])
            later = _spread([each["later"][0] for each in found])
            lines.append([f"`{policy}`, {what}{where}", f"energy saved: {saved}", f"later half: {later}"])
    if fleet := results.get("fleet"):
        extent = f"{fleet['jobs']} jobs of a year, {fleet['recurrences']} recurrences, simulated"
        saved = ", ".join(f"`{policy}` {100 * fleet['policies'][policy]:.1f} %" for policy in (GP_VOI, ZEUS))
        lines.append([f"{extent} (`python -m benchmarks.year`)", f"energy saved: {saved}".replace("-", "−"), ""])
    return markdown_table(lines)


def _spread(shares: Sequence[float]) -> str:
    """The mean, and the least and the most of the tasks."""
    return f"{_share(mean(shares))} ({_share(min(shares))} to {_share(max(shares))} by kind)"


def _sizes(results: Results) -> str:
    """A line for each task, and for each phase of one that drifts."""
    tasks = results["tasks"].items()
    sizes = sorted({found["batch_size"] for _, task in tasks for found in task["sizes"]})
    lines = [[f"cost until the target, J ({energy_of(results)})", "runs of each", *map(str, sizes)]]
    for name, task in tasks:
        for drifted in (False, True):
            of_phase = {found["batch_size"]: found for found in task["sizes"] if found["drifted"] == drifted}
            costs_j = [found["cost_j"] for found in of_phase.values() if found["cost_j"] is not None]
            if costs_j:
                runs = sorted({found["runs"] for found in of_phase.values()})
                cells = [_size(of_phase.get(size), task["default"], min(costs_j)) for size in sizes]
                lines.append([name + (", after the drift" if drifted else ""), "–".join(map(str, runs)), *cells])
    return markdown_table(lines)


def _size(found: dict[str, Any] | None, default: int, least_j: float) -> str:
    """The cost at one size, the best in bold and the default in italics; ∞ where no run has reached the target."""
    if found is None:
        return ""
    if found["cost_j"] is None:
        return "∞"
    cost = _three_digits(found["cost_j"])
    if found["batch_size"] == default:
        cost = f"*{cost}*"
    return f"**{cost}**" if found["cost_j"] == least_j else cost


def _overhead(results: Results) -> str:
    on = f" (on a {SIMULATED})" if _is_simulated(results) else ""
    lines = [[f"task{on}", "pairs", "CPU s without", "with", "CPU time, with / without", "time, with / without"]]
    for name, task in results["tasks"].items():
        found = task["overhead"]
        if found is not None:
            seconds = [f"{found['cpu_s'][who]:.2f}" for who in ("without", "with")]
            ratios = [_ratio(found[clock]) for clock in ("cpu", "wall")]
            lines.append([name, str(found["pairs"]), *seconds, *ratios])
    return markdown_table(lines)


def _conditions(results: Results) -> str:
    load = results["load"]
    lines = [
        ["condition", ""],
        ["from, to", f"{results['begun_at']}, {results['ended_at']}"],
        ["machine", ", ".join(f"{name} {of}" for name, of in results["machine"].items())],
        *([["trained on", "; ".join(results["trained_on"])]] if results.get("trained_on") else []),
        ["energy", energy_of(results)],
        ["load of the machine (1 min)", f"median {load['median']:.1f}, highest {load['highest']:.1f}"],
        ["trainings", str(results["trainings"])],
    ]
    return markdown_table(lines)


def _parts(results: Results) -> str:
    on = f" (on a {SIMULATED})" if _is_simulated(results) else ""
    lines = [[f"part{on}", "expected", "found", "as expected"]]
    for part in results["parts"]:
        verdict = {True: "yes", False: "no", None: "left open"}[part["is_as_expected"]]
        lines.append([part["name"], part["expected"], part["found"], verdict])
    return markdown_table(lines)


def _status(results: Results) -> str:
    """The state of the figures of a GPU, for a reader to know before any of them."""
    devices = "; ".join(results["trained_on"])
    if _is_simulated(results):
        return f"**No figure of a GPU exists.** All figures [below](#on-a-gpu) show that the harness works: {devices}."
    return f"The figures of a GPU are [below](#on-a-gpu): {devices}."


def _is_simulated(results: Results) -> bool:
    """True if any of the trainings ran on what only stands for a GPU."""
    return any(SIMULATED in device for device in results.get("trained_on", ()))


def energy_of(results: Results) -> str:
    """The sources of the energies, in words; of a simulated GPU they say so."""
    told = "; ".join(results["energy_sources"])
    return f"{SIMULATED}: {told}" if _is_simulated(results) else told


def _device(results: Results) -> str:
    if results["device"] == GPU:
        return f"{'; '.join(results['trained_on'])}, {results['begun_at'][:10]}"
    return f"{results['machine'].get('cores', '?')} CPU cores, {results['begun_at'][:10]}"


def _three_digits(value: float) -> str:
    """The number without an exponent."""
    return f"{float(f'{value:.3g}'):.15g}"


def _interval(found: Interval) -> str:
    value, low, high = found
    return f"{_share(value)} ({_share(low)} to {_share(high)})"


def _ratio(found: Interval) -> str:
    value, low, high = found
    return f"{value:.3f} ({low:.3f} to {high:.3f})"


def _share(value: float, *, signed: bool = False) -> str:
    percent = round(100 * value)
    return f"{percent:+} %".replace("-", "−") if signed and percent else f"{percent} %".replace("-", "−")
