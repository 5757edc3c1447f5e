"""All tables: of a server for the terminal; of policies and real trainings for documents."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.policies.calibration import BANDS
from benchmarks.policies.cases import ROWS
from benchmarks.policies.contest import CONTENDERS, FLOOR, WARM
from benchmarks.recurrences.tasks import DEFAULT, GPU, SIMULATED, UNSCALED
from benchmarks.reports import (
    MAIN_ROWS,
    MARKS,
    Entry,
    PolicyResults,
    ProofResults,
    in_order,
    made_conditions,
)
from zeus_plugins.protocol import GP_VOI

if TYPE_CHECKING:
    from benchmarks.driver import RequestFigures
    from benchmarks.fleet_load import FleetFigures

NOT_MEASURED = "Not measured yet."
_END = "<!-- end of table -->"
_NUMBER = re.compile(r"[\d.,]+|–")


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose header is the first line; without further lines, `NOT_MEASURED`."""
    head, *body = ("| " + " | ".join(cells) + " |" for cells in lines)
    if not body:
        return NOT_MEASURED
    return "\n".join([head, "|" + "---|" * len(lines[0]), *body])


def mark_of(name: str) -> str:
    """Return the line that marks the start of a table in a document; ``<!-- end of table -->`` marks its end."""
    return f"<!-- table: {name} -->"


def write_tables(tables: Mapping[str, str], files: Iterable[Path]) -> None:
    """Replace each named table in the documents that have the marks of this table.

    Raises:
        ValueError: A document has no marks for any of the tables, or lacks the mark at a table's end.
    """
    for file in files:
        shown = file.read_text("utf-8")
        wanted = {name: table for name, table in tables.items() if mark_of(name) in shown}
        if not wanted:
            raise ValueError(f"{file} has no line such as {mark_of(next(iter(tables)))} for a table")
        for name, table in wanted.items():
            before, mark, rest = shown.partition(f"{mark_of(name)}\n")
            _, end, after = rest.partition(_END)
            if not end:
                raise ValueError(f"{file}: there is no line {_END} below {mark_of(name)}")
            shown = f"{before}{mark}{table}\n{end}{after}"
        file.write_text(shown, "utf-8")


def text_table(lines: Sequence[Sequence[str]]) -> str:
    """Return a table for the terminal: columns as wide as their widest cell, numbers aligned right."""
    head, *rows = lines
    columns = [
        (max(map(len, cells)), all(map(_NUMBER.fullmatch, cells[1:]))) for cells in zip(head, *rows, strict=True)
    ]
    aligned = (
        "  ".join(
            cell.rjust(width) if is_number else cell.ljust(width)
            for cell, (width, is_number) in zip(line, columns, strict=True)
        )
        for line in lines
    )
    return "\n".join(f"  {line}".rstrip() for line in aligned)


def _percent(share: float, *, digits: int = 0, sign: str = "") -> str:
    percent = round(100 * share, digits) + 0.0  # adding 0.0 turns -0.0 into 0.0
    return f"{percent:{sign if percent else ''}.{digits}f} %".replace("-", "−")


# A server under load


def fleet_text(figures: FleetFigures) -> str:
    """Return the table of a fleet's requests and their cost for the server."""
    cores, memory = _or_dash(figures.server_cores, 2), _or_dash(figures.rss_mib, 0)
    lines = [
        f"{figures.requests_per_s:.0f} requests/s for {figures.window_s:.0f} s, {figures.failures} without success",
        f"server {cores} cores, {memory} MiB; load generator {figures.generator_cores:.2f} cores",
        text_table([["request", "n", "p50 ms", "p99 ms", "answers"], *map(_of_kind, figures.kinds)]),
        f"rows: {', '.join(f'{name} {number}' for name, number in figures.rows.items())}",
    ]
    if figures.database_bytes is not None:
        per_trial = figures.database_bytes / (figures.rows["trials"] or 1)
        lines.append(f"database: {per_trial:.0f} bytes for each trial with its reports")
    return "\n".join(lines)


def _of_kind(kind: RequestFigures) -> list[str]:
    answers = " ".join(f"{number}×{status}" for status, number in kind.answers.items())
    return [kind.request, str(kind.due), f"{kind.p50_ms:.1f}", f"{kind.p99_ms:.1f}", answers]


