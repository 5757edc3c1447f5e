"""A probe of a Hugging Face training leaves no trace, and ends wherever it might."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor
from transformers import Trainer

from tests.support.hf_models import quiet_trainer
from tests.support.job_bench import seconds_and_joules
from tests.support.trapped import OWN_SIZE, SIZES, Noisy, Trapped, generous, rest, seed
from zeus_plugins.huggingface import ZeusBSOTrainerCallback

TIMED = ("runtime", "per_second", "zeus/")


class Own(Trainer):
    """A trainer with a state of its own, which also logs within a step."""

    own_steps = 0
    own_numbers: dict[str, float]

    def compute_loss(self, *args: Any, **kwargs: Any) -> Tensor:
        self.own_steps += 1
        self.own_numbers["steps"] = self.own_numbers.get("steps", 0.0) + 1
        self.log({"own": self.own_steps})
        loss: Tensor = super().compute_loss(*args, **kwargs)
        return loss


class Ran:
    """A training of two epochs."""

    def __init__(self, folder: Path, probe: str, *, has_batch_norm: bool = True, **options: Any) -> None:
        seed()
        self.data, self.model = Noisy(), Trapped(has_batch_norm=has_batch_norm)
        self.model.config = SimpleNamespace(problem_type=None)  # type: ignore[assignment]  # read by transformers
        has_evaluations = options.get("eval_strategy") != "no"
        self.callback = ZeusBSOTrainerCallback(
            "eval_loss" if has_evaluations else "loss",
            target=-1.0,
            batch_sizes=SIZES,
            job_id="job",
            server_url=f"embedded://{folder / probe / 'bso.sqlite3'}",
            energy_monitor=seconds_and_joules(1.0, 10.0),
            on_failure="stop",
            probe=probe,  # type: ignore[arg-type]  # a test's text
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


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"gradient_accumulation_steps": 2, "bf16": True}, id="accumulated, bf16"),
        pytest.param({"dataloader_num_workers": 2}, id="workers"),
        pytest.param({"eval_strategy": "no", "has_batch_norm": False}, id="without evaluations"),
        pytest.param({"has_batch_norm": False}, id="LayerNorm"),
    ],
)
def test_training_is_bit_equal_with_and_without_a_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    seen = []
    for probe in ("off", "auto"):
        with generous(monkeypatch) as sent:
            run = Ran(tmp_path, probe, **options)
            run.trainer.train()
        assert len(sent) == (probe == "auto")
        assert all((found.critical_batch_size is not None) == ("has_batch_norm" in options) for found in sent)
        trainer: Any = run.trainer
        history = [
            {name: value for name, value in row.items() if not any(part in name for part in TIMED)}
            for row in trainer.state.log_history
        ]
        counts = trainer.own_steps, trainer.own_numbers, trainer.state.global_step, trainer.state.total_flos
        loaders = len(trainer.accelerator._dataloaders)
        optimizer = str(trainer.optimizer.state_dict())
        seen.append((run.model.losses, rest(run.model, run.data, json.dumps(history), counts, loaders, optimizer)))
    assert seen[0][0] == seen[1][0]
    assert seen[0][1] == seen[1][1]
