"""Trainings of the Hugging Face Trainer that go on from a checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

if not os.environ.get("CI"):
    pytest.importorskip("transformers", reason="the Trainer's callback needs zeus-plugins[transformers]")

from transformers import TrainerCallback

from tests.support.hf_bench import (
    Bench,
    Watch,
    make_bench,  # noqa: F401 - a fixture
    sizes_of,
    use_one_thread,  # noqa: F401 - a fixture
)
from tests.support.hf_models import Classifier
from tests.support.job_bench import (
    EPOCH_OF_24,
    EPOCH_OF_48,
    NEVER,
    NEXT_SIZE,
    CountingMonitor,
)
from zeus_plugins import JobSpec
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import TrialState

RESUMABLE: dict[str, Any] = {"num_train_epochs": 4, "save_strategy": "epoch", "lr_scheduler_type": "constant"}


def long_job(bench: Bench, **spec: Any) -> JobSpec:
    """A job whose next trial gets half the default size, and may cost what it likes."""
    job = bench.job(0.9, max_epochs=4, beta_knob=None, **spec)
    bench.complete_first_trial(job)
    return job


def interrupt(bench: Bench, job: JobSpec, error: BaseException, **options: Any) -> None:
    """Train two epochs of seven steps, and some of the next."""
    data = {"model": Classifier(error, fails_at=16)}
    trainer = bench.trainer(bench.callback(job, lr_scaling="linear"), data=data, **(RESUMABLE | options))
    with pytest.raises(type(error)):
        trainer.train()
    assert sizes_of(trainer) == [NEXT_SIZE] * 16


def saved_trial(checkpoint: Path) -> dict[str, Any]:
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    trial: dict[str, Any] = state["stateful_callbacks"]["zeus_bso"]["trial"]
    return trial


@pytest.mark.parametrize(
    ("saving", "step", "last_step", "time_s"),
    [
        # One second for each report and each saving: two and two before, one and one after, and the last report.
        ({}, 14, 28, 7.0),
        # Before, the report of the first epoch, the saving, and the report of the second epoch, which is trained again;
        # afterwards two reports and a saving.
        ({"save_strategy": "steps", "save_steps": 10}, 10, 21, 6.0),
        ({"save_strategy": "steps", "save_steps": 10, "save_only_model": True}, 10, 21, 6.0),
    ],
    ids=["after an epoch", "within an epoch", "without the optimizer"],
)
@pytest.mark.parametrize("named", [False, True], ids=["latest", "named"])
def test_a_resumed_training_goes_on_with_its_trial(
    bench: Bench, named: bool, saving: dict[str, Any], step: int, last_step: int, time_s: float
) -> None:
    job = long_job(bench)
    interrupt(bench, job, KeyboardInterrupt(), **saving)
    assert bench.view().trials[-1].state is TrialState.SUSPENDED
    checkpoint = bench.folder / f"checkpoint-{step}"
    callback, watch = bench.callback(job, lr_scaling="linear"), Watch()
    trainer = bench.trainer(callback, watch, scores=(0.1, 0.9), **(RESUMABLE | saving))
    trainer.train(resume_from_checkpoint=str(checkpoint) if named else True)
    assert (callback.trial.trial_number, callback.trial.batch_size) == (2, NEXT_SIZE)
    assert (trainer.state.max_steps, trainer.state.global_step) == (28, last_step)
    assert sizes_of(trainer) == [NEXT_SIZE] * (last_step - step)
    assert set(watch.rates) == {0.05}
    _, second = bench.view().trials
    assert (second.state, second.time_s) == (TrialState.COMPLETED, time_s)
    assert second.time_s > saved_trial(checkpoint)["time_s"]


class Totals(TrainerCallback):
    """Notes what the server knows of the only trial after each evaluation."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.seen: list[tuple[float | None, float | None, float | None]] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        trial = self._bench.only_trial()
        self.seen.append((trial.epochs, trial.time_s, trial.energy_j))


