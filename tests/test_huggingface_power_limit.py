"""The Trainer tries power limits while it trains, keeps the best, and leaves the GPUs as they were."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

if not os.environ.get("CI"):
    pytest.importorskip("transformers", reason="the Trainer's callback needs zeus-plugins[transformers]")

from transformers import TrainerCallback

from tests.support.fake_nvml import FakeGpu, FakeNvml
from tests.support.fake_zeus_monitor import ReplayedZeusMonitor
from tests.support.hf_bench import (
    use_one_thread,  # noqa: F401 - a fixture
)
from tests.support.hf_models import val_digits
from tests.support.hf_powered import EVALUATION_S, Powered
from tests.support.power_limit_bench import BEST_W, FOUND_W, TABLE, Forbidden, is_as_the_table
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOOperationOrderError
from zeus_plugins.power_limit import PowerLimitProfile

STEPS_OF_16 = 11


def test_the_best_limit_is_found_within_the_epochs_and_kept_until_the_end(tmp_path: Path) -> None:
    model = Powered()
    callback = model.callback()
    trainer = model.trainer(tmp_path, callback, num_train_epochs=3)
    trainer.train()
    assert callback.chosen_limit_w == BEST_W
    assert is_as_the_table(callback.profile)
    first = [250.0] * 3 + [200.0] * 3 + [150.0] * 3 + [100.0] * 2
    second = [100.0] * 3 + [BEST_W] * 8
    assert model.limits_of_steps == first + second + [BEST_W] * STEPS_OF_16
    assert model.limits_of_evaluations == [FOUND_W, BEST_W, BEST_W]
    assert model.device_.limit_w() == FOUND_W
    logged = [row["zeus/power_limit_w"] for row in trainer.state.log_history if "zeus/power_limit_w" in row]
    assert logged == [BEST_W]
    assert "_evaluate" not in vars(trainer)
    assert "on_step_end" not in vars(callback)


def test_a_zeus_monitor_measures_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([FakeGpu(max_power_mw=250_000)]))  # for its description
    model = Powered()
    callback = model.callback(energy_monitor=ReplayedZeusMonitor(model.machine))
    model.trainer(tmp_path, callback, num_train_epochs=2).train()
    assert callback.chosen_limit_w == BEST_W
    assert is_as_the_table(callback.profile)
    assert callback.profile is not None
    assert {sample.source for sample in callback.profile.samples} == {"ReplayedZeusMonitor"}


@pytest.mark.parametrize("eval_steps", [2, 4, 5])
def test_evaluations_within_an_epoch_are_not_measured(tmp_path: Path, eval_steps: int) -> None:
    model = Powered()
    callback = model.callback()
    model.trainer(tmp_path, callback, num_train_epochs=3, eval_strategy="steps", eval_steps=eval_steps).train()
    assert len(model.limits_of_evaluations) > 4
    assert is_as_the_table(callback.profile)


class SlowCheckpoint(TrainerCallback):
    """Makes saving take very long."""

    def __init__(self, model: Powered) -> None:
        self._machine = model.machine

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._machine.time_s += EVALUATION_S


def test_checkpoints_are_not_measured(tmp_path: Path) -> None:
    model = Powered()
    callback = model.callback()
    options = {"save_strategy": "steps", "save_steps": 5, "save_total_limit": 1}
    model.trainer(tmp_path, SlowCheckpoint(model), callback, num_train_epochs=3, **options).train()
    assert is_as_the_table(callback.profile)


def test_accumulated_batches_are_one_step(tmp_path: Path) -> None:
    model = Powered()
    callback = model.callback()
    model.trainer(tmp_path, callback, num_train_epochs=5, gradient_accumulation_steps=2).train()
    assert callback.profile is not None
    assert [sample.steps for sample in callback.profile.samples] == [2] * 4
    # The last step of an epoch accumulates one batch alone.
    assert callback.profile.samples[-1].time_per_step_s == pytest.approx(2 * TABLE[FOUND_W].time_per_step_s)
    assert callback.profile.batch_size == 32


def test_epochs_shorter_than_a_window_are_measured_too(tmp_path: Path) -> None:
    model = Powered()
    callback = model.callback(warmup_steps=10, profile_steps=40)
    model.trainer(tmp_path, callback, num_train_epochs=5).train()
    assert callback.chosen_limit_w == BEST_W
    assert is_as_the_table(callback.profile)


def test_an_error_puts_the_limit_back(tmp_path: Path) -> None:
    model = Powered(RuntimeError("the user's own"), fails_at=5)
    with pytest.raises(RuntimeError, match="the user's own"):
        model.trainer(tmp_path, model.callback()).train()
    assert model.limits_of_steps[-1] == 200.0
    assert model.device_.limit_w() == FOUND_W


def test_what_was_measured_is_kept_for_the_next_training(tmp_path: Path) -> None:
    path = tmp_path / "{batch_size}.json"
    first = Powered()
    first.trainer(tmp_path, first.callback(profile_path=path), num_train_epochs=2).train()
    second = Powered()
    second.trainer(tmp_path, second.callback(profile_path=path)).train()
    assert second.limits_of_steps == [BEST_W] * STEPS_OF_16
    assert is_as_the_table(PowerLimitProfile.load(tmp_path / "16.json"))


def test_without_permission_the_limit_in_force_is_measured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Powered()
    callback = model.callback(devices=[Forbidden()], limits_w=None)
    with caplog.at_level(logging.WARNING, logger="zeus_plugins"):
        model.trainer(tmp_path, callback).train()
    assert callback.chosen_limit_w is None
    assert callback.profile is not None
    assert callback.profile.limits_w == (200.0,)
    assert len([record for record in caplog.records if record.name == "zeus_plugins"]) == 1


@pytest.mark.parametrize("run", ["evaluate", "predict"])
def test_outside_train_no_limit_is_set(tmp_path: Path, run: str) -> None:
    model = Powered()
    getattr(model.trainer(tmp_path, model.callback()), run)(val_digits())
    assert model.device_.set_w == []


def test_a_trainer_that_exists_already_takes_the_callback(tmp_path: Path) -> None:
    model = Powered()
    trainer = model.trainer(tmp_path, num_train_epochs=2)
    callback = model.callback()
    callback.attach(trainer)
    trainer.train()
    assert callback.chosen_limit_w == BEST_W


def test_a_callback_added_without_attaching_says_what_to_do(tmp_path: Path) -> None:
    model = Powered()
    trainer = model.trainer(tmp_path)
    trainer.add_callback(model.callback())
    with pytest.raises(ZeusBSOOperationOrderError, match=r"callback.attach\(trainer\)"):
        trainer.train()


def test_two_callbacks_on_one_trainer_are_refused(tmp_path: Path) -> None:
    model = Powered()
    with pytest.raises(ZeusBSOConfigError, match="two ZeusPowerLimitTrainerCallback: keep one"):
        model.trainer(tmp_path, model.callback(), model.callback())
