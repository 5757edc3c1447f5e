"""Energy in the trainer's own loggers, without a server."""

from __future__ import annotations

import csv
import logging
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from tests.support.lightning_bench import (
    QUIET,
    Bench,
    Interrupt,
    StepMonitor,
    make_bench,  # noqa: F401 - a fixture
)
from tests.support.lightning_models import Classifier, quiet_trainer, train_loader
from zeus_plugins.energy import EstimateMonitor
from zeus_plugins.lightning import ZeusEnergyCallback

pytestmark = [
    *QUIET,
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided:UserWarning"),
]

STEPS_OF_16 = 11


def metered(module: Classifier) -> ZeusEnergyCallback:
    monitor = StepMonitor()
    monitor.watch(module)
    return ZeusEnergyCallback(monitor)


def logged(folder: Path) -> list[dict[str, float]]:
    with (folder / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("zeus/energy_j")]
    names = ("zeus/epoch_time_s", "zeus/epoch_energy_j", "zeus/time_s", "zeus/energy_j")
    return [{name: float(row[name]) for name in names} for row in rows]


def epoch_row(epochs: int) -> dict[str, float]:
    """What is logged after so many epochs."""
    return {
        "zeus/epoch_time_s": STEPS_OF_16,
        "zeus/epoch_energy_j": 10.0 * STEPS_OF_16,
        "zeus/time_s": STEPS_OF_16 * epochs,
        "zeus/energy_j": 10.0 * STEPS_OF_16 * epochs,
    }


def test_each_epoch_and_the_totals_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = Classifier()
    callback = metered(module)
    csv_logger = CSVLogger(tmp_path, name=None, version="")
    with caplog.at_level(logging.INFO, logger="zeus_plugins.energy"):
        quiet_trainer(callback, logger=csv_logger, max_epochs=2, log_every_n_steps=1).fit(module, train_loader())
    assert logged(tmp_path) == [epoch_row(1), epoch_row(2)]
    assert (callback.time_s, callback.energy_j) == (22.0, 220.0)
    assert caplog.text.count("energy of the training: counted steps") == 1


def test_a_resumed_training_continues_its_totals(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, save_last=True)
    first = Classifier()
    quiet_trainer(metered(first), saver, enable_checkpointing=True).fit(first, train_loader())
    second = Classifier()
    callback = metered(second)
    logger = CSVLogger(tmp_path / "second", name=None, version="")
    trainer = quiet_trainer(callback, logger=logger, max_epochs=2, log_every_n_steps=1)
    trainer.fit(second, train_loader(), ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert logged(tmp_path / "second") == [epoch_row(2)]


# It sees the same images again, which this test does not mind.
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended:UserWarning")
def test_a_training_resumed_within_an_epoch_counts_the_whole_epoch(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=5, save_top_k=-1)
    first = Classifier()
    quiet_trainer(metered(first), saver, enable_checkpointing=True).fit(first, train_loader())
    second = Classifier()
    logger = CSVLogger(tmp_path / "second", name=None, version="")
    trainer = quiet_trainer(metered(second), logger=logger, log_every_n_steps=1)
    trainer.fit(second, train_loader(), ckpt_path=tmp_path / "step=5.ckpt", weights_only=True)
    assert len(second.seen_rates) == STEPS_OF_16 - 5
    assert logged(tmp_path / "second") == [epoch_row(1)]


def test_a_second_training_after_an_error_begins_anew() -> None:
    callback = ZeusEnergyCallback(EstimateMonitor(50.0))
    with pytest.raises(RuntimeError, match="the user's own"):
        quiet_trainer(callback, Interrupt(RuntimeError("the user's own"))).fit(Classifier(), train_loader())
    assert callback.energy_j == 0.0
    quiet_trainer(callback).fit(Classifier(), train_loader())
    assert callback.energy_j == pytest.approx(50.0 * callback.time_s)
    assert callback.time_s > 0


def test_a_second_training_has_totals_of_its_own() -> None:
    module = Classifier()
    callback = metered(module)
    for _ in range(2):
        quiet_trainer(callback).fit(module, train_loader())
        assert callback.time_s == STEPS_OF_16


def test_both_callbacks_measure_side_by_side(bench: Bench) -> None:
    module = Classifier()
    monitor = StepMonitor()
    monitor.watch(module)
    meter = ZeusEnergyCallback(monitor)
    quiet_trainer(bench.callback(energy_monitor=monitor), meter).fit(module, train_loader())
    assert meter.time_s == bench.only_trial().time_s == 4.0


def test_a_rehearsal_is_not_measured() -> None:
    callback = ZeusEnergyCallback(EstimateMonitor(50.0))
    quiet_trainer(callback, fast_dev_run=True).fit(Classifier(), train_loader())
    assert callback.time_s == 0.0
