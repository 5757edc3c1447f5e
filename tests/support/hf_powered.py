"""A training of the Hugging Face Trainer on a pretended machine, whose GPU's power limit can be set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from tests.support.hf_models import Classifier, quiet_trainer
from tests.support.power_limit_bench import LIMITS_W, Recorder, machine
from zeus_plugins.huggingface import ZeusPowerLimitTrainerCallback

EVALUATION_S = 1000.0


class Powered(Classifier):
    """Steps cost what the pretended machine says; evaluations and checkpoints take very long."""

    def __init__(self, error: BaseException | None = None, fails_at: int = 2) -> None:
        super().__init__(error, fails_at)
        self.machine = machine()
        self.device_ = Recorder(self.machine.devices[0])
        self.limits_of_steps: list[float] = []
        self.limits_of_evaluations: list[float] = []

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.limits_of_steps.append(self.device_.limit_w())
            self.machine.train()
        return super().forward(pixels, labels)

    def evaluated(self, _: Any) -> dict[str, float]:
        self.limits_of_evaluations.append(self.device_.limit_w())
        self.machine.time_s += EVALUATION_S
        return {"score": 0.0}

    def callback(self, **options: Any) -> ZeusPowerLimitTrainerCallback:
        defaults: dict[str, Any] = {
            "warmup_steps": 1,
            "profile_steps": 2,
            "limits_w": LIMITS_W,
            "energy_monitor": self.machine.monitor,
            "devices": [self.device_],
        }
        return ZeusPowerLimitTrainerCallback(**(defaults | options))

    def trainer(self, folder: Path, *callbacks: Any, **options: Any) -> Trainer:
        data = {"model": self, "compute_metrics": self.evaluated}
        return quiet_trainer(folder, *callbacks, trainer_options=data, **options)
