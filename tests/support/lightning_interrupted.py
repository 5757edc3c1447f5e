"""Lightning trainings that are interrupted, and the checkpoints that they leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.support.lightning_bench import (
    Interrupt,
    make_bench,  # noqa: F401 - a fixture
)
from tests.support.lightning_models import Classifier, quiet_trainer, train_loader


class InterruptAfter(Interrupt):
    """Raises at the second step of an epoch."""

    def __init__(self, epoch: int, error: BaseException) -> None:
        super().__init__(error)
        self._epoch = epoch

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if trainer.current_epoch == self._epoch and trainer.fit_loop.epoch_loop.batch_idx == 1:
            raise self._error


def interrupted(folder: Path, module: Classifier, *others: Any, **options: Any) -> list[Path]:
    """The checkpoints, one after each epoch, of a training that is preempted in its third or another epoch."""
    stop = InterruptAfter(options.pop("epoch", 2), options.pop("error", SystemExit(143)))
    saver = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    defaults = {"max_epochs": 4, "enable_checkpointing": True}
    trainer = quiet_trainer(*others, stop, saver, **(defaults | options))
    with pytest.raises(type(stop._error)):
        trainer.fit(module, train_loader())
    return sorted(folder.glob("epoch=*.ckpt"))
