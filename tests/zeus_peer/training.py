"""One launch of a training script that a user of Zeus could have written. Runs where Zeus is installed.

Usage: ``python training.py SERVER_URL JOB EPOCHS``: the job's fields as JSON, and, as JSON too, how many epochs each
batch size needs to reach the target; where it needs more than the job allows, the target is not reached. With
``--leave-after N`` the script ends after so many epochs without a word to anybody.

Prints one JSON object: the batch size, and whether the training finished, left, or which error it ended with.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from zeus.exception import ZeusBaseError
from zeus.monitor import ZeusMonitor
from zeus.optimizer.batch_size import BatchSizeOptimizer, JobSpec

outcome: dict[str, Any] = {"batch_size": None, "ended": "left", "message": None}


def train(server_url: str, job: JobSpec, epochs: Mapping[str, int], leave_after: int) -> None:
    optimizer = BatchSizeOptimizer(ZeusMonitor(), server_url, job)
    outcome["batch_size"] = batch_size = optimizer.get_batch_size()
    optimizer.on_train_begin()
    for epoch in range(1, leave_after + 1):
        optimizer.on_evaluate(0.95 if epoch >= epochs[str(batch_size)] else 0.5)
        if optimizer.training_finished:
            outcome["ended"] = "finished"
            return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("server_url")
    parser.add_argument("job", type=json.loads)
    parser.add_argument("epochs", type=json.loads)
    parser.add_argument("--leave-after", type=int, default=100)
    options = parser.parse_args()
    try:
        train(options.server_url, JobSpec(**options.job), options.epochs, options.leave_after)
    except ZeusBaseError as error:
        outcome.update(ended=type(error).__name__, message=str(error))
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
