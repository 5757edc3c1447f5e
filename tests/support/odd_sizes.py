"""Data and modules of Lightning trainings that do not simply train at the batch size that their attributes say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset

from tests.support.lightning_models import TRAIN_IMAGES, Classifier, SizedModule, digits, train_loader, val_loader


class Buckets(Sampler[list[int]]):
    """Makes its batches once, in the beginning; its `batch_size` says whatever it is told later."""

    def __init__(self, samples: int = TRAIN_IMAGES, batch_size: int = 16) -> None:
        self.batch_size = batch_size
        self._batches = [list(range(first, first + batch_size)) for first in range(0, samples - batch_size, batch_size)]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class FixedLength(Sampler[list[int]]):
    """Follows its `batch_size`, but computes its length once, in the beginning."""

    def __init__(self, samples: int = TRAIN_IMAGES, batch_size: int = 16) -> None:
        self.samples, self.batch_size = samples, batch_size
        self._length = -(-samples // batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(0, self.samples, self.batch_size):
            yield list(range(first, min(first + self.batch_size, self.samples)))

    def __len__(self) -> int:
        return self._length


class FixedLengthData(LightningDataModule):
    """Makes such a sampler for its present `batch_size`, which is right."""

    batch_size = 16

    def train_dataloader(self) -> Any:
        return DataLoader(digits()[0], batch_sampler=FixedLength(batch_size=self.batch_size))

    def val_dataloader(self) -> Any:
        return val_loader()


class Announced(IterableDataset[Any]):
    """A stream that announces more images than it has."""

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
    """Return the first item, as users do for items that are batches; of a larger batch, all others are lost."""
    return items[0]


class RateFromSize(SizedModule):
    """Computes its learning rate from its batch size."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1 * self.batch_size / 16)


class Unfreezing(BaseFinetuning):
    """Adds a layer in the second epoch, at a rate of its own or one that follows the first group's."""

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
    """Batches of different sizes around one that its `batch_size` asks for, give or take a factor."""

    def __init__(self, factor: float = 1.0) -> None:
        self.batch_size = 16
        self._factor = factor

    def __iter__(self) -> Iterator[list[int]]:
        for more in (-4, 4, -2, 2, -1, 1):
            yield list(range(round(self.batch_size * self._factor) + more))


class ReadOnce:
    """No torch loader: cuts its batches as it was told in the beginning."""

    def __init__(self) -> None:
        self.batch_size = 16
        self._batches = list(train_loader())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


class ByHand(Classifier):
    """Accumulates the gradients of two batches itself."""

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
    """Leaves out every other step that the trainer wants."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:  # noqa: ARG002
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


def small_loader() -> Any:
    return DataLoader(Subset(digits()[0], range(100, 142)), batch_size=4)


class MixedData(LightningDataModule):
    """One of its loaders follows its `batch_size`, the other does not."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 16

    def train_dataloader(self) -> Any:
        return CombinedLoader([DataLoader(digits()[0], batch_size=self.batch_size), small_loader()])

    def val_dataloader(self) -> Any:
        return val_loader()
