"""The ``zeus-plugins`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from zeus_plugins.cli import doctor, energy, master, sync
from zeus_plugins.errors import ZeusBSOError
from zeus_plugins.protocol import GP_VOI, OWN_POLICIES, printable

_DEFAULT_RECURRENCES = 18


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: its own, 0, or 1 after one line on standard error."""
    options = _parser().parse_args(arguments)
    try:
        status: int | None = options.run(options)
    except ZeusBSOError as error:
        print(printable(f"zeus-plugins: {error}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("zeus-plugins: interrupted", file=sys.stderr)
        return 130
    return status or 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="zeus-plugins", description="Batch size optimization: the training side.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('zeus-plugins')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="watch a recurring training find its batch size on this machine",
        description="Starts a server and lets a small training recur on it. Everything is real, nothing simulated.",
    )
    demo.add_argument(
        "--recurrences",
        type=master.positive,
        default=_DEFAULT_RECURRENCES,
        help="how often the training has to reach its target (default %(default)s)",
    )
    demo.add_argument(
        "--directory", type=Path, default=Path(".demo"), help="where results are written (default %(default)s)"
    )
    demo.add_argument(
        "--policy",
        choices=OWN_POLICIES,
        default=GP_VOI,
        help="how batch sizes are chosen (default %(default)s; zeus is the policy of the Zeus paper)",
    )
    demo.add_argument("--open", action="store_true", help="show the server's pages in a browser meanwhile")
    demo.set_defaults(run=_demo)
    doctor.add_parser(commands)
    energy.add_parser(commands)
    master.add_parser(commands)
    sync.add_parser(commands)
    return parser


def _demo(options: argparse.Namespace) -> None:
    try:
        from zeus_plugins.demo.runner import run_demo
    except ModuleNotFoundError as error:
        raise ZeusBSOError(f"{error.name} is not installed: pip install 'zeus-plugins[demo]'") from None
    run_demo(options.recurrences, options.directory, options.policy, opens=options.open)
