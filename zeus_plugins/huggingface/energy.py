"""Time and energy of a Hugging Face training, epoch by epoch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from zeus_plugins.energy import ClusterMonitor, EnergyMonitor, EpochMeter, WindowMonitor
from zeus_plugins.huggingface._attach import TrainWrapper
from zeus_plugins.huggingface._trainer import (
    afterwards,
    already_training,
    beforehand,
    checkpointed,
    cluster_of,
    log,
    node_monitor,
    not_attached,
)
from zeus_plugins.training.patches import Patches

T = TypeVar("T")


_logger = logging.getLogger("zeus_plugins")


_ENERGY_STATE_KEY = "zeus_energy"


class ZeusEnergyTrainerCallback(TrainWrapper):
    """Logs the time and energy of each epoch and of the training so far to the trainer's loggers; needs no server.

    The metrics are ``zeus/epoch_time_s``, ``zeus/epoch_energy_j``, ``zeus/time_s`` and ``zeus/energy_j``, in seconds
    and joules, the epoch's evaluations included. They come to the trainer's `state.log_history` and to all that
    `report_to` names. Process 0 logs; the first process of each machine measures its devices. A training that resumes
    from a checkpoint continues its totals. Outside `train` the callback does nothing.

    Give it to the trainer as one of its `callbacks`. A trainer that exists already takes it by `attach`.

    Args:
        energy_monitor: Measures energy and time. None: the best one that this machine offers.
    """

    _OWNER = "zeus_energy_owner"

    def __init__(self, energy_monitor: EnergyMonitor | WindowMonitor | None = None) -> None:
        self._energy_monitor = energy_monitor
        self._trainer: Trainer | None = None
        self._meter: EpochMeter | None = None
        self._cluster: ClusterMonitor | None = None
        self._has_begun = False
        self._totals: dict[str, float] = {}
        # Whether the present epoch lacks nothing but its evaluation.
        self._is_trained = False

    @property
    def time_s(self) -> float:
        """Seconds of all epochs of the present or latest training; 0 on other processes than 0."""
        return self._totals.get("time_s", 0.0)

    @property
    def energy_j(self) -> float:
        """Joules of the same epochs."""
        return self._totals.get("energy_j", 0.0)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to measure."""
        if self._trainer is None or self._trainer.state is not state:
            raise not_attached()
        # With auto_find_batch_size a training may begin several times: what the earlier attempts cost counts, too.
        if self._has_begun:
            return
        self._has_begun = True
        self._cluster = cluster_of(self._trainer, self._energy_monitor)
        if self._cluster is not None:
            self._cluster.synchronize()
        if not state.is_world_process_zero:
            return
        monitor = self._cluster or node_monitor(self._trainer, self._energy_monitor)
        meter = EpochMeter(monitor, checkpointed(state).get(_ENERGY_STATE_KEY))
        meter.begin()
        self._meter, self._totals = meter, meter.totals

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Log an epoch whose evaluation another callback has called off."""
        self._end_trained_epoch()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Log the epoch, unless an evaluation is still to come."""
        self._is_trained = True
        if not control.should_evaluate:
            self._end_trained_epoch()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Log a last epoch whose evaluation another callback has called off."""
        self._end_trained_epoch()

    def _train(self, trainer: Trainer, train: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> T:
        if self._trainer is not None:
            raise already_training()
        self._trainer, self._totals, self._is_trained, self._has_begun = trainer, {}, False, False
        patches = Patches()
        afterwards(trainer, "_evaluate", lambda _: self._end_trained_epoch(), patches)
        beforehand(trainer, "_save_checkpoint", self._keep_state, patches)
        try:
            return train(*args, **kwargs)
        finally:
            patches.undo()
            self._trainer = None
            if self._meter is not None:
                self._meter.end()
                self._meter = None
            if self._cluster is not None:
                self._cluster.close()
                self._cluster = None

    def _end_trained_epoch(self) -> None:
        if not self._is_trained:
            return
        self._is_trained = False
        if self._cluster is not None:
            self._cluster.synchronize()
        if self._meter is not None and self._trainer is not None:
            metrics = self._meter.end_epoch()
            self._totals = self._meter.totals
            log(self._trainer, metrics)

    def _keep_state(self) -> None:
        """Put the totals where the trainer's checkpoints take them from."""
        if self._meter is not None and self._trainer is not None:
            checkpointed(self._trainer.state)[_ENERGY_STATE_KEY] = self._meter.state()
