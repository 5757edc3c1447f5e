"""Time and energy of a Lightning training, epoch by epoch."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

from zeus_plugins.energy import ClusterMonitor, EnergyMonitor, EpochMeter, WindowMonitor
from zeus_plugins.lightning._trainer import Callback, LightningModule, Trainer, cluster_of, is_rehearsal, node_monitor

T = TypeVar("T")


_logger = logging.getLogger("zeus_plugins")


class ZeusEnergyCallback(Callback):
    """Logs the time and energy of each epoch and of the training so far to the trainer's loggers; needs no server.

    The metrics are ``zeus/epoch_time_s``, ``zeus/epoch_energy_j``, ``zeus/time_s`` and ``zeus/energy_j``, in seconds
    and joules, validation included. The first rank of each machine measures its devices, and rank 0 logs the sum. A
    training that continues from a checkpoint continues its totals.

    Args:
        energy_monitor: Measures energy and time; one that measures as Zeus's `ZeusMonitor` does will do. None: the best
            one that this machine offers.
    """

    # The name of the totals in a checkpoint.
    state_key = "zeus_energy"

    def __init__(self, energy_monitor: EnergyMonitor | WindowMonitor | None = None) -> None:
        self._energy_monitor = energy_monitor
        self._meter: EpochMeter | None = None
        self._cluster: ClusterMonitor | None = None
        self._totals: dict[str, float] = {}

    @property
    def time_s(self) -> float:
        """Seconds of all epochs of the present or latest training; 0 on other ranks than 0."""
        return self._totals.get("time_s", 0.0)

    @property
    def energy_j(self) -> float:
        """Joules of the same epochs."""
        return self._totals.get("energy_j", 0.0)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin the totals anew."""
        if stage == "fit" and not is_rehearsal(trainer):
            self._totals = {}

    def state_dict(self) -> dict[str, Any]:
        """The totals, and what the present epoch has cost so far."""
        return dict(self._totals) if self._meter is None else dict(self._meter.state())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what a checkpoint kept."""
        self._totals = dict(state_dict)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to measure."""
        if is_rehearsal(trainer):
            return
        self._cluster = cluster_of(trainer, self._energy_monitor)
        if self._cluster is not None:
            self._cluster.synchronize()
        if not trainer.is_global_zero:
            return
        self._meter = EpochMeter(self._cluster or node_monitor(trainer, self._energy_monitor), self._totals)
        self._meter.begin()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the epoch."""
        if self._cluster is not None:
            self._cluster.synchronize()
        if self._meter is None:
            return
        metrics = self._meter.end_epoch()
        self._totals = self._meter.totals
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop measuring."""
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop measuring."""
        self._end()

    def _end(self) -> None:
        if self._meter is not None:
            self._meter.end()
            self._meter = None
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None
