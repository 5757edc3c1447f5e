"""The trainings with Lightning."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import ResNetConfig, ResNetForImageClassification

from benchmarks.recurrences import data
from benchmarks.recurrences.runs import Curve, Run
from benchmarks.recurrences.tasks import GPU
from zeus_plugins.lightning import ZeusBSOCallback
from zeus_plugins.training.trial import TrialInfo

_VALIDATION_BATCH = 500

_CONTRASTS = {"resnet18": 5.0, "resnet50": 4.0}
"""Contrast of generated images, in byte levels: weak enough that the default size needs several epochs."""


class Learner(LightningModule):
    """A network, its loss and its metric.

    Args:
        network: Network to train.
        metric: ``val_acc`` or ``val_r2``.
        optimizer: ``sgd``, ``adam`` or ``adamw``.
        lr: Learning rate of the optimizer.
    """

    def __init__(self, network: nn.Module, metric: str, optimizer: str, lr: float) -> None:
        super().__init__()
        self.network = network
        self._metric, self._optimizer, self._lr = metric, optimizer, lr
        self._seen: list[tuple[Tensor, Tensor]] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the cross-entropy, or the squared error for ``val_r2``."""
        inputs, targets = batch
        outputs = self(inputs)
        if self._metric == "val_r2":
            return nn.functional.mse_loss(outputs.squeeze(1), targets)
        return nn.functional.cross_entropy(outputs, targets)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the network's output; scale images that consist of bytes to 0 to 1."""
        if inputs.dtype == torch.uint8:
            inputs = (inputs.float() / 255).contiguous(memory_format=torch.channels_last)
        outputs = self.network(inputs)
        answer: Tensor = getattr(outputs, "logits", outputs)
        return answer

    def validation_step(self, batch: list[Tensor]) -> None:
        """Keep the predictions and the targets of a batch for the metric."""
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
        """Return SGD with momentum, Adam or AdamW."""
        return optimizer_of(self._optimizer, self.parameters(), self._lr)


def optimizer_of(name: str, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Return ``sgd`` with momentum, ``adam`` or ``adamw``."""
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)
    return (torch.optim.Adam if name == "adam" else torch.optim.AdamW)(parameters, lr=lr)


def train(run: Run) -> TrialInfo | None:
    """Train once; return the trial, or None without the callback."""
    task, order = run.task, run.order
    samples, network, optimizer, lr = _of_images(run) if task.device == GPU else making(run)
    callbacks: list[Callback] = []
    zeus = None
    if order.with_callback:
        zeus = ZeusBSOCallback(monitor=task.metric, **order.arguments)
        callbacks.append(zeus)
    elif order.epochs is None and run.curve is None:
        mode = "max" if task.higher_is_better else "min"
        callbacks.append(
            EarlyStopping(task.metric, mode=mode, patience=task.max_epochs, stopping_threshold=task.target)
        )
    if run.curve is not None:
        callbacks.append(_Watching(task.metric, run.curve))
    on_gpu = task.device == GPU and torch.cuda.is_available()
    trainer = Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=1,
        precision="bf16-mixed" if on_gpu else "32-true",
        max_epochs=order.epochs or task.max_epochs,
        val_check_interval=1 / task.evaluations,
        callbacks=callbacks,
        default_root_dir=run.folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
    )
    if isinstance(samples, data.Data):
        train_loader = batches_of_samples(samples.train, run.batch_size, shuffle=True)
        validation_loader = batches_of_samples(samples.validation, _VALIDATION_BATCH, shuffle=False)
    else:
        drawn = _Drawn(samples, task.samples)
        train_loader = DataLoader(drawn, run.batch_size, shuffle=True, collate_fn=_as_it_is)
        kept = samples.draw(max(60, 1000 // task.shrink**2))
        validation_loader = batches_of_samples(kept, _VALIDATION_BATCH, shuffle=False)
    trainer.fit(Learner(network, task.metric, optimizer, lr), train_loader, validation_loader)
    return None if zeus is None else zeus.trial


class _Watching(Callback):
    """A callback that records each epoch's metric, and ends the training when the curve is complete."""

    def __init__(self, metric: str, curve: Curve) -> None:
        self._metric, self._curve = metric, curve

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - the hook's
        """Record the metric of the epoch that has been validated."""
        # item() waits for the GPU, so that the epoch's time includes all of its work.
        trainer.should_stop = self._curve.add(trainer.callback_metrics[self._metric].item())


class _Drawn(Dataset[list[Tensor]]):
    """A dataset that draws a batch in one operation, because a GPU would wait for single samples."""

    def __init__(self, images: data.Images, samples: int) -> None:
        self._images, self._samples = images, samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, place: int) -> list[Tensor]:
        return [each[0] for each in self._images.draw(1)]

    def __getitems__(self, places: list[int]) -> list[Tensor]:
        return self._images.draw(len(places))


def _as_it_is(batch: list[Tensor]) -> list[Tensor]:
    return batch


def batches_of_samples(tensors: Sequence[Tensor], size: int, *, shuffle: bool) -> DataLoader[Any]:
    """Return a loader that collates sample by sample, as most scripts do."""
    return DataLoader(TensorDataset(*tensors), size, shuffle=shuffle)


def making(run: Run) -> tuple[data.Data, nn.Module, str, float]:
    """Return data, network, the optimizer's name, and the learning rate at the default size, of a task for a CPU."""
    order = run.order
    if run.task.name in ("digits", "digits-adam"):
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
        return data.digits(order.seed), network, *(("sgd", 0.01) if run.task.name == "digits" else ("adam", 0.001))
    network = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    return data.friedman(order.seed, drifted=order.drifted), network, "adamw", 0.002


def _of_images(run: Run) -> tuple[data.Images, nn.Module, str, float]:
    """Return the source of images and the network of a task for a GPU, and like `making` the other values."""
    order, shrink = run.order, run.task.shrink
    depth, pixels = {"resnet18": (18, 64), "resnet50": (50, 160)}[run.task.name]
    pictures = data.Images(
        order.seed,
        pixels=max(16, pixels // shrink),
        contrast=min(100.0, _CONTRASTS[run.task.name] * shrink**2),
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    residual = _resnet(depth, classes=pictures.classes, width=max(8, 64 // shrink), shrink=shrink)
    residual.to(memory_format=torch.channels_last)  # type: ignore[call-arg]  # Hugging Face's wrapper hides `self`
    return pictures, residual, "adamw", 0.001 * shrink


def _resnet(depth: int, *, classes: int, width: int, shrink: int) -> ResNetForImageClassification:
    """Return an untrained residual network (He et al. 2016); `shrink` divides the blocks per stage, down to one."""
    is_basic = depth == 18
    config = ResNetConfig(
        embedding_size=width,
        hidden_sizes=[(width << stage) * (1 if is_basic else 4) for stage in range(4)],
        depths=[max(1, blocks // shrink) for blocks in ((2, 2, 2, 2) if is_basic else (3, 4, 6, 3))],
        layer_type="basic" if is_basic else "bottleneck",
    )
    config.num_labels = classes
    return ResNetForImageClassification(config)
