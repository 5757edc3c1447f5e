"""The power limit of the GPUs of a Lightning training."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import cuda

from zeus_plugins.energy import EnergyMonitor
from zeus_plugins.lightning._trainer import (
    STEP_HOOKS,
    Callback,
    LightningModule,
    Trainer,
    all_gathered,
    delivered_batch_sizes,
    gpu_indices,
    is_rehearsal,
)
from zeus_plugins.lightning.batch_size import ZeusBSOCallback
from zeus_plugins.power_limit import (
    OptimumSelector,
    PowerLimitDevice,
    PowerLimitProfile,
    PowerLimitProfiler,
    ZeusCost,
)
from zeus_plugins.power_limit.options import ProfilerOptions, Rank, choice_of
from zeus_plugins.training.patches import Patches

T = TypeVar("T")


_logger = logging.getLogger("zeus_plugins")


class ZeusPowerLimitCallback(Callback):
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
        limits_w: Limits to measure, watts of each GPU. None: from the one in force downwards in steps of 25 W.
        profile_path: File that keeps what was measured, for the next training on such GPUs at the same batch size;
            ``{batch_size}`` in it stands for that size. It is not read where the server knows of the limits.
        energy_monitor: Measures energy and time. None: the best one that this machine offers.
        devices: Whose limits are set, those of this machine. None: the NVIDIA GPUs that train.
        command: Sets a limit, such as ``sudo -n nvidia-smi -i {index} -pl {watts}``. None: the environment variable
            ``ZEUS_POWER_LIMIT_COMMAND``, and without that one the driver is asked directly.

    Raises:
        ZeusBSOConfigError: An argument cannot work. `fit` raises it for limits that the GPUs cannot have.
    """

    state_key = "zeus_power_limit"

    def __init__(
        self,
        selector: OptimumSelector | None = None,
        *,
        warmup_steps: int = 10,
        profile_steps: int = 40,
        limits_w: Sequence[float] | None = None,
        profile_path: str | os.PathLike[str] | None = None,
        energy_monitor: EnergyMonitor | None = None,
        devices: Sequence[PowerLimitDevice] | None = None,
        command: str | None = None,
    ) -> None:
        self._options = ProfilerOptions(
            selector or ZeusCost(),
            warmup_steps,
            profile_steps,
            limits_w,
            profile_path,
            energy_monitor,
            devices,
            command,
        )
        self._profiler: PowerLimitProfiler | None = None
        # Who knows the server, if anybody does.
        self._zeus: ZeusBSOCallback | None = None
        self._hidden = Patches()
        # Whether batches are being trained, and nothing else.
        self._is_training = False
        self._is_over = True

    @property
    def chosen_limit_w(self) -> float | None:
        """The best limit, watts of each GPU; None before it is known, and when no limit could be set."""
        return None if self._profiler is None else self._profiler.chosen_limit_w

    @property
    def profile(self) -> PowerLimitProfile | None:
        """What the present or latest `fit` has measured, and what it knew from the server or `profile_path`."""
        return None if self._profiler is None else self._profiler.profile

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare; no limit is changed yet."""
        if is_rehearsal(trainer):
            return
        self._end()
        self._zeus = _batch_size_callback(trainer)
        trial = None if self._zeus is None else self._zeus.trial
        if trial is None:
            self._profiler = self._options.profiler(_rank(trainer), _delivered_batch_size(trainer))
        else:
            self._profiler = self._options.profiler(_rank(trainer), trial.batch_size, trial.power_profile)
        self._is_over = False
        self._hide(*(hook for hook in STEP_HOOKS if hook != "on_train_batch_end"))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to measure, or go on with it."""
        self._begin_batches(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Count the batch. Hidden from the trainer as soon as nothing is left to measure."""
        if self._profiler is not None:
            self._profiler.on_step_end()
            self._finish_profiling(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Interrupt a measurement."""
        self._end_batches()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on with measuring, after a validation within an epoch."""
        if not trainer.sanity_checking and not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._begin_batches(trainer)

    # The trainer writes it after this; the batches after that warm up first.
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Interrupt a measurement."""
        if self._is_training:
            self._end_batches()
            self._begin_batches(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Interrupt a measurement."""
        self._end_batches()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the limits back."""
        if not self._is_over and trainer.is_global_zero:
            self._keep()  # what there is: the next training goes on from there
        self._end()

    # Lightning calls no other hook after an exception.
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Put the limits back."""
        self._end()

    def _begin_batches(self, trainer: Trainer) -> None:
        if self._profiler is None or self._is_over:
            return
        self._is_training = True
        self._profiler.on_epoch_begin(_batches_in_a_row(trainer))
        self._finish_profiling(trainer)

    def _end_batches(self) -> None:
        if self._is_training and self._profiler is not None:
            self._is_training = False
            self._profiler.on_epoch_end()

    def _finish_profiling(self, trainer: Trainer) -> None:
        if self._profiler is None or not self._profiler.is_done or self._is_over:
            return
        self._is_over, self._is_training = True, False
        self._hide("on_train_batch_end")
        if not trainer.is_global_zero:
            return
        self._keep()
        if self._profiler.chosen_limit_w is not None:
            for logger in trainer.loggers:
                logger.log_metrics({"zeus/power_limit_w": self._profiler.chosen_limit_w}, step=trainer.global_step)

    def _keep(self) -> None:
        """Keep what is known by now, in the file and on the server."""
        if self._profiler is None:
            return
        self._options.save(self._profiler.profile)
        choice = None if self._zeus is None else choice_of(self._profiler)
        if self._zeus is not None and choice is not None:
            self._zeus.keep_power_limits(choice)

    def _hide(self, *hooks: str) -> None:
        """Have the trainer leave hooks out, but for those of a subclass of the user's."""
        for hook in hooks:
            if getattr(type(self), hook) in (getattr(Callback, hook), getattr(ZeusPowerLimitCallback, hook)):
                self._hidden.set_attribute(self, hook, None)

    def _end(self) -> None:
        self._is_over, self._is_training = True, False
        self._hidden.undo()
        if self._profiler is not None:
            self._profiler.close()


def _batch_size_callback(trainer: Trainer) -> ZeusBSOCallback | None:
    """The callback that has a trial in this `fit`, if there is one."""
    callbacks = getattr(trainer, "callbacks", ())
    return next((each for each in callbacks if isinstance(each, ZeusBSOCallback) and each.has_trial), None)


def _rank(trainer: Trainer) -> Rank:
    return Rank(
        controls=trainer.local_rank == 0,
        is_zero=trainer.is_global_zero,
        gpu_indices=gpu_indices(trainer),
        all_gather=all_gathered if trainer.world_size > 1 else None,
        synchronize=cuda.synchronize if trainer.strategy.root_device.type == "cuda" else None,
    )


def _delivered_batch_size(trainer: Trainer) -> int | None:
    """The global batch size that the train loaders deliver, or None when they do not say."""
    per_device = next(iter(delivered_batch_sizes(trainer)), None)
    return None if per_device is None else int(per_device) * trainer.world_size * trainer.accumulate_grad_batches


def _batches_in_a_row(trainer: Trainer) -> int | None:
    """Batches between two validations, or in an epoch, whichever is less; None when nobody knows."""
    known = [n for n in (trainer.num_training_batches, trainer.val_check_batch) if n is not None and math.isfinite(n)]
    return int(min(known)) if known else None
