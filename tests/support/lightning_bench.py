"""Helpers of the tests of the Lightning callbacks: a server with a separate job, and recording callbacks."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from torch.utils.data import DataLoader

from tests.support.frameworks import TRAIN_IMAGES, FrameworkBench, Powered, Training, Work
from tests.support.lightning_models import Classifier, digits, quiet_trainer, train_loader
from tests.support.servers import ServerProcess
from tests.support.versions import WEIGHTS_ONLY
from zeus_plugins.lightning import ZeusBSOCallback, ZeusEnergyCallback, ZeusPowerLimitCallback

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

    def training(
        self,
        *callbacks: Any,
        work: Work | None = None,
        scores: tuple[float, ...] = (),
        epochs: int = 1,
        size: int = 16,
        samples: int = TRAIN_IMAGES,
        accumulation: int = 1,
        validate_every: int | None = None,
        save_every: int | None = None,
        data: Any = None,
        **options: Any,
    ) -> Training:
        model = Classifier(*scores)
        model.work = work or model.work
        savers = []
        if save_every is not None and not any(isinstance(each, ModelCheckpoint) for each in callbacks):
            savers = [ModelCheckpoint(self.folder, "{step}", every_n_train_steps=save_every or None, save_top_k=-1)]
        return Fit(
            model,
            *callbacks,
            *savers,
            data=data or train_loader(size, samples),
            max_epochs=epochs,
            accumulate_grad_batches=accumulation,
            val_check_interval=validate_every,
            enable_checkpointing=save_every is not None,
            **options,
        )

    def checkpoint(self, step: int) -> Path:
        return self.folder / f"step={step}.ckpt"

    def saved_trial(self, step: int) -> dict[str, Any]:
        trial: dict[str, Any] = torch.load(self.checkpoint(step), weights_only=True)["callbacks"]["zeus_bso"]["trial"]
        return trial

    def forking(self, *, stay: bool) -> dict[str, Any]:
        workers: Any = {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": stay}
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
