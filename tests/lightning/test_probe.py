"""A probe of a Lightning training leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import WeightedRandomSampler

from tests.support.lightning_bench import QUIET, Rows
from tests.support.trapped import SIZES, favour_large_batches, generous, predicting, rest
from tests.support.trapped_lightning import Ran

pytestmark = QUIET


@pytest.mark.parametrize(
    ("loading", "options"),
    [
        pytest.param({}, {}, id="shuffled"),
        pytest.param({"shuffle": True}, {"precision": "bf16-mixed"}, id="bf16"),
        pytest.param(
            {"sampler": WeightedRandomSampler(torch.rand(640).tolist(), 640)},
            {"accumulate_grad_batches": 2},
            id="weighted, accumulated",
        ),
        pytest.param({"shuffle": True, "has_batch_norm": False}, {}, id="LayerNorm"),
        pytest.param({"shuffle": True, "num_workers": 2}, {}, id="workers"),
    ],
)
def test_training_is_bit_equal_with_and_without_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loading: dict[str, Any], options: dict[str, Any]
) -> None:
    seen = []
    for probe in ("off", "auto"):
        with generous(monkeypatch) as sent:
            run = Ran(tmp_path, probe, **loading)
            trainer = run.train(**options)
        assert len(sent) == (probe == "auto")
        assert all((found.critical_batch_size is not None) == ("has_batch_norm" in loading) for found in sent)
        state: Any = trainer.optimizers[0].state_dict()
        logged = [{name: value for name, value in row.items() if not name.startswith("zeus/")} for row in run.rows.rows]
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        counts = run.module.accuracy.update_count, trainer.global_step
        seen.append((run.module.model.losses, rest(run.module.model, run.data, str(state), logged, metrics, counts)))
    assert seen[0][0] == seen[1][0]
    assert seen[0][1] == seen[1][1]


def test_probe_has_cost_of_sizes_and_no_noise_scale_with_batch_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with generous(monkeypatch) as sent:
        Ran(tmp_path, "auto").train()
    (found,) = sent
    assert [each.batch_size for each in found.sizes] == list(SIZES)
    assert found.critical_batch_size is None


class Refusing(Rows):
    """Takes hyperparameters once, as MLflow does not let them change."""

    batch_size: int | None = None

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        if self.batch_size is not None:
            raise ValueError("zeus/batch_size has a value already")
        self.batch_size = params["zeus/batch_size"]


def test_logger_that_refuses_the_predicted_size_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    favour_large_batches(monkeypatch)
    with generous(monkeypatch):
        run = Ran(tmp_path, "auto")
        run.rows = Refusing()
        run.said = {"job": predicting(first_run="predicted")}
        trainer = run.train()
    assert set(run.module.model.sizes) == {64}
    assert trainer.current_epoch == 2
    assert "Refusing did not take the batch size: zeus/batch_size has a value already" in caplog.text
