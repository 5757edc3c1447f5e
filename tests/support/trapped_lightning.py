"""Trapped models trained by Lightning."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from tests.support.job_bench import seconds_and_joules
from tests.support.lightning_bench import Rows
from tests.support.lightning_models import quiet_trainer
from tests.support.trapped import OWN_SIZE, SIZES, Noisy, Trapped, seed
from zeus_plugins.lightning import ZeusBSOCallback


class Module(LightningModule):
    """A trapped model with metrics and logs that a probe could change."""

    def __init__(self, *, has_batch_norm: bool = True) -> None:
        super().__init__()
        self.model = Trapped(has_batch_norm=has_batch_norm)
        self.accuracy = MulticlassAccuracy(3)

    def training_step(self, batch: dict[str, Tensor]) -> Any:
        out = self.model(**batch)
        known = len(self.trainer.callback_metrics)
        self.accuracy(out["logits"], batch["labels"])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True, prog_bar=True)
        self.log("loss", out["loss"], on_step=True, on_epoch=True)
        assert self.logger is not None
        known += len(self.trainer.callback_metrics)
        self.logger.log_metrics({"own": float(out["loss"].detach()), "known": known})
        return out["loss"]

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        self.log("val_loss", self.model(**batch)["loss"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Ran:
    """A training of two epochs, which a test may change before `train`."""

    def __init__(self, folder: Path, probe: str, *, has_batch_norm: bool = True, **loading: Any) -> None:
        seed()
        self.data, self.module, self.rows = Noisy(), Module(has_batch_norm=has_batch_norm), Rows()
        self.loader: Any = DataLoader(self.data, OWN_SIZE, **(loading or {"shuffle": True}))
        self.url = f"embedded://{folder / f'{uuid.uuid4().hex}.sqlite3'}"
        self.probe = probe
        self.said: dict[str, Any] = {"target": -1.0, "mode": "min", "batch_sizes": SIZES, "job_id": "job"}
        self.validating = DataLoader(Noisy(), 64)

    def train(self, **options: Any) -> Trainer:
        callback = ZeusBSOCallback(
            monitor="val_loss",
            **self.said,
            server_url=self.url,
            energy_monitor=seconds_and_joules(1.0, 10.0),
            on_failure="stop",
            probe=self.probe,
        )
        defaults: dict[str, Any] = {"max_epochs": 2, "logger": self.rows, "log_every_n_steps": 1}
        trainer = quiet_trainer(callback, **(defaults | options))
        trainer.fit(self.module, self.loader, self.validating)
        return trainer
