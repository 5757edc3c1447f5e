"""Trainings of the Hugging Face Trainer that resume from a checkpoint."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.support.frameworks import Work
from tests.support.hf_bench import Bench, Classifier, Watch, sizes_of
from tests.support.job_bench import NEXT_SIZE
from zeus_plugins import JobSpec
from zeus_plugins.protocol import TrialState

RESUMABLE: dict[str, Any] = {"num_train_epochs": 4, "save_strategy": "epoch", "lr_scheduler_type": "constant"}


def long_job(bench: Bench, **spec: Any) -> JobSpec:
    """Return a job without a cost bound; its next trial gets half the default size."""
    job = bench.job(0.9, max_epochs=4, beta_knob=None, **spec)
    bench.complete_first_trial(job)
    return job


def interrupt(bench: Bench, job: JobSpec, error: BaseException, **options: Any) -> None:
    """Train two epochs of seven steps, and some steps of the third."""
    data = {"model": Classifier(Work({16: error}))}
    trainer = bench.trainer(
        bench.callback(job, lr_scaling="linear", steps="unchanged"), data=data, **(RESUMABLE | options)
    )
    with pytest.raises(type(error)):
        trainer.train()
    assert sizes_of(trainer) == [NEXT_SIZE] * 16


@pytest.mark.parametrize(
    ("saving", "step", "last_step", "time_s"),
    [
        # Each report and each saving takes a second: two and two before, one and one after, and the last report.
        ({}, 14, 28, 7.0),
        # Before: the report of the first epoch, the saving, and the report of the second epoch, which is trained again.
        # Afterwards: two reports and a saving.
        ({"save_strategy": "steps", "save_steps": 10}, 10, 21, 6.0),
        ({"save_strategy": "steps", "save_steps": 10, "save_only_model": True}, 10, 21, 6.0),
    ],
    ids=["after an epoch", "within an epoch", "without the optimizer"],
)
def test_resumed_training_continues_trial(
    bench: Bench, saving: dict[str, Any], step: int, last_step: int, time_s: float
) -> None:
    job = long_job(bench)
    interrupt(bench, job, KeyboardInterrupt(), **saving)
    assert bench.view().trials[-1].state is TrialState.SUSPENDED
    callback, watch = bench.callback(job, lr_scaling="linear", steps="unchanged"), Watch()
    trainer = bench.trainer(callback, watch, scores=(0.1, 0.9), **(RESUMABLE | saving))
    trainer.train(resume_from_checkpoint=True)
    assert (callback.trial.trial_number, callback.trial.batch_size) == (2, NEXT_SIZE)
    assert (trainer.state.max_steps, trainer.state.global_step) == (28, last_step)
    assert sizes_of(trainer) == [NEXT_SIZE] * (last_step - step)
    assert set(watch.rates) == {0.05}
    _, second = bench.view().trials
    assert (second.state, second.time_s) == (TrialState.COMPLETED, time_s)
    assert second.time_s > bench.saved_trial(step)["time_s"]


def test_resumed_schedule_continues_from_checkpoint(bench: Bench) -> None:
    job = long_job(bench)
    undisturbed, resumed = Watch(), Watch()
    options = {**RESUMABLE, "lr_scheduler_type": "linear"}
    bench.trainer(undisturbed, per_device_train_batch_size=NEXT_SIZE, **options | {"learning_rate": 0.05}).train()
    interrupt(bench, job, KeyboardInterrupt(), **options)
    trainer = bench.trainer(
        bench.callback(job, lr_scaling="linear", steps="unchanged"), resumed, scores=(0.1, 0.9), **options
    )
    trainer.train(resume_from_checkpoint=str(bench.checkpoint(14)))
    assert resumed.rates == pytest.approx(undisturbed.rates[14:])


def test_restored_callbacks_leave_trial_unchanged(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("transformers.trainer").addHandler(caplog.handler)
    job = long_job(bench)
    interrupt(bench, job, KeyboardInterrupt())
    callback = bench.callback(job)
    trainer = bench.trainer(callback, scores=(0.9,), restore_callback_states_from_checkpoint=True, **RESUMABLE)
    trainer.train(resume_from_checkpoint=True)
    logging.getLogger("transformers.trainer").removeHandler(caplog.handler)
    assert bench.view().trials[-1].state is TrialState.COMPLETED
    assert "zeus_bso" not in caplog.text
