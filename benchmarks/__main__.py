"""``python -m benchmarks``: load test of the server; checks its costs against limits (the gate) and prints both.

The gate has limits for the load of a fleet of 10,000 trainings on one server, and for the server's CPU time per request
in whole trials, compared with Zeus 0.16's server in the same run. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from benchmarks.fleet_load import Fleet, FleetFigures, measure_fleet
from benchmarks.processes import BenchmarkError
from benchmarks.tables import fleet_text, text_table, trials_text
from benchmarks.whole_trials import OURS, ZEUS, Shape, TrialFigures, measure_trials

FLEET_CORES = 0.35
FLEET_P99_MS = 50.0
ZEUS_RATIO = 3.2
"""Minimum ratio of CPU time of Zeus's server to ours: 3.7 (measured 2026-11-23), divided by 1.15 for tolerance."""

_SECONDS = 45.0
_QUICK_SECONDS = 5.0
_QUICK_FLEET = Fleet(trainings=200, epoch_s=10.0, heartbeat_s=2.0)
_QUICK_SHAPE = Shape(jobs=2, in_flight=2, trials=4, epochs=5)

# The figures depend on these packages. In all servers, uvicorn uses uvloop if it is installed.
_PACKAGES = ("zeus-plugins", "litestar", "sqlalchemy", "aiosqlite", "uvicorn", "uvloop")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; return 0 if the measurement succeeded, even if it misses the gate, and 1 if it failed."""
    options = _parser().parse_args(arguments)
    fleet = _QUICK_FLEET if options.quick else Fleet()
    shape = _QUICK_SHAPE if options.quick else Shape(options.jobs, options.in_flight, options.trials, options.epochs)
    print(f"{datetime.now(UTC).isoformat(timespec='seconds')}, {_machine()}\n", flush=True)
    try:
        with tempfile.TemporaryDirectory(prefix="bso-bench-") as temporary:
            directory = Path(temporary)
            seconds = _QUICK_SECONDS if options.quick else _SECONDS
            fleet_figures = measure_fleet(fleet, directory, seconds=seconds)
            print(f"A fleet of {fleet.trainings} trainings\n{fleet_text(fleet_figures)}\n", flush=True)
            prefix = f"bench-{secrets.token_hex(4)}"
            servers = measure_trials(shape, directory, prefix, beside=options.beside, with_zeus=options.zeus)
            extent = f"{shape.jobs} jobs × {shape.in_flight} in flight × {shape.trials} trials × {shape.epochs} epochs"
            print(f"Whole trials: {extent}\n{trials_text(servers)}\n", flush=True)
    except BenchmarkError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    gate = judge(fleet_figures, servers)
    print("The gate" + (", of a quick run, which says nothing" if options.quick else ""))
    print(text_table([["goal", "", "measured", "result"], *gate]))
    if options.json is not None:
        document = {"fleet": asdict(fleet_figures), "whole_trials": [asdict(each) for each in servers], "gate": gate}
        options.json.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    return 0


def judge(fleet: FleetFigures, servers: Sequence[TrialFigures]) -> list[list[str]]:
    """Compare the figures with the gate.

    Returns:
        A list for each goal: its name, its limit, the measured value, and ``met``, ``not met`` or ``not known``.
    """
    cpu_ms = {each.server: each.cpu_ms for each in servers}
    ours_ms, zeus_ms = cpu_ms[OURS], cpu_ms.get(ZEUS)
    ratio = zeus_ms / ours_ms if zeus_ms is not None and ours_ms else None
    return [
        _at_most("fleet: cores", FLEET_CORES, fleet.server_cores),
        _at_most("fleet: p99 of a heartbeat, ms", FLEET_P99_MS, fleet.heartbeat_p99_ms),
        _at_most("fleet: requests without success", 0, fleet.failures),
        ["whole trials: CPU of Zeus's server / of ours", f"≥ {ZEUS_RATIO:g}", *_result(ratio, ratio, ZEUS_RATIO)],
    ]


def _at_most(what: str, limit: float, measured: float | None) -> list[str]:
    return [what, f"≤ {limit:g}", *_result(measured, limit, measured)]


def _result(measured: float | None, larger: float | None, smaller: float | None) -> list[str]:
    if measured is None or larger is None or smaller is None:
        return ["–", "not known"]
    return [f"{measured:.3g}", "met" if larger >= smaller else "not met"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Put load on `bso-server serve` over HTTP, and hold what it costs against the gate. "
        "See docs/benchmarks.md.",
    )
    for name, standard, what in (
        ("jobs", 4, "number of jobs"),
        ("in-flight", 4, "trials of each job at the same time"),
        ("trials", 40, "trials of each job"),
        ("epochs", 20, "reports per trial, at least 2"),
    ):
        parser.add_argument(f"--{name}", type=_count, default=standard, help=f"{what} (default {standard})")
    parser.add_argument("--quick", action="store_true", help="a small run that shows that all works")
    parser.add_argument(
        "--zeus",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure Zeus 0.16's server, too, which is installed into .zeus-peer (default: yes)",
    )
    parser.add_argument(
        "--beside",
        action="append",
        default=[],
        metavar="URL",
        help="measure whole trials on this database, too: one of its own, whose schema is brought up to date",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _machine() -> str:
    versions = (f"{name} {version(name)}" for name in _PACKAGES)
    python = f"Python {platform.python_version()}"
    return ", ".join([platform.system(), platform.machine(), f"{os.cpu_count()} CPUs", python, *versions])


if __name__ == "__main__":
    sys.exit(main())
