"""The power limit of the GPUs of a Hugging Face training."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from torch import cuda
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from zeus_plugins.huggingface._trainer import HuggingFacePort, TrainWrapper, log
from zeus_plugins.training.patches import Patches
from zeus_plugins.training.power_run import PowerLimitFindings, batch_size_callback


class ZeusPowerLimitTrainerCallback(PowerLimitFindings, TrainWrapper):
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
        wait_steps: Optimizer steps before the first limit, in which the model is compiled and kernels are benchmarked.
            After them it is waited until the GPUs' temperature is stable, two minutes at most.
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
        ZeusBSOConfigError: An argument cannot work. `train` raises it for limits that the GPUs cannot have.
    """

    _OWNER = "zeus_power_limit_owner"

    # With auto_find_batch_size a training may begin several times, each at another size.
    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Prepare; no limit is changed yet."""
        trainer = self._trainer_of(state)
        self._run.begin(
            HuggingFacePort(trainer),
            trainer.get_total_train_batch_size(args),
            keeper=batch_size_callback(trainer.callback_handler.callbacks),
            log=functools.partial(log, trainer),
            on_done=self._hide_steps,
            synchronize=cuda.synchronize,
        )

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to measure, or go on with it."""
        self._run.begin_steps(_steps_in_a_row(args, state, kwargs.get("train_dataloader")))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Count the step. Hidden from the trainer as soon as nothing is left to measure."""
        self._run.end_step()

    # The checkpoint has been written, within what would have been measured.
    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Interrupt a measurement."""
        self._run.disturb()

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Interrupt a measurement."""
        self._run.end_steps()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Keep what was measured, if not everything was: the next training goes on from there."""
        self._run.keep_unfinished()

    def _train(self, trainer: Trainer, train: functools.partial[Any]) -> Any:
        patches = Patches()
        patches.extend(trainer, "_evaluate", first=self._run.interrupt, then=lambda _: self._run.resume())
        try:
            return train()
        finally:
            patches.undo()
            self._run.close()

    def _hide_steps(self) -> None:
        if type(self).on_step_end is ZeusPowerLimitTrainerCallback.on_step_end:  # not that of a subclass of the user's
            self._run.patches.set_attribute(self, "on_step_end", super().on_step_end)


def _steps_in_a_row(args: TrainingArguments, state: TrainerState, loader: Any) -> int | None:
    """Optimizer steps between two evaluations, or in an epoch, whichever is less; None when nobody knows."""
    known = [state.max_steps]
    if args.eval_strategy == "steps":
        known.append(int(state.eval_steps))
    with contextlib.suppress(TypeError):  # a stream has no length
        known.append(-(-len(loader) // args.gradient_accumulation_steps))
    counted = [steps for steps in known if steps > 0]
    return min(counted) if counted else None
