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
    hide_step_hooks,
    is_last_batch,
    is_rehearsal,
)
from zeus_plugins.training.power_run import PowerLimitFindings, batch_size_callback


class ZeusPowerLimitCallback(PowerLimitFindings, Callback):
    """Finds the GPUs' best power limit within the first epochs, keeps it until `fit` ends, and then puts it back.

    Each limit is measured over some batches of the training itself, while nothing else happens: a validation, a
    checkpoint or the end of an epoch interrupts a measurement, which is then made again. Once the limit is chosen, the
    batches cost nothing any more; ``zeus/power_limit_w`` goes to the trainer's loggers. Without a GPU or the
    permission to set limits, only the limit in force is measured, with one warning.

    Beside a `ZeusBSOCallback`, before or after it in the trainer's `callbacks`, the server keeps what was measured, and
    only limits are measured that no earlier trial of the job had measured at this batch size.

    Args:
        selector: What is best: `zeus_plugins.power_limit.ZeusCost(eta)` (the cost that batch sizes are compared by),
            `Energy()`, `Time()` or `MaxSlowdown(factor)`.
        warmup_steps: Batches under a new limit before it is measured.
        profile_steps: Batches measured under each limit.
        wait_steps: Batches before the first limit, in which the model is compiled and kernels are benchmarked. After
            them it is waited until the GPUs' temperature is stable, two minutes at most.
        warmup_s: Seconds under a new limit before it is measured, should `warmup_steps` take less.
        profile_s: Seconds measured under each limit, should `profile_steps` take less.
        limits_w: Limits to measure, watts of each GPU. None: from the one in force downwards in steps of 25 W.
        profile_path: File that keeps what was measured, for the next training on such GPUs at the same batch size;
            ``{batch_size}`` in it stands for that size. It is not read where the server knows of the limits.
        energy_monitor: Measures energy and time; one that measures as Zeus's `ZeusMonitor` does will do. None: the best
            one that this machine offers.
        devices: The devices of this machine whose limits are set. None: the NVIDIA GPUs that train.
        command: Sets a limit, such as ``sudo -n nvidia-smi -i {uuid} -pl {watts}``. None: the environment variable
            ``ZEUS_POWER_LIMIT_COMMAND``, and without that one zeusd (``ZEUSD_SOCK_PATH``) or the driver is asked.

    Raises:
        ZeusBSOConfigError: An argument cannot work. `fit` raises it for limits that the GPUs cannot have.
    """

    state_key = "zeus_power_limit"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare; no limit is changed yet."""
        if is_rehearsal(trainer):
            return
        port = LightningPort(trainer)
        self._run.begin(
            port,
            _delivered_batch_size(trainer),
            keeper=batch_size_callback(getattr(trainer, "callbacks", ())),
            log=port.log,
            on_done=self._hide_batch_end,
            synchronize=cuda.synchronize,
        )
        hide_step_hooks(self, self._run.patches)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to measure, or go on with it."""
        self._run.begin_steps(_batches_in_a_row(trainer))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Count the batch. Hidden from the trainer as soon as nothing is left to measure."""
        self._run.end_step()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Interrupt a measurement."""
        self._run.interrupt()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on with measuring, after a validation within an epoch."""
        if not is_last_batch(trainer):
            self._run.resume()

    # The trainer writes it after this; the batches after that warm up first.
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Interrupt a measurement."""
        self._run.disturb()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Interrupt a measurement."""
        self._run.end_steps()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the limits back."""
        self._run.keep_unfinished()
        self._run.close()

    # Lightning calls no other hook after an exception.
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Put the limits back."""
        self._run.close()

    def _hide_batch_end(self) -> None:
        if type(self).on_train_batch_end is ZeusPowerLimitCallback.on_train_batch_end:  # not that of a user's subclass
            self._run.patches.set_attribute(self, "on_train_batch_end", None)


def _delivered_batch_size(trainer: Trainer) -> int | None:
    """The global batch size that the train loaders deliver, or None when they do not say."""
    per_device = next(iter(delivered_batch_sizes(trainer)), None)
    return None if per_device is None else int(per_device) * trainer.world_size * trainer.accumulate_grad_batches


def _batches_in_a_row(trainer: Trainer) -> int | None:
    """Batches between two validations, or in an epoch, whichever is less; None when nobody knows."""
    known = [n for n in (trainer.num_training_batches, trainer.val_check_batch) if n is not None and math.isfinite(n)]
    return int(min(known)) if known else None
