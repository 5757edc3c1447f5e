"""A training step costs nothing of ours: the longer of two epochs calls our code as often as the shorter one."""

from __future__ import annotations

import os
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

if not os.environ.get("CI"):
    pytest.importorskip("transformers", reason="the Trainer's callback needs zeus-plugins[transformers]")

from torch.utils.data import DataLoader, Subset

import zeus_plugins
from tests.support import hf_models, lightning_models
from tests.support.job_bench import (
    JobBench,
    seconds_and_joules,
)
from tests.support.lightning_bench import QUIET
from tests.support.power_limit_bench import TABLE, machine
from tests.support.servers import Server
from zeus_plugins.huggingface import ZeusBSOTrainerCallback, ZeusPowerLimitTrainerCallback
from zeus_plugins.lightning import ZeusBSOCallback, ZeusEnergyCallback, ZeusPowerLimitCallback
from zeus_plugins.power_limit import PowerLimitProfile, PowerLimitSample, ReplayMachine

pytestmark = QUIET

TRANSPORT = "_transport.py"  # of which the network decides how many pieces an answer comes in
PACKAGE = str(Path(zeus_plugins.__file__).parent)
# The first few steps of an epoch are counted.
STEPS = (6, 9)
BATCH_SIZE = 16

Train = Callable[[JobBench, int, Path], int]


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """How often each function of the package is called within the block, by this thread."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE) and not file.endswith(TRANSPORT):
            calls[frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def fit(callback: Any, steps: int) -> int:
    loader = DataLoader(Subset(lightning_models.digits()[0], range(steps * BATCH_SIZE)), batch_size=BATCH_SIZE)
    trainer = lightning_models.quiet_trainer(callback)
    trainer.fit(lightning_models.Classifier(), loader)
    return trainer.global_step


def lightning(bench: JobBench, steps: int, _: Path) -> int:
    job = bench.job(batch_sizes=(BATCH_SIZE,), default_batch_size=BATCH_SIZE)
    return fit(ZeusBSOCallback(job, "score", **bench.callback_options({})), steps)


def lightning_energy(_: JobBench, steps: int, __: Path) -> int:
    return fit(ZeusEnergyCallback(seconds_and_joules(1.0, 10.0)), steps)


def known_profile(where: ReplayMachine, folder: Path) -> dict[str, Any]:
    """The options of a power-limit callback that has nothing left to measure."""
    samples = [
        PowerLimitSample(limit_w=limit_w, steps=1, time_s=point.time_per_step_s, energy_j=point.average_power_w)
        for limit_w, point in TABLE.items()
    ]
    path = folder / "profile.json"
    PowerLimitProfile(gpus=where.monitor.gpus(), batch_size=BATCH_SIZE, samples=tuple(samples)).save(path)
    return {
        "profile_path": path,
        "devices": where.devices,
        "limits_w": tuple(TABLE),
        "energy_monitor": where.monitor,
    }


def lightning_power_limit(_: JobBench, steps: int, folder: Path) -> int:
    callback = ZeusPowerLimitCallback(**known_profile(machine(), folder))
    trained = fit(callback, steps)
    assert callback.chosen_limit_w is not None
    return trained


def hugging_face_power_limit(_: JobBench, steps: int, folder: Path) -> int:
    callback = ZeusPowerLimitTrainerCallback(**known_profile(machine(), folder))
    data = {"train_dataset": hf_models.Digits(length=steps * BATCH_SIZE)}
    trainer = hf_models.quiet_trainer(folder, callback, trainer_options=data, per_device_train_batch_size=BATCH_SIZE)
    trainer.train()
    assert callback.chosen_limit_w is not None
    return trainer.state.global_step


def hugging_face(bench: JobBench, steps: int, folder: Path) -> int:
    job = bench.job(batch_sizes=(BATCH_SIZE,), default_batch_size=BATCH_SIZE)
    callback = ZeusBSOTrainerCallback(job, "score", **bench.callback_options({}))
    data = {"train_dataset": hf_models.Digits(length=steps * BATCH_SIZE)}
    trainer = hf_models.quiet_trainer(folder, callback, trainer_options=data)
    trainer.train()
    return trainer.state.global_step


@pytest.mark.parametrize(
    "train",
    [
        lightning,
        lightning_energy,
        lightning_power_limit,
        hugging_face,
        hugging_face_power_limit,
    ],
    ids=lambda train: train.__name__,
)
def test_more_steps_call_nothing_more_of_ours(shared_server: Server, tmp_path: Path, train: Train) -> None:
    calls = []
    for steps in STEPS:
        with counted_calls() as counted:
            assert train(JobBench(shared_server, f"digits-{uuid.uuid4().hex}"), steps, tmp_path) == steps
        calls.append(counted)
    assert calls[0]
    assert calls[0] == calls[1]
