"""Lightning's trainer tries power limits while it trains, keeps the best, and leaves the GPUs as they were."""

from __future__ import annotations

import csv
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from tests.support.fake_nvml import FakeGpu, FakeNvml
from tests.support.fake_zeus_monitor import ReplayedZeusMonitor
from tests.support.lightning_bench import (
    QUIET,
    Bench,
    Interrupt,
    make_bench,  # noqa: F401 - a fixture
)
from tests.support.lightning_models import Classifier, quiet_trainer, train_loader
from tests.support.lightning_powered import VALIDATION_S, Powered
from tests.support.power_limit_bench import BEST_W, FOUND_W, LIMITS_W, Forbidden, is_as_the_table
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.lightning import ZeusPowerLimitCallback
from zeus_plugins.power_limit import Energy, PowerLimitProfile

pytestmark = QUIET

STEPS_OF_16 = 11


def test_the_best_limit_is_found_within_the_epochs_and_kept_until_the_end(tmp_path: Path) -> None:
    module = Powered()
    callback = module.callback()
    logger = CSVLogger(tmp_path, name=None, version="")
    quiet_trainer(callback, logger=logger, max_epochs=3, log_every_n_steps=1).fit(module, train_loader())
    assert callback.chosen_limit_w == BEST_W
    assert is_as_the_table(callback.profile)
    # 3 steps for each limit; the first epoch ends within the measurement of the fourth, which begins anew.
    first = [250.0] * 3 + [200.0] * 3 + [150.0] * 3 + [100.0] * 2
    second = [100.0] * 3 + [BEST_W] * 8
    assert module.limits_of_steps == first + second + [BEST_W] * STEPS_OF_16
    # Those before the training and after the first epoch; then those under the chosen limit.
    assert module.limits_of_validations == [FOUND_W, FOUND_W, BEST_W, BEST_W]
    assert module.device_.limit_w() == FOUND_W
    with (tmp_path / "metrics.csv").open() as file:
        logged = [row["zeus/power_limit_w"] for row in csv.DictReader(file) if row["zeus/power_limit_w"]]
    assert logged == [str(BEST_W)]


def test_a_zeus_monitor_measures_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([FakeGpu(max_power_mw=250_000)]))  # for its description
    module = Powered()
    callback = module.callback(energy_monitor=ReplayedZeusMonitor(module.machine))
    quiet_trainer(callback, max_epochs=2).fit(module, train_loader())
    assert callback.chosen_limit_w == BEST_W
    assert is_as_the_table(callback.profile)
    assert callback.profile is not None
    assert {sample.source for sample in callback.profile.samples} == {"ReplayedZeusMonitor"}


def test_the_selector_decides() -> None:
    module = Powered()
    callback = module.callback(selector=Energy())
    quiet_trainer(callback, max_epochs=2).fit(module, train_loader())
    assert callback.chosen_limit_w == 150.0


def test_validations_within_an_epoch_are_not_measured() -> None:
    module = Powered()
    callback = module.callback()
    quiet_trainer(callback, max_epochs=3, val_check_interval=4).fit(module, train_loader())
    assert len(module.limits_of_validations) > 4
    assert is_as_the_table(callback.profile)


class SlowCheckpoint(ModelCheckpoint):
    """Takes very long to write."""

    def __init__(self, module: Powered, **options: Any) -> None:
        super().__init__(**options)
        self._machine = module.machine

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        self._machine.time_s += VALIDATION_S


def test_checkpoints_are_not_measured(tmp_path: Path) -> None:
    module = Powered()
    callback = module.callback()
    saver = SlowCheckpoint(module, dirpath=tmp_path, every_n_train_steps=5)
    quiet_trainer(callback, saver, max_epochs=3, enable_checkpointing=True).fit(module, train_loader())
    assert is_as_the_table(callback.profile)


def test_epochs_shorter_than_a_window_are_measured_too() -> None:
    module = Powered()
    callback = module.callback(warmup_steps=10, profile_steps=40)
    quiet_trainer(callback, max_epochs=5).fit(module, train_loader())
    assert callback.chosen_limit_w == BEST_W
    assert callback.profile is not None
    assert [sample.steps for sample in callback.profile.samples] == [8] * 4
    assert is_as_the_table(callback.profile)


@pytest.mark.parametrize(
    "error", [RuntimeError("the user's own"), SystemExit(3), KeyboardInterrupt()], ids=["error", "exit", "ctrl-c"]
)
def test_an_exception_puts_the_limit_back(error: BaseException) -> None:
    module = Powered()
    callback = module.callback(limits_w=(150.0, 100.0))
    with pytest.raises((type(error), SystemExit)):
        quiet_trainer(callback, Interrupt(error)).fit(module, train_loader())
    assert module.limits_of_steps[-1] == 150.0
    assert module.device_.limit_w() == FOUND_W


