"""The ``bso-server simulate`` command."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bso_server.cli.common import CommandError
from bso_server.cli.jobs import add_source, read_job
from bso_server.cli.simulate_tables import ratios_text, spending_text
from bso_server.service.views import csv_of
from bso_server.simulate.plots import FORMATS, plot
from bso_server.simulate.recorded import recorded_account, recorded_workload
from bso_server.simulate.results import Comparison, Setting, compare, geometric_means
from bso_server.simulate.savings import Account
from bso_server.simulate.traces import PAPER_WORKLOADS, Selection, Traces
from bso_server.simulate.workload import Workload
from zeus_plugins.protocol import PolicyName

if TYPE_CHECKING:
    # argparse keeps the name to itself.
    from argparse import _SubParsersAction

# What names one workload in the traces; ``--all`` needs none of it.
_SELECTION = ("dataset", "network", "optimizer", "target_metric", "max_epochs", "default_batch_size")


def add_simulate_command(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``simulate``."""
    parser = commands.add_parser("simulate", help="what a policy would have done with recorded trainings")
    parser.add_argument("--train-trace", type=Path, metavar="FILE", help="epochs to the target, as CSV")
    parser.add_argument("--power-trace", type=Path, metavar="FILE", help="time and power, as CSV")
    parser.add_argument("--job", dest="job_id", metavar="JOB", help="a job's own trials in place of traces")
    add_source(parser)
    parser.add_argument("--all", action="store_true", help="the six workloads of the Zeus paper")
    for name in ("dataset", "network", "optimizer"):
        parser.add_argument(f"--{name}", help="as in the traces")
    parser.add_argument("--target-metric", type=float, metavar="X", help="one of the train trace's")
    parser.add_argument("--max-epochs", type=_at_least_1, metavar="E", help="a run that needs more has failed")
    parser.add_argument("--default-batch-size", type=_at_least_1, metavar="B", help="what the job's owner would take")
    parser.add_argument(
        "--policy", type=PolicyName, choices=list(PolicyName), action="append", help="one or several (default: all)"
    )
    parser.add_argument("--recurrences", type=_at_least_1, default=100, metavar="N", help="(default 100)")
    parser.add_argument("--seeds", type=_at_least_1, default=200, metavar="N", help="simulated jobs (default 200)")
    parser.add_argument(
        "--eta",
        type=_share,
        action="append",
        metavar="ETA",
        help="η of the cost, from 0 to 1, one or several (default: the job's, or 0.5)",
    )
    parser.add_argument(
        "--beta", type=_beta, default="", help="β of early stopping, or none (default: the job's, or 2)"
    )
    parser.add_argument(
        "--power-limit",
        choices=["optimal", "max"],
        default="optimal",
        help="each size at its cheapest power limit, found in its first epoch (default), or all at the maximum",
    )
    parser.add_argument(
        "--concurrency", type=_at_least_1, default=1, metavar="K", help="recurrences always under way (default 1)"
    )
    parser.add_argument(
        "--no-foresight",
        dest="foresight",
        action="store_false",
        help="trainings end after the epoch that crosses their cost bound, not before it",
    )
    parser.add_argument(
        "--cost-noise",
        type=_at_least_0,
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
    parser.add_argument(
        "--price", type=_at_least_0, metavar="PRICE", help="of a kWh, in any currency: also tell what energy cost in it"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--history", type=Path, metavar="FILE", help="write every trial of the first seed as CSV")
    parser.add_argument(
        "--plot",
        type=_picture,
        metavar="FILE",
        help="draw costs over recurrences, what gp_voi believes, and every trial of the first seed (png, svg or pdf)",
    )
    parser.set_defaults(run=_simulate)


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is simulated.

    Attributes:
        workloads: One or several.
        eta: η unless the command line says otherwise.
        beta: β likewise.
        recorded: What the job really took whose trials they are; None with traces.
        untried_default: That job's default size, if another one has to stand for it.
    """

    workloads: Sequence[Workload]
    eta: float = 0.5
    beta: float | None = 2.0
    recorded: Account | None = None
    untried_default: int | None = None


def _simulate(options: argparse.Namespace) -> None:
    if options.plot is not None:
        _require_matplotlib()
    subject = _recorded(options) if options.job_id is not None else _traced(options)
    workloads = subject.workloads
    if options.landscape is not None:
        workloads = [options.landscape(workload) for workload in workloads]
    settings = [
        Setting(
            recurrences=options.recurrences,
            seeds=options.seeds,
            eta=eta,
            beta=subject.beta if options.beta == "" else options.beta,
            optimal_power_limits=options.power_limit == "optimal",
            concurrency=options.concurrency,
            foresight=options.foresight,
            cost_noise_sd=options.cost_noise,
            drift_at=options.drift,
        )
        for eta in dict.fromkeys(options.eta or [subject.eta])
    ]
    policies = list(dict.fromkeys(options.policy or PolicyName))
    comparisons = [compare(workload, policies, setting) for setting in settings for workload in workloads]
    if options.json is not None:
        shown = _as_json(comparisons, options.price, subject.recorded, together=options.all or len(comparisons) > 1)
        options.json.write_text(json.dumps(shown, indent=2, allow_nan=False) + "\n", "utf-8")
    if options.history is not None:
        options.history.write_text(csv_of(_history(comparisons)), encoding="utf-8", newline="")
    if options.plot is not None:
        plot(comparisons, options.plot)
    print(ratios_text(comparisons), spending_text(comparisons, options.price, subject.recorded), sep="\n\n")
    if subject.untried_default is not None:
        print(
            f"\nthe default size, {subject.untried_default}, was never measured: the nearest one that was stands for it"
        )


def _require_matplotlib() -> None:
    """Not to find out only after the simulation."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise CommandError(f"--plot needs matplotlib ({error}): pip install 'zeus-plugins[plot]'") from error


def _recorded(options: argparse.Namespace) -> _Subject:
    """The workload of a job's own trials, with its η and β."""
    given = ("train_trace", "power_trace", *_SELECTION)
    named = [_flag(name) for name in given if getattr(options, name) is not None] + ["--all"] * options.all
    if named:
        raise CommandError(f"--job takes a job's own trials: leave out {', '.join(named)}")
    view = read_job(options)
    workload, job = recorded_workload(view), view.job
    return _Subject(
        [workload],
        job.eta_knob,
        job.beta_knob,
        recorded_account(view, workload),
        None if workload.default_batch_size == job.default_batch_size else job.default_batch_size,
    )


def _traced(options: argparse.Namespace) -> _Subject:
    """The workloads from the traces."""
    missing = [_flag(name) for name in ("train_trace", "power_trace") if getattr(options, name) is None]
    if missing:
        raise CommandError(f"what to simulate? Give {' and '.join(missing)}, or --job for a job's own trials")
    selections = _selections(options)
    traces = Traces.read(options.train_trace, options.power_trace)
    return _Subject([traces.workload(selection) for selection in selections])


def _selections(options: argparse.Namespace) -> Sequence[Selection]:
    given = {name: getattr(options, name) for name in _SELECTION}
    if options.all:
        named = [_flag(name) for name, value in given.items() if value is not None]
        if named:
            raise CommandError(f"--all takes the six workloads as they are: leave out {', '.join(named)}")
        return PAPER_WORKLOADS
    missing = [_flag(name) for name, value in given.items() if value is None]
    if missing:
        raise CommandError(f"which workload? Give {', '.join(missing)}, or --all for the six of the Zeus paper")
    return [Selection(**given)]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _as_json(
    comparisons: Sequence[Comparison], price: float | None, recorded: Account | None, *, together: bool
) -> dict[str, Any]:
    workloads = [each.as_json(price, recorded) for each in comparisons]
    if not together:
        return workloads[0]
    return {"workloads": workloads, "geometric_mean": geometric_means(comparisons)}


def _history(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    return [
        {
            "workload": each.workload.name,
            "policy": str(policy),
            "eta": each.eta,
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
        for each in comparisons
        for policy, job in each.first_jobs.items()
        for trial in job.trials
    ]


def _at_least_1(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _at_least_0(text: str) -> float:
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return number


def _share(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return number


def _beta(text: str) -> float | str | None:
    # argparse passes a default that is text through here, too.
    if text == "":
        return text
    if text == "none":
        return None
    number = float(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _landscape(text: str) -> Callable[[Workload], Workload]:
    match = re.fullmatch(r"bad-neighbours|shuffled@(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no landscape: write shuffled@1 or bad-neighbours")
    if match[1] is None:
        return Workload.with_bad_neighbours
    return lambda workload: workload.shuffled(int(match[1]))


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
