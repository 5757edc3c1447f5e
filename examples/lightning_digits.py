"""A Lightning training that learns, recurrence by recurrence, which batch size is cheapest.

Usage: ``python examples/lightning_digits.py [--recurrences N] [--accelerator cpu|gpu] [--devices N] [--nodes N]
[--data digits|mnist] [--target ACCURACY] [--on-failure finish|stop|raise] [--server-url URL] [--job-id ID]``
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import torch
from images import TARGETS, add_arguments, load
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from zeus_plugins import JobSpec
from zeus_plugins.lightning import ZeusBSOCallback

MAX_EPOCHS = 20


class Classifier(LightningModule):
    """A small network for images, which are rows of pixels."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(pixels, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the cross-entropy."""
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Log the accuracy."""
        images, labels = batch
        self.log("val_acc", (self.network(images).argmax(dim=1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Create Adam with the learning rate for the default batch size; the callback scales the rate."""
        return torch.optim.Adam(self.parameters(), lr=0.003)


def train(options: argparse.Namespace) -> None:
    """Train once, as one recurrence of the job."""
    train_set, validation_set = load(options)
    job = JobSpec(
        job_id=options.job_id,
        job_id_prefix="digits",
        batch_sizes=(16, 32, 64, 128),
        default_batch_size=64,
        target_metric=options.target or TARGETS[options.data],
        max_epochs=MAX_EPOCHS,
    )
    callback = ZeusBSOCallback(job, monitor="val_acc", server_url=options.server_url, on_failure=options.on_failure)
    trainer = Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        num_nodes=options.nodes,
        max_epochs=MAX_EPOCHS,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # The callback replaces the batch size of this loader.
    train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
    trainer.fit(Classifier(len(train_set[0][0])), train_loader, DataLoader(validation_set, batch_size=256))
    if trainer.is_global_zero:
        trial = callback.summary
        print(f"trial {trial.trial_number}: batch size {trial.batch_size}, {trial.outcome}", flush=True)


def main() -> None:
    """Train once, or launch this script ``--recurrences`` times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recurrences", type=int, default=0, metavar="N", help="launch this script N times")
    parser.add_argument("--accelerator", default="cpu", choices=("cpu", "gpu"), help="training device (default: cpu)")
    parser.add_argument("--devices", type=int, default=1, help="number of processes per machine")
    parser.add_argument("--nodes", type=int, default=1, help="number of machines; torchrun starts this script on each")
    parser.add_argument("--target", type=float, help="target accuracy (default: 0.93, for MNIST 0.97)")
    parser.add_argument(
        "--on-failure",
        default="finish",
        choices=("finish", "stop", "raise"),
        help="after a missed target: finish at the best known batch size, stop, or end with exit status 75",
    )
    parser.add_argument("--server-url", help="default: ZEUS_SERVER_URL, or if unset, a server in this process")
    parser.add_argument("--job-id", default="digits-lightning")
    add_arguments(parser)
    options = parser.parse_args()
    if not options.recurrences:
        train(options)
    once = ["--accelerator", options.accelerator, "--devices", str(options.devices)]
    once += ["--data", options.data, "--data-folder", str(options.data_folder)]
    once += [] if options.target is None else ["--target", str(options.target)]
    once += [] if options.server_url is None else ["--server-url", options.server_url]
    once += ["--job-id", options.job_id]
    for _ in range(options.recurrences):
        subprocess.run([sys.executable, __file__, *once], check=True)  # noqa: S603 - this very script


if __name__ == "__main__":
    main()
