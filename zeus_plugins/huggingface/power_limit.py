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
    """Finds the GPUs' best power limit in the first epochs, keeps it until `train` ends, and then restores the old one.

    Pass the callback in the trainer's `callbacks`, or call `attach` for an existing trainer. It acts only in `train`.

    The callback measures each limit over some steps of the training. An evaluation, a checkpoint or the end of an epoch
    interrupts a measurement, which then begins again. Once the limit is chosen, the trainer's logs get
    ``zeus/power_limit_w``. Without a GPU or the permission to set limits, the callback warns and measures the present
    limit. With a `ZeusBSOTrainerCallback`, in any order, a file keeps the measurements, and this callback skips limits
    that an earlier trial of the job measured on this machine at this batch size.
    """

    _OWNER = "zeus_power_limit_owner"

    # With auto_find_batch_size this hook may run several times, each time at another size.
    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Prepare the search, without changing a limit."""
        trainer = self._trainer_of(state)
        self._run.begin(
            HuggingFacePort(trainer),
            trainer.get_total_train_batch_size(args),
            keeper=batch_size_callback(trainer.callback_handler.callbacks),
            log=functools.partial(log, trainer),
            synchronize=cuda.synchronize,
        )

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        self._run.begin_steps(_steps_in_a_row(args, state, kw.get("train_dataloader")))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._run.end_step()

    # The trainer has written the checkpoint during a measurement.
    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._run.disturb()

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._run.end_steps()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._run.keep_unfinished()

    def _train(self, trainer: Trainer, train: functools.partial[Any]) -> Any:
        patches = Patches()
        patches.extend(trainer, "_evaluate", first=self._run.interrupt, then=lambda _: self._run.resume())
        try:
            return train()
        finally:
            patches.undo()
            self._run.close()


def _steps_in_a_row(args: TrainingArguments, state: TrainerState, loader: Any) -> int | None:
    """Return the number of optimizer steps until an evaluation or the end of the epoch; None if unknown."""
    known = [state.max_steps]
    if args.eval_strategy == "steps":
        known.append(int(state.eval_steps))
    with contextlib.suppress(TypeError):  # a stream has no length
        known.append(-(-len(loader) // args.gradient_accumulation_steps))
    counted = [steps for steps in known if steps > 0]
    return min(counted) if counted else None
