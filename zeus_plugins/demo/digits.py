"""One recurrence: a small network learns scikit-learn's handwritten digits with Lightning.

This is an ordinary training script, except for the callback in `train`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zeus_plugins.demo import JOB
from zeus_plugins.errors import ZeusBSOTrainFailError
from zeus_plugins.lightning import ZeusBSOCallback

Batch = tuple[Tensor, Tensor]


def digits(batch_size: int) -> tuple[DataLoader[tuple[Tensor, ...]], DataLoader[tuple[Tensor, ...]]]:
    """Load 1,797 grey images of 8 × 8 pixels: in shuffled batches for training, and a fifth of them for validation."""
    images, labels = load_digits(return_X_y=True)
    # Scale the pixels from 0–16 to 0–1.
    train_x, val_x, train_y, val_y = train_test_split(images / 16, labels, test_size=0.2, random_state=0)
    train_set = TensorDataset(torch.tensor(train_x, dtype=torch.float32), torch.tensor(train_y))
    val_set = TensorDataset(torch.tensor(val_x, dtype=torch.float32), torch.tensor(val_y))
    return DataLoader(train_set, batch_size=batch_size, shuffle=True), DataLoader(val_set, batch_size=len(val_set))


class Classifier(LightningModule):
    """A small convolutional network, trained by gradient descent with momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 2 * 2, 10),
        )

    def training_step(self, batch: Batch) -> Tensor:
        """Return the cross-entropy."""
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def validation_step(self, batch: Batch) -> None:
        """Log the accuracy."""
        images, labels = batch
        self.log("val_acc", (self.network(images).argmax(dim=1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimizer whose rate suits all batch sizes."""
        return torch.optim.SGD(self.parameters(), lr=0.03, momentum=0.9)


def train(server_url: str, seed: int) -> None:
    """Train once; raise `ZeusBSOTrainFailError` if the trial ends without reaching the target."""
    # More threads would not speed up so small a network, and would compete for the cores of a small machine.
    torch.set_num_threads(1)
    seed_everything(seed, verbose=False)
    trainer = Trainer(
        max_epochs=JOB.max_epochs,
        callbacks=[ZeusBSOCallback(JOB, monitor="val_acc", server_url=server_url)],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), *digits(JOB.default_batch_size))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one recurrence; return the exit status 0, or that of `ZeusBSOTrainFailError` if it missed the target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server-url", required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args(arguments)
    try:
        train(options.server_url, options.seed)
    except ZeusBSOTrainFailError as failure:
        print(failure, file=sys.stderr)
        return ZeusBSOTrainFailError.exit_status
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
