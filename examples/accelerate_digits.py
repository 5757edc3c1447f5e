"""A custom training loop under Accelerate, with one or more processes, that learns which batch size is cheapest.

Usage: ``python examples/accelerate_digits.py [--recurrences N] [--server-url URL] [--job-id ID]``, or with several
processes ``accelerate launch --num_processes 2 examples/accelerate_digits.py``
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from zeus_plugins import BatchSizeOptimizer, JobSpec
from zeus_plugins.errors import ZeusBSOTrainFailError

RATE = 0.003  # learning rate at the default batch size


def train(server_url: str | None, job_id: str) -> None:
    """Train once, as one recurrence of the job."""
    job = JobSpec(
        job_id=job_id,
        job_id_prefix="digits",
        batch_sizes=(16, 32, 64, 128),
        default_batch_size=64,
        target_metric=0.93,
        max_epochs=20,
    )
    accelerator = Accelerator(cpu=True)
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train_set, validation_set = random_split(dataset, [0.8, 0.2], torch.Generator().manual_seed(0))
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    # Only the process with rank 0 talks to the server. It broadcasts the batch size and the outcome to the others.
    rank = accelerator.process_index
    with BatchSizeOptimizer(monitor=None, server_url=server_url, job=job, rank=rank) as optimizer:
        batch_size = broadcast_object_list([optimizer.get_batch_size() if rank == 0 else 0])[0]
        optimizer.current_batch_size = batch_size
        per_process = batch_size // accelerator.num_processes
        adam = torch.optim.Adam(network.parameters(), lr=RATE)
        optimizer.scale_learning_rate(adam)
        network, adam, loader, validation = accelerator.prepare(
            network,
            adam,
            DataLoader(train_set, batch_size=per_process, shuffle=True),
            DataLoader(validation_set, batch_size=256),
        )
        if rank == 0:
            optimizer.on_train_begin()
        outcome = "goes on"
        while outcome == "goes on":
            network.train()
            for images, labels in loader:
                adam.zero_grad()
                accelerator.backward(nn.functional.cross_entropy(network(images), labels))
                adam.step()
            metric = accuracy(accelerator, network, validation)
            if rank == 0:
                try:
                    optimizer.on_evaluate(metric)
                    outcome = "target reached" if optimizer.training_finished else "goes on"
                except ZeusBSOTrainFailError as failure:
                    outcome = str(failure)
            outcome = broadcast_object_list([outcome])[0]
    accelerator.print(f"batch size {batch_size}: {outcome}", flush=True)


@torch.no_grad()
def accuracy(accelerator: Accelerator, network: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]]) -> float:
    """Return the share of images that are classified correctly, over all processes."""
    network.eval()
    correct = [accelerator.gather_for_metrics(network(images).argmax(dim=1) == labels) for images, labels in loader]
    return torch.cat(correct).float().mean().item()


def main() -> None:
    """Train ``--recurrences`` times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recurrences", type=int, default=1, metavar="N", help="train N times")
    parser.add_argument("--server-url", help="default: ZEUS_SERVER_URL, or if unset, a server in this process")
    parser.add_argument("--job-id", default="digits-accelerate")
    options = parser.parse_args()
    for _ in range(options.recurrences):
        train(options.server_url, options.job_id)


if __name__ == "__main__":
    main()
