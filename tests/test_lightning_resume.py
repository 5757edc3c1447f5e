"""Trainings that go on from a checkpoint."""

from __future__ import annotations

import itertools
import json
import logging
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.support import resumed_training as script
from tests.support import warm
from tests.support.job_bench import (
    NEVER,
    NEXT_SIZE,
    SERVERS_SIZE,
)
from tests.support.lightning_bench import (
    QUIET,
    Bench,
    StepMonitor,
    make_bench,  # noqa: F401 - a fixture
)
from tests.support.lightning_interrupted import InterruptAfter, interrupted
from tests.support.lightning_models import TRAIN_IMAGES, USERS_SIZE, Classifier, quiet_trainer, train_loader
from tests.support.servers import Server
from zeus_plugins.client.http import BsoClient
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOOperationOrderError
from zeus_plugins.protocol import TrialState, TrialView

pytestmark = [
    *QUIET,
    # Lightning's own remark on saving where something is saved already.
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
    # The callbacks that interrupted and saved the first training have no place in the second.
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided:UserWarning"),
]

LIMIT_S = 240
JOB_ID = "digits-nightly"
STEPS_OF_48 = 4


# Real signals to real processes


def run_script(server: Server, folder: Path, number: int) -> tuple[int, str]:
    """Exit status and output of a training that sends itself the signal, or none if that is 0."""
    command = ["tests.support.resumed_training", server.url, JOB_ID, str(folder), str(int(number))]
    training = warm.start(*command, modules=warm.LIGHTNING, output=folder / "output")
    return training.wait(LIMIT_S), (folder / "output").read_text()


def trial_on(server: Server) -> TrialView:
    with BsoClient(server.url) as client:
        (trial,) = client.show_job(JOB_ID).trials
    return trial


def seen_in(folder: Path) -> dict[str, Any]:
    seen: dict[str, Any] = json.loads((folder / "seen.json").read_text())
    return seen


