"""A Lightning training on a pretended machine, whose GPU's power limit can be set."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.support.lightning_models import Classifier
from tests.support.power_limit_bench import LIMITS_W, Recorder, machine
from zeus_plugins.lightning import ZeusPowerLimitCallback

VALIDATION_S = 1000.0


class Powered(Classifier):
    """A training whose steps cost what the pretended machine says, and whose validations take very long."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = machine()
        self.device_ = Recorder(self.machine.devices[0])
        self.limits_of_steps: list[float] = []
        self.limits_of_validations: list[float] = []

    def training_step(self, batch: Any) -> Tensor:
        self.limits_of_steps.append(self.device_.limit_w())
        self.machine.train()
        return super().training_step(batch)

    def validation_step(self, batch: Any) -> None:
        self.limits_of_validations.append(self.device_.limit_w())
        self.machine.time_s += VALIDATION_S
        super().validation_step(batch)

    def callback(self, **options: Any) -> ZeusPowerLimitCallback:
        defaults: dict[str, Any] = {
            "warmup_steps": 1,
            "profile_steps": 2,
            "limits_w": LIMITS_W,
            "energy_monitor": self.machine.monitor,
            "devices": [self.device_],
        }
        return ZeusPowerLimitCallback(**(defaults | options))
