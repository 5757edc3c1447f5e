"""A training in experiment trackers: its size with the reason, and its cost.

CSV is always tested; the other trackers only if installed, each with a local store and without a network.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from tests.support.job_bench import SERVERS_SIZE
from tests.support.lightning_bench import (  # noqa: F401 - a fixture
    QUIET,
    USERS_SIZE,
    Bench,
    Classifier,
    HyperparameterData,
    make_bench,
    quiet_trainer,
)

pytestmark = QUIET


class Saving(Classifier):
    """Module that saves its hyperparameters, including the user's size, as in Lightning's guides."""

    def __init__(self, batch_size: int = USERS_SIZE, note: str = "kept") -> None:  # noqa: ARG002 - to be saved
        super().__init__(0.5)
        self.save_hyperparameters()


def trained(bench: Bench, logger: Logger) -> Saving:
    """Train with a target that the second epoch reaches."""
    module = Saving()
    callback = bench.callback(bench.job(0.25, max_epochs=2))
    quiet_trainer(callback, max_epochs=2, logger=logger, log_every_n_steps=1).fit(
        module, datamodule=HyperparameterData()
    )
    assert module.seen_sizes[0] == SERVERS_SIZE
    return module


def expected(bench: Bench) -> dict[str, Any]:
    return {
        "batch_size": SERVERS_SIZE,
        "note": "kept",
        "zeus/job_id": bench.job_id,
        "zeus/batch_size": SERVERS_SIZE,
        "zeus/policy": "zeus",
        "zeus/reason": "exploring: your default size (round 1 of 2)",
    }


def test_csv_has_the_trained_size_and_the_cost(bench: Bench, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    module = trained(bench, logger)
    kept = yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text())
    assert kept == expected(bench)
    rows = csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines())
    (last,) = [row for row in rows if row["zeus/target_reached"]]
    assert float(last["zeus/cost_j"]) == 55.0
    assert float(last["zeus/target_reached"]) == 1.0
    assert (float(last["zeus/trial_time_s"]), float(last["zeus/trial_energy_j"])) == (1.0, 10.0)
    # The user's value is restored after the training.
    assert (module.hparams["batch_size"], module.hparams_initial["batch_size"]) == (USERS_SIZE, USERS_SIZE)


@pytest.mark.slow
def test_tensorboard_has_the_trained_size_and_the_cost(bench: Bench, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="no tensorboard")
    logger = TensorBoardLogger(str(tmp_path))
    trained(bench, logger)
    logger.finalize("success")
    assert yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text()) == expected(bench)
    events = accumulator.EventAccumulator(logger.log_dir).Reload()
    assert events.Scalars("zeus/cost_j")[-1].value == 55.0
    assert events.Scalars("zeus/batch_size")[-1].value == SERVERS_SIZE


@pytest.mark.slow
def test_wandb_has_the_trained_size_and_the_cost(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="no wandb", exc_type=ImportError)
    for variable in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_ARTIFACT_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    logger = WandbLogger(offline=True, save_dir=str(tmp_path))
    trained(bench, logger)
    assert dict(logger.experiment.config) == expected(bench)
    assert logger.experiment.summary["zeus/cost_j"] == 55.0
    logger.experiment.finish()


@pytest.mark.slow
def test_mlflow_has_the_trained_size_and_the_cost(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="no mlflow", exc_type=ImportError)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = MLFlowLogger(tracking_uri=f"file:{tmp_path}")
    trained(bench, logger)
    run = logger.experiment.get_run(logger.run_id)
    assert run.data.params == {name: str(value) for name, value in expected(bench).items()}
    assert run.data.metrics["zeus/cost_j"] == 55.0
