"""A custom training loop under Lightning Fabric that learns which batch size is cheapest, with one or more processes.

Usage: ``python examples/fabric_digits.py [--recurrences N] [--devices N] [--server-url URL] [--job-id ID]``
"""

from __future__ import annotations

import argparse

import torch
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from zeus_plugins import BatchSizeOptimizer, JobSpec
from zeus_plugins.errors import ZeusBSOTrainFailError

RATE = 0.003  # learning rate at the default batch size


def train(fabric: Fabric, server_url: str | None, job_id: str) -> None:
    """Train once, as one recurrence of the job."""
    job = JobSpec(
        job_id=job_id,
        job_id_prefix="digits",
        batch_sizes=(16, 32, 64, 128),
        default_batch_size=64,
        target_metric=0.93,
        max_epochs=20,
    )
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train_set, validation_set = random_split(dataset, [0.8, 0.2], torch.Generator().manual_seed(0))
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    # Only the process with rank 0 talks to the server. It broadcasts the batch size and the outcome to the others.
    with BatchSizeOptimizer(monitor=None, server_url=server_url, job=job, rank=fabric.global_rank) as optimizer:
        batch_size = fabric.broadcast(optimizer.get_batch_size() if fabric.is_global_zero else 0)
        optimizer.current_batch_size = batch_size
        adam = torch.optim.Adam(network.parameters(), lr=RATE)
        optimizer.scale_learning_rate(adam)
        network, adam = fabric.setup(network, adam)
        loader, validation = fabric.setup_dataloaders(
            DataLoader(train_set, batch_size=batch_size // fabric.world_size, shuffle=True),
            DataLoader(validation_set, batch_size=256),
        )
        if fabric.is_global_zero:
            optimizer.on_train_begin()
        outcome = "goes on"
        while outcome == "goes on":
            for images, labels in loader:
                adam.zero_grad()
                fabric.backward(nn.functional.cross_entropy(network(images), labels))
                adam.step()
            metric = accuracy(fabric, network, validation)
            if fabric.is_global_zero:
                try:
                    optimizer.on_evaluate(metric)
                    outcome = "target reached" if optimizer.training_finished else "goes on"
                except ZeusBSOTrainFailError as failure:
                    outcome = str(failure)
            outcome = fabric.broadcast(outcome)
    fabric.print(f"batch size {batch_size}: {outcome}", flush=True)


@torch.no_grad()
def accuracy(fabric: Fabric, network: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]]) -> float:
    """Return the share of images that are classified correctly, over all processes."""
    correct = [(network(images).argmax(dim=1) == labels).float() for images, labels in loader]
    return float(fabric.all_reduce(torch.cat(correct).mean(), reduce_op="mean"))


def main() -> None:
    """Train ``--recurrences`` times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recurrences", type=int, default=1, metavar="N", help="train N times")
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="number of processes, all on the CPU")
    parser.add_argument("--server-url", help="default: ZEUS_SERVER_URL, or if unset, a server in this process")
    parser.add_argument("--job-id", default="digits-fabric")
    options = parser.parse_args()
    fabric = Fabric(accelerator="cpu", devices=options.devices, strategy="ddp" if options.devices > 1 else "auto")
    fabric.launch()
    for _ in range(options.recurrences):
        train(fabric, options.server_url, options.job_id)


if __name__ == "__main__":
    main()
