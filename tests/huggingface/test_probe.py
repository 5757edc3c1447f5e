"""A probe of a Hugging Face training leaves no trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.trapped import generous, rest
from tests.support.trapped_huggingface import Ran

TIMED = ("runtime", "per_second", "zeus/")


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
def test_training_is_bit_equal_with_and_without_probe(
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
