"""``python -m benchmarks``: measure, print tables, and write JSON if asked to."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks import marks, suite, tables
from benchmarks.errors import BenchmarkError
from benchmarks.processes import Meter, Target


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 0 whatever the figures say, or 1 when they could not be had."""
    options = _parser().parse_args(arguments)
    try:
        results = suite.run(
            _plan(options), database_url=options.database_url, peer=_peer(options), beside=options.beside
        )
    except BenchmarkError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    judged = marks.judge(results)
    print(tables.text(results, judged))
    if options.json is not None:
        document = {**results.to_json(), "marks": [asdict(mark) for mark in judged]}
        options.json.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    shape = suite.FULL.shape
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Put load on `bso-server serve` over HTTP and say what a request costs; train with the callbacks "
        "and say what they cost. See docs/benchmarks.md.",
    )
    parser.add_argument("--jobs", type=_count, help=f"number of jobs (default {shape.jobs})")
    parser.add_argument(
        "--concurrency", type=_count, help=f"trials of each job at the same time (default {shape.concurrency})"
    )
    parser.add_argument(
        "--epochs", type=_epochs, help=f"reports per trial, at least 2 (default {shape.epochs}); the last is final"
    )
    parser.add_argument("--rounds", type=_count, help=f"trials per client, one after another (default {shape.rounds})")
    parser.add_argument(
        "--growth",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure how costs grow with the trials of a job (default: yes)",
    )
    parser.add_argument(
        "--overhead",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure what the callbacks cost a training (default: yes)",
    )
    parser.add_argument("--quick", action="store_true", help="a small run that shows that all works; judges no mark")
    parser.add_argument(
        "--database-url", help="SQLAlchemy URL of a database for the benchmark (default: a temporary SQLite file)"
    )
    parser.add_argument(
        "--beside",
        action="append",
        default=[],
        metavar="URL",
        help="measure this database beside SQLite, too, and workers on the first of them; may be given again",
    )
    parser.add_argument("--peer-url", help="measure this running server of the same wire contract too, e.g. a Zeus one")
    parser.add_argument("--peer-pid", type=_count, help="its process on this machine, for its CPU time and memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _epochs(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"{value} is not at least 2: one report within the trial and one that ends it")
    return value


def _plan(options: argparse.Namespace) -> suite.Plan:
    """The preset, with what was given on the command line on top."""
    preset = suite.QUICK if options.quick else suite.FULL
    names = ("jobs", "concurrency", "epochs", "rounds")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    sizes = preset.growth_sizes if options.growth else ()
    overhead = preset.overhead if options.overhead else None
    return replace(preset, shape=replace(preset.shape, **given), growth_sizes=sizes, overhead=overhead)


def _peer(options: argparse.Namespace) -> Target | None:
    if options.peer_url is None:
        return None
    url = urlsplit(options.peer_url)
    if url.scheme != "http" or url.hostname is None or url.path not in {"", "/"}:
        raise BenchmarkError(f"--peer-url {options.peer_url}: give it as http://HOST:PORT")
    meter = Meter(options.peer_pid)
    if meter.cpu_s() == 0:
        raise BenchmarkError(f"--peer-pid {options.peer_pid}: no such process on this machine")
    return Target(suite.PEER, url.hostname, url.port or 80, meter)


if __name__ == "__main__":
    sys.exit(main())
