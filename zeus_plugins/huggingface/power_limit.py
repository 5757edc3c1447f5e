"""The power limit of the GPUs of a Hugging Face training."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import cuda
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from zeus_plugins.energy import EnergyMonitor
from zeus_plugins.huggingface._attach import TrainWrapper
from zeus_plugins.huggingface._trainer import (
    afterwards,
    all_gathered,
    already_training,
    beforehand,
    gpu_indices,
    log,
    not_attached,
)
from zeus_plugins.huggingface.batch_size import ZeusBSOTrainerCallback
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


class ZeusPowerLimitTrainerCallback(TrainWrapper):
    """Finds the GPUs' best power limit within the first epochs, keeps it until `train` ends, and then puts it back.

    Each limit is measured over some steps of the training itself, while nothing else happens: an evaluation, a
    checkpoint or the end of an epoch interrupts a measurement, which is then made again. Once the limit is chosen, the
    steps cost nothing any more; ``zeus/power_limit_w`` goes to the trainer's logs. Without a GPU or the permission to
    set limits, only the limit in force is measured, with one warning. Outside `train` the callback does nothing.

    Beside a `ZeusBSOTrainerCallback`, before or after it in the trainer's `callbacks`, the server keeps what was
    measured, and only limits are measured that no earlier trial of the job had measured at this batch size.

    Give it to the trainer as one of its `callbacks`. A trainer that exists already takes it by `attach`.

    Args:
        selector: What is best: `zeus_plugins.power_limit.ZeusCost(eta)` (the cost that batch sizes are compared by),
            `Energy()`, `Time()` or `MaxSlowdown(factor)`.
        warmup_steps: Optimizer steps under a new limit before it is measured.
        profile_steps: Optimizer steps measured under each limit.
        limits_w: Limits to measure, watts of each GPU. None: from the one in force downwards in steps of 25 W.
        profile_path: File that keeps what was measured, for the next training on such GPUs at the same batch size;
            ``{batch_size}`` in it stands for that size. It is not read where the server knows of the limits.
        energy_monitor: Measures energy and time. None: the best one that this machine offers.
        devices: Whose limits are set, those of this machine. None: the NVIDIA GPUs that train.
        command: Sets a limit, such as ``sudo -n nvidia-smi -i {index} -pl {watts}``. None: the environment variable
            ``ZEUS_POWER_LIMIT_COMMAND``, and without that one the driver is asked directly.

    Raises:
        ZeusBSOConfigError: An argument cannot work. `train` raises it for limits that the GPUs cannot have.
    """

    _OWNER = "zeus_power_limit_owner"

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
        self._trainer: Trainer | None = None
        self._profiler: PowerLimitProfiler | None = None
        # Who knows the server, if anybody does.
        self._zeus: ZeusBSOTrainerCallback | None = None
        self._hidden = Patches()
        # Whether steps are being trained, and nothing else; and how many there are in a row.
        self._is_training = False
        self._steps_in_a_row: int | None = None
        self._is_over = True

    @property
    def chosen_limit_w(self) -> float | None:
        """The best limit, watts of each GPU; None before it is known, and when no limit could be set."""
        return None if self._profiler is None else self._profiler.chosen_limit_w

    @property
    def profile(self) -> PowerLimitProfile | None:
        """What the present or latest `train` has measured, and what it knew from the server or `profile_path`."""
        return None if self._profiler is None else self._profiler.profile

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Prepare; no limit is changed yet."""
        if self._trainer is None or self._trainer.state is not state:
            raise not_attached()
        # With auto_find_batch_size a training may begin several times, each at another size.
        self._end()
        self._zeus = _batch_size_callback(self._trainer)
        if self._zeus is None:
            self._profiler = self._options.profiler(_rank(args), self._trainer.get_total_train_batch_size(args))
        else:
            trial = self._zeus.trial
            self._profiler = self._options.profiler(_rank(args), trial.batch_size, trial.power_profile)
        self._is_over = False

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to measure, or go on with it."""
        self._steps_in_a_row = _steps_in_a_row(args, state, kwargs.get("train_dataloader"))
        self._begin_steps()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the step. Hidden from the trainer as soon as nothing is left to measure."""
        if self._profiler is not None:
            self._profiler.on_step_end()
            self._finish_profiling()

    # The checkpoint has been written, within what would have been measured.
    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Interrupt a measurement."""
        if self._is_training:
            self._end_steps()
            self._begin_steps()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Interrupt a measurement."""
        self._end_steps()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Keep what was measured, if not everything was: the next training goes on from there."""
        if not self._is_over and state.is_world_process_zero:
            self._keep()

    def _train(self, trainer: Trainer, train: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> T:
        if self._trainer is not None:
            raise already_training()
        self._trainer = trainer
        patches = Patches()
        was_training = False

        def interrupt() -> None:
            nonlocal was_training
            was_training = self._is_training
            self._end_steps()

        def go_on(_: Any) -> None:
            if was_training:
                self._begin_steps()

        beforehand(trainer, "_evaluate", interrupt, patches)
        afterwards(trainer, "_evaluate", go_on, patches)
        try:
            return train(*args, **kwargs)
        finally:
            patches.undo()
            self._trainer = None
            self._end()

    def _begin_steps(self) -> None:
        if self._profiler is None or self._is_over:
            return
        self._is_training = True
        self._profiler.on_epoch_begin(self._steps_in_a_row)
        self._finish_profiling()

    def _end_steps(self) -> None:
        if self._is_training and self._profiler is not None:
            self._is_training = False
            self._profiler.on_epoch_end()

    def _finish_profiling(self) -> None:
        if self._profiler is None or not self._profiler.is_done or self._is_over:
            return
        self._is_over, self._is_training = True, False
        if type(self).on_step_end is ZeusPowerLimitTrainerCallback.on_step_end:  # not that of a subclass of the user's
            self._hidden.set_attribute(self, "on_step_end", super().on_step_end)
        if self._trainer is None or not self._trainer.is_world_process_zero():
            return
        self._keep()
        if self._profiler.chosen_limit_w is not None:
            log(self._trainer, {"zeus/power_limit_w": self._profiler.chosen_limit_w})

    def _keep(self) -> None:
        """Keep what is known by now, in the file and on the server."""
        if self._profiler is None:
            return
        self._options.save(self._profiler.profile)
        choice = None if self._zeus is None else choice_of(self._profiler)
        if self._zeus is not None and choice is not None:
            self._zeus.keep_power_limits(choice)

    def _end(self) -> None:
        self._is_over, self._is_training = True, False
        self._hidden.undo()
        if self._profiler is not None:
            self._profiler.close()


def _batch_size_callback(trainer: Trainer) -> ZeusBSOTrainerCallback | None:
    """The callback that has a trial in this `train`, if there is one."""
    callbacks = trainer.callback_handler.callbacks
    found = (each for each in callbacks if isinstance(each, ZeusBSOTrainerCallback))
    return next((each for each in found if each.is_training(trainer)), None)


def _rank(args: TrainingArguments) -> Rank:
    return Rank(
        controls=args.local_process_index == 0,
        is_zero=args.process_index == 0,
        gpu_indices=gpu_indices(args),
        all_gather=all_gathered if args.world_size > 1 else None,
        synchronize=cuda.synchronize if args.device.type == "cuda" else None,
    )


def _steps_in_a_row(args: TrainingArguments, state: TrainerState, loader: Any) -> int | None:
    """Optimizer steps between two evaluations, or in an epoch, whichever is less; None when nobody knows."""
    known = [state.max_steps]
    if args.eval_strategy == "steps":
        known.append(int(state.eval_steps))
    with contextlib.suppress(TypeError):  # a stream has no length
        known.append(-(-len(loader) // args.gradient_accumulation_steps))
    counted = [steps for steps in known if steps > 0]
    return min(counted) if counted else None
