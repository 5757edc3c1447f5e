"""``python -m benchmarks.policies report``: all rows of the comparison with what people would otherwise do."""

from __future__ import annotations

import argparse
import os
import sys
import time
from itertools import chain, islice
from pathlib import Path

from benchmarks.policies.cases import ROWS
from benchmarks.policies.contest import CONTENDERS, RIVALS, check_requirements
from benchmarks.policies.optuna_study import SAMPLERS
from benchmarks.policies.parallel import Task, simulate
from benchmarks.policies.plots import require_matplotlib
from benchmarks.policies.report import (
    MAIN_ROWS,
    MARKS,
    Results,
    entry,
    read_results,
    tables,
    write_results,
    write_tables,
)
from benchmarks.policies.report_plots import plot_report
from bso_server.cli.common import Commands
from bso_server.cli.simulate import at_least_1, policy_name

RESULTS = Path(__file__).parent / "results.json"
"""The latest measurements, as far as they are in the documentation."""

# Seeds of a task: few enough that all processes end at about the same time, and that progress shows.
_SEEDS_EACH = 8


def add_report_command(commands: Commands) -> None:
    """Add ``report``."""
    parser = commands.add_parser("report", help="policies and their rivals on traces, MLPerf's file, and robustness")
    parser.add_argument(
        "--traces", type=Path, metavar="DIR", help="folder of the traces and of mlperf_convergence.json"
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW", help=f"of {', '.join(ROWS)}"
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        type=_contender,
        default=CONTENDERS,
        metavar="NAME",
        help=f"of {', '.join(CONTENDERS)}, or another policy that is installed",
    )
    parser.add_argument("--seeds", type=at_least_1, default=24, metavar="N", help="simulated jobs (default 24)")
    parser.add_argument(
        "--optuna-seeds",
        type=at_least_1,
        default=4,
        metavar="N",
        help="of Optuna's samplers, which are slow, at most (default 4)",
    )
    parser.add_argument(
        "--workers", type=at_least_1, default=os.cpu_count(), metavar="N", help="processes (default: one a core)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        metavar="FILE",
        help="JSON in which what is measured replaces what was there before (default: the source tree's)",
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="Markdown file in which to replace the tables")
    parser.add_argument("--images", type=Path, metavar="DIR", help="folder in which to write the pictures, as SVG")
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> None:
    if options.images is not None:
        require_matplotlib("--images")
    results = read_results(options.results)
    if options.traces is not None:
        check_requirements(options.policies)
        _measure(options, results)
        write_results(results, options.results)
    if options.write is not None:
        write_tables(results, options.write)
    if options.images is not None:
        plot_report(results, options.images)
    print("\n\n".join(tables(results).values()))


def _measure(options: argparse.Namespace, results: Results) -> None:
    """Play what the options name, and put it into the results."""
    rows = {row: ROWS[row].cases(options.traces, MARKS[-1]) for row in dict.fromkeys(options.only)}
    pairs = [(row, name) for row in rows for name in dict.fromkeys(options.policies)]
    tasks = [Task(case, name, seeds) for row, name in pairs for case in rows[row] for seeds in _seeds(name, options)]
    played = iter(simulate(tasks, options.workers, _Progress()))
    for row, name in pairs:
        blocks = len(_seeds(name, options))
        jobs = [list(chain.from_iterable(islice(played, blocks))) for _ in rows[row]]
        results.setdefault(row, {})[name] = entry(rows[row], jobs, with_curve=row in MAIN_ROWS)


def _contender(name: str) -> str:
    return name if name in RIVALS else policy_name(name)


def _seeds(name: str, options: argparse.Namespace) -> list[range]:
    count = min(options.seeds, options.optuna_seeds) if name in SAMPLERS else options.seeds
    return [range(first, min(first + _SEEDS_EACH, count)) for first in range(0, count, _SEEDS_EACH)]


class _Progress:
    """One line on standard error, written anew every second."""

    def __init__(self) -> None:
        self._began_s = self._shown_s = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if done < total and now_s < self._shown_s + 1:
            return
        self._shown_s, took_s = now_s, now_s - self._began_s
        line = f"\r{done} of {total} parts, {took_s:.0f} s, about {took_s * (total - done) / done:.0f} s to go "
        print(line, end="\n" if done == total else "", file=sys.stderr, flush=True)
