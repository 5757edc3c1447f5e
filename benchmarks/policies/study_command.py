"""``python -m benchmarks.policies study``: `bso-server simulate` under more conditions, every trial and pictures."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.policies.conditions import shuffled, with_bad_neighbours
from benchmarks.policies.plots import FORMATS, plot, require_matplotlib
from benchmarks.policies.study import Study, study
from bso_server.cli.common import Commands
from bso_server.cli.simulate import (
    add_arguments,
    at_least_0,
    policies_of,
    results_json,
    results_text,
    settings_of,
    subject_of,
    write_json,
)
from bso_server.service.views import csv_of
from bso_server.simulate.workload import Workload


def add_study_command(commands: Commands) -> None:
    """Add ``study``."""
    parser = commands.add_parser("study", help="policies on one workload or six, with every trial and pictures")
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
    parser.add_argument(
        "--plot",
        type=_picture,
        metavar="FILE",
        help="draw costs over recurrences, what gp_voi predicts, and every trial of the first seed (png, svg or pdf)",
    )
    parser.set_defaults(run=_simulate)


def _simulate(options: argparse.Namespace) -> None:
    if options.plot is not None:
        require_matplotlib("--plot")
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
        options.history.write_text(csv_of(_history(studies)), encoding="utf-8", newline="")
    if options.plot is not None:
        plot(studies, options.plot)
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


def _picture(text: str) -> Path:
    file = Path(text)
    if file.suffix.lower().removeprefix(".") not in FORMATS:
        raise argparse.ArgumentTypeError(f"{text}: a picture's name ends in .{', .'.join(FORMATS)}")
    return file


def _drift(text: str) -> int:
    match = re.fullmatch(r"reversed@([1-9][0-9]*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no drift: write reversed@50")
    return int(match[1]) - 1
