"""Checkpoints that version 0.1.0 wrote go on as the trials that its server knows."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

if not os.environ.get("CI"):
    pytest.importorskip("transformers", reason="the Trainer's callback needs zeus-plugins[transformers]")

from tests.support import hf_models, lightning_models
from tests.support.hf_bench import sizes_of
from tests.support.job_bench import CountingMonitor
from tests.support.lightning_bench import QUIET
from zeus_plugins import JobSpec
from zeus_plugins.client.connect import client_from_environment
from zeus_plugins.huggingface import ZeusBSOTrainerCallback, ZeusEnergyTrainerCallback
from zeus_plugins.lightning import ZeusBSOCallback, ZeusEnergyCallback
from zeus_plugins.training.trial import TrialInfo

pytestmark = [
    *QUIET,
    # The callback that saved the first training has no place in the second.
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided:UserWarning"),
]

FIXTURES = Path(__file__).parent / "fixtures" / "v0_1"
EXPECTED = json.loads((FIXTURES / "checkpoints_expected.json").read_text())
LATER_SCORES = (0.3, 0.4, 0.95)


@pytest.fixture
def server_url(tmp_path: Path) -> str:
    """The server of version 0.1.0, in this process."""
    path = tmp_path / "bso.sqlite3"
    with sqlite3.connect(path) as connection:
        connection.executescript((FIXTURES / "checkpoints_server.sql").read_text())
    connection.close()
    return f"embedded://{path}"


def job_of(job_id: str, **spec: Any) -> JobSpec:
    return JobSpec(
        job_id=job_id,
        job_id_prefix="old",
        batch_sizes=(24, 48),
        default_batch_size=48,
        target_metric=0.9,
        max_epochs=6,
        **spec,
    )


def on_server(server_url: str, job_id: str, names: Any) -> dict[str, Any]:
    with client_from_environment(server_url) as client:
        trial = client.show_job(job_id).trials[-1]
    return {name: trial.model_dump(mode="json")[name] for name in names}


def test_a_lightning_checkpoint_goes_on(server_url: str) -> None:
    module = lightning_models.Classifier(0.1, 0.2, *LATER_SCORES)
    callback = ZeusBSOCallback(
        job_of("old-lightning"),
        "score",
        server_url=server_url,
        lr_scaling="linear",
        energy_monitor=CountingMonitor(lambda: len(module.seen_rates)),
    )
    energy = ZeusEnergyCallback(CountingMonitor(lambda: len(module.seen_rates)))
    trainer = lightning_models.quiet_trainer(callback, energy, max_epochs=6)
    trainer.fit(module, lightning_models.train_loader(), ckpt_path=FIXTURES / "lightning.ckpt")
    expected = EXPECTED["lightning"]
    assert (module.seen_sizes, trainer.global_step) == (expected["sizes"], expected["steps"])
    assert sorted(set(module.seen_rates)) == pytest.approx(expected["rates"])
    assert on_server(server_url, "old-lightning", expected["trial"]) == expected["trial"]
    assert {"time_s": energy.time_s, "energy_j": energy.energy_j} == expected["energy_callback"]


def test_a_hugging_face_checkpoint_goes_on(server_url: str, tmp_path: Path) -> None:
    model = hf_models.Classifier()
    monitor = CountingMonitor(lambda: len(model.seen_sizes))
    callback = ZeusBSOTrainerCallback(
        job_of("old-huggingface", policy="zeus", beta_knob=3.0, mab_seed=5),
        "score",
        server_url=server_url,
        lr_scaling="linear",
        energy_monitor=monitor,
    )
    energy = ZeusEnergyTrainerCallback(CountingMonitor(lambda: len(model.seen_sizes)))
    shutil.copytree(FIXTURES / "huggingface_checkpoint", tmp_path / "training")
    trainer = hf_models.quiet_trainer(
        tmp_path / "training",
        callback,
        energy,
        trainer_options={"model": model, "compute_metrics": hf_models.Scores(*LATER_SCORES)},
        num_train_epochs=6,
        lr_scheduler_type="constant",
        optim="sgd",
    )
    trainer.train(resume_from_checkpoint=True)
    expected = EXPECTED["huggingface"]
    assert (sizes_of(trainer), trainer.state.global_step) == (expected["sizes"], expected["steps"])
    assert on_server(server_url, "old-huggingface", expected["trial"]) == expected["trial"]
    assert {"time_s": energy.time_s, "energy_j": energy.energy_j} == expected["energy_callback"]


STATES = json.loads((FIXTURES / "session_states.json").read_text())
CALLBACKS = json.loads((FIXTURES / "lightning_power_limit_state.json").read_text())
STATES["with_power_limits"] = CALLBACKS["zeus_bso"]["trial"]


@pytest.mark.parametrize("name", STATES)
def test_a_state_of_a_session_is_read_and_written_back_alike(name: str) -> None:
    assert TrialInfo.restored(STATES[name]).model_dump(mode="json") == STATES[name]
