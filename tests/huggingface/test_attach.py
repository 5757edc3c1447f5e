"""Attaching the callbacks to a Trainer, and several trainings with a single callback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from tests.support.frameworks import Powered
from tests.support.hf_bench import USERS_SIZE, Bench, Classifier, sizes_of, val_digits
from tests.support.job_bench import EPOCH_OF_24, EPOCH_OF_48, NEVER, seconds_and_joules
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOOperationOrderError
from zeus_plugins.huggingface import ZeusEnergyTrainerCallback, ZeusPowerLimitTrainerCallback
from zeus_plugins.protocol import GP_VOI, TrialState

KINDS: dict[str, Callable[[Bench], Any]] = {
    "ZeusBSOTrainerCallback": lambda bench: bench.callback(),
    "ZeusEnergyTrainerCallback": lambda _: ZeusEnergyTrainerCallback(seconds_and_joules(1.0, 10.0)),
    "ZeusPowerLimitTrainerCallback": lambda _: ZeusPowerLimitTrainerCallback(**Powered().options()),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_callback_added_without_attaching_raises_error_with_remedy(bench: Bench, make: Callable[[Bench], Any]) -> None:
    trainer = bench.trainer()
    trainer.add_callback(make(bench))
    with pytest.raises(ZeusBSOOperationOrderError, match=r"callback.attach\(trainer\)"):
        trainer.train()
    assert not bench.is_registered()


@pytest.mark.parametrize("name", KINDS)
def test_two_callbacks_on_same_trainer_are_refused(bench: Bench, name: str) -> None:
    with pytest.raises(ZeusBSOConfigError, match=f"two {name}: keep one"):
        bench.trainer(KINDS[name](bench), KINDS[name](bench))


def test_callback_attaches_to_existing_trainer(bench: Bench) -> None:
    trainer, callback = bench.trainer(), bench.callback()
    callback.attach(trainer)
    callback.attach(trainer)
    meter = ZeusEnergyTrainerCallback(seconds_and_joules(1.0, 10.0))
    meter.attach(trainer)
    trainer.train()
    assert (meter.time_s, meter.energy_j) == (1.0, 10.0)
    assert sizes_of(trainer) == EPOCH_OF_48
    assert trainer.callback_handler.callbacks.count(callback) == 1
    assert bench.only_trial().state is TrialState.COMPLETED


def test_removed_callbacks_leave_training_unchanged(bench: Bench) -> None:
    callback, meter = bench.callback(), ZeusEnergyTrainerCallback(seconds_and_joules(1.0, 10.0))
    trainer = bench.trainer(callback, meter)
    trainer.remove_callback(callback)
    trainer.remove_callback(meter)
    trainer.train()
    assert set(sizes_of(trainer)[:-1]) == {USERS_SIZE}
    assert not bench.is_registered()
    assert not any("zeus/energy_j" in row for row in trainer.state.log_history)


@pytest.mark.parametrize("run", ["evaluate", "predict"])
def test_trainer_without_training_has_no_trial(bench: Bench, run: str) -> None:
    callback, work = bench.callback(), Powered()
    trainer = bench.trainer(callback, ZeusPowerLimitTrainerCallback(**work.options()))
    getattr(trainer, run)(val_digits())
    with pytest.raises(ZeusBSOOperationOrderError, match="there is no trial before"):
        _ = callback.trial
    assert not bench.is_registered()
    assert work.device.set_w == []


@pytest.mark.slow
def test_misses_do_not_end_hyperparameter_search(bench: Bench) -> None:
    pytest.importorskip("optuna")
    callback = bench.callback(bench.job(NEVER, policy=GP_VOI))
    trainer = bench.trainer(callback, data={"model_init": lambda: Classifier()})
    trainer.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 0.01, 0.1)}, n_trials=3
    )
    assert [trial.state for trial in bench.view().trials] == [TrialState.EXHAUSTED] * 3


def test_search_over_batch_size_is_refused(bench: Bench) -> None:
    pytest.importorskip("optuna")
    trainer = bench.trainer(bench.callback(), data={"model_init": lambda: Classifier()})
    space = {"per_device_train_batch_size": [8]}
    with pytest.raises(ZeusBSOConfigError, match="leave it out of hp_space"):
        trainer.hyperparameter_search(
            lambda trial: {name: trial.suggest_categorical(name, values) for name, values in space.items()}, n_trials=1
        )
    assert bench.only_trial().state is TrialState.WITHDRAWN


# Several trainings


class TrainsAnother(TrainerCallback):
    def __init__(self, other: Trainer) -> None:
        self._other = other

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._other.state.global_step = 1
        self._other.evaluate()
        self._other.train()


def test_callback_in_two_concurrent_trainings_is_refused(bench: Bench) -> None:
    callback = bench.callback(bench.job(NEVER))
    trainer = bench.trainer(callback, TrainsAnother(bench.trainer(callback)))
    with pytest.raises(ZeusBSOOperationOrderError, match="make a callback for each Trainer"):
        trainer.train()
    # The trial has no metric from the evaluation of the inner trainer.
    assert bench.only_trial().metric is None


def test_missed_run_with_own_scheduler_is_not_finished(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    job = bench.job(0.9)
    bench.complete_first_trial(job)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = optimizer, torch.optim.lr_scheduler.LinearLR(optimizer)
    trainer = bench.trainer(
        bench.callback(job, on_failure="finish"), scores=(0.1,), data={"model": model, "optimizers": own}
    )
    trainer.train()
    assert sizes_of(trainer) == EPOCH_OF_24
    assert "own learning rate scheduler is made for one training" in capfd.readouterr().err
