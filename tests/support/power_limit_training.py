"""A training that changes its GPU's power limit and then ends in one of many ways.

Usage: ``python -m tests.support.power_limit_training FILE WAY``;
the limit is the number in the file. It prints a line after the
change of the limit.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from tests.support.power_limit_bench import FileDevice
from zeus_plugins.energy import EstimateMonitor
from zeus_plugins.power_limit import Energy, PowerLimitProfiler

TRIED_W = 150.0


def end(profiler: PowerLimitProfiler, way: str) -> None:
    match way:
        case "closed":
            profiler.close()
        case "closed, and goes on":
            profiler.close()
            print("closed", flush=True)
            signal.pause()
        case "forgotten":
            pass
        case "raised":
            raise RuntimeError("the user's own")
        case "exit":
            sys.exit(3)
        case "hard exit":
            os._exit(3)
        case "abort":
            os.abort()
        case "signal":
            signal.pause()
        case "signal with a child":
            # Like a worker of a data loader: inherits all open files, and outlives the training.
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.pause()
            print(child, flush=True)
            signal.pause()
        case "signal with a handler":
            signal.signal(signal.SIGTERM, lambda *_: os._exit(4))
            print("handled", flush=True)
            signal.pause()


def train(path: Path, way: str) -> None:
    profiler = PowerLimitProfiler([FileDevice(path)], Energy(), monitor=EstimateMonitor(100.0), limits_w=[TRIED_W])
    profiler.on_epoch_begin()
    assert float(path.read_text()) == TRIED_W
    print("changed", flush=True)
    end(profiler, way)


if __name__ == "__main__":
    file, chosen_way = Path(sys.argv[1]), sys.argv[2]
    if chosen_way == "signal, trained in a thread":
        # Only the main thread may handle signals, so SIGTERM ends the process immediately.
        threading.Thread(target=train, args=(file, "forgotten"), daemon=True).start()
        signal.pause()
    else:
        train(file, chosen_way)
