"""The callback beside other settings of the trainer, other callbacks, and Lightning's other package."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner.tuning import Tuner

from tests.support.frameworks import STEPS_OF_16, Powered
from tests.support.job_bench import EPOCH_OF_48, NEVER, NEXT_SIZE
from tests.support.lightning_bench import (
    QUIET,
    Bench,
    Classifier,
    Loader,
    ManualModule,
    SizedModule,
    Watch,
    quiet_trainer,
    train_loader,
    val_loader,
)
from tests.support.power_limit_bench import FOUND_W
from tests.support.versions import since
from zeus_plugins.energy import EstimateMonitor
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.lightning import ZeusEnergyCallback, ZeusPowerLimitCallback
from zeus_plugins.protocol import TrialState

pytestmark = QUIET


# Finders


class Tunable(SizedModule):
    """Has its learning rate at the attribute that finders read."""

    def __init__(self) -> None:
        super().__init__()
        self.learning_rate = 0.1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


@since("lightning", "2.5.6", "the finder's rate does not reach the optimizer of the training")
def test_learning_rate_finder_replaces_scaling(bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = bench.job(max_epochs=3)
    bench.complete_first_trial(job)
    module = Tunable()
    finder = LearningRateFinder(min_lr=0.01, num_training_steps=20, early_stop_threshold=None)
    trainer = quiet_trainer(bench.callback(job, lr_scaling="linear"), finder, max_epochs=3, default_root_dir=tmp_path)
    with caplog.at_level(logging.INFO, logger="zeus_plugins"):
        trainer.fit(module)
    # The search and the training both have the trial's size.
    assert set(module.seen_sizes) == {NEXT_SIZE}
    assert module.seen_rates[-7:] == [module.learning_rate] * 7
    assert finder.optimal_lr is not None
    assert module.learning_rate == finder.optimal_lr.suggestion()
    assert "lr_scaling='linear' is left out" in caplog.text
    trial = bench.view().trials[-1]
    assert (trial.state, trial.epochs) == (TrialState.COMPLETED, 1)


def test_batch_size_finder_is_refused_before_trial(bench: Bench) -> None:
    trainer = quiet_trainer(BatchSizeFinder(), bench.callback())
    with pytest.raises(ZeusBSOConfigError, match=r"remove BatchSizeFinder, and give .* max_per_device_batch_size"):
        trainer.fit(SizedModule())
    assert not bench.is_registered()


def test_callback_is_idle_in_rate_search_of_tuner(bench: Bench, tmp_path: Path) -> None:
    trainer = quiet_trainer(bench.callback(), default_root_dir=tmp_path)
    module = Tunable()
    Tuner(trainer).lr_find(module, num_training=3, early_stop_threshold=None)
    assert set(module.seen_sizes) == {16}
    assert not bench.is_registered()
    module.seen_sizes.clear()
    trainer.fit(module)
    assert module.seen_sizes == EPOCH_OF_48


# Times of validations


@pytest.mark.parametrize(
    ("options", "epochs"),
    [({"check_val_every_n_epoch": 2}, [2.0]), ({"val_check_interval": 3}, [0.75, 1.75, 2.75])],
    ids=["every second epoch", "within epochs"],
)
def test_last_epoch_without_validation_is_reported(bench: Bench, options: dict[str, Any], epochs: list[float]) -> None:
    callback = bench.callback(bench.job(NEVER, max_epochs=3), on_failure="stop", steps="unchanged")
    watch = Watch(callback)
    quiet_trainer(callback, watch, max_epochs=3, **options).fit(Classifier(), train_loader())
    assert watch.epochs == epochs
    trial = bench.only_trial()
    assert (trial.state, trial.epochs, trial.metric) == (TrialState.EXHAUSTED, 3, 0.0)


def test_trainer_without_validations_is_refused_before_trial(bench: Bench) -> None:
    trainer = quiet_trainer(bench.callback(bench.job(max_epochs=3)), max_epochs=3, check_val_every_n_epoch=5)
    with pytest.raises(ZeusBSOConfigError, match="never validates in 3 epochs"):
        trainer.fit(Classifier(), train_loader())
    assert not bench.is_registered()


class TwoValidations(Classifier):
    def val_dataloader(self) -> list[Loader]:  # type: ignore[override]  # two loaders replace the single loader
        return [val_loader(), val_loader()]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:  # type: ignore[override]  # noqa: ARG002
        self.log("score", float(dataloader_idx))


@pytest.mark.parametrize("index", [0, 1])
def test_validation_with_index_is_monitored(bench: Bench, index: int) -> None:
    callback = bench.callback(bench.job(float(index)), monitor=f"score/dataloader_idx_{index}")
    quiet_trainer(callback).fit(TwoValidations(), train_loader())
    assert bench.only_trial().metric == index


def test_metric_of_second_validation_is_watched(bench: Bench) -> None:
    names = [f"score/dataloader_idx_{index}" for index in (0, 1)]
    quiet_trainer(bench.callback(bench.job(0.0), names[0], watch=names)).fit(TwoValidations(), train_loader())
    assert bench.only_trial().watched == {names[1]: 1.0}, "the monitored one has a place of its own"


def test_metric_name_shared_by_validations_is_error_with_list(bench: Bench) -> None:
    with pytest.raises(ZeusBSOConfigError, match=r"'score' is not among .*score/dataloader_idx_0'.*_idx_1'"):
        quiet_trainer(bench.callback()).fit(TwoValidations(), train_loader())


# Energy and power limits


class OwnHook(ZeusPowerLimitCallback):
    """A user's subclass with a hook for every batch."""

    heard = 0

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.heard += 1
        super().on_train_batch_end(*args, **kwargs)