def test_epochs_after_the_checkpoint_are_trained_again_and_paid_twice(bench: Bench) -> None:
    job = bench.job(NEVER, max_epochs=4)

    def train(model: Classifier, **options: Any) -> Totals:
        totals = Totals(bench)
        monitor = CountingMonitor(lambda: len(model.seen_sizes))
        callback = bench.callback(job, energy_monitor=monitor, on_failure="stop")
        trainer = bench.trainer(callback, totals, data={"model": model}, **RESUMABLE)
        with contextlib.suppress(KeyboardInterrupt):
            trainer.train(**options)
        return totals

    # Interrupted in the fourth epoch.
    assert train(Classifier(KeyboardInterrupt(), fails_at=14)).seen[-1] == (3.0, 12.0, 120.0)
    assert bench.only_trial().state is TrialState.SUSPENDED
    again = Classifier()
    totals = train(again, resume_from_checkpoint=str(bench.folder / "checkpoint-4"))
    assert again.seen_sizes == EPOCH_OF_48 * 3
    # Three epochs were reported before, and three are trained now; none of what is known to the server shrinks.
    assert totals.seen == [(3.0, 16.0, 160.0), (3.0, 20.0, 200.0), (4.0, 24.0, 240.0)]
    trial = bench.only_trial()
    assert (trial.state, trial.trial_number, trial.epochs) == (TrialState.EXHAUSTED, 1, 4.0)
    assert (trial.time_s, trial.energy_j) == (24.0, 240.0)


def test_a_resumed_schedule_goes_on_where_it_was(bench: Bench) -> None:
    job = long_job(bench)
    undisturbed, resumed = Watch(), Watch()
    options = {**RESUMABLE, "lr_scheduler_type": "linear"}
    bench.trainer(undisturbed, per_device_train_batch_size=NEXT_SIZE, **options | {"learning_rate": 0.05}).train()
    interrupt(bench, job, KeyboardInterrupt(), **options)
    trainer = bench.trainer(bench.callback(job, lr_scaling="linear"), resumed, scores=(0.1, 0.9), **options)
    trainer.train(resume_from_checkpoint=str(bench.folder / "checkpoint-14"))
    assert resumed.rates == pytest.approx(undisturbed.rates[14:])


def test_a_resumed_trial_that_is_over_is_trained_on_unreported(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    job = long_job(bench)
    interrupt(bench, job, RuntimeError("a crash"))
    callback = bench.callback(job)
    trainer = bench.trainer(callback, scores=(1.0,), **RESUMABLE)
    trainer.train(resume_from_checkpoint=True)
    assert "nothing more of it is measured or reported" in caplog.text
    assert sizes_of(trainer) == [NEXT_SIZE] * 14
    assert bench.view().trials[-1].state is TrialState.FAILED
    assert saved_trial(bench.folder / "checkpoint-28")["batch_size"] == NEXT_SIZE


def test_a_checkpoint_without_a_trial_is_trained_on_as_the_script_says(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"num_train_epochs": 2, "save_strategy": "epoch"}
    bench.trainer(**options).train()
    callback = bench.callback()
    trainer = bench.trainer(callback, **options)
    trainer.train(resume_from_checkpoint=str(bench.folder / "checkpoint-11"))
    assert "the checkpoint holds no trial" in caplog.text
    assert sizes_of(trainer) == [16] * 10 + [8]
    assert not bench.is_registered()


def test_a_resumed_size_that_the_job_has_no_more_is_trained_on(bench: Bench) -> None:
    interrupt(bench, long_job(bench), KeyboardInterrupt())
    job = bench.job(0.9, max_epochs=4, beta_knob=None, batch_sizes=(48, 96))
    trainer = bench.trainer(bench.callback(job), scores=(0.9,), **RESUMABLE)
    trainer.train(resume_from_checkpoint=True)
    assert sizes_of(trainer) == EPOCH_OF_24
    assert bench.view().trials[-1].state is TrialState.COMPLETED


def test_a_resumed_size_that_cannot_be_spread_is_refused_and_waits(bench: Bench) -> None:
    interrupt(bench, long_job(bench), KeyboardInterrupt())
    job = bench.job(0.9, max_epochs=4, beta_knob=None, batch_sizes=(96,), default_batch_size=96)
    trainer = bench.trainer(bench.callback(job), gradient_accumulation_steps=32, **RESUMABLE)
    with pytest.raises(ZeusBSOConfigError, match=r"the batch sizes \[24\] cannot be spread"):
        trainer.train(resume_from_checkpoint=True)
    assert bench.view().trials[-1].state is TrialState.SUSPENDED


def test_callbacks_that_are_restored_leave_the_trial_alone(bench: Bench) -> None:
    job = long_job(bench)
    interrupt(bench, job, KeyboardInterrupt())
    callback = bench.callback(job)
    trainer = bench.trainer(callback, scores=(0.9,), restore_callback_states_from_checkpoint=True, **RESUMABLE)
    trainer.train(resume_from_checkpoint=True)
    assert bench.view().trials[-1].state is TrialState.COMPLETED
