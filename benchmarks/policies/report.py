"""The report's results as JSON, and as Markdown tables between markers of a document."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.documents import markdown_table, replace_tables
from benchmarks.policies.cases import ROWS, Case
from benchmarks.policies.contest import CONTENDERS, FLOOR, Paid
from bso_server.simulate.results import mean_curve

MARKS = (10, 20, 50, 100)
"""After so many recurrences costs are compared."""

MAIN_ROWS = ("traces", "mlperf")
"""Rows with a table of their own; the others share one."""

LABELS = {
    "zeus": "`zeus`",
    "gp_voi": "`gp_voi`",
    "default": "the default for ever, full power",
    "grid": "each size once, then the best",
    "halving": "successive halving",
    "thompson": "Thompson sampling, nothing stopped",
    "optuna-tpe": "Optuna, TPE",
    "optuna-gp": "Optuna, GP",
    FLOOR: "floor: default once, then clairvoyant",
}
"""The names of contenders in tables and pictures; another one has its own name."""

Entry: TypeAlias = dict[str, Any]
"""Results of one contender in one row, in JSON's types; see `entry`."""

Results: TypeAlias = dict[str, dict[str, Entry]]
"""Entries by row and contender."""


def entry(cases: Sequence[Case], jobs: Sequence[Sequence[Paid]], *, with_curve: bool) -> Entry:
    """Summarise what a contender has cost in the cases of a row.

    Args:
        cases: The cases.
        jobs: For each case what the job of each seed has cost; shape (cases, seeds).
        with_curve: Include the curve.

    Returns:
        ``{seeds, cases, geometric_mean: {N: …}, worst: {N: …}, worst_case, given_up, curve: […]}``. For each case the
        total cost over the oracle's after N recurrences is averaged over the seeds: the geometric mean and the largest
        of these over the cases. Then the case that is worst in the end, the recurrences that were given up in all
        jobs, and the geometric mean after each recurrence. What is infinite is None.
    """
    curves = [
        mean_curve([case.ratios(job.costs_j) for job in of_case]) for case, of_case in zip(cases, jobs, strict=True)
    ]
    first = cases[0].counted_from
    marks = [mark for mark in MARKS if first < mark <= first + len(curves[0])]
    columns = list(zip(*curves, strict=True))
    means = [math.exp(math.fsum(map(math.log, column)) / len(column)) for column in columns]
    last = columns[-1]
    return {
        "seeds": len(jobs[0]),
        "cases": len(cases),
        "geometric_mean": {str(mark): _rounded(means[mark - first - 1]) for mark in marks},
        "worst": {str(mark): _rounded(max(columns[mark - first - 1])) for mark in marks},
        "worst_case": cases[last.index(max(last))].name,
        "given_up": sum(job.given_up for of_case in jobs for job in of_case),
        **({"curve": [_rounded(mean) for mean in means]} if with_curve else {}),
    }


def _rounded(ratio: float) -> float | None:
    return round(ratio, 4) if math.isfinite(ratio) else None


def read_results(file: Path) -> Results:
    """The earlier measurements; nothing where there is no such file."""
    results: Results = json.loads(file.read_text("utf-8")) if file.exists() else {}
    return results


def write_results(results: Results, file: Path) -> None:
    """Write JSON with a line for each entry, rows and contenders in the report's order."""
    rows = []
    for row in _in_order(results, ROWS):
        entries = [
            f'    "{name}": {json.dumps(results[row][name], ensure_ascii=False)}'
            for name in _in_order(results[row], CONTENDERS)
        ]
        rows.append(f'  "{row}": {{\n' + ",\n".join(entries) + "\n  }")
    file.write_text("{\n" + ",\n".join(rows) + "\n}\n", "utf-8")


def tables(results: Results) -> dict[str, str]:
    """The Markdown tables of all rows that have results, by the name of their marker."""
    made = {row: _table(results[row]) for row in MAIN_ROWS if row in results}
    if robust := robustness(results):
        made["robustness"] = _common_table(robust)
    return made


def robustness(results: Results) -> Results:
    """The results of the rows that share a table, in the report's order."""
    return {row: results[row] for row in ROWS if row in results and row not in MAIN_ROWS}


def write_tables(results: Results, file: Path) -> None:
    """Replace the tables of a document; as `replace_tables`."""
    replace_tables(tables(results), file)


def label(name: str) -> str:
    """A contender's name as tables have it."""
    return LABELS.get(name, f"`{name}`")


def _table(entries: Mapping[str, Entry]) -> str:
    """A line for each contender."""
    lines = [["", *(f"N = {mark}" for mark in MARKS), "worst", "given up", "seeds"]]
    for name in _in_order(entries, CONTENDERS):
        found = entries[name]
        worst = " / ".join(_number(found["worst"].get(str(mark))) for mark in MARKS)
        means = (_number(found["geometric_mean"].get(str(mark))) for mark in MARKS)
        lines.append([label(name), *means, worst, str(found["given_up"]), str(found["seeds"])])
    return markdown_table(lines)


def _common_table(rows: Mapping[str, Mapping[str, Entry]]) -> str:
    """A line for each row and N, with a column for each contender: the mean, and in brackets the worst case."""
    names = _in_order({name for entries in rows.values() for name in entries}, CONTENDERS)
    lines = [["case", "N", *map(label, names)]]
    for row, entries in rows.items():
        marks = [mark for mark in MARKS if any(str(mark) in each["worst"] for each in entries.values())]
        for mark in marks:
            cells = (_pair(entries[name], str(mark)) if name in entries else "" for name in names)
            lines.append([ROWS[row].title if mark == marks[0] else "", str(mark), *cells])
    for title, key, combined in (("recurrences given up, in all cases", "given_up", sum), ("seeds", "seeds", max)):
        found = ([entries[name][key] for entries in rows.values() if name in entries] for name in names)
        lines.append([title, "", *(str(combined(numbers)) for numbers in found)])
    return markdown_table(lines)


def _pair(found: Entry, mark: str) -> str:
    return f"{_number(found['geometric_mean'].get(mark))} ({_number(found['worst'].get(mark))})"


def _number(ratio: float | None) -> str:
    """Four digits that count, or the sign of what is never finished."""
    if ratio is None:
        return "∞"
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:.4g}"


def _in_order(names: Mapping[str, Any] | set[str], order: Mapping[str, Any] | Sequence[str]) -> list[str]:
    known = [name for name in order if name in names]
    return known + sorted(set(names) - set(known))
