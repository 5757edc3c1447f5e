"""A watchdog that ends a process when its parent process has ended, even if the parent was killed.

``python -m benchmarks.recurrences.following MODULE …`` runs ``python -m MODULE …`` with this watchdog.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import threading
import time

_POLL_S = 0.5


def end_with_parent() -> None:
    """Start a thread that ends this process, without any cleanup, as soon as the parent process has ended."""
    parent, parent_pid = multiprocessing.parent_process(), os.getppid()

    def follow() -> None:
        if parent is not None:  # getppid() of a fork is the fork server, which lives as long as its forks
            parent.join()
        while parent is None and os.getppid() == parent_pid:
            time.sleep(_POLL_S)
        os._exit(1)

    threading.Thread(target=follow, name="end-with-parent", daemon=True).start()


if __name__ == "__main__":
    end_with_parent()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
