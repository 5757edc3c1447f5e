"""Ends processes with the one that started them, also when that one was killed and could end nothing itself.

``python -m benchmarks.recurrences.following MODULE …`` runs ``python -m MODULE …`` so.
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
    """End this process, without ceremony, as soon as the one that started it has ended."""
    parent, parent_pid = multiprocessing.parent_process(), os.getppid()

    def follow() -> None:
        if parent is not None:  # the parent of a fork is the fork server, which lives as long as its forks
            parent.join()
        while parent is None and os.getppid() == parent_pid:
            time.sleep(_POLL_S)
        os._exit(1)

    threading.Thread(target=follow, name="end-with-parent", daemon=True).start()


if __name__ == "__main__":
    end_with_parent()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