def rates_of(steps: range) -> list[float]:
    """The default size's rate, halved each epoch; the job's first trial has the default size."""
    per_epoch = -(-TRAIN_IMAGES // (2 * script.BATCH_SIZE))
    return [script.RATE * 0.5 ** (step // per_epoch) for step in steps]


def test_a_training_killed_without_warning_goes_on_as_the_same_trial(server: Server, tmp_path: Path) -> None:
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


def test_a_preempted_training_goes_on_within_its_epoch(server: Server, tmp_path: Path) -> None:
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
    # The steps between the last report and the signal count, too.
    assert (after.time_s, after.energy_j) == (8.0, 80.0)


# Interrupted in the tests' own process


def resumable(bench: Bench, **job: Any) -> Any:
    """Makes callbacks for one job of four epochs that never gets to its target; each counts a module's steps."""

    def make(module: Classifier, **options: Any) -> Any:
        monitor = StepMonitor()
        monitor.watch(module)
        spec = {"max_epochs": 4, "target": NEVER} | job
        return bench.callback(bench.job(**spec), energy_monitor=monitor, on_failure="stop", **options)

    return make


def test_a_checkpoint_holds_the_trial_in_plain_types(bench: Bench, tmp_path: Path) -> None:
    module = Classifier()
    *_, checkpoint = interrupted(tmp_path, module, resumable(bench)(module))
    state = torch.load(checkpoint, weights_only=True)["callbacks"]["zeus_bso"]
    assert state["first_epoch"] == 0
    trial = state["trial"]
    assert (trial["job_id"], trial["trial_number"], trial["batch_size"]) == (bench.job_id, 1, SERVERS_SIZE)
    assert (trial["epoch"], trial["time_s"], trial["energy_j"]) == (2.0, 8.0, 80.0)


def test_a_checkpoint_within_an_epoch_counts_what_is_not_reported_yet(bench: Bench, tmp_path: Path) -> None:
    module = Classifier()
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    quiet_trainer(resumable(bench, max_epochs=2)(module), saver, max_epochs=2, enable_checkpointing=True).fit(
        module, train_loader()
    )
    trial = torch.load(tmp_path / "step=6.ckpt", weights_only=True)["callbacks"]["zeus_bso"]["trial"]
    assert (trial["epoch"], trial["time_s"], trial["energy_j"]) == (1.0, 6.0, 60.0)
    assert bench.only_trial().time_s == 8.0


def test_epochs_after_the_checkpoint_are_trained_again_and_paid_twice(bench: Bench, tmp_path: Path) -> None:
    make = resumable(bench)
    module = Classifier()
    first_epoch, _, _ = interrupted(tmp_path, module, make(module), epoch=3)
    again = Classifier()
    callback = make(again)
    quiet_trainer(callback, max_epochs=4).fit(again, train_loader(), ckpt_path=first_epoch)
    assert again.seen_sizes == [48, 48, 48, 24] * 3
    trial = bench.only_trial()
    assert (trial.state, trial.epochs) == (TrialState.EXHAUSTED, 4)
    # Three epochs were reported before, and three are trained now.
    assert (trial.time_s, callback.trial.time_s) == (24.0, 24.0)


def scheduled(*scores: float) -> Classifier:
    return Classifier(
        *scores, scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, 0.01)
    )


def test_the_scaled_rates_and_the_accumulation_go_on(bench: Bench, tmp_path: Path) -> None:
    job = {"target": 1.0, "max_epochs": 4, "beta_knob": None}
    bench.complete_first_trial(bench.job(**job))  # so that the next trial has half of the default size
    make = resumable(bench, **job)
    first = scheduled()
    callback = make(first, lr_scaling="linear", max_per_device_batch_size=12)
    *_, checkpoint = interrupted(tmp_path, first, callback)
    second = scheduled()
    callback = make(second, lr_scaling="linear", max_per_device_batch_size=8)
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


def test_a_trial_that_is_over_on_the_server_trains_on_unreported(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make = resumable(bench)
    module = Classifier()
    *_, checkpoint = interrupted(tmp_path, module, make(module), error=ValueError("no such label"))
    again = Classifier()
    callback = bench.callback(bench.job(NEVER, max_epochs=4), on_failure="raise")
    trainer = quiet_trainer(callback, max_epochs=4)
    trainer.fit(again, train_loader(), ckpt_path=checkpoint)
    assert again.seen_sizes == [48, 48, 48, 24] * 2
    assert trainer.accumulate_grad_batches == 1
    trial = bench.only_trial()
    assert (trial.state, trial.epochs) == (TrialState.FAILED, 2)
    assert "it is failed" in caplog.text


def test_a_checkpoint_of_a_trial_that_reached_its_target_trains_on_unreported(bench: Bench, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, save_last=True)
    quiet_trainer(bench.callback(), saver, enable_checkpointing=True).fit(Classifier(), train_loader())
    again = Classifier()
    quiet_trainer(bench.callback(), max_epochs=2).fit(again, train_loader(), ckpt_path=tmp_path / "last.ckpt")
    assert again.seen_sizes == [48, 48, 48, 24]
    assert bench.only_trial().epochs == 1


def test_a_checkpoint_without_a_trial_keeps_the_scripts_own_size(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    *_, checkpoint = interrupted(tmp_path, Classifier())
    callback, module = bench.callback(), Classifier()
    quiet_trainer(callback, max_epochs=3).fit(module, train_loader(), ckpt_path=checkpoint)
    assert set(module.seen_sizes[:-1]) == {USERS_SIZE}
    (warning,) = [record for record in caplog.records if record.name == "zeus_plugins"]
    assert warning.levelno == logging.WARNING
    assert "holds no trial" in warning.getMessage()
    assert not bench.is_registered()
    with pytest.raises(ZeusBSOOperationOrderError, match="holds no trial"):
        _ = callback.trial


def test_a_checkpoint_of_weights_alone_is_refused_by_lightning(bench: Bench, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, save_last=True, save_weights_only=True)
    quiet_trainer(saver, enable_checkpointing=True).fit(Classifier(), train_loader())
    loader = train_loader()
    with pytest.raises(KeyError, match="contains only the model"):
        quiet_trainer(bench.callback(), max_epochs=2).fit(Classifier(), loader, ckpt_path=tmp_path / "last.ckpt")
    assert loader.batch_size == USERS_SIZE
    assert not bench.is_registered()


@pytest.mark.parametrize("which", ["last", "best"])
def test_the_same_trainer_goes_on_from_its_own_checkpoint(bench: Bench, tmp_path: Path, which: str) -> None:
    callback = bench.callback(bench.job(NEVER, max_epochs=4), on_failure="stop")
    stop = InterruptAfter(2, SystemExit(143))
    saver = ModelCheckpoint(tmp_path, save_last=True)
    trainer = quiet_trainer(callback, stop, saver, max_epochs=4, enable_checkpointing=True)
    module = Classifier()
    with pytest.raises(SystemExit):
        trainer.fit(module, train_loader())
    stop._epoch = -1
    trainer.fit(module, train_loader(), ckpt_path=which)
    assert trainer.global_step == 4 * STEPS_OF_48
    trial = bench.only_trial()
    assert (trial.state, trial.epochs) == (TrialState.EXHAUSTED, 4)


def test_a_job_that_no_longer_has_the_trials_size_goes_on_with_it(bench: Bench, tmp_path: Path) -> None:
    first = Classifier()
    *_, checkpoint = interrupted(tmp_path, first, resumable(bench)(first))
    second = Classifier()
    callback = resumable(bench, batch_sizes=(NEXT_SIZE,), default_batch_size=NEXT_SIZE)(second, lr_scaling="sqrt")
    quiet_trainer(callback, max_epochs=4).fit(second, train_loader(), ckpt_path=checkpoint)
    assert second.seen_sizes == [48, 48, 48, 24] * 2
    assert bench.only_trial().state is TrialState.EXHAUSTED


def test_a_size_that_these_devices_cannot_have_is_refused_and_the_trial_stays_resumable(
    bench: Bench, tmp_path: Path
) -> None:
    first = Classifier()
    *_, checkpoint = interrupted(tmp_path, first, resumable(bench)(first))
    second = Classifier()
    trainer = quiet_trainer(resumable(bench)(second), max_epochs=4, accumulate_grad_batches=5)
    with pytest.raises(ZeusBSOConfigError, match=r"\[48\] cannot be spread evenly over 1 devices × 5"):
        trainer.fit(second, train_loader(), ckpt_path=checkpoint)
    assert second.seen_sizes == []
    assert bench.only_trial().state is TrialState.SUSPENDED


def test_evaluating_a_checkpoint_leaves_the_callback_idle(bench: Bench, tmp_path: Path) -> None:
    first = Classifier()
    *_, checkpoint = interrupted(tmp_path, first, resumable(bench)(first))
    callback = bench.callback()
    quiet_trainer(callback).test(Classifier(), train_loader(), ckpt_path=checkpoint)
    with pytest.raises(ZeusBSOOperationOrderError):
        _ = callback.trial
    assert bench.only_trial().state is TrialState.SUSPENDED
