"""The ``zeus-plugins`` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from zeus_plugins.cli import doctor, energy, master, sync
from zeus_plugins.errors import ZeusBSOError
from zeus_plugins.protocol import package_version, printable

_DEFAULT_RECURRENCES = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: its own, 0, or 1 after one line on standard error."""
    options = _parser().parse_args(arguments)
    try:
        status: int | None = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has ended. The interpreter flushes standard output at its end, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except ZeusBSOError as error:
        print(printable(f"zeus-plugins: {error}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("zeus-plugins: interrupted", file=sys.stderr)
        return 130
    return status or 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="zeus-plugins", description="Batch size optimization for trainings.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {package_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="watch a recurring training find its batch size on this machine",
        description="Starts a server and runs a small recurring training with it. Trainings are real, not simulated.",
    )
    demo.add_argument(
        "--recurrences",
        type=master.positive,
        default=_DEFAULT_RECURRENCES,
        help="number of trainings that reach the target (default %(default)s)",
    )
    demo.add_argument(
        "--directory", type=Path, default=Path(".demo"), help="directory of the results (default %(default)s)"
    )
    demo.add_argument("--policy", help=argparse.SUPPRESS)
    demo.add_argument("--open", action="store_true", help="open the server's pages in a browser")
    demo.set_defaults(run=_demo)
    doctor.add_parser(commands)
    energy.add_parser(commands)
    master.add_parser(commands)
    sync.add_parser(commands)
    return parser


def _demo(options: argparse.Namespace) -> None:
    if options.policy:
        raise ZeusBSOError("--policy was removed: `python -m benchmarks.policies` compares policies")
    try:
        from zeus_plugins.demo.runner import run_demo
    except ModuleNotFoundError as error:
        raise ZeusBSOError(f"{error.name} is not installed: pip install 'zeus-plugins[demo]'") from None
    run_demo(options.recurrences, options.directory, opens=options.open)
