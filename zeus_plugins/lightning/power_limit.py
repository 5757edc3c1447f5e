"""The power limit of the GPUs of a Lightning training."""

from __future__ import annotations

import math
from typing import Any

from torch import cuda

from zeus_plugins.lightning._trainer import (
    Callback,
    LightningModule,
    LightningPort,
    Trainer,
    delivered_batch_sizes,
    is_last_batch,
    is_rehearsal,
)
from zeus_plugins.training.power_run import PowerLimitFindings, batch_size_callback


class ZeusPowerLimitCallback(PowerLimitFindings, Callback):
    """Finds the GPUs' best power limit in the first epochs, keeps it until `fit` ends, and then restores the old limit.

    The callback measures each limit over some batches of the training. A validation, a checkpoint or the end of an
    epoch interrupts a measurement, which then begins again. Once the limit is chosen, the trainer's loggers get
    ``zeus/power_limit_w``. Without a GPU or the permission to set limits, the callback warns and measures the present
    limit. With a `ZeusBSOCallback`, in any order, a file keeps the measurements, and this callback skips limits that an
    earlier trial of the job measured on this machine at this batch size.
    """

    state_key = "zeus_power_limit"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare the search, without changing a limit."""
        if is_rehearsal(trainer):
            return
        port = LightningPort(trainer)
        self._run.begin(
            port,
            _delivered_batch_size(trainer),
            keeper=batch_size_callback(getattr(trainer, "callbacks", ())),
            log=port.log,
            synchronize=cuda.synchronize,
        )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._run.begin_steps(_batches_in_a_row(trainer))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        self._run.end_step()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._run.interrupt()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not is_last_batch(trainer):
            self._run.resume()

    # The trainer writes the checkpoint after this hook, while the restarted measurement warms up.
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._run.disturb()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._run.end_steps()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep an unfinished search for the next training, and restore the limits."""
        self._run.keep_unfinished()
        self._run.close()

    # Lightning calls no other hook after an exception.
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._run.close()


def _delivered_batch_size(trainer: Trainer) -> int | None:
    """Return the global batch size that the train loaders deliver, or None if they do not state it."""
    per_device = next(iter(delivered_batch_sizes(trainer)), None)
    return None if per_device is None else int(per_device) * trainer.world_size * trainer.accumulate_grad_batches


def _batches_in_a_row(trainer: Trainer) -> int | None:
    """Return the number of batches until a validation or the end of the epoch; None if unknown."""
    known = [n for n in (trainer.num_training_batches, trainer.val_check_batch) if n is not None and math.isfinite(n)]
    return int(min(known)) if known else None
