"""Time and energy of a Hugging Face training, epoch by epoch."""

from __future__ import annotations

import functools
from typing import Any

from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from zeus_plugins.huggingface._trainer import HuggingFacePort, TrainWrapper, checkpointed, log
from zeus_plugins.training.energy_run import EnergyTotals
from zeus_plugins.training.patches import Patches

# The name of the totals in a checkpoint.
_STATE_KEY = "zeus_energy"


class ZeusEnergyTrainerCallback(EnergyTotals, TrainWrapper):
    """Logs the time and energy of each epoch and of the training so far to the trainer's loggers; needs no server.

    The metrics are ``zeus/epoch_time_s``, ``zeus/epoch_energy_j``, ``zeus/time_s`` and ``zeus/energy_j``, in seconds
    and joules, the epoch's evaluations included. They come to the trainer's `state.log_history` and to all that
    `report_to` names. Process 0 logs; the first process of each machine measures its devices. A training that resumes
    from a checkpoint continues its totals. Without a monitor of one's own, parts of an epoch's energy, power,
    temperature, money and CO2 are logged beside them: docs/energy.md lists these metrics. Outside `train` the callback
    does nothing.

    Give it to the trainer as one of its `callbacks`. A trainer that exists already takes it by `attach`.

    Args:
        energy_monitor: Measures energy and time; one that measures as Zeus's `ZeusMonitor` does will do. None: the best
            one that this machine offers.
    """

    _OWNER = "zeus_energy_owner"

    # Whether the present epoch lacks nothing but its evaluation.
    _is_trained = False

    # With auto_find_batch_size a training may begin several times: what the earlier attempts cost counts, too.
    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Begin to measure."""
        trainer = self._trainer_of(state)
        self._run.begin(HuggingFacePort(trainer), self._energy_monitor, checkpointed(state).get(_STATE_KEY))

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Log an epoch whose evaluation another callback has called off."""
        self._end_trained_epoch()

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Log the epoch, unless an evaluation is still to come."""
        self._is_trained = True
        if not control.should_evaluate:
            self._end_trained_epoch()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Log a last epoch whose evaluation another callback has called off."""
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
        """Put the totals where the trainer's checkpoints take them from."""
        if self._trainer is not None and self._run.is_measuring:
            checkpointed(self._trainer.state)[_STATE_KEY] = self._run.state()
