"""Runs itself in two fresh processes, as the demo runs its training; arguments: the log, and perhaps ``lose``.

With that, nobody can reach the fork server any more once the first process has ended.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path

from zeus_plugins.demo.processes import Launcher

IMPORTED_IN = os.getpid()


def main(arguments: Sequence[str]) -> int:
    """What each process does."""
    print("imported beforehand:", os.getpid() != IMPORTED_IN, *arguments, flush=True)
    print("to standard error", file=sys.stderr)
    return len(arguments)


def launch(log: Path, *, lose: bool) -> None:
    launcher = Launcher("tests.support.launching")
    for arguments in (["one"], ["one", "two"]):
        process = launcher.start(arguments, log)
        process.join()
        print(process.exitcode)
        if lose:
            address: str = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]  # private
            Path(address).unlink(missing_ok=True)


if __name__ == "__main__":
    launch(Path(sys.argv[1]), lose="lose" in sys.argv)
