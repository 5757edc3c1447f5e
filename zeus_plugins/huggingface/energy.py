"""Time and energy of a Hugging Face training, epoch by epoch."""

from __future__ import annotations

import functools
from typing import Any

from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from zeus_plugins.huggingface._trainer import HuggingFacePort, TrainWrapper, checkpointed, log
from zeus_plugins.training.energy_run import EnergyTotals
from zeus_plugins.training.patches import Patches

# Name of the totals in a checkpoint.
_STATE_KEY = "zeus_energy"


class ZeusEnergyTrainerCallback(EnergyTotals, TrainWrapper):
    """Logs the time and energy of each epoch and of the training so far to the trainer's loggers; needs no server.

    Pass the callback in the trainer's `callbacks`, or call `attach` for an existing trainer. It measures only `train`.

    The metrics are ``zeus/epoch_time_s``, ``zeus/epoch_energy_j``, ``zeus/time_s`` and ``zeus/energy_j``, in seconds
    and joules, evaluations included. The trainer's `state.log_history` and the integrations of `report_to` get them.
    The first process of each machine measures its devices, and process 0 logs the sum. A training that resumes from a
    checkpoint continues its totals. If you state rates, the callback also logs money and CO2 (docs/energy.md).
    """

    _OWNER = "zeus_energy_owner"

    # True between the last step of an epoch and its log.
    _is_trained = False

    # With auto_find_batch_size this hook may run several times. The totals include the cost of the failed attempts.
    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Begin to measure, unless an earlier attempt has begun."""
        trainer = self._trainer_of(state)
        totals = checkpointed(state).get(_STATE_KEY)
        if totals is not None and not self._run.is_measuring:
            self._run.restore(totals)
        self._run.begin(HuggingFacePort(trainer), self._energy_monitor)

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Log the previous epoch, if another callback has cancelled its evaluation."""
        self._end_trained_epoch()

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Log the epoch, unless an evaluation follows."""
        self._is_trained = True
        if not control.should_evaluate:
            self._end_trained_epoch()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Log the last epoch, if another callback has cancelled its evaluation."""
        self._end_trained_epoch()

    def _train(self, trainer: Trainer, train: functools.partial[Any]) -> Any:
        self._is_trained = False
        self._run.restore({})
        patches = Patches()
        patches.extend(trainer, "_evaluate", then=lambda _: self._end_trained_epoch())
        patches.extend(trainer, "_save_checkpoint", first=self._keep_state)
        try:
            return train()
        finally:
            patches.undo()
            self._run.close()

    def _end_trained_epoch(self) -> None:
        if not self._is_trained or self._trainer is None:
            return
        self._is_trained = False
        metrics = self._run.end_epoch()
        if metrics is not None:
            log(self._trainer, metrics)

    def _keep_state(self) -> None:
        """Put the totals into the state that the trainer writes to checkpoints."""
        if self._trainer is not None and self._run.is_measuring:
            checkpointed(self._trainer.state)[_STATE_KEY] = self._run.state()
