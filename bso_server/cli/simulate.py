"""The ``bso-server simulate`` command."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

from bso_server.cli.common import CommandError, Commands, RemovedOption, add_source, table
from bso_server.cli.jobs import read_job
from bso_server.core.policy import find
from bso_server.simulate.results import Comparison, Setting, compare, geometric_means
from bso_server.simulate.traces import PAPER_WORKLOADS, Selection, Traces, recorded_workload
from bso_server.simulate.workload import Consumption, Workload
from zeus_plugins.protocol import OWN_POLICIES, JobView

# Options that select one workload of the traces, not allowed with ``--all``.
_SELECTION = ("dataset", "network", "optimizer", "target_metric", "max_epochs", "default_batch_size")


def add_simulate_command(commands: Commands) -> None:
    """Add ``simulate``."""
    parser = commands.add_parser("simulate", help="compute costs and savings of the policies on recorded trainings")
    parser.set_defaults(run=_simulate)
    parser.add_argument("--train-trace", type=Path, metavar="FILE", help="epochs to the target, as CSV")
    parser.add_argument("--power-trace", type=Path, metavar="FILE", help="time and power, as CSV")
    parser.add_argument(
        "--job", dest="job_id", metavar="JOB", help="simulate from the trials of this job instead of traces"
    )
    add_source(parser)
    parser.add_argument("--all", action="store_true", help="simulate the six workloads of the Zeus paper")
    for name in ("dataset", "network", "optimizer"):
        parser.add_argument(f"--{name}", help=f"{name} of the workload, as named in the traces")
    parser.add_argument("--target-metric", type=float, metavar="X", help="a target metric of the train trace")
    parser.add_argument(
        "--max-epochs", type=at_least_1, metavar="E", help="epochs after which a run has missed its target"
    )
    parser.add_argument("--default-batch-size", type=at_least_1, metavar="B", help="default size of the job")
    parser.add_argument(
        "--policy",
        type=policy_name,
        action="append",
        metavar="POLICY",
        help="gp_voi, zeus or an installed policy, one or several (default: gp_voi and zeus)",
    )
    parser.add_argument(
        "--recurrences", type=at_least_1, default=100, metavar="N", help="recurrences of each job (default 100)"
    )
    parser.add_argument(
        "--seeds", type=at_least_1, default=200, metavar="N", help="number of simulated jobs (default 200)"
    )
    parser.add_argument(
        "--eta",
        type=_share,
        action="append",
        metavar="ETA",
        help="η of the cost, from 0 to 1, one or several (default: the job's, or 0.5)",
    )
    parser.add_argument(
        "--beta", type=_beta, default=argparse.SUPPRESS, help="β of early stopping, or none (default: the job's, or 2)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    instead = "the first run takes the default size"
    parser.add_argument("--probe", "--first-run", action=RemovedOption, instead=instead)
    instead = "python -m benchmarks.policies --policies warm simulates warm starts"
    parser.add_argument("--warm-start", action=RemovedOption, instead=instead)
    instead = "each size runs at its cheapest limit, which its first run finds"
    parser.add_argument("--power-limit", action=RemovedOption, instead=instead)
    instead = "python -m benchmarks.policies --only made-in-flight-4 simulates four recurrences at a time"
    parser.add_argument("--concurrency", action=RemovedOption, instead=instead)
    instead = "multiply the column KWH by the price"
    parser.add_argument("--price", action=RemovedOption, instead=instead)


def _simulate(options: argparse.Namespace) -> None:
    job = None if options.job_id is None else _job_of(options)
    workloads = _traced(options) if job is None else [recorded_workload(job)]
    terms = (0.5, 2.0) if job is None else (job.job.eta_knob, job.job.beta_knob)
    policies = list(dict.fromkeys(options.policy or OWN_POLICIES))
    settings = [
        Setting(
            recurrences=options.recurrences,
            seeds=options.seeds,
            eta=eta,
            beta=getattr(options, "beta", terms[1]),
        )
        for eta in dict.fromkeys(options.eta or [terms[0]])
    ]
    comparisons = [compare(workload, policies, setting) for setting in settings for workload in workloads]
    if options.json is not None:
        found = [each.as_json() for each in comparisons]
        is_one = not options.all and len(comparisons) == 1
        document = {"workloads": found, "geometric_mean": geometric_means(comparisons)}
        # Results have no infinity or NaN.
        text = json.dumps(found[0] if is_one else document, indent=2, allow_nan=False)
        options.json.write_text(text + "\n", "utf-8")
    print(f"{ratios_text(comparisons)}\n\n{savings_text(comparisons)}")
    if job is not None and (default := job.job.default_batch_size) != workloads[0].default_batch_size:
        print(f"\nthe default size, {default}, was never measured: the nearest measured size is used")


def policy_name(name: str) -> str:
    """Parse the name of an installed policy."""
    missing = find(name).missing
    if missing is not None:
        raise argparse.ArgumentTypeError(missing)
    return name


def _job_of(options: argparse.Namespace) -> JobView:
    named = _flags(options, ("train_trace", "power_trace", *_SELECTION))
    if options.all:
        named.append("--all")
    if named:
        raise CommandError(f"--job takes a job's own trials: leave out {', '.join(named)}")
    return read_job(options)


def _traced(options: argparse.Namespace) -> list[Workload]:
    missing = _flags(options, ("train_trace", "power_trace"), given=False)
    if missing:
        raise CommandError(f"what to simulate? Give {' and '.join(missing)}, or --job for a job's own trials")
    named, missing = _flags(options, _SELECTION), _flags(options, _SELECTION, given=False)
    if options.all and named:
        raise CommandError(f"--all takes the six workloads as they are: leave out {', '.join(named)}")
    if not options.all and missing:
        raise CommandError(f"which workload? Give {', '.join(missing)}, or --all for the six of the Zeus paper")
    one = {name: getattr(options, name) for name in _SELECTION}
    traces = Traces.read(options.train_trace, options.power_trace)
    selections = PAPER_WORKLOADS if options.all else [Selection(**one)]
    return [traces.workload(each) for each in selections]


def _flags(options: argparse.Namespace, names: Sequence[str], *, given: bool = True) -> list[str]:
    """Return the options of these names that the command line gives, or with `given` False those that it omits."""
    return ["--" + name.replace("_", "-") for name in names if (getattr(options, name) is not None) is given]


def at_least_1(text: str) -> int:
    """Parse a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _share(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return number


def _beta(text: str) -> float | None:
    if text == "none":
        return None
    number = float(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def ratios_text(comparisons: Sequence[Comparison]) -> str:
    """Format the ratios of total cost to the oracle's total cost, by policy and number of recurrences."""
    results = [(each, policy, result) for each in comparisons for policy, result in each.results.items()]
    marks = [str(mark) for mark in results[0][2].ratio]
    rows = [
        [
            each.workload.name,
            policy,
            f"{each.eta:g}",
            *map(_ratio, [*result.ratio.values(), result.worst_seed_ratio]),
            str(result.unfinished),
            _percent(result.energy_reduction_last5),
        ]
        for each, policy, result in results
    ]
    if len(comparisons) > 1:
        rows += [
            ["geometric mean", policy, "", *map(_ratio, ratios.values()), "", "", ""]
            for policy, ratios in geometric_means(comparisons).items()
        ]
    header = ["WORKLOAD", "POLICY", "ETA", *marks, "WORST SEED", "UNFINISHED", "ENERGY SAVED"]
    return (
        "total cost over the oracle's, mean over the seeds, by number of recurrences\n\n"
        + table(header, rows)
        + "\n\nENERGY SAVED: last five recurrences against the default batch size at the maximum power limit"
    )


def savings_text(comparisons: Sequence[Comparison]) -> str:
    """Format energy, time and savings of all recurrences, by policy."""
    rows = []
    for each in comparisons:
        name, eta, default = each.workload.name, f"{each.eta:g}", each.default_consumption
        always = f"always {each.landscape.default.batch_size}"
        rows.append([name, always, eta, *_amounts(default), "", ""])
        for policy, result in each.results.items():
            saved = map(_percent, result.consumed.saved_against(default))
            rows.append([name, policy, eta, *_amounts(result.consumed), *saved])
    unfinished = any(result.unfinished for each in comparisons for result in each.results.values())
    return (
        f"what {comparisons[0].recurrences} recurrences took, mean over the seeds, and what they saved against always "
        "taking the default\n\n"
        + table(["WORKLOAD", "POLICY", "ETA", "KWH", "HOURS", "SAVED ENERGY", "SAVED TIME"], rows)
        + ("\n\nUNFINISHED recurrences include their trials and a run at the default, with which they end" * unfinished)
    )


def _amounts(consumed: Consumption | None) -> list[str]:
    if consumed is None:
        return ["-", "-"]
    return [f"{amount:.4g}" for amount in (consumed.energy_kwh, consumed.time_h)]


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None or math.isinf(ratio) else f"{ratio:.3f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