def _or_dash(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


# Policies and their rivals in simulated jobs

_LABELS = {
    "default": "the default for ever, full power",
    "grid": "each size once, then the best",
    FLOOR: "floor: default once, then clairvoyant",
    WARM: "`gp_voi`, with the epochs of another GPU",
}


_LAST = "last_too_expensive"


def policy_tables(results: PolicyResults) -> dict[str, str]:
    """Return the tables of all rows that have results."""
    made = {row: _main_row(results[row]) for row in MAIN_ROWS if row in results}
    if rows := made_conditions(results):
        made["made-conditions"] = _condition_rows(rows)
    if lines := _bands(results):
        made["calibration"] = markdown_table(lines)
    return made


def label(name: str) -> str:
    """Return a contender's name in tables; policies keep their names."""
    return _LABELS.get(name, f"`{name}`")


def _main_row(entries: Mapping[str, Entry]) -> str:
    """Return a table with a line for each contender."""
    head = ["", *(f"N = {mark}" for mark in MARKS), "worst", "last size > 5 % too expensive", "given up", "seeds"]
    lines = [head]
    for name in in_order(entries, CONTENDERS):
        found = entries[name]
        worst = " / ".join(_ratio_to_oracle(found["worst"].get(str(mark))) for mark in MARKS)
        means = (_ratio_to_oracle(found["geometric_mean"].get(str(mark))) for mark in MARKS)
        last = _share(found.get(_LAST))  # results of earlier versions lack this field
        lines.append([label(name), *means, worst, last, str(found["given_up"]), str(found["seeds"])])
    return markdown_table(lines)


def _condition_rows(rows: PolicyResults) -> str:
    """Return a table with a line for each row, and a column for each contender: means at two N, and the worst case."""
    names = in_order({name for entries in rows.values() for name in entries}, CONTENDERS)
    lines = [["case", *map(label, names)]]
    for row, entries in rows.items():
        shown = (_at_two(entries[name]) if name in entries else "" for name in names)
        lines.append([ROWS[row].title, *shown])
    for title, key, combined in (("recurrences given up, in all cases", "given_up", sum), ("seeds", "seeds", max)):
        found = ([entries[name][key] for entries in rows.values() if name in entries] for name in names)
        lines.append([title, *(str(combined(numbers)) for numbers in found)])
    return markdown_table(lines)


def _bands(results: PolicyResults) -> list[list[str]]:
    """Return a header and a line for each of `BANDS`: the share that held the true cost, and in brackets their number.

    Each policy and row with results has a column; without such results the list is empty.
    """
    columns = {
        f"{row}, {label(name)}": found["calibration"]
        for row in MAIN_ROWS
        for name, found in results.get(row, {}).items()
        if "calibration" in found
    }
    lines = [["90 % band holds the expected cost of the", *columns]]
    for kind, title in BANDS.items():
        found = [each.get(kind) for each in columns.values()]
        if any(found):
            lines.append(
                [title, *("" if each is None else f"{_share(each[0] / each[1])} ({each[1]})" for each in found)]
            )
    return lines if len(lines) > 1 else []


def _share(share: float | None) -> str:
    return "–" if share is None else _percent(share)


def _at_two(found: Entry) -> str:
    """Return the means at two numbers of recurrences, with the worst case at the second in brackets."""
    early, late = (_ratio_to_oracle(found["geometric_mean"].get(mark)) for mark in ("20", "100"))
    return f"{early} / {late} ({_ratio_to_oracle(found['worst'].get('100'))})"


def _ratio_to_oracle(ratio: float | None) -> str:
    """Format with four significant digits, or ∞ for a job that never reaches the target."""
    if ratio is None:
        return "∞"
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:.4g}"


# Real trainings

_CALLS = {GP_VOI: "`gp_voi`", UNSCALED: '`gp_voi`, `lr_scaling="none"`'}
"""Contenders as tables name them."""

_ENOUGH_RECURRENCES = 10
"""The summary leaves out tasks with fewer recurrences, unless all tasks have fewer."""


