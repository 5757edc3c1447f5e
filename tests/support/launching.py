"""Run this module in two fresh processes, like the demo's training; the argument is the log."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from zeus_plugins.demo.processes import Launcher

IMPORTED_IN = os.getpid()


def main(arguments: Sequence[str]) -> int:
    """Print the facts of a process."""
    print("imported beforehand:", os.getpid() != IMPORTED_IN, *arguments, flush=True)
    print("to standard error", file=sys.stderr)
    return len(arguments)


def launch(log: Path) -> None:
    launcher = Launcher("tests.support.launching")
    for arguments in (["one"], ["one", "two"]):
        process = launcher.start(arguments, log)
        process.join()
        print(process.exitcode)


if __name__ == "__main__":
    launch(Path(sys.argv[1]))
