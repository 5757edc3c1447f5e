"""Data and modules of Lightning trainings that do not train at the batch size in their attributes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset

from tests.support.lightning_bench import (
    TRAIN_IMAGES,
    Classifier,
    InOrder,
    SizedModule,
    digits,
    train_loader,
    val_loader,
)


class Buckets(Sampler[list[int]]):
    """Sampler that creates its batches once; later changes of its `batch_size` have no effect."""

    def __init__(self, samples: int = TRAIN_IMAGES, batch_size: int = 16) -> None:
        self.batch_size = batch_size
        self._batches = [list(range(first, first + batch_size)) for first in range(0, samples - batch_size, batch_size)]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class FixedLength(InOrder):
    """Sampler that follows its `batch_size`, but computes its length once."""

    def __init__(self, length: int = TRAIN_IMAGES, batch_size: int = 16) -> None:
        super().__init__(length, batch_size)
        self._length = super().__len__()

    def __len__(self) -> int:
        return self._length


class FixedLengthData(LightningDataModule):
    """Data module that correctly creates such a sampler for its present `batch_size`."""

    batch_size = 16

    def train_dataloader(self) -> Any:
        return DataLoader(digits()[0], batch_sampler=FixedLength(batch_size=self.batch_size))

    def val_dataloader(self) -> Any:
        return val_loader()


class Announced(IterableDataset[Any]):
    """Stream that announces more images than it has."""

    def __iter__(self) -> Iterator[Any]:
        return iter(digits()[0])

    def __len__(self) -> int:
        return 2 * TRAIN_IMAGES


class BatchItems(Dataset[Any]):
    """Each item is a batch of twelve images."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        return digits()[0][index : index + 12]


def first_of(items: Any) -> Any:
    """Return the first item, as users do for items that are batches; all further items of a batch are lost."""
    return items[0]


class RateFromSize(SizedModule):
    """Module that computes its learning rate from its batch size."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1 * self.batch_size / 16)


class Unfreezing(BaseFinetuning):
    """Add a layer in the second epoch, at its own rate or a rate that follows the first group's."""

    def __init__(self, learning_rate: float | None) -> None:
        super().__init__()
        self._learning_rate = learning_rate

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.late)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.late, optimizer, lr=self._learning_rate)


class TwoLayers(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.late = torch.nn.Linear(10, 10)
        self.network: Any = torch.nn.Sequential(self.network, self.late)
        self.all_rates: list[list[float]] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.1)

    def on_train_epoch_end(self) -> None:
        self.all_rates.append([group["lr"] for group in self.trainer.optimizers[0].param_groups])


class Ragged(Sampler[list[int]]):
    """Sampler of batches with varying sizes around its `batch_size`, times a factor."""

    def __init__(self, factor: float = 1.0) -> None:
        self.batch_size = 16
        self._factor = factor

    def __iter__(self) -> Iterator[list[int]]:
        for more in (-4, 4, -2, 2, -1, 1):
            yield list(range(round(self.batch_size * self._factor) + more))


class ReadOnce:
    """Loader without torch that cuts its batches once."""

    def __init__(self) -> None:
        self.batch_size = 16
        self._batches = list(train_loader())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


class ByHand(Classifier):
    """Module that accumulates the gradients of two batches itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        loss = super().training_step(batch)
        self.manual_backward(loss)
        if batch_idx % 2 == 1:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
        return loss


class EveryOther(Classifier):
    """Module that skips every other step of the trainer."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:  # noqa: ARG002
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


def small_loader() -> Any:
    return DataLoader(Subset(digits()[0], range(100, 142)), batch_size=4)


class MixedData(LightningDataModule):
    """Data module with a loader that follows its `batch_size` and a loader that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 16

    def train_dataloader(self) -> Any:
        return CombinedLoader([DataLoader(digits()[0], batch_size=self.batch_size), small_loader()])

    def val_dataloader(self) -> Any:
        return val_loader()
