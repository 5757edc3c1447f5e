"""Trainings with the Hugging Face Trainer for which only a target and a metric are stated."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer
from transformers.training_args import OptimizerNames

from tests.support import hf_bench as models
from tests.support.hf_bench import USERS_SIZE, Bench
from tests.support.job_bench import SERVERS_SIZE
from zeus_plugins.huggingface._trainer import HuggingFacePort
from zeus_plugins.training.defaults import hash_of_parameters

SIZES = (2, 4, 8, 16, 32, 64, 128)
HYPERPARAMETERS = {
    "zeus/batch_size": SERVERS_SIZE,
    "zeus/policy": "zeus",
    "zeus/reason": "exploring: your default size (round 1 of 2)",
}


def test_sizes_and_epochs_are_read_from_arguments(bench: Bench) -> None:
    trainer = bench.trainer(bench.guessing(), num_train_epochs=5)
    trainer.train()
    view = bench.view()
    assert (view.job.batch_sizes, view.job.default_batch_size, view.job.max_epochs) == (SIZES, USERS_SIZE, 5)
    assert view.job.fingerprint is not None
    told = {
        "model": "Classifier",
        "framework": "transformers",
        "optimizer": OptimizerNames(trainer.args.optim).value,
        "monitor": "score",
        "samples": 168,
        "parameters": hash_of_parameters(trainer.model),
        "data": "Digits",
    }
    assert view.job.fingerprint.model_dump() == told
    assert view.trials[0].state == "completed"


def test_accumulated_batches_and_limit_on_steps_count(bench: Bench) -> None:
    trainer = bench.trainer(bench.guessing(), gradient_accumulation_steps=2, max_steps=12)
    trainer.train()
    job = bench.view().job
    # 12 steps of 32 are two epochs, and other sizes train the same samples.
    assert (job.default_batch_size, job.batch_sizes, job.max_epochs) == (32, (4, 8, 16, 32, 64, 128), 2)


def test_passed_optimizer_and_loss_reach_fingerprint(bench: Bench) -> None:
    model = models.Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeus = bench.guessing(target=1e9, monitor="loss")
    trainer = bench.trainer(zeus, data={"model": model, "compute_metrics": None, "optimizers": (optimizer, None)})
    trainer.train()
    job = bench.view().job
    assert job.fingerprint is not None
    assert (job.fingerprint.optimizer, job.higher_is_better_metric) == ("SGD", False)


def test_second_training_of_trainer_keeps_optimizer_of_first(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    trainer = bench.trainer(bench.guessing())
    assert trainer.model is not None
    first_weights = copy.deepcopy(trainer.model.state_dict())
    for _ in range(2):
        trainer.model.load_state_dict(first_weights)
        trainer.train()
    assert len(bench.view().trials) == 2
    assert "something else" not in caplog.text


@pytest.mark.parametrize(
    ("best", "is_greater", "higher"), [("score", False, False), ("eval_score", False, False), ("loss", False, True)]
)
def test_metric_for_best_model_decides_direction(bench: Bench, best: str, *, is_greater: bool, higher: bool) -> None:
    trainer = bench.trainer(bench.guessing(mode=None), metric_for_best_model=best, greater_is_better=is_greater)
    port = HuggingFacePort(trainer)
    assert [*port.modes("score").values()] == ([] if higher else ["min"])
    if not higher:
        trainer.train()
        assert not bench.view().job.higher_is_better_metric


@pytest.mark.slow
def test_tensorboard_gets_trained_values(bench: Bench) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="no tensorboard")
    trainer: Trainer = bench.trainer(bench.guessing(), report_to="tensorboard")
    trainer.train()
    (folder,) = {path.parent for path in bench.folder.rglob("events.out*")}
    events = accumulator.EventAccumulator(str(folder)).Reload()
    (text,) = events.Tensors("zeus/job_id/text_summary")
    assert text.tensor_proto.string_val[0].decode() == bench.job_id
    assert events.Scalars("train/zeus/cost_j")[-1].value == 55.0


@pytest.mark.slow
def test_wandb_gets_trained_values(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="no wandb", exc_type=ImportError)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for variable in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_ARTIFACT_DIR"):
        monkeypatch.setenv(variable, str(bench.folder))
    bench.trainer(bench.callback(), report_to="wandb").train()
    assert {name: value for name, value in wandb.config.items() if name.startswith("zeus/")} == HYPERPARAMETERS | {
        "zeus/job_id": bench.job_id
    }
    assert wandb.config["per_device_train_batch_size"] == SERVERS_SIZE
    assert wandb.run.summary["train/zeus/cost_j"] == 55.0
    wandb.finish()


@pytest.fixture(name="mlflow")
def make_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """MLflow with a store of the test's own, a folder."""
    mlflow = pytest.importorskip("mlflow", reason="no mlflow", exc_type=ImportError)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    gc.collect()  # Otherwise an earlier test's callback would end this test's run when it is collected.
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"file:{tmp_path / 'mlruns'}")
    yield mlflow
    mlflow.end_run()
    mlflow.set_tracking_uri(before)


@pytest.mark.slow
def test_mlflow_gets_trained_values(bench: Bench, mlflow: Any) -> None:
    bench.trainer(bench.callback(), report_to="mlflow").train()
    run = mlflow.last_active_run()
    assert (
        run.data.params.items()
        >= {
            "zeus/job_id": bench.job_id,
            "per_device_train_batch_size": str(SERVERS_SIZE),
            **{name: str(value) for name, value in HYPERPARAMETERS.items()},
        }.items()
    )
    assert run.data.metrics["zeus/cost_j"] == 55.0


@pytest.mark.slow
def test_parameter_with_different_value_in_mlflow_ends_no_training(
    bench: Bench, mlflow: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with mlflow.start_run():
        mlflow.log_param("zeus/batch_size", 1)
        bench.trainer(bench.callback(), report_to="mlflow").train()
    assert bench.only_trial().state == "completed"
    (said,) = [text for text in caplog.messages if "did not take the batch size" in text]
    assert said.startswith("MLflowCallback did not take the batch size: Changing param values is not allowed")
