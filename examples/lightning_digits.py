"""A Lightning training that learns, recurrence by recurrence, which batch size is cheapest.

Usage: ``python examples/lightning_digits.py [--recurrences N] [--devices N] [--server-url URL] [--job-id ID]``
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from zeus_plugins import JobSpec
from zeus_plugins.lightning import ZeusBSOCallback

MAX_EPOCHS = 20


class Classifier(LightningModule):
    """A small network for images of 8 × 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy."""
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Log the accuracy."""
        images, labels = batch
        self.log("val_acc", (self.network(images).argmax(dim=1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The learning rate is meant for the default batch size; the callback scales it."""
        return torch.optim.Adam(self.parameters(), lr=0.003)


def loaders() -> tuple[DataLoader[tuple[Tensor, ...]], DataLoader[tuple[Tensor, ...]]]:
    """Four fifths of the digits for training; the batch size in here is replaced."""
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train, validation = random_split(dataset, [0.8, 0.2], torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size=64, shuffle=True), DataLoader(validation, batch_size=256)


def train(options: argparse.Namespace) -> None:
    """Train once, as one recurrence of the job."""
    job = JobSpec(
        job_id=options.job_id,
        job_id_prefix="digits",
        batch_sizes=(16, 32, 64, 128),
        default_batch_size=64,
        target_metric=0.93,
        max_epochs=MAX_EPOCHS,
    )
    callback = ZeusBSOCallback(
        job, monitor="val_acc", server_url=options.server_url, lr_scaling="sqrt", on_failure="stop"
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=options.devices,
        max_epochs=MAX_EPOCHS,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), *loaders())
    if trainer.is_global_zero:
        trial = callback.trial
        verdict = "ended early" if trial.verdict is None else trial.verdict.message
        print(f"trial {trial.trial_number}: batch size {trial.batch_size}, {verdict}", flush=True)


def main() -> None:
    """Train once, or launch this script again and again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recurrences", type=int, default=0, metavar="N", help="launch this script N times")
    parser.add_argument("--devices", type=int, default=1, help="processes that train together")
    parser.add_argument("--server-url", default=os.environ.get("ZEUS_SERVER_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--job-id", default="digits-lightning")
    options = parser.parse_args()
    if not options.recurrences:
        train(options)
    once = ["--devices", str(options.devices), "--server-url", options.server_url, "--job-id", options.job_id]
    for _ in range(options.recurrences):
        subprocess.run([sys.executable, __file__, *once], check=True)  # noqa: S603 - this very script


if __name__ == "__main__":
    main()
