"""The trainings with Lightning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.recurrences import data
from benchmarks.recurrences.models import resnet
from benchmarks.recurrences.power import power_limits_of
from benchmarks.recurrences.runs import Run
from benchmarks.recurrences.tasks import GPU
from zeus_plugins.lightning import ZeusBSOCallback, ZeusPowerLimitCallback
from zeus_plugins.training.trial import TrialInfo

_VALIDATION_BATCH = 500

_CONTRASTS = {"resnet18": 5.0, "resnet50": 8.0}
"""Of generated images, in levels: so weak that the default needs some epochs."""


class Learner(LightningModule):
    """A network, its loss and its metric.

    Args:
        network: What learns.
        metric: ``val_acc`` or ``val_r2``.
        optimizer: ``sgd`` or ``adamw``.
        lr: Its learning rate.
        steps: Called with the size of the batch in each training step, by what only pretends to be a GPU.
    """

    def __init__(
        self, network: nn.Module, metric: str, optimizer: str, lr: float, steps: Sequence[Callable[[int], object]]
    ) -> None:
        super().__init__()
        self.network = network
        self._metric, self._optimizer, self._lr, self._steps = metric, optimizer, lr, steps
        self._seen: list[tuple[Tensor, Tensor]] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Cross-entropy, or squared error."""
        inputs, targets = batch
        for step in self._steps:
            step(len(inputs))
        outputs = self(inputs)
        if self._metric == "val_r2":
            return nn.functional.mse_loss(outputs.squeeze(1), targets)
        return nn.functional.cross_entropy(outputs, targets)

    def forward(self, inputs: Tensor) -> Tensor:
        """The network's answer; images may come as bytes."""
        outputs: Tensor = self.network(inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs)
        return outputs

    def validation_step(self, batch: list[Tensor]) -> None:
        """Keep what is needed for the metric."""
        inputs, targets = batch
        outputs = self(inputs)
        guesses = outputs.squeeze(1) if self._metric == "val_r2" else outputs.argmax(dim=1)
        self._seen.append((guesses, targets))

    def on_validation_epoch_end(self) -> None:
        """Log the metric of all validation data."""
        guesses, targets = (torch.cat(parts) for parts in zip(*self._seen, strict=True))
        self._seen.clear()
        if self._metric == "val_r2":
            value = 1 - (guesses - targets).pow(2).sum() / (targets - targets.mean()).pow(2).sum()
        else:
            value = (guesses == targets).float().mean()
        self.log(self._metric, value)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum, or AdamW."""
        if self._optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=self._lr, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=self._lr)


def train(run: Run) -> TrialInfo | None:
    """Train once; the trial, or None without the callback."""
    task, order = run.task, run.order
    samples, network, optimizer, lr = _making(run)
    callbacks: list[Callback] = []
    zeus = None
    if run.job is not None:
        zeus = ZeusBSOCallback(run.job, task.metric, **run.callback_arguments)
        callbacks.append(zeus)
    steps: list[Callable[[int], object]] = [] if order.fits is None else [partial(_fill, order.fits)]
    limits = None
    if order.power_limits is not None:
        search = power_limits_of(order.power_limits)
        limits = ZeusPowerLimitCallback(**search.arguments)
        callbacks.append(limits)
        steps += [] if search.step is None else [search.step]
    trainer = Trainer(
        accelerator="gpu" if task.device == GPU and torch.cuda.is_available() else "cpu",
        devices=1,
        precision="bf16-mixed" if task.device == GPU else "32-true",
        max_epochs=order.epochs or task.max_epochs,
        callbacks=callbacks,
        default_root_dir=run.folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
    )
    loader = _batches_at_once if task.device == GPU else _batches_of_samples
    train_loader = loader(samples.train, run.batch_size, shuffle=True)
    validation_loader = loader(samples.validation, _VALIDATION_BATCH, shuffle=False)
    trainer.fit(Learner(network, task.metric, optimizer, run.scaled(lr), steps), train_loader, validation_loader)
    if limits is not None:
        run.notes["chosen_limit_w"] = limits.chosen_limit_w
        run.notes["limits_w"] = [] if limits.profile is None else list(limits.profile.limits_w)
    return None if zeus is None else zeus.trial


class _AtOnce(Dataset[list[Tensor]]):
    """Tensors of which a batch is taken in one piece: sample by sample, a GPU would wait for each."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors[0])

    def __getitem__(self, place: int) -> list[Tensor]:
        return [each[place] for each in self._tensors]

    def __getitems__(self, places: list[int]) -> list[Tensor]:
        return [each[places] for each in self._tensors]


def _batches_at_once(tensors: Sequence[Tensor], size: int, *, shuffle: bool) -> DataLoader[list[Tensor]]:
    pin = torch.cuda.is_available()
    return DataLoader(_AtOnce(tensors), size, shuffle=shuffle, collate_fn=_as_it_is, pin_memory=pin)


def _as_it_is(batch: list[Tensor]) -> list[Tensor]:
    return batch


def _batches_of_samples(tensors: Sequence[Tensor], size: int, *, shuffle: bool) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors), size, shuffle=shuffle)


def _fill(fits: int, batch_size: int) -> None:
    """Run out of a pretended memory; a GPU's own is limited by the process's fraction of it."""
    if not torch.cuda.is_available() and batch_size > fits:
        raise torch.OutOfMemoryError(f"pretended: a batch of {batch_size} does not fit")


def _making(run: Run) -> tuple[data.Data, nn.Module, str, float]:
    """Data, network, optimizer and learning rate at the default size."""
    order, shrink = run.order, run.task.shrink
    if run.task.name == "digits":
        network = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 2 * 2, 10),
        )
        return data.digits(order.seed), network, "sgd", 0.01
    if run.task.name in ("tabular", "drift"):
        network = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        return data.friedman(order.seed, drifted=order.drifted), network, "adamw", 0.002
    depth, pixels = {"resnet18": (18, 64), "resnet50": (50, 96)}[run.task.name]
    pictures = data.images(
        order.seed,
        pixels=max(16, pixels // shrink),
        samples=max(5_000 // shrink**2, 400),
        contrast=min(100.0, _CONTRASTS[run.task.name] * shrink**2),
    )
    network = resnet(depth, classes=pictures.classes, width=max(8, 64 // shrink), shrink=shrink)
    return pictures, network, "adamw", 0.001 * shrink
