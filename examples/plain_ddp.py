"""A data-parallel PyTorch loop without a framework that learns, recurrence by recurrence, which batch size is cheapest.

Usage: ``python examples/plain_ddp.py [--recurrences N] [--devices N] [--data digits|mnist] [--server-url URL]
[--job-id ID]``; or ``torchrun --nproc-per-node N examples/plain_ddp.py``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from typing import Any

import torch
import torch._dynamo  # before the process group exists; otherwise gloo's threads outlive it and may abort the exit
import torch.distributed as dist
from images import TARGETS, add_arguments, load
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from zeus_plugins import BatchSizeOptimizer, JobSpec
from zeus_plugins.errors import ZeusBSOTrainFailError

RATE = 0.003  # learning rate at the default batch size


def train(options: argparse.Namespace) -> None:
    """Train once, as one recurrence of the job; each process calls this, but only rank 0 talks to the server."""
    rank, processes = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    train_set, validation_set = load(options)
    job = JobSpec(
        job_id=options.job_id,
        job_id_prefix="digits",
        batch_sizes=(16, 32, 64, 128),
        default_batch_size=64,
        target_metric=TARGETS[options.data],
        max_epochs=20,
    )
    network = nn.Sequential(nn.Linear(len(train_set[0][0]), 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    parallel = DistributedDataParallel(network)
    with BatchSizeOptimizer(monitor=None, server_url=options.server_url, job=job, rank=rank) as optimizer:
        batch_size = told_by_the_first(optimizer.get_batch_size() if rank == 0 else None)
        optimizer.current_batch_size = batch_size
        # Batch sizes are global: each process loads an equal share of the batch.
        sampler = DistributedSampler(train_set)
        loader = DataLoader(train_set, batch_size=batch_size // processes, sampler=sampler)
        adam = torch.optim.Adam(parallel.parameters(), lr=RATE)
        optimizer.scale_learning_rate(adam)
        if rank == 0:
            optimizer.on_train_begin()
        outcome, epoch = None, 0
        while outcome is None:
            sampler.set_epoch(epoch)
            for images, labels in loader:
                adam.zero_grad()
                nn.functional.cross_entropy(parallel(images.to(device)), labels.to(device)).backward()
                adam.step()
            epoch += 1
            if rank == 0:
                outcome = outcome_of(optimizer, accuracy(network, DataLoader(validation_set, batch_size=256), device))
            outcome = told_by_the_first(outcome)
    if rank == 0:
        print(f"batch size {batch_size}: {outcome}", flush=True)


def outcome_of(optimizer: BatchSizeOptimizer, metric: float) -> str | None:
    """Report an evaluation; return the outcome of the training, or None if the training must continue."""
    try:
        optimizer.on_evaluate(metric)
    except ZeusBSOTrainFailError as failure:
        return str(failure)
    return "target reached" if optimizer.training_finished else None


def told_by_the_first(value: Any) -> Any:
    """Return in every process the value that rank 0 has passed."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


@torch.no_grad()
def accuracy(network: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]], device: torch.device) -> float:
    """Return the share of images that are classified correctly."""
    correct = [network(images.to(device)).argmax(dim=1).cpu() == labels for images, labels in loader]
    return torch.cat(correct).float().mean().item()


def main() -> None:
    """Train once if torchrun launched this process; otherwise launch torchrun ``--recurrences`` times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recurrences", type=int, default=1, metavar="N", help="launch this script N times")
    parser.add_argument("--devices", type=int, default=2, metavar="N", help="number of processes per launch")
    parser.add_argument("--server-url", default=os.environ.get("ZEUS_SERVER_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--job-id", default="digits-ddp")
    add_arguments(parser)
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        try:
            train(options)
        finally:
            dist.destroy_process_group()
        return
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.devices), __file__]
    once = ["--server-url", options.server_url, "--job-id", options.job_id, "--data", options.data]
    once += ["--data-folder", str(options.data_folder)]
    for _ in range(options.recurrences):
        subprocess.run([*launcher, *once], check=True)  # noqa: S603 - this very script


if __name__ == "__main__":
    main()
