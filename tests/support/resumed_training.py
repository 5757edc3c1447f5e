"""A training started as a script, interrupted by a real signal, and started again to resume.

Usage: ``python -m tests.support.resumed_training SERVER_URL JOB_ID FOLDER SIGNAL``.
SIGNAL is the number of the signal that the
process sends to itself in its third epoch, 0 for none. The observations are written to ``FOLDER/seen.json``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from tests.support.job_bench import CountingMonitor
from tests.support.lightning_bench import Classifier, quiet_trainer, train_loader
from tests.support.versions import WEIGHTS_ONLY
from zeus_plugins import JobSpec
from zeus_plugins.lightning import ZeusBSOCallback

EPOCHS = 4
DOOMED_EPOCH = 2  # counted from 0
BATCH_SIZE = 48
RATE = 0.1


class SignalItself(Callback):
    """Interrupt the second batch of the doomed epoch."""

    def __init__(self, number: int) -> None:
        self._number = number

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,  # noqa: ARG002 - Lightning's signature
        outputs: Any,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,
    ) -> None:
        if self._number and trainer.current_epoch == DOOMED_EPOCH and batch_idx == 1:
            os.kill(os.getpid(), self._number)


def halved_each_epoch(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=steps // EPOCHS, gamma=0.5)


def main(server_url: str, job_id: str, folder: str, number: str) -> None:
    torch.set_num_threads(1)
    job = JobSpec(
        job_id=job_id,
        job_id_prefix="digits",
        batch_sizes=(BATCH_SIZE, 2 * BATCH_SIZE),
        default_batch_size=2 * BATCH_SIZE,
        target_metric=0.9,
        max_epochs=EPOCHS,
    )
    module = Classifier(0.1, 0.2, 0.3, 0.9, learning_rate=RATE, scheduler=halved_each_epoch)
    monitor = CountingMonitor(lambda: module.work.batches)
    callback = ZeusBSOCallback(job, "score", server_url=server_url, lr_scaling="linear", energy_monitor=monitor)
    interruption = signal.Signals(int(number)) if int(number) else None
    savers = [ModelCheckpoint(folder, save_last=True)]
    if interruption is signal.SIGTERM:
        savers.append(OnExceptionCheckpoint(folder))
    trainer = quiet_trainer(callback, SignalItself(int(number)), *savers, max_epochs=EPOCHS, enable_checkpointing=True)
    seen: dict[str, Any] = {"left": "normally"}
    try:
        trainer.fit(module, train_loader(), ckpt_path="last", **WEIGHTS_ONLY)
    except SystemExit as leaving:
        seen["left"] = type(leaving).__name__
    seen |= {
        "sizes": module.seen_sizes,
        "rates": module.seen_rates,
        "steps": trainer.global_step,
        "trial": callback.trial.model_dump(mode="json"),
    }
    Path(folder, "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
