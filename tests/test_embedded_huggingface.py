"""Trainings with the Hugging Face Trainer whose server runs in their own process."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest

if not os.environ.get("CI"):
    pytest.importorskip("transformers", reason="the Trainer's callback needs zeus-plugins[transformers]")

from tests.support.hf_bench import (
    sizes_of,
    use_one_thread,  # noqa: F401 - a fixture
)
from tests.support.hf_models import Scores, quiet_trainer
from tests.support.job_bench import EPOCH_OF_48, GPUS, NEVER, seconds_and_joules
from zeus_plugins import JobSpec
from zeus_plugins.client.connect import client_from_environment
from zeus_plugins.energy import EnergyMonitor, Measurement, ReplayMonitor
from zeus_plugins.huggingface import ZeusBSOTrainerCallback
from zeus_plugins.protocol import TrialState, TrialView


@pytest.fixture(autouse=True)
def _no_server_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZEUS_SERVER_URL", raising=False)
    monkeypatch.setenv("ZEUS_BSO_DATABASE_URL", f"sqlite:///{tmp_path / 'bso.sqlite3'}")


def callback_with(monitor: EnergyMonitor) -> ZeusBSOTrainerCallback:
    job = JobSpec(
        job_id="digits-1",
        job_id_prefix="digits",
        batch_sizes=(24, 48),
        default_batch_size=48,
        target_metric=NEVER,
        max_epochs=3,
    )
    return ZeusBSOTrainerCallback(job, "score", energy_monitor=monitor, on_failure="stop")


def only_trial() -> TrialView:
    with client_from_environment() as client:
        (trial,) = client.show_job("digits-1").trials
    return trial


@pytest.mark.skipif(sys.platform == "win32" or not hasattr(os, "fork"), reason="loads data in forked processes")
@pytest.mark.filterwarnings("ignore:.*This process.*is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize(
    "stay",
    [
        pytest.param(False, id="new workers each epoch"),
        # When such a trainer is collected, torch waits five seconds for each of its workers.
        pytest.param(True, marks=pytest.mark.slow, id="workers that stay"),
    ],
)
def test_a_training_with_forked_workers_needs_no_server_url(tmp_path: Path, stay: bool) -> None:
    trainer = quiet_trainer(
        tmp_path / "training",
        callback_with(seconds_and_joules(1.0, 10.0)),
        num_train_epochs=3,
        eval_strategy="epoch",
        dataloader_num_workers=2,
        dataloader_persistent_workers=stay,
    )
    trainer.train()
    assert sizes_of(trainer) == EPOCH_OF_48 * 3
    trial = only_trial()
    assert (trial.state, trial.epochs, trial.energy_j) == (TrialState.EXHAUSTED, 3, 30)


def test_a_training_whose_energy_is_lost_goes_on_to_its_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = ReplayMonitor([Measurement(1.0, 10.0, "replayed")], GPUS)  # for the first epoch of three
    trainer = quiet_trainer(
        tmp_path / "training",
        callback_with(monitor),
        num_train_epochs=3,
        eval_strategy="epoch",
        trainer_options={"compute_metrics": Scores(0.1, 0.2, 0.3)},
    )
    with caplog.at_level(logging.WARNING, logger="zeus_plugins"):
        trainer.train()
    assert sizes_of(trainer) == EPOCH_OF_48 * 3
    assert "can no longer be measured" in caplog.text
    trial = only_trial()
    assert (trial.state, trial.epochs, trial.energy_j) == (TrialState.FAILED, 1, 10)
    assert "no measurement left" in (trial.message or "")
