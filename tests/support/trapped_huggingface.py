"""Trapped models trained by the Trainer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import Trainer

from tests.support.hf_models import quiet_trainer
from tests.support.job_bench import seconds_and_joules
from tests.support.trapped import OWN_SIZE, SIZES, Noisy, Trapped, seed
from zeus_plugins.huggingface import ZeusBSOTrainerCallback


class Own(Trainer):
    """A trainer with a state, which also logs within a step."""

    own_steps = 0
    own_numbers: dict[str, float]

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.own_steps += 1
        self.own_numbers["steps"] = self.own_numbers.get("steps", 0.0) + 1
        self.log({"own": self.own_steps})
        return super().compute_loss(*args, **kwargs)


class Ran:
    """A training of two epochs."""

    def __init__(
        self,
        folder: Path,
        probe: str,
        *,
        has_batch_norm: bool = True,
        said: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        seed()
        self.data, self.model = Noisy(), Trapped(has_batch_norm=has_batch_norm)
        self.model.config = SimpleNamespace(problem_type=None)  # type: ignore[assignment]  # read by transformers
        has_evaluations = options.get("eval_strategy") != "no"
        self.callback = ZeusBSOTrainerCallback(
            monitor="eval_loss" if has_evaluations else "loss",
            **(said or {"target": -1.0, "batch_sizes": SIZES, "job_id": "job"}),
            server_url=f"embedded://{folder / probe / 'bso.sqlite3'}",
            energy_monitor=seconds_and_joules(1.0, 10.0),
            on_failure="stop",
            probe=probe,
        )
        (folder / probe).mkdir(exist_ok=True)
        defaults = {"num_train_epochs": 2, "per_device_train_batch_size": OWN_SIZE, "logging_steps": 1, "seed": 1} | {
            "learning_rate": 1e-3
        }
        self.trainer = quiet_trainer(
            folder / probe,
            self.callback,
            kind=Own,
            trainer_options={
                "model": self.model,
                "train_dataset": self.data,
                "eval_dataset": Noisy(),
                "compute_metrics": None,
            },
            **(defaults | options),
        )
        vars(self.trainer)["own_numbers"] = {}
