"""A plain PyTorch script that a master launches: a small network learns handwritten digits.

Usage: ``zeus-plugins master run examples/master/digits.toml``; or without a master, e.g.
``ZEUS_TARGET_METRIC=0.95 python examples/master/digits.py --batch-size 64 --lr 0.003 --epochs 20 --seed 1``
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

from zeus_plugins.dataloader import ZeusDataLoader


def train(batch_size: int, lr: float, epochs: int, seed: int) -> None:
    """Train until the target is reached, or another epoch would cross the cost threshold."""
    torch.set_num_threads(1)  # More threads do not speed up so small a network.
    torch.manual_seed(seed)
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train_set, validation_set = random_split(dataset, [0.8, 0.2], torch.Generator().manual_seed(0))
    train_loader = ZeusDataLoader(train_set, batch_size=batch_size, max_epochs=epochs, shuffle=True)
    validation_loader = ZeusDataLoader(validation_set, batch_size=256)

    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    adam = torch.optim.Adam(network.parameters(), lr=lr)
    for epoch in train_loader.epochs():
        for images, labels in train_loader:
            adam.zero_grad()
            nn.functional.cross_entropy(network(images), labels).backward()
            adam.step()
        with torch.no_grad():
            correct = [(network(images).argmax(dim=1) == labels).float() for images, labels in validation_loader]
        accuracy = torch.cat(correct).mean().item()
        print(f"epoch {epoch}: accuracy {accuracy:.3f}")
        train_loader.report_metric(accuracy)


def main() -> None:
    """Train once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True, help="learning rate")
    parser.add_argument("--epochs", type=int, required=True, help="maximum number of epochs")
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    train(options.batch_size, options.lr, options.epochs, options.seed)


if __name__ == "__main__":
    main()
