"""``python -m benchmarks.probing``: the probed time of an epoch at each batch size, beside the time that it takes.

A small convolutional network learns the digits of scikit-learn, repeated to fill an epoch, on one core. Its first run
is probed at the default batch size. Then a training without the callback measures an epoch at each size. Both use the
CPU time of the process by default, which other work on the machine does not lengthen.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.plots import plot_probe, require_matplotlib
from zeus_plugins.client.local import LocalServer
from zeus_plugins.lightning import ZeusBSOCallback
from zeus_plugins.lightning import batch_size as lightning_batch_size
from zeus_plugins.protocol import Probe, TrialId
from zeus_plugins.training import probe

SIZES = (8, 16, 32, 64, 128, 256, 512)
DEFAULT = 32
VALIDATION = 360


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Images of the digits, repeated cyclically for indices beyond the number of images."""

    def __init__(self, samples: int) -> None:
        images, labels = load_digits(return_X_y=True)
        self._images = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
        self._labels, self._samples = torch.tensor(labels), samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        place = index % len(self._images)
        return self._images[place], self._labels[place]


class Network(LightningModule):
    """Two convolutions and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self._layers = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10)),
        )

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the loss."""
        return nn.functional.cross_entropy(self._layers(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor]) -> None:
        """Log the accuracy."""
        self.log("val_acc", (self._layers(batch[0]).argmax(dim=1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain gradient descent with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Epochs(Callback):
    """Callback that measures epochs, including their validations."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock
        self.seconds: list[float] = []

    def on_train_epoch_start(self, *_: Any) -> None:
        """Record the start time of the epoch."""
        self._began_s = self._clock()

    def on_train_epoch_end(self, *_: Any) -> None:
        """Record the duration of the epoch."""
        self.seconds.append(self._clock() - self._began_s)


def train(samples: int, batch_size: int, epochs: int, *callbacks: Any) -> None:
    """Train a new network."""
    seed_everything(0)
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = Trainer(
        accelerator="cpu", max_epochs=epochs, callbacks=list(callbacks), enable_model_summary=False, **quiet
    )
    loader = DataLoader(Digits(samples), batch_size=batch_size, shuffle=True)
    trainer.fit(Network(), loader, DataLoader(Digits(VALIDATION), batch_size=VALIDATION))


def probed(samples: int, folder: Path) -> Probe:
    """Run a job for the first time, for two epochs, and return its probe."""
    found: list[Probe] = []

    def keep(_: LocalServer, __: TrialId, probe: Probe) -> None:
        found.append(probe)

    LocalServer.store_probe = keep  # type: ignore[method-assign,assignment]  # nothing else runs in this process
    options: dict[str, Any] = {"job_id": "probing", "on_failure": "stop", "target": 2.0, "batch_sizes": SIZES}
    callback = ZeusBSOCallback("val_acc", probe="auto", server_url=f"embedded://{folder / 'bso.sqlite3'}", **options)
    train(samples, DEFAULT, 2, callback)
    return found[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table in Markdown, and draw it if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.probing", description=__doc__)
    parser.add_argument("--samples", type=int, default=60_000, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=3, help="measured at each size, after one to warm up")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    parser.add_argument("--plot", type=Path, help="SVG file to draw")
    options = parser.parse_args(arguments)
    if options.plot is not None:
        require_matplotlib("--plot")
    torch.set_num_threads(1)
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    for module in (probe, lightning_batch_size):
        vars(module)["time"] = SimpleNamespace(monotonic=clock, perf_counter=clock)
    with tempfile.TemporaryDirectory() as folder:
        found = probed(options.samples, Path(folder))
    by_size = {each.batch_size: each for each in found.sizes}
    rows = []
    print(f"critical batch size: {found.critical_batch_size}\n\n| size | probed | true | difference | stated error |")
    print("|---|---|---|---|---|")
    for size in SIZES:
        if size not in by_size:
            continue
        epochs = Epochs(clock)
        train(options.samples, size, options.epochs + 1, epochs)
        true_s, one = statistics.median(epochs.seconds[1:]), by_size[size]
        rows.append({"batch_size": size, "probed_s": one.time_s, "true_s": true_s, "error": one.error})
        print(
            f"| {size} | {one.time_s:.3g} s | {true_s:.3g} s | {one.time_s / true_s - 1:+.0%} | ±{one.error:.0%} |",
            flush=True,
        )
    print(json.dumps(rows), file=sys.stderr)
    if options.plot is not None:
        plot_probe(rows, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
