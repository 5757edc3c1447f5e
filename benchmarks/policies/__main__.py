"""``python -m benchmarks.policies``: what policies cost in simulated jobs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.policies.report_command import add_report_command
from benchmarks.policies.study_command import add_study_command
from bso_server.cli.common import CommandError
from bso_server.errors import BsoError


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, print tables, and write what is asked for; the exit status is 0, or 1 with one line of reason."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.policies", description="Costs of policies in simulated jobs. See docs/policy.md."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_report_command(commands)
    add_study_command(commands)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except (CommandError, BsoError, ValueError, OSError) as error:
        print(f"benchmarks.policies: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
