"""Lightning trainings that resume from a checkpoint."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from tests.support import warm
from tests.support.frameworks import Work
from tests.support.job_bench import NEVER, NEXT_SIZE, CountingMonitor
from tests.support.lightning_bench import (
    QUIET,
    RESUMES,
    TRAIN_IMAGES,
    Bench,
    Classifier,
    quiet_trainer,
    train_loader,
)
from tests.support.servers import ServerProcess
from tests.support.versions import WEIGHTS_ONLY
from zeus_plugins import JobSpec
from zeus_plugins.client.http import BsoClient
from zeus_plugins.errors import ZeusBSOOperationOrderError
from zeus_plugins.lightning import ZeusBSOCallback
from zeus_plugins.protocol import TrialState, TrialView

EPOCHS = 4
BATCH_SIZE = 48
RATE = 0.1


pytestmark = [*QUIET, *RESUMES]

JOB_ID = "digits-nightly"
STEPS_OF_48 = 4


# Real signals to real processes


def halved_each_epoch(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=steps // EPOCHS, gamma=0.5)


def main(server_url: str, job_id: str, folder: str, number: str) -> None:
    """Train as a script that resumes from its last checkpoint, and sends itself a signal in its third epoch."""
    torch.set_num_threads(1)
    job = JobSpec(
        job_id=job_id,
        job_id_prefix="digits",
        batch_sizes=(BATCH_SIZE, 2 * BATCH_SIZE),
        default_batch_size=2 * BATCH_SIZE,
        target_metric=0.9,
        higher_is_better_metric=True,
        max_epochs=EPOCHS,
    )
    module = Classifier(0.1, 0.2, 0.3, 0.9, learning_rate=RATE, scheduler=halved_each_epoch)
    monitor = CountingMonitor(lambda: module.work.batches)
    callback = ZeusBSOCallback(job, "score", server_url=server_url, lr_scaling="linear", energy_monitor=monitor)
    if int(number):
        module.work = Work({6: lambda: os.kill(os.getpid(), int(number))})
    savers = [ModelCheckpoint(folder, save_last=True)]
    if int(number) == signal.SIGTERM:
        savers.append(OnExceptionCheckpoint(folder))
    trainer = quiet_trainer(callback, *savers, max_epochs=EPOCHS, enable_checkpointing=True)
    seen: dict[str, Any] = {"left": "normally"}
    try:
        trainer.fit(module, train_loader(), ckpt_path="last", **WEIGHTS_ONLY)
    except SystemExit as leaving:
        seen["left"] = type(leaving).__name__
    seen |= {
        "sizes": module.seen_sizes,
        "rates": module.seen_rates,
        "steps": trainer.global_step,
        "trial": callback.trial.model_dump(mode="json"),
    }
    Path(folder, "seen.json").write_text(json.dumps(seen))


def run_script(server: ServerProcess, folder: Path, number: int) -> tuple[int, str]:
    """Return the exit status and the output of a training that sends itself this signal, or none if it is 0."""
    command = ["tests.lightning.test_resume", server.url, JOB_ID, str(folder), str(int(number))]
    training = warm.start(*command, modules=warm.LIGHTNING, output=folder / "output")
    return training.wait(warm.LIMIT_S), (folder / "output").read_text()


def trial_on(server: ServerProcess) -> TrialView:
    with BsoClient(server.url) as client:
        (trial,) = client.show_job(JOB_ID).trials
    return trial


def seen_in(folder: Path) -> dict[str, Any]:
    seen: dict[str, Any] = json.loads((folder / "seen.json").read_text())
    return seen


def rates_of(steps: range) -> list[float]:
    """Return the default size's rate, halved each epoch; the job's first trial has the default size."""
    per_epoch = -(-TRAIN_IMAGES // (2 * BATCH_SIZE))
    return [RATE * 0.5 ** (step // per_epoch) for step in steps]


def test_training_killed_without_warning_resumes_same_trial(server: ServerProcess, tmp_path: Path) -> None:
    status, output = run_script(server, tmp_path, signal.SIGKILL)
    assert status == -signal.SIGKILL, output
    before = trial_on(server)
    assert (before.state, before.epochs, before.time_s) == (TrialState.RUNNING, 2, 4.0)
    status, output = run_script(server, tmp_path, 0)
    assert status == 0, output
    seen = seen_in(tmp_path)
    assert seen["sizes"] == [96, 72, 96, 72]
    assert seen["rates"] == pytest.approx(rates_of(range(4, 8)))
    assert seen["steps"] == 8
    assert seen["trial"]["trial_number"] == 1
    after = trial_on(server)
    assert (after.state, after.epochs, after.metric) == (TrialState.COMPLETED, 4, 0.9)
    assert (after.time_s, after.energy_j) == (8.0, 80.0)


def test_preempted_training_resumes_within_epoch(server: ServerProcess, tmp_path: Path) -> None:
    status, output = run_script(server, tmp_path, signal.SIGTERM)
    assert status == 0, output
    first = seen_in(tmp_path)
    assert first["left"] == "SIGTERMException"
    assert trial_on(server).state is TrialState.SUSPENDED
    status, output = run_script(server, tmp_path, 0)
    assert status == 0, output
    second = seen_in(tmp_path)
    assert len(first["sizes"]) + len(second["sizes"]) == second["steps"] == 8
    assert first["rates"] + second["rates"] == pytest.approx(rates_of(range(8)))
    after = trial_on(server)
    assert (after.state, after.trial_number, after.epochs) == (TrialState.COMPLETED, 1, 4)
    # The steps between the last report and the signal count as well.
    assert (after.time_s, after.energy_j) == (8.0, 80.0)


# Interruption in the process of the tests


def interrupted(folder: Path, module: Classifier, callback: Any, batch: int) -> Path:
    """Return the checkpoint after the second of four epochs of a training preempted at this batch of the third."""
    module.work = Work({batch: SystemExit(143)})
    saver = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    with pytest.raises(SystemExit):
        quiet_trainer(callback, saver, max_epochs=4, enable_checkpointing=True).fit(module, train_loader())
    return folder / "epoch=1.ckpt"


def scheduled(*scores: float) -> Classifier:
    return Classifier(
        *scores, scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, 0.01)
    )


def test_scaled_rates_and_accumulation_continue_after_resume(bench: Bench, tmp_path: Path) -> None:
    job = bench.job(1.0, max_epochs=4, beta_knob=None)
    bench.complete_first_trial(job)  # The next trial then has half of the default size.
    options = {"lr_scaling": "linear", "on_failure": "stop"}
    first, second = scheduled(), scheduled()
    callback = bench.callback(job, max_per_device_batch_size=12, **options)
    checkpoint = interrupted(tmp_path, first, callback, batch=30)
    assert torch.load(checkpoint, weights_only=True)["callbacks"]["zeus_bso"]["first_epoch"] == 0
    callback = bench.callback(job, max_per_device_batch_size=8, **options)
    quiet_trainer(callback, max_epochs=4).fit(second, train_loader(), ckpt_path=checkpoint)
    assert (callback.trial.trial_number, callback.trial.batch_size) == (2, NEXT_SIZE)
    assert set(first.seen_sizes) == {12}
    assert set(second.seen_sizes) == {8}
    assert (first.seen_accumulation, second.seen_accumulation) == ({2}, {3})
    steps_per_epoch = TRAIN_IMAGES // NEXT_SIZE
    assert second.estimated_steps == 4 * steps_per_epoch
    whole = [
        0.5 * (0.01 + 0.09 * (1 + torch.cos(torch.tensor(torch.pi * step / (4 * steps_per_epoch))).item()) / 2)
        for step in range(4 * steps_per_epoch)
    ]
    assert [rate for rate, _ in itertools.groupby(second.seen_rates)] == pytest.approx(whole[2 * steps_per_epoch :])


@pytest.mark.parametrize("which", ["last", "best"])
def test_same_trainer_resumes_from_own_checkpoint(bench: Bench, tmp_path: Path, which: str) -> None:
    callback = bench.callback(bench.job(NEVER, max_epochs=4), on_failure="stop")
    saver = ModelCheckpoint(tmp_path, save_last=True)
    trainer = quiet_trainer(callback, saver, max_epochs=4, enable_checkpointing=True)
    module = Classifier()
    module.work = Work({2 * STEPS_OF_48 + 2: SystemExit(143)})
    with pytest.raises(SystemExit):
        trainer.fit(module, train_loader())
    trainer.fit(module, train_loader(), ckpt_path=which)
    assert trainer.global_step == 4 * STEPS_OF_48
    trial = bench.only_trial()
    assert (trial.state, trial.epochs) == (TrialState.EXHAUSTED, 4)


def test_callback_is_idle_while_checkpoint_is_evaluated(bench: Bench, tmp_path: Path) -> None:
    first = bench.callback(bench.job(NEVER, max_epochs=4), on_failure="stop")
    checkpoint = interrupted(tmp_path, Classifier(), first, batch=2 * STEPS_OF_48 + 2)
    callback = bench.callback()
    quiet_trainer(callback).test(Classifier(), train_loader(), ckpt_path=checkpoint)
    with pytest.raises(ZeusBSOOperationOrderError):
        _ = callback.trial
    assert bench.only_trial().state is TrialState.SUSPENDED


if __name__ == "__main__":
    main(*sys.argv[1:])
