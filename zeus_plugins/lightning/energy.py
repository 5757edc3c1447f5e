"""Time and energy of a Lightning training, epoch by epoch."""

from __future__ import annotations

from typing import Any

from zeus_plugins.lightning._trainer import Callback, LightningModule, LightningPort, Trainer, is_rehearsal
from zeus_plugins.training.energy_run import EnergyTotals


class ZeusEnergyCallback(EnergyTotals, Callback):
    """Logs the time and energy of each epoch and of the training so far to the trainer's loggers; needs no server.

    The metrics are ``zeus/epoch_time_s``, ``zeus/epoch_energy_j``, ``zeus/time_s`` and ``zeus/energy_j``, in seconds
    and joules, validation included. The first rank of each machine measures its devices, and rank 0 logs the sum. A
    training that resumes from a checkpoint continues its totals. If you state rates, the callback also logs money and
    CO2 (docs/energy.md).
    """

    # Name of the totals in a checkpoint.
    state_key = "zeus_energy"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and not is_rehearsal(trainer):
            self._run.restore({})

    def state_dict(self) -> dict[str, Any]:
        return dict(self._run.state())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._run.restore(state_dict)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if is_rehearsal(trainer):
            return
        self._run.begin(LightningPort(trainer), self._energy_monitor)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = self._run.end_epoch()
        if metrics is not None:
            LightningPort(trainer).log(metrics)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._run.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._run.close()