def proof_tables(results: ProofResults) -> dict[str, str]:
    """Return the tables of a measurement of real trainings."""
    is_of_gpu = results["device"] == GPU
    made = {"": _savings(results), "-sizes": _sizes(results), "-conditions": _conditions(results)}
    if not is_of_gpu:
        made |= {"-rules": _rules(results), "-overhead": _overhead(results)}
    else:
        made["-hour"] = _hour(results)
        made["-status"] = _gpu_status(results)
        made["-calibration"] = _calibration(results)
        made["-check"] = _gpu_check(results.get("gpu_check", {}), _on_simulated(results))
    if not _is_simulated(results) and any(task["jobs"] for task in results["tasks"].values()):
        made["-summary"] = _summary(results)
    return {f"{'gpu' if is_of_gpu else 'proof'}{name}": table for name, table in made.items()}


def energy_of(results: ProofResults) -> str:
    """Return the energy sources in words; for a simulated GPU, the words say that it is simulated."""
    sources = "; ".join(results["energy_sources"])
    return f"{SIMULATED}: {sources}" if _is_simulated(results) else sources


def _is_simulated(results: ProofResults) -> bool:
    """Return True if any of the trainings ran on a CPU in place of a GPU."""
    return any(SIMULATED in device for device in results.get("trained_on", ()))


def _on_simulated(results: ProofResults) -> str:
    return f" (on a {SIMULATED})" if _is_simulated(results) else ""


def _savings(results: ProofResults) -> str:
    head = ["task", "jobs, recurrences", "contender", f"energy, kJ ({energy_of(results)})"]
    saved = [
        "energy saved (95 %)",
        "verdict",
        "time saved",
        "cost saved (95 %)",
        "in the first five",
        "in the later half",
        "break-even at",
    ]
    lines = [[*head, *saved, "regret", "trainings", "given up"]]
    for name, task in results["tasks"].items():
        extent = [name, f"{task['jobs']}, {task['recurrences']}"]
        for who in (GP_VOI, UNSCALED, DEFAULT):
            found = task["contenders"].get(who)
            if found is None:
                continue
            label = f"always {task['default']}" if who == DEFAULT else _CALLS[who]
            cells = ["–"] * 7
            if who != DEFAULT:
                energy = found["saved"]["energy_j"]
                early = _interval(found["early"]) if "early" in found else "–"
                cells = [_interval(energy), _verdict(energy), _percent(found["saved"]["time_s"][0])]
                cells += [_interval(found["saved"]["cost_j"]), early, _interval(found["later"])]
                cells.append("not yet" if found["break_even"] is None else str(found["break_even"]))
            regret = "–" if found["regret"] is None else _percent(found["regret"], sign="+")
            counts = [regret, str(found["tries"]), str(found["given_up"])]
            lines.append([*extent, label, _three_digits(found["energy_j"] / 1000), *cells, *counts])
    return markdown_table(lines)


def _hour(results: ProofResults) -> str:
    """Return a table with a line for each task and way to count its energy, and a list of further figures by task."""
    head = ["task", f"energy counted ({energy_of(results)})", "default, kJ", "`gp_voi`, kJ", "saved (95 %)"]
    lines, notes = [[*head, "saved in the last five", "recurrences with less energy"]], []
    for name, task in results["tasks"].items():
        if (found := task.get("hour")) is None:
            continue
        for each in found["counted"]:
            energies = [_three_digits(each[who] / 1000) for who in ("default_j", "policy_j")]
            wins = f"{each['wins']} of {found['recurrences']}"
            lines.append([name, each["name"], *energies, _interval(each["saved"]), _percent(each["last"]), wins])
        extent = "one job: run-to-run spread only" if found["jobs"] == 1 else f"intervals by {found['jobs']} jobs"
        joules = [f"{_three_digits(found['sample_j'][who])} J" for who in (DEFAULT, GP_VOI) if who in found["sample_j"]]
        per_sample = f"; per sample {' and '.join(joules)} (default, `gp_voi`)" if joules else ""
        ratios = ["–" if found[each] is None else f"{found[each]:.2f}" for each in ("to_best", "to_largest")]
        sizes = f"`gp_voi` took {ratios[0]} times the energy of the best size, {ratios[1]} of the largest that fits"
        notes.append(f"- `{name}`: {extent}; {sizes}{per_sample}")
    return "\n".join([markdown_table(lines), "", *notes]).rstrip()


