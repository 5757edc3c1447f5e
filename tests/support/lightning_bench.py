"""The bench of Lightning: small trainings on scikit-learn's digits, with every kind of data argument.

The user of these trainings states `USERS_SIZE` everywhere; a trial at another size shows that the callback set it.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, Subset, TensorDataset

from tests.support.frameworks import (
    TRAIN_IMAGES,
    VAL_IMAGES,
    FrameworkBench,
    Plan,
    Powered,
    Training,
    Work,
    digit_tensors,
)
from tests.support.servers import ServerProcess
from tests.support.versions import WEIGHTS_ONLY
from zeus_plugins.lightning import ZeusBSOCallback, ZeusEnergyCallback, ZeusPowerLimitCallback

USERS_SIZE = 16

# For every test with a training.
QUIET = [
    # A loader in the training's own process is the fastest for digits.
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    # Lightning uses a deprecated part of torch when it iterates over a collection of loaders.
    pytest.mark.filterwarnings("ignore:.*isinstance\\(treespec, LeafSpec\\):FutureWarning"),
]
# For every test with a resume.
RESUMES = [
    # Lightning's remark on saving into a folder that contains a checkpoint.
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
    # The callbacks that interrupted and saved the first training are absent in the second.
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided:UserWarning"),
    # A training from a checkpoint within an epoch repeats the images of the epoch.
    pytest.mark.filterwarnings(
        "ignore:You're resuming from a checkpoint that ended before the epoch ended:UserWarning"
    ),
]


Batch = list[Tensor]
Loader = DataLoader[tuple[Tensor, ...]]


@functools.cache
def digits() -> tuple[Subset[tuple[Tensor, ...]], Subset[tuple[Tensor, ...]]]:
    """Return the first images for training and the next images for validation."""
    dataset = TensorDataset(*digit_tensors())
    return Subset(dataset, range(TRAIN_IMAGES)), Subset(dataset, range(TRAIN_IMAGES, TRAIN_IMAGES + VAL_IMAGES))


def train_loader(batch_size: int | None = USERS_SIZE, samples: int = TRAIN_IMAGES) -> Loader:
    return DataLoader(Subset(digits()[0], range(samples)), batch_size=batch_size)


def val_loader() -> Loader:
    return DataLoader(digits()[1], batch_size=VAL_IMAGES)


def quiet_trainer(*callbacks: Any, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(callbacks=list(callbacks), **(defaults | options))


class TrainOnly(LightningModule):
    """A linear classifier that records its training.

    Args:
        learning_rate: Rate of plain gradient descent.
        scheduler: Makes a scheduler stepped at every optimizer step, from the optimizer and the number of steps.

    Attributes:
        work: Work at each batch and validation.
    """

    def __init__(
        self,
        *,
        learning_rate: float = 0.1,
        scheduler: Callable[[torch.optim.Optimizer, int], Any] | None = None,
    ) -> None:
        super().__init__()
        self.work = Work()
        self.network = nn.Linear(64, 10)
        self._learning_rate = learning_rate
        self._scheduler = scheduler
        self.seen_sizes: list[int] = []
        self.seen_rates: list[float] = []
        self.seen_accumulation: set[int] = set()
        self.estimated_steps: float | None = None

    def training_step(self, batch: Any) -> Tensor:
        batches = _leaves(batch)
        self.seen_sizes.extend(len(labels) for _, labels in batches)
        self.seen_rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.seen_accumulation.add(self.trainer.accumulate_grad_batches)
        self.work.batch()
        losses = [nn.functional.cross_entropy(self.network(images), labels) for images, labels in batches]
        self.log("train_epoch", float(self.current_epoch + 1), on_step=False, on_epoch=True, batch_size=1)
        return torch.stack(losses).mean()

    def configure_optimizers(self) -> Any:
        # Reading this makes Lightning request the train loaders here, before `on_fit_start`.
        self.estimated_steps = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=self._learning_rate)
        if self._scheduler is None:
            return optimizer
        scheduler = self._scheduler(optimizer, int(self.estimated_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Classifier(TrainOnly):
    """Classifier with a validation that logs its accuracy and a given score.

    Args:
        scores: The score after each epoch; the last is repeated.
        **options: As in `TrainOnly`.
    """

    def __init__(self, *scores: float, **options: Any) -> None:
        super().__init__(**options)
        self._scores = scores or (0.0,)

    def validation_step(self, batch: Batch) -> None:
        self.work.validation()
        images, labels = batch
        self.log("val_acc", (self.network(images).argmax(dim=1) == labels).float().mean())
        self.log("score", self._scores[min(self.current_epoch, len(self._scores) - 1)])

    def test_step(self, batch: Batch) -> None:
        self.validation_step(batch)

    def predict_step(self, batch: Batch) -> Tensor:
        return self.network(batch[0]).argmax(dim=1)

    def val_dataloader(self) -> Loader:
        return val_loader()


def _leaves(batch: Any) -> list[Batch]:
    """Return the batches of a step: one, or those in a list or dict of loaders."""
    if isinstance(batch, dict):
        return list(batch.values())
    return [batch] if isinstance(batch[0], Tensor) else list(batch)


class SizedModule(Classifier):
    """Module with the batch size as an attribute."""

    def __init__(self, *scores: float, **options: Any) -> None:
        super().__init__(*scores, **options)
        self.batch_size = USERS_SIZE

    def train_dataloader(self) -> Loader:
        return train_loader(self.batch_size)


class HyperparameterModule(Classifier):
    """Module with the batch size among its hyperparameters."""

    def __init__(self, batch_size: int = USERS_SIZE) -> None:  # noqa: ARG002 - for save_hyperparameters
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Loader:
        return train_loader(self.hparams["batch_size"])


class ManualModule(Classifier):
    """Module that steps its optimizer itself."""

    def __init__(self, *scores: float, **options: Any) -> None:
        super().__init__(*scores, **options)
        self.automatic_optimization = False

    def training_step(self, batch: Any) -> None:  # type: ignore[override]  # Lightning takes no loss from it
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch))
        optimizer.step()


class HardCodedModule(Classifier):
    """Module with the batch size in its code."""

    def train_dataloader(self) -> Loader:
        return train_loader(16)


class Data(LightningDataModule):
    """Base class with the validation data."""

    def val_dataloader(self) -> Loader:
        return val_loader()


class AttributeData(Data):
    def __init__(self, batch_size: int = USERS_SIZE) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Loader:
        return train_loader(self.batch_size)


class HyperparameterData(Data):
    def __init__(self, batch_size: int = USERS_SIZE) -> None:  # noqa: ARG002 - for save_hyperparameters
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Loader:
        return train_loader(self.hparams["batch_size"])


class HardCodedData(Data):
    def train_dataloader(self) -> Loader:
        return train_loader(16)


class PropertyData(Data):
    @property
    def batch_size(self) -> int:
        return USERS_SIZE

    def train_dataloader(self) -> Loader:
        return train_loader(self.batch_size)


class BuiltOnceData(Data):
    """Data module that creates its loader in setup and returns the same loader repeatedly."""

    loader: Loader | None = None

    def setup(self, stage: str) -> None:  # noqa: ARG002 - Lightning's signature
        self.loader = self.loader or train_loader()

    def train_dataloader(self) -> Loader | None:
        return self.loader


class LoaderWithSurcharge(DataLoader[tuple[Tensor, ...]]):
    """A subclass with other constructor arguments, so that it cannot be rebuilt."""

    def __init__(self, surcharge: float) -> None:
        self.surcharge = surcharge
        super().__init__(digits()[0], USERS_SIZE, True)


class InOrder(Sampler[list[int]]):
    """A batch sampler written by a user."""

    def __init__(self, length: int, batch_size: int) -> None:
        self.length = length
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(0, self.length, self.batch_size):
            yield list(range(first, min(first + self.batch_size, self.length)))

    def __len__(self) -> int:
        return -(-self.length // self.batch_size)


class Stream(IterableDataset[tuple[Tensor, ...]]):
    """Stream of images with unknown length."""

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return iter(digits()[0])


class MeasuredStream(Stream):
    """Stream of images with a known length."""

    def __len__(self) -> int:
        return TRAIN_IMAGES


def batch_sampler_loader() -> Loader:
    return DataLoader(digits()[0], batch_sampler=InOrder(TRAIN_IMAGES, USERS_SIZE))


def loaders_in_a_dict() -> dict[str, Loader]:
    return {"left": train_loader(), "right": train_loader()}


def stream_loader() -> Loader:
    return DataLoader(Stream(), batch_size=USERS_SIZE)


def list_of_batches() -> list[Batch]:
    images, labels = digits()[0][:USERS_SIZE]
    return [[images, labels]] * 4


def list_of_tensors() -> list[Tensor]:
    return [digits()[0][:USERS_SIZE][0]] * 4


# Ways to give the training data: the module, and the arguments of fit.
DataKind = Callable[[], tuple[TrainOnly, dict[str, Any]]]
WAYS: dict[str, DataKind] = {
    "datamodule.batch_size": lambda: (Classifier(), {"datamodule": AttributeData()}),
    "datamodule.hparams": lambda: (Classifier(), {"datamodule": HyperparameterData()}),
    "hard-coded in the datamodule": lambda: (Classifier(), {"datamodule": HardCodedData()}),
    "built once in setup": lambda: (Classifier(), {"datamodule": BuiltOnceData()}),
    "module.batch_size": lambda: (SizedModule(), {}),
    "loader": lambda: (Classifier(), {"train_dataloaders": train_loader()}),
    "subclass": lambda: (Classifier(), {"train_dataloaders": LoaderWithSurcharge(0.5)}),
    "batch sampler": lambda: (Classifier(), {"train_dataloaders": batch_sampler_loader()}),
    "stream": lambda: (Classifier(), {"train_dataloaders": stream_loader()}),
    "manual optimization": lambda: (ManualModule(), {"train_dataloaders": train_loader()}),
}


class Rows(Logger):
    """A logger that stores its rows."""

    name = "rows"
    version = 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:  # noqa: ARG002
        self.rows.append(metrics)


class Fit(Training):
    """A training with Lightning.

    Args:
        data: Further arguments of `fit`.
        options: Options of the trainer.
    """

    def __init__(self, model: Classifier, *callbacks: Any, data: Any, **options: Any) -> None:
        self.model, self._data, self._logger = model, data, Rows()
        self.trainer = quiet_trainer(*callbacks, logger=self._logger, log_every_n_steps=1, **options)

    @property
    def steps(self) -> tuple[int, int]:
        return self.trainer.global_step, int(self.model.estimated_steps)

    @property
    def epochs(self) -> float:
        return self.trainer.current_epoch

    @property
    def accumulation(self) -> set[int]:
        return set(self.model.seen_accumulation)

    @property
    def script(self) -> tuple[int, int]:
        return self._data.batch_size, self.trainer.accumulate_grad_batches

    def train(self, checkpoint: Path | None = None) -> None:
        resume = {} if checkpoint is None else {"ckpt_path": checkpoint, **WEIGHTS_ONLY}
        self.trainer.fit(self.model, self._data, **resume)

    def logged(self, name: str) -> list[dict[str, float]]:
        rows = [row for row in self._logger.rows if name in row]
        return [{key: value for key, value in row.items() if key.startswith("zeus/")} for row in rows]

    def left_behind(self, *callbacks: Any) -> list[str]:
        parts: list[tuple[Any, str]] = [
            (self.trainer.fit_loop._data_source, "dataloader"),
            (self.trainer.fit_loop.epoch_loop, "run"),
        ]
        hooks = [name for callback in callbacks for name in vars(callback) if hasattr(Callback, name)]
        return [name for part, name in parts if name in vars(part)] + hooks


class Watch(Callback):
    """Record the state of the callback under test after each validation."""

    def __init__(self, zeus: ZeusBSOCallback) -> None:
        self._zeus = zeus
        self.epochs: list[float | None] = []
        self.sanity_metrics: list[float | None] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        if trainer.sanity_checking:
            self.sanity_metrics.append(self._zeus.trial.metric)
        else:
            self.epochs.append(self._zeus.trial.epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        if not trainer.enable_validation:
            self.epochs.append(self._zeus.trial.epoch)


class Bench(FrameworkBench):
    """Bench for Lightning."""

    BatchSize = ZeusBSOCallback
    Energy = ZeusEnergyCallback
    PowerLimit = ZeusPowerLimitCallback
    Watch = Watch
    SANITY_CHECKS = 1
    CTRL_C = SystemExit(1)
    HAS_LOGGER = True
    EPOCHS_OPTION = "max_epochs"

    def _make(self, callbacks: tuple[Any, ...], plan: Plan, options: dict[str, Any]) -> Fit:
        model = Classifier(*plan.scores)
        model.work = plan.work
        every, savers = plan.save_every, []
        if every is not None and not any(isinstance(each, ModelCheckpoint) for each in callbacks):
            savers = [ModelCheckpoint(self.folder, "{step}", every_n_train_steps=every or None, save_top_k=-1)]
        return Fit(
            model,
            *callbacks,
            *savers,
            data=plan.data or train_loader(plan.size, plan.samples),
            max_epochs=plan.epochs,
            accumulate_grad_batches=plan.accumulation,
            val_check_interval=plan.validate_every,
            enable_checkpointing=every is not None,
            **options,
        )

    def checkpoint(self, step: int) -> Path:
        return self.folder / f"step={step}.ckpt"

    def saved_trial(self, step: int) -> dict[str, Any]:
        trial: dict[str, Any] = torch.load(self.checkpoint(step), weights_only=True)["callbacks"]["zeus_bso"]["trial"]
        return trial

    def forking(self, *, stay: bool) -> dict[str, Any]:
        workers: Any = {"num_workers": 1, "multiprocessing_context": "fork", "persistent_workers": stay}
        return {"data": DataLoader(digits()[0], batch_size=16, **workers)}

    def slow_saver(self, work: Powered) -> Any:
        class Slow(ModelCheckpoint):
            def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
                super()._save_checkpoint(trainer, filepath)
                work.be_slow()

        return Slow(self.folder, every_n_train_steps=5)


@pytest.fixture(name="bench")
def make_bench(shared_server: ServerProcess, tmp_path: Path) -> Bench:
    return Bench(shared_server, f"digits-{uuid.uuid4().hex}", tmp_path)