def test_what_was_measured_is_kept_for_the_next_training(tmp_path: Path) -> None:
    path = tmp_path / "profiles" / "{batch_size}.json"
    first = Powered()
    quiet_trainer(first.callback(profile_path=path), max_epochs=2).fit(first, train_loader())
    assert is_as_the_table(PowerLimitProfile.load(tmp_path / "profiles" / "16.json"))
    second = Powered()
    callback = second.callback(profile_path=path)
    quiet_trainer(callback).fit(second, train_loader())
    assert second.limits_of_steps == [BEST_W] * STEPS_OF_16
    assert callback.profile == PowerLimitProfile.load(tmp_path / "profiles" / "16.json")
    other_size = Powered()
    quiet_trainer(other_size.callback(profile_path=tmp_path / "profiles" / "16.json")).fit(other_size, train_loader(8))
    assert set(other_size.limits_of_steps) == set(LIMITS_W)


def test_a_file_that_holds_no_profile_is_measured_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "profile.json"
    path.write_text("{}")
    module = Powered()
    callback = module.callback(profile_path=path)
    quiet_trainer(callback, max_epochs=2).fit(module, train_loader())
    assert "holds no power-limit profile" in caplog.text
    assert is_as_the_table(PowerLimitProfile.load(path))


def test_without_permission_the_limit_in_force_is_measured(caplog: pytest.LogCaptureFixture) -> None:
    module = Powered()
    callback = module.callback(devices=[Forbidden()], limits_w=None)
    with caplog.at_level(logging.WARNING, logger="zeus_plugins"):
        quiet_trainer(callback).fit(module, train_loader())
    assert callback.chosen_limit_w is None
    assert callback.profile is not None
    assert callback.profile.limits_w == (200.0,)
    assert [record.message for record in caplog.records if record.name == "zeus_plugins"] == [
        "the power limits are left alone, and only what the training costs under the one in force (200 W) is measured: "
        "Insufficient Permissions"
    ]


def test_without_a_gpu_the_training_goes_on(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEUS_ESTIMATED_POWER_W", "65")
    module = Classifier()
    callback = ZeusPowerLimitCallback(warmup_steps=1, profile_steps=2)
    with caplog.at_level(logging.WARNING, logger="zeus_plugins"):
        quiet_trainer(callback).fit(module, train_loader())
    assert callback.chosen_limit_w is None
    assert callback.profile is not None
    assert callback.profile.samples[0].steps == 2
    assert [record.message for record in caplog.records if "power limits" in record.message] == [
        "the power limits are left alone, and only what the training costs under the one in force "
        f"({callback.profile.limits_w[0]:g} W) is measured: the training runs on no NVIDIA GPU"
    ]


def test_limits_that_the_gpus_cannot_have_are_refused() -> None:
    module = Powered()
    with pytest.raises(ZeusBSOConfigError, match=r"limits_w has \[300.0\].*they take 100 W to 250 W"):
        quiet_trainer(module.callback(limits_w=(300.0, 200.0))).fit(module, train_loader())


@pytest.mark.parametrize("options", [{"warmup_steps": -1}, {"profile_steps": 0}, {"limits_w": ()}])
def test_arguments_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ZeusBSOConfigError):
        ZeusPowerLimitCallback(**options)


def test_a_rehearsal_changes_nothing() -> None:
    module = Powered()
    quiet_trainer(module.callback(), fast_dev_run=True).fit(module, train_loader())
    assert module.device_.set_w == []


def test_a_second_training_finds_its_limit_anew() -> None:
    module = Powered()
    callback = module.callback()
    for _ in range(2):
        module.limits_of_steps.clear()
        quiet_trainer(callback, max_epochs=2).fit(module, train_loader())
        assert set(module.limits_of_steps) == set(LIMITS_W)
        assert module.device_.limit_w() == FOUND_W


def test_beside_the_batch_size_callback_the_limit_is_of_its_size(bench: Bench) -> None:
    module = Powered()
    zeus = bench.callback(energy_monitor=module.machine.monitor)
    callback = module.callback()
    quiet_trainer(zeus, callback).fit(module, train_loader())
    assert callback.profile is not None
    assert callback.profile.batch_size == bench.only_trial().batch_size == 48


class OwnHook(ZeusPowerLimitCallback):
    """A user's subclass that wants to hear of every batch."""

    heard = 0

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.heard += 1
        super().on_train_batch_end(*args, **kwargs)


def test_hooks_of_a_subclass_stay() -> None:
    module = Powered()
    options: Any = {"devices": [module.device_], "energy_monitor": module.machine.monitor}
    callback = OwnHook(limits_w=(FOUND_W,), warmup_steps=0, profile_steps=1, **options)
    quiet_trainer(callback).fit(module, train_loader())
    assert callback.heard == STEPS_OF_16


def test_all_hooks_are_back_after_the_training() -> None:
    module = Powered()
    callback = module.callback()
    quiet_trainer(callback, max_epochs=2).fit(module, train_loader())
    assert not [name for name in vars(callback) if hasattr(Callback, name)]