def _rules(results: ProofResults) -> str:
    """Return the energy saved with and without the rule for learning rates: a line for each task, and for all."""
    total = results.get("total", {})  # results of earlier versions lack it
    if UNSCALED not in total:
        return NOT_MEASURED
    kinds = ("energy saved (95 %)", "in the first five")
    lines = [["task", "default", *(f"{_CALLS[who]}: {kind}" for who in (GP_VOI, UNSCALED) for kind in kinds)]]
    for name, task in results["tasks"].items():
        of = task["contenders"]
        if {GP_VOI, UNSCALED} <= of.keys():
            found = [each for who in (GP_VOI, UNSCALED) for each in (of[who]["saved"]["energy_j"], of[who]["early"])]
            lines.append([name, str(task["default"]), *map(_interval, found)])
    found = [total[who][part] for who in (GP_VOI, UNSCALED) for part in ("saved", "early")]
    worst = "; ".join(f"{_CALLS[who]} {_worst(results, who)}" for who in (GP_VOI, UNSCALED))
    return markdown_table([*lines, ["**all**", "", *map(_interval, found)]]) + f"\n\nWorst task: {worst}."


def _worst(results: ProofResults, who: str) -> str:
    """Return the task of which a contender saved the smallest share of the energy, with its share."""
    name = results["total"][who]["worst"]
    return f"`{name}` {_interval(results['tasks'][name]['contenders'][who]['saved']['energy_j'])}"


def _verdict(saved: Sequence[float]) -> str:
    """Return the verdict of an interval of the share saved."""
    _, low, high = saved
    return "saves" if low > 0 else "loses" if high < 0 else "not shown yet"


def _interval(found: Sequence[float]) -> str:
    value, low, high = map(_percent, found)
    return f"{value} ({low} to {high})"


def _three_digits(value: float) -> str:
    """Format a number with three digits and no exponent."""
    return f"{float(f'{value:.3g}'):.15g}"


def _sizes(results: ProofResults) -> str:
    """Return a table with a line for each task; a task with a drift has a line before and one after it."""
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
    """Format the cost at one size: the best bold, the default in italics, and ∞ if no run has reached the target."""
    if found is None:
        return ""
    if found["cost_j"] is None:
        return "∞"
    cost = _three_digits(found["cost_j"])
    if found["batch_size"] == default:
        cost = f"*{cost}*"
    return f"**{cost}**" if found["cost_j"] == least_j else cost


def _overhead(results: ProofResults) -> str:
    lines = [["task", "pairs", "CPU s without", "with", "CPU time, with / without", "time, with / without"]]
    for name, task in results["tasks"].items():
        if (found := task["overhead"]) is not None:
            seconds = [f"{found['cpu_s'][who]:.2f}" for who in ("without", "with")]
            ratios = [_ratio(found.get(clock)) for clock in ("cpu", "wall")]
            lines.append([name, str(found["pairs"]), *seconds, *ratios])
    return markdown_table(lines)


def _ratio(found: Sequence[float] | None) -> str:
    return "–" if found is None else "{:.3f} ({:.3f} to {:.3f})".format(*found)


def _watts(mean_w: float | None, limit_w: float | None) -> str:
    """Format the mean power; mark it if below half of the limit: the GPU then mostly waits for kernel launches."""
    if mean_w is None:
        return "–"
    is_waiting = limit_w is not None and mean_w < limit_w / 2
    return f"{mean_w:.0f}" + (f", launch-bound (below half of {limit_w:.0f} W)" if is_waiting else "")


def _calibration(results: ProofResults) -> str:
    """Return a table with a line for each training of the calibration."""
    head = ["task", "size", "metric at each evaluation", "seconds", "target reached after, s", "mean W", "peak W"]
    lines = [[*head, f"memory, GiB{_on_simulated(results)}"]]
    for name, task in results["tasks"].items():
        of_target = results.get("targets", {}).get(name, {})
        for found in task["calibration"]:
            reached_s = of_target.get("reached_s", {})
            metrics = found["metrics"]
            kept = sorted({round(place * (len(metrics) - 1) / 7) for place in range(8)}) if metrics else []
            shown = ", ".join(f"{metrics[place]:.3g}" for place in kept) or found["state"]
            times = [_or_dash(found["time_s"], 1), _or_dash(reached_s.get(str(found["batch_size"])), 1)]
            watts = [_watts(found["mean_w"], task["limit_w"]), _or_dash(found["peak_w"], 0)]
            lines.append([name, str(found["batch_size"]), shown, *times, *watts, _or_dash(found["memory_gib"], 1)])
    targets = (
        f"- `{name}`: target {found['metric']:g}, at most {found['max_epochs']} epochs"
        + (f". **{found['problem']}.**" if found["problem"] else "")
        for name, found in results.get("targets", {}).items()
    )
    return "\n".join([markdown_table(lines), "", *targets]).rstrip()


