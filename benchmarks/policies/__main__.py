"""``python -m benchmarks.policies``: the costs of policies in simulated jobs.

The command compares policies with the alternatives of users, for example a grid search, row by row.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path

from benchmarks.policies.cases import ROWS
from benchmarks.policies.contest import CONTENDERS, Task, simulate
from benchmarks.reports import (
    MAIN_ROWS,
    MARKS,
    RESULTS,
    PolicyResults,
    entry,
    read_policy_results,
    write_policy_results,
)
from benchmarks.tables import policy_tables, write_tables
from bso_server.cli.common import CommandError
from bso_server.cli.simulate import at_least_1, policy_name
from bso_server.errors import BsoError
from zeus_plugins.protocol import ZEUS

# Seeds per task: few enough that all processes finish at about the same time, and that progress is visible.
_SEEDS_EACH = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, print tables, and write the requested files; return 0, or 1 after printing a reason."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.policies", description="Costs of policies in simulated jobs: docs/policy-figures.md."
    )
    parser.add_argument(
        "--traces",
        type=Path,
        metavar="DIR",
        help="folder of the traces and of mlperf_convergence.json; made landscapes need none",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(ROWS),
        metavar="ROW",
        help=f"of {', '.join(ROWS)} (default: all with --traces, none without)",
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
        "--workers", type=at_least_1, default=os.cpu_count(), metavar="N", help="processes (default: one a core)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS / "policies.json",
        metavar="FILE",
        help="JSON in which what is measured replaces what was there before (default: the source tree's)",
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="Markdown file in which to replace the tables")
    options = parser.parse_args(arguments)
    try:
        _report(options)
    except (CommandError, BsoError, ValueError, OSError) as error:
        print(f"benchmarks.policies: {error}", file=sys.stderr)
        return 1
    return 0


def _report(options: argparse.Namespace) -> None:
    results = read_policy_results(options.results)
    if names := _rows(options):
        _measure(names, options, results)
        write_policy_results(results, options.results)
    tables = policy_tables(results)
    if options.write is not None:
        write_tables(tables, [options.write])
    print("\n\n".join(tables.values()))


def _rows(options: argparse.Namespace) -> list[str]:
    """Return the names of the rows to measure; raise `CommandError` if some need the folder of the traces."""
    if options.traces is not None:
        return list(dict.fromkeys(options.only or ROWS))
    rows = list(dict.fromkeys(options.only or ()))
    if needing := [row for row in rows if not ROWS[row].is_made]:
        raise CommandError(f"these rows need --traces DIR, the folder of the traces: {', '.join(needing)}")
    return rows


def _measure(names: Sequence[str], options: argparse.Namespace, results: PolicyResults) -> None:
    """Play the named rows according to the options, and add them to `results`."""
    rows = {row: ROWS[row].cases(options.traces, MARKS[-1]) for row in names}
    pairs = [(row, name) for row in rows for name in dict.fromkeys(options.policies)]
    tasks = [
        # Policy `zeus` is not calibrated: it predicts no costs of sizes without a completed run, and no chances.
        Task(case, name, seeds, calibrates=row in MAIN_ROWS and name != ZEUS)
        for row, name in pairs
        for case in rows[row]
        for seeds in _seeds(options.seeds)
    ]
    played = iter(simulate(tasks, options.workers, _Progress()))
    for row, name in pairs:
        blocks = len(_seeds(options.seeds))
        jobs = [list(chain.from_iterable(islice(played, blocks))) for _ in rows[row]]
        results.setdefault(row, {})[name] = entry(rows[row], jobs)


def _contender(name: str) -> str:
    return name if name in CONTENDERS else policy_name(name)


def _seeds(count: int) -> list[range]:
    return [range(first, min(first + _SEEDS_EACH, count)) for first in range(0, count, _SEEDS_EACH)]


class _Progress:
    """A progress line on standard error, updated every second."""

    def __init__(self) -> None:
        self._began_s = self._shown_s = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if done < total and now_s < self._shown_s + 1:
            return
        self._shown_s, took_s = now_s, now_s - self._began_s
        line = f"\r{done} of {total} parts, {took_s:.0f} s, about {took_s * (total - done) / done:.0f} s to go "
        print(line, end="\n" if done == total else "", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