def test_hooks_of_subclass_stay(bench: Bench) -> None:
    work = Powered()
    callback = OwnHook(**work.options(limits_w=(FOUND_W,), warmup_steps=0, profile_steps=1))
    bench.training(callback, work=work).train()
    assert callback.heard == STEPS_OF_16


def test_rehearsal_measures_and_changes_nothing(bench: Bench) -> None:
    work = Powered()
    meter = ZeusEnergyCallback(EstimateMonitor(50.0))
    bench.training(meter, ZeusPowerLimitCallback(**work.options()), work=work, fast_dev_run=True).train()
    assert work.batches == 1
    assert work.device.set_w == []
    assert meter.time_s == 0.0


# Several trainings with a single trainer


@since("lightning", "2.5.6", "a second fit begins again where the first began")
def test_second_fit_of_same_trainer_counts_own_epochs(bench: Bench) -> None:
    callback = bench.callback(bench.job(0.5, max_epochs=2), on_failure="stop")
    trainer = quiet_trainer(callback, max_epochs=4)
    trainer.fit(Classifier(1.0), train_loader())
    assert trainer.current_epoch == 2
    trainer.fit(Classifier(0.0, 0.0), train_loader())
    assert trainer.current_epoch == 4
    assert [(trial.state, trial.epochs) for trial in bench.view().trials] == [
        (TrialState.COMPLETED, 1),
        (TrialState.EXHAUSTED, 2),
    ]


# Manual optimization


def test_accumulation_in_manual_optimization_is_refused_before_trial(bench: Bench) -> None:
    trainer = quiet_trainer(bench.callback(max_per_device_batch_size=24))
    with pytest.raises(ZeusBSOConfigError, match=r"manual optimization .* max_per_device_batch_size=24"):
        trainer.fit(ManualModule(), train_loader())
    assert not bench.is_registered()


# Lightning's other package


@since("pytorch-lightning", "2.6", "where both packages are installed, it refuses callbacks of the other")
def test_twin_package_trains_at_size_of_server(bench: Bench) -> None:
    twin: Any = pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")

    class Twin(twin.LightningModule):  # type: ignore[misc, name-defined, unused-ignore]  # mypy cannot see it
        def __init__(self) -> None:
            super().__init__()
            self.network = torch.nn.Linear(64, 10)
            self.sizes: list[int] = []

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            self.sizes.append(len(batch[1]))
            return torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1])

        def validation_step(self, batch: list[torch.Tensor]) -> None:  # noqa: ARG002
            self.log("score", 0.0)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            self.estimate = self.trainer.estimated_stepping_batches
            return torch.optim.SGD(self.parameters(), lr=0.1)

    callback = bench.callback(bench.job(NEVER, max_epochs=2), on_failure="stop")
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = twin.Trainer(accelerator="cpu", max_epochs=2, callbacks=[callback], enable_model_summary=False, **quiet)
    module = Twin()
    trainer.fit(module, train_loader(), val_loader())
    assert module.sizes == EPOCH_OF_48 * 2
    assert module.estimate == 2 * len(EPOCH_OF_48)
    assert bench.only_trial().state is TrialState.EXHAUSTED


WITHOUT_LIGHTNING = """
import sys
sys.modules["lightning"] = None  # as if it were not installed
import pytorch_lightning
from zeus_plugins.lightning import ZeusBSOCallback
assert issubclass(ZeusBSOCallback, pytorch_lightning.Callback)
"""


@pytest.mark.slow
def test_twin_package_is_enough() -> None:
    pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")
    subprocess.run([sys.executable, "-c", WITHOUT_LIGHTNING], check=True)


def test_finder_of_twin_package_is_refused(bench: Bench) -> None:
    twin = pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")
    trainer = quiet_trainer(bench.callback())
    trainer.callbacks.append(twin.callbacks.BatchSizeFinder())  # type: ignore[attr-defined]
    with pytest.raises(ZeusBSOConfigError, match="remove BatchSizeFinder"):
        trainer.fit(SizedModule())