def _gpu_check(found: Mapping[str, Any], simulated: str) -> str:
    """Return a table with a line for each check of `benchmarks.gpu_check`."""
    lines = [["check", "verdict", f"found{simulated}"]]
    lines += [[each["check"], each["verdict"], each["found"].replace("|", "/")] for each in found.get("results", ())]
    if found.get("problem"):
        lines.append(["all", "failed", found["problem"].strip().splitlines()[-1]])
    return markdown_table(lines)


def _conditions(results: ProofResults) -> str:
    load = results["load"]
    lines = [
        ["condition", ""],
        ["from, to", f"{results['begun_at']}, {results['ended_at']}"],
        ["machine", ", ".join(f"{name} {of}" for name, of in results["machine"].items())],
        ["trained on", "; ".join(results.get("trained_on", ()))],
        ["energy", energy_of(results)],
        ["load of the machine (1 min)", f"median {load['median']:.1f}, highest {load['highest']:.1f}"],
        ["trainings", str(results["trainings"])],
        *(["broken", each] for each in results.get("broken", ())),
    ]
    return markdown_table(lines)


def _gpu_status(results: ProofResults) -> str:
    """Return the statement above all figures that says whether a saving was measured on a GPU."""
    devices = "; ".join(results["trained_on"])
    if _is_simulated(results):
        return f"**No figure of a GPU exists.** All figures [below](#on-a-gpu) show that the harness works: {devices}."
    told = []
    for name, task in results["tasks"].items():
        if {GP_VOI, DEFAULT} <= task["contenders"].keys():
            saved = _interval(task["contenders"][GP_VOI]["saved"]["energy_j"])
            told.append(f"{saved} of the energy in {task['recurrences']} runs of `{name}`")
    if not told:
        return f"**No saving was measured on a GPU yet.** Other figures of {devices} are [below](#on-a-gpu)."
    return f"On {devices}, `gp_voi` saved {'; '.join(told)} (95 %, with its trials and idle power): [below](#on-a-gpu)."


def _summary(results: ProofResults) -> str:
    """Return the README's table: the share of the summed energy that `gp_voi` saved, and the conditions."""
    recurring = [task for task in results["tasks"].values() if task["jobs"]]
    tasks = [task for task in recurring if task["longest_job"] >= _ENOUGH_RECURRENCES] or recurring
    compared = [task for task in tasks if {GP_VOI, DEFAULT} <= task["contenders"].keys()]
    lines = [["energy saved by `gp_voi` against always the default, with its trials", "trainings", "conditions"]]
    if compared:
        contenders = [task["contenders"] for task in compared]
        default_j = sum(each[DEFAULT]["energy_j"] for each in contenders)
        total = _percent(1 - sum(each[GP_VOI]["energy_j"] for each in contenders) / default_j)
        shares = [each[GP_VOI]["saved"]["energy_j"][0] for each in contenders]
        of_tasks = f"; by task {_percent(min(shares))} to {_percent(max(shares))}" if len(shares) > 1 else ""
        if GP_VOI in results.get("total", {}) and len(compared) == len(results["tasks"]) > 1:
            total = _interval(results["total"][GP_VOI]["saved"])
            of_tasks = f"; worst task {_worst(results, GP_VOI)}, best {_percent(max(shares))}"
        per_job = "–".join(map(str, sorted({round(task["recurrences"] / task["jobs"]) for task in compared})))
        tasks_in_words = "1 task" if len(compared) == 1 else f"{len(compared)} tasks"
        extent = f"{tasks_in_words}, {sum(task['recurrences'] for task in compared)} runs, {per_job} per job"
        command, device = "make proof", f"{results['machine'].get('cores', '?')} CPU cores"
        if results["device"] == GPU:
            command, device = "bash gpu-bundle/run.sh", "; ".join(results["trained_on"])
        conditions = f"`{command}`, {results['begun_at'][:10]}; {device}; {energy_of(results)}"
        lines.append([f"{total} of {_three_digits(default_j / 1000)} kJ{of_tasks}", extent, conditions])
    return markdown_table(lines)
