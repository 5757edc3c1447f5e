"""A probe of a Lightning training leaves no trace, and ends wherever it might."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, WeightedRandomSampler
from torchmetrics.classification import MulticlassAccuracy

from tests.support.job_bench import seconds_and_joules
from tests.support.lightning_bench import QUIET, Rows
from tests.support.lightning_models import quiet_trainer
from tests.support.trapped import OWN_SIZE, SIZES, Noisy, Trapped, generous, rest, seed
from zeus_plugins.lightning import ZeusBSOCallback

pytestmark = QUIET


class Module(LightningModule):
    """A trapped model whose metrics and logs a probe could change."""

    def __init__(self, *, has_batch_norm: bool = True) -> None:
        super().__init__()
        self.model = Trapped(has_batch_norm=has_batch_norm)
        self.accuracy = MulticlassAccuracy(3)

    def training_step(self, batch: dict[str, Tensor]) -> Any:
        out = self.model(**batch)
        known = len(self.trainer.callback_metrics)
        self.accuracy(out["logits"], batch["labels"])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True, prog_bar=True)
        self.log("loss", out["loss"], on_step=True, on_epoch=True)
        assert self.logger is not None
        known += len(self.trainer.callback_metrics)
        self.logger.log_metrics({"own": float(out["loss"].detach()), "known": known})
        return out["loss"]

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        self.log("val_loss", self.model(**batch)["loss"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Ran:
    """A training of two epochs, which a test may change before `train`."""

    def __init__(self, folder: Path, probe: str, *, has_batch_norm: bool = True, **loading: Any) -> None:
        seed()
        self.data, self.module, self.rows = Noisy(), Module(has_batch_norm=has_batch_norm), Rows()
        self.loader: Any = DataLoader(self.data, OWN_SIZE, **(loading or {"shuffle": True}))
        self.url = f"embedded://{folder / f'{uuid.uuid4().hex}.sqlite3'}"
        self.probe = probe
        self.validating = DataLoader(Noisy(), 64)

    def train(self, **options: Any) -> Trainer:
        callback = ZeusBSOCallback(
            "val_loss",
            target=-1.0,
            mode="min",
            batch_sizes=SIZES,
            job_id="job",
            server_url=self.url,
            energy_monitor=seconds_and_joules(1.0, 10.0),
            on_failure="stop",
            probe=self.probe,  # type: ignore[arg-type]  # a test's text
        )
        defaults: dict[str, Any] = {"max_epochs": 2, "logger": self.rows, "log_every_n_steps": 1}
        trainer = quiet_trainer(callback, **(defaults | options))
        trainer.fit(self.module, self.loader, self.validating)
        return trainer


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
        pytest.param({"shuffle": True, "num_workers": 2, "persistent_workers": True}, {}, id="workers"),
    ],
)
def test_training_is_bit_equal_with_and_without_a_probe(
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with generous(monkeypatch) as sent, caplog.at_level(logging.INFO):
        Ran(tmp_path, "auto").train()
    (found,) = sent
    assert [each.batch_size for each in found.sizes] == list(SIZES)
    assert found.critical_batch_size is None
