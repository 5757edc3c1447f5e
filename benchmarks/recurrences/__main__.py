"""The command ``python -m benchmarks.recurrences``: measures recurring trainings in several calls, and reports."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.processes import BenchmarkError
from benchmarks.recurrences.calibration import SECONDS
from benchmarks.recurrences.data import python_files
from benchmarks.recurrences.harness import State, measure, read_records, write_whole
from benchmarks.recurrences.hour import GPU_CHECK, HOUR, LEFT_STATUS, MACHINE, TARGETS, Hour, pack
from benchmarks.recurrences.plan import QUICK, Extent, steps
from benchmarks.recurrences.tasks import CPU, GPU, HOUR_TASKS, tasks_for
from benchmarks.reports import machine, proof_results
from benchmarks.tables import mark_of, proof_tables, write_tables
from zeus_plugins.errors import ZeusBSOError

_STATE = Path(".proof")
_EXTENTS = {
    "seeds": "jobs of each task and contender",
    "recurrences": "of each job",
    "repeats": "runs of each size, for each seed",
    "pairs": "trainings with and without the callback, for each seed",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status: 0, `LEFT_STATUS`, or 1 after printing an error in one line."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the exception also ends the server
    try:
        status: int = options.run(options)
    except (BenchmarkError, ZeusBSOError, ValueError, OSError) as error:
        print(f"benchmarks.recurrences: {error}", file=sys.stderr)
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recurrences",
        description="Real recurring trainings: README's call against always the default size. See docs/proof.md.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="measure, or go on with a measurement")
    names = ", ".join(task.name for task in tasks_for(CPU))
    run.add_argument("--tasks", nargs="+", default=[], metavar="NAME", help=f"of {names} (default: all)")
    run.add_argument("--quick", action="store_true", help="a few recurrences of each task, which show that all works")
    _add_extent(run, Extent())
    run.add_argument("--state", type=Path, default=_STATE, metavar="DIR", help=f"what was measured (default {_STATE})")
    run.set_defaults(run=_run)
    hour = commands.add_parser("hour", help="one call of the hour on a GPU: check, calibrate, measure, write results")
    hour.add_argument("--minutes", type=float, default=8.0, metavar="M", help="end before so many (default 8)")
    hour.add_argument("--began", type=float, metavar="S", help="the minutes began at this second since 1970")
    hour.add_argument("--seconds", type=float, nargs=2, default=SECONDS, metavar="S", help="time to reach a target")
    hour.add_argument(
        "--tasks", nargs="+", default=HOUR_TASKS, metavar="NAME", help=f"default: {', '.join(HOUR_TASKS)}"
    )
    hour.add_argument("--targets", type=Path, metavar="FILE", help="targets.json of an earlier call: no calibration")
    _add_extent(hour, HOUR)
    hour.add_argument(
        "--shrink",
        type=int,
        default=1,
        metavar="N",
        help="shrink the models, for tests; without a GPU a CPU stands for it, and all tables say so",
    )
    hour.add_argument("--state", type=Path, default=_STATE, metavar="DIR", help=f"what was measured (default {_STATE})")
    hour.add_argument("--out", type=Path, default=_STATE, metavar="DIR", help="gets the packed state and the results")
    hour.set_defaults(run=_hour)
    collect = commands.add_parser("collect", help="tables, JSON and documents of what was measured")
    collect.add_argument("--state", type=Path, nargs="+", default=[_STATE], metavar="DIR", help="one or several")
    collect.add_argument("--results", type=Path, metavar="FILE", help="write the figures as JSON")
    collect.add_argument("--from", dest="source", type=Path, metavar="FILE", help="take the figures of an earlier JSON")
    collect.add_argument("--write", type=Path, nargs="+", default=[], metavar="FILE", help="documents with marks")
    collect.set_defaults(run=_collect)
    return parser


def _add_extent(parser: argparse.ArgumentParser, extent: Extent) -> None:
    for name, what in _EXTENTS.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{what} (default {getattr(extent, name)})")


def _extent(options: argparse.Namespace, usual: Extent) -> Extent:
    return replace(usual, **{name: value for name in _EXTENTS if (value := getattr(options, name)) is not None})


def _run(options: argparse.Namespace) -> int:
    extent = _extent(options, QUICK if options.quick else Extent())
    state = State(options.state)
    write_whole(options.state / MACHINE, json.dumps(machine()) + "\n")
    measure(list(steps(tasks_for(CPU, options.tasks), extent)), state, say=_say)
    return 0


def _hour(options: argparse.Namespace) -> int:
    spent_s = 0.0 if options.began is None else max(0.0, time.time() - options.began)
    end_s = time.monotonic() + 60 * options.minutes - spent_s
    require_gpu(options.shrink)
    hour = Hour(
        State(options.state),
        end_s,
        tuple(options.seconds),
        options.shrink,
        options.out / "gpu-state.tgz",
        _extent(options, HOUR),
        tuple(options.tasks),
    )
    hour.exit_in_time()
    write_whole(options.state / MACHINE, json.dumps(machine(GPU) | {"texts": python_files()[1]}) + "\n")
    if options.targets is not None:
        hour.take_targets(options.targets)
    hour.say(f"a call of {options.minutes:g} minutes, {end_s - time.monotonic():.0f} s left")
    try:
        left = hour.measure()
    finally:
        pack(hour.state.directory, hour.pack_to)
        if hour.state.records:
            _write_results(options)
    hour.say(f"at least {left} steps are left: run the same command again" if left else "all steps are done")
    pack(hour.state.directory, hour.pack_to)
    return LEFT_STATUS if left else 0


def _write_results(options: argparse.Namespace) -> None:
    results = hour_results(options.state)
    write_whole(options.out / "gpu-results.json", json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    page = "\n\n".join(f"{mark_of(name)}\n{table}" for name, table in proof_tables(results).items())
    write_whole(options.out / "gpu-page.md", page + "\n")


def hour_results(directory: Path) -> dict[str, Any]:
    """Return the figures of the hour on a GPU: of the trainings, windows, calibrated targets and GPU check."""
    records = read_records([directory])
    results = proof_results(records, json.loads((directory / MACHINE).read_text("utf-8")))
    for name, file in (("gpu_check", GPU_CHECK), ("targets", TARGETS)):
        if (directory / file).exists():
            results[name] = json.loads((directory / file).read_text("utf-8"))
    return results


def require_gpu(shrink: int) -> None:
    """Hide all GPUs but the first visible one, because the Hugging Face Trainer would split batches over several.

    Raises:
        BenchmarkError: PyTorch finds no GPU, and the models are not shrunk.
    """
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    if shrink > 1:
        return
    import torch  # the import takes seconds

    if not torch.cuda.is_available():
        raise BenchmarkError(
            "PyTorch finds no GPU, and a CPU would train these models for weeks: "
            "--shrink 8 has a CPU stand for a GPU, with small models, for tests"
        )


def _collect(options: argparse.Namespace) -> int:
    if options.source is not None:
        results = json.loads(options.source.read_text("utf-8"))
    elif (options.state[0] / GPU_CHECK).exists():
        results = hour_results(options.state[0])
    else:
        told = json.loads((options.state[0] / MACHINE).read_text("utf-8"))
        results = proof_results(read_records(options.state), told)
    if options.results is not None:
        options.results.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", "utf-8")
    tables = proof_tables(results)
    write_tables(tables, options.write)
    print("\n\n".join(tables.values()))
    return 0


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
