"""``python -m benchmarks.policies``: the costs of policies in simulated jobs.

``report`` compares policies with the alternatives of users, for example a grid search, row by row. ``study`` is
`bso-server simulate` under more conditions, with every trial. ``values`` compares the savings by trials of `gp_voi`
with the savings that the policy expected.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from benchmarks.plots import plot_policies, require_matplotlib
from benchmarks.policies.cases import ROWS, shuffled, with_bad_neighbours
from benchmarks.policies.contest import CONTENDERS, SAMPLERS, Task, check_requirements, simulate
from benchmarks.policies.study import Study, study
from benchmarks.policies.values import RANGES, lines, tries_of
from benchmarks.reports import (
    MAIN_ROWS,
    MARKS,
    RESULTS,
    PolicyResults,
    entry,
    read_policy_results,
    write_policy_results,
)
from benchmarks.tables import policy_tables, text_table, write_tables
from bso_server.cli.common import CommandError, Commands
from bso_server.cli.simulate import (
    add_arguments,
    at_least_0,
    at_least_1,
    policies_of,
    policy_name,
    results_json,
    results_text,
    settings_of,
    subject_of,
    write_json,
)
from bso_server.errors import BsoError
from bso_server.service.reading import csv_of
from bso_server.simulate.workload import Workload
from zeus_plugins.protocol import ZEUS

# Seeds per task: few enough that all processes finish at about the same time, and that progress is visible.
_SEEDS_EACH = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, print tables, and write the requested files; return 0, or 1 after printing a reason."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.policies", description="Costs of policies in simulated jobs: docs/policy-figures.md."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_report(commands)
    _add_study(commands)
    _add_values(commands)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except (CommandError, BsoError, ValueError, OSError) as error:
        print(f"benchmarks.policies: {error}", file=sys.stderr)
        return 1
    return 0


def _add_report(commands: Commands) -> None:
    """Add subcommand ``report``."""
    parser = commands.add_parser(
        "report", help="policies and their rivals on traces, MLPerf's file and made landscapes"
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
        default=RESULTS / "policies.json",
        metavar="FILE",
        help="JSON in which what is measured replaces what was there before (default: the source tree's)",
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="Markdown file in which to replace the tables")
    parser.add_argument("--images", type=Path, metavar="DIR", help="folder in which to write the pictures, as SVG")
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> None:
    if options.images is not None:
        require_matplotlib("--images")
    results = read_policy_results(options.results)
    if names := _rows(options):
        check_requirements(options.policies)
        _measure(names, options, results)
        write_policy_results(results, options.results)
    tables = policy_tables(results)
    if options.write is not None:
        write_tables(tables, [options.write])
    if options.images is not None:
        plot_policies(results, options.images)
    print("\n\n".join(tables.values()))


def _rows(options: argparse.Namespace) -> list[str]:
    """Return the names of the rows to measure; raise `CommandError` if their files are missing."""
    if options.traces is not None:
        return list(dict.fromkeys(options.only or ROWS))
    _check_needs_no_files(options.only or ())
    return list(dict.fromkeys(options.only or ()))


def _check_needs_no_files(rows: Sequence[str]) -> None:
    """Raise `CommandError` if some of these rows need the folder of the traces."""
    needing = [row for row in rows if not ROWS[row].is_made]
    if needing:
        need = "this row needs" if len(needing) == 1 else "these rows need"
        raise CommandError(f"{', '.join(needing)}: {need} --traces DIR, the folder of the traces")


def _measure(names: Sequence[str], options: argparse.Namespace, results: PolicyResults) -> None:
    """Play the named rows according to the options, and add them to `results`."""
    rows = {row: ROWS[row].cases(options.traces, MARKS[-1]) for row in names}
    pairs = [(row, name) for row in rows for name in dict.fromkeys(options.policies)]
    tasks = [
        # Policy `zeus` is not calibrated: it predicts no costs of sizes without a completed run, and no chances.
        Task(case, name, seeds, calibrates=row in MAIN_ROWS and name != ZEUS)
        for row, name in pairs
        for case in rows[row]
        for seeds in _seeds(name, options)
    ]
    played = iter(simulate(tasks, options.workers, _Progress()))
    for row, name in pairs:
        blocks = len(_seeds(name, options))
        jobs = [list(chain.from_iterable(islice(played, blocks))) for _ in rows[row]]
        results.setdefault(row, {})[name] = entry(rows[row], jobs, with_curve=row in MAIN_ROWS)


def _contender(name: str) -> str:
    return name if name in CONTENDERS else policy_name(name)


def _seeds(name: str, options: argparse.Namespace) -> list[range]:
    count = min(options.seeds, options.optuna_seeds) if name in SAMPLERS else options.seeds
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


def _add_study(commands: Commands) -> None:
    """Add subcommand ``study``."""
    parser = commands.add_parser("study", help="policies on one workload or six, with every trial")
    add_arguments(parser)
    parser.add_argument(
        "--no-foresight",
        dest="foresight",
        action="store_false",
        help="trainings end after the epoch that crosses their cost bound, not before it",
    )
    parser.add_argument(
        "--cost-noise",
        type=at_least_0,
        default=0.0,
        metavar="SD",
        help="σ of the log of a factor on each trial's time and energy, as on a busy machine (default 0)",
    )
    parser.add_argument(
        "--drift",
        type=_drift,
        metavar="reversed@N",
        help="from recurrence N on (counting from 1), sizes need the epochs of those in reverse order",
    )
    parser.add_argument(
        "--landscape",
        type=_landscape,
        metavar="shuffled@SEED|bad-neighbours",
        help="sizes need each other's epochs, dealt out by chance; or those beside the default three times theirs",
    )
    parser.add_argument("--history", type=Path, metavar="FILE", help="write every trial of the first seed as CSV")
    parser.set_defaults(run=_simulate)


def _add_values(commands: Commands) -> None:
    """Add subcommand ``values``."""
    parser = commands.add_parser("values", help="what trials of gp_voi save, against what it expected of them")
    parser.add_argument("--row", choices=MAIN_ROWS, default="landscapes", help="default: landscapes")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder of the traces, for rows that need it")
    parser.set_defaults(run=_values)


def _values(options: argparse.Namespace) -> None:
    if options.traces is None:
        _check_needs_no_files([options.row])
    cases = ROWS[options.row].cases(options.traces, RANGES[-1][1])
    tries = [each for case in cases for each in tries_of(case, 0)]
    print(text_table(lines(tries)))


def _simulate(options: argparse.Namespace) -> None:
    subject = subject_of(options)
    workloads = subject.workloads
    if options.landscape is not None:
        workloads = [options.landscape(workload) for workload in workloads]
    studies = [
        study(
            workload,
            policies_of(options),
            setting,
            foresight=options.foresight,
            cost_noise_sd=options.cost_noise,
            drift_at=options.drift,
        )
        for setting in settings_of(options, subject)
        for workload in workloads
    ]
    comparisons = [each.comparison for each in studies]
    if options.json is not None:
        document = results_json(comparisons, options, subject.recorded)
        for each, of_it in zip(studies, document.get("workloads", [document]), strict=True):
            each.add_ratios_since_drift(of_it)
        write_json(document, options.json)
    if options.history is not None:
        history = _history(studies)
        options.history.write_text(csv_of(history, list(history[0])), encoding="utf-8", newline="")
    print(results_text(comparisons, options, subject))


def _history(studies: Sequence[Study]) -> list[dict[str, Any]]:
    return [
        {
            "workload": each.comparison.workload.name,
            "policy": str(policy),
            "eta": each.comparison.eta,
            "recurrence": trial.recurrence + 1,
            "trial_number": trial.record.trial_number,
            "batch_size": trial.record.batch_size,
            "origin": str(trial.record.origin),
            "state": str(trial.record.state),
            "epochs": trial.record.epoch,
            "time_s": trial.record.time_s,
            "energy_j": trial.record.energy_j,
            "cost_j": trial.cost_j,
            "reason": trial.record.reason,
            "message": trial.record.message,
        }
        for each in studies
        for policy, job in each.first_jobs.items()
        for trial in job.trials
    ]


def _landscape(text: str) -> Callable[[Workload], Workload]:
    match = re.fullmatch(r"bad-neighbours|shuffled@(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no landscape: write shuffled@1 or bad-neighbours")
    if match[1] is None:
        return with_bad_neighbours
    return lambda workload: shuffled(workload, int(match[1]))


def _drift(text: str) -> int:
    match = re.fullmatch(r"reversed@([1-9][0-9]*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no drift: write reversed@50")
    return int(match[1]) - 1


if __name__ == "__main__":
    sys.exit(main())
