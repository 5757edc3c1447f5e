"""One rank of a data-parallel training in a plain loop, as in Zeus's documentation; two trainings of one job.

Usage: ``python -m tests.support.loop_ranks FOLDER SERVER_URL`` with torch's variables for a process group.
"""

from __future__ import annotations

import json
import logging
import sys
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from tests.support.process_end import leave
from zeus_plugins import BatchSizeOptimizer, JobSpec
from zeus_plugins.energy import Measurement, ReplayMonitor
from zeus_plugins.protocol import ZEUS, GpuConfig

GPUS = GpuConfig(max_power=100, number_of_gpus=1, gpu_model="V100")
JOB = JobSpec(
    job_id_prefix="loop",
    job_id="loop",
    batch_sizes=(8, 16, 32),
    default_batch_size=32,
    target_metric=0.9,
    max_epochs=4,
    policy=ZEUS,
)
EPOCHS = {32: 3, 16: 2}


def train(server_url: str, rank: int) -> dict[str, Any]:
    """Launch the script once; the ranks measure slightly different costs and compute the same metric."""
    monitor = ReplayMonitor(repeat(Measurement(1 + rank / 1000, 100 - rank, "replay")), GPUS)
    optimizer = BatchSizeOptimizer(monitor, server_url, JOB, rank=rank)
    told = torch.zeros(2, dtype=torch.int)
    if rank == 0:
        told[0] = optimizer.get_batch_size()
        told[1] = optimizer.trial_number
    distributed.broadcast(told, src=0)
    optimizer.current_batch_size = told[0].item()  # type: ignore[assignment]  # as users write it
    optimizer.trial_number = told[1].item()  # type: ignore[assignment]
    optimizer.on_train_begin()
    for epoch in range(1, JOB.max_epochs + 1):
        distributed.barrier()
        optimizer.on_evaluate(0.95 if epoch >= EPOCHS[optimizer.current_batch_size] else 0.5)
        if optimizer.training_finished:
            break
    return {
        "sizes": optimizer.current_batch_size,
        "numbers": optimizer.trial_number,
        "epochs": epoch,
        "finished": optimizer.training_finished,
    }


def main(folder: str, server_url: str) -> None:
    """Train twice, and write the observations and warnings of this rank."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeus_plugins").addHandler(handler)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    launches = [train(server_url, rank) for _ in range(2)]
    story = {name: [launch[name] for launch in launches] for name in launches[0]} | {"warnings": warnings}
    Path(folder, f"{rank}.json").write_text(json.dumps(story))
    distributed.destroy_process_group()
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
