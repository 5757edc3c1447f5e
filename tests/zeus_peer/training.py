"""A launch of a training script in the style of Zeus's users. Runs where Zeus is installed.

Usage: ``python training.py SERVER_URL JOB EPOCHS``: the job's fields as JSON, and, also as JSON, the number of epochs
that each batch size needs to reach the target; if it exceeds the job's limit, the target is not reached. With
``--leave-after N`` the script ends silently after N epochs. With ``--ranks N``, N processes
are the synchronized ranks of one data-parallel training: the first asks for the batch size, and each
reports every epoch. With ``--pause FILE`` a pause follows the first epoch: it begins with the creation of the file
and ends with its removal.

Print one JSON object: the batch size, and the end of the training (finished, left, or an error), per rank if there
are several.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Mapping
from multiprocessing.pool import Pool
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from zeus.exception import ZeusBaseError
from zeus.monitor import ZeusMonitor
from zeus.optimizer.batch_size import BatchSizeOptimizer, JobSpec

# Time limit for the slowest rank to catch up, unless it has left.
TOGETHER_S = 120.0


def train(
    optimizer: Any, epochs: Mapping[str, int], leave_after: int, together: Barrier | None, pause: Path | None = None
) -> tuple[str, Any]:
    """Return the end of the training with its message."""
    try:
        optimizer.on_train_begin()
        for epoch in range(1, leave_after + 1):
            if together is not None:
                together.wait(TOGETHER_S)
            optimizer.on_evaluate(0.95 if epoch >= epochs[str(optimizer.current_batch_size)] else 0.5)
            if optimizer.training_finished:
                return "finished", None
            if pause is not None and epoch == 1:
                pause.touch()
                while pause.exists():
                    time.sleep(0.02)
    except ZeusBaseError as error:
        return type(error).__name__, str(error)
    return "left", None


def train_rank(
    rank: int, server_url: str, job: JobSpec, told: tuple[int, int], epochs: Mapping[str, int]
) -> tuple[str, Any]:
    """Train as a later rank with the given batch size and trial number."""
    optimizer = BatchSizeOptimizer(ZeusMonitor(), server_url, job, rank=rank)
    optimizer.current_batch_size, optimizer.trial_number = told
    return train(optimizer, epochs, 100, _together)


_together: Barrier | None = None


def _keep(together: Barrier) -> None:
    global _together  # a barrier reaches the processes of a pool only at their start
    _together = together


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("server_url")
    parser.add_argument("job", type=json.loads)
    parser.add_argument("epochs", type=json.loads)
    parser.add_argument("--leave-after", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--pause", type=Path)
    options = parser.parse_args()
    outcome: dict[str, Any] = {"batch_size": None, "ended": "left", "message": None}
    job = JobSpec(**options.job)
    try:
        optimizer = BatchSizeOptimizer(ZeusMonitor(), options.server_url, job)
        outcome["batch_size"] = optimizer.get_batch_size()
    except ZeusBaseError as error:
        outcome.update(ended=type(error).__name__, message=str(error))
        print(json.dumps(outcome))
        return
    together = multiprocessing.Barrier(options.ranks) if options.ranks > 1 else None
    told = optimizer.current_batch_size, optimizer.trial_number
    if together is None:
        ends = [train(optimizer, options.epochs, options.leave_after, None, options.pause)]
    else:
        with Pool(options.ranks - 1, _keep, (together,)) as pool:
            others = pool.starmap_async(
                train_rank,
                [(rank, options.server_url, job, told, options.epochs) for rank in range(1, options.ranks)],
                chunksize=1,
            )
            ends = [train(optimizer, options.epochs, options.leave_after, together), *others.get(TOGETHER_S)]
    outcome["ended"] = " ".join(ended for ended, _ in ends)
    outcome["message"] = ends[0][1]
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
