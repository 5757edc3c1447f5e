"""A training loop without a framework that learns, recurrence by recurrence, which batch size is cheapest.

Usage: ``python examples/plain_pytorch.py [--recurrences N] [--data digits|mnist] [--server-url URL] [--job-id ID]``
"""

from __future__ import annotations

import argparse

import torch
from images import TARGETS, add_arguments, load
from torch import nn
from torch.utils.data import DataLoader

from zeus_plugins import BatchSizeOptimizer, JobSpec
from zeus_plugins.errors import ZeusBSOTrainFailError

RATE = 0.003  # learning rate at the default batch size


def train(options: argparse.Namespace) -> None:
    """Train once, as one recurrence of the job."""
    job = JobSpec(
        job_id=options.job_id,
        job_id_prefix="digits",
        batch_sizes=(16, 32, 64, 128),
        default_batch_size=64,
        target_metric=TARGETS[options.data],
        max_epochs=20,
    )
    train_set, validation_set = load(options)
    network = nn.Sequential(nn.Linear(len(train_set[0][0]), 64), nn.ReLU(), nn.Linear(64, 10))
    with BatchSizeOptimizer(monitor=None, server_url=options.server_url, job=job) as optimizer:
        batch_size = optimizer.get_batch_size()
        loader = DataLoader(train_set, batch_size=batch_size, shuffle=True)
        adam = torch.optim.Adam(network.parameters(), lr=RATE)
        optimizer.scale_learning_rate(adam)
        optimizer.on_train_begin()
        try:
            while not optimizer.training_finished:
                train_epoch(network, loader, adam)
                optimizer.on_evaluate(accuracy(network, DataLoader(validation_set, batch_size=256)))
        except ZeusBSOTrainFailError as failure:
            print(f"batch size {batch_size}: {failure}", flush=True)
        else:
            print(f"batch size {batch_size}: target reached", flush=True)


def train_epoch(
    network: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]], optimizer: torch.optim.Optimizer
) -> None:
    """Train for one pass over the training data."""
    for images, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(network: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]]) -> float:
    """Return the share of images that are classified correctly."""
    correct = [(network(images).argmax(dim=1) == labels).float() for images, labels in loader]
    return torch.cat(correct).mean().item()


def main() -> None:
    """Train ``--recurrences`` times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recurrences", type=int, default=1, metavar="N", help="train N times")
    parser.add_argument("--server-url", help="default: ZEUS_SERVER_URL, or if unset, a server in this process")
    parser.add_argument("--job-id", default="digits-plain")
    add_arguments(parser)
    options = parser.parse_args()
    for _ in range(options.recurrences):
        train(options)


if __name__ == "__main__":
    main()
