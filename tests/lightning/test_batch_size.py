"""Real fits of a tiny network against a real server process."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler
from lightning.pytorch.tuner.tuning import Tuner
from torch.utils.data import DataLoader, DistributedSampler

from tests.support import lightning_bench as models
from tests.support.frameworks import Work
from tests.support.job_bench import AT_ONCE, EPOCH_OF_48, NEVER, SERVERS_SIZE
from tests.support.lightning_bench import (
    QUIET,
    USERS_SIZE,
    Bench,
    Classifier,
    DataKind,
    TrainOnly,
    Watch,
    digits,
    quiet_trainer,
    train_loader,
)
from zeus_plugins.energy import EstimateMonitor
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOOperationOrderError, ZeusBSOTrainFailError
from zeus_plugins.protocol import TrialState
from zeus_plugins.training.metrics import as_written

pytestmark = QUIET

DATA: dict[str, DataKind] = {
    **models.WAYS,
    "read-only property": lambda: (Classifier(), {"datamodule": models.PropertyData()}),
    "hard-coded in the module": lambda: (models.HardCodedModule(), {}),
    "stream with a length": lambda: (
        Classifier(),
        {"train_dataloaders": DataLoader(models.MeasuredStream(), batch_size=USERS_SIZE)},
    ),
    "persistent workers": lambda: (
        Classifier(),
        {"train_dataloaders": DataLoader(digits()[0], USERS_SIZE, num_workers=1, persistent_workers=True)},
    ),
    "own distributed sampler": lambda: (
        Classifier(),
        {"train_dataloaders": DataLoader(digits()[0], USERS_SIZE, sampler=DistributedSampler(digits()[0], 1, 0))},
    ),
    "module.hparams": lambda: (models.HyperparameterModule(), {}),
}


def kinds(data: dict[str, DataKind]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", data.values(), ids=data.keys())


# The batch size


# Lightning remarks on a stream with a length.
@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined:UserWarning")
@kinds(DATA)
def test_every_way_to_give_data_trains_at_size_of_server(bench: Bench, kind: DataKind) -> None:
    module, data = kind()
    trainer = quiet_trainer(bench.callback())
    trainer.fit(module, **data)
    assert module.seen_sizes == EPOCH_OF_48
    # The length of a stream is unknown, and Lightning's estimate then is -1.
    assert module.estimated_steps in (-1, trainer.global_step)
    assert trainer.global_step == len(EPOCH_OF_48)


def test_reloaded_loaders_get_size_of_server(bench: Bench) -> None:
    module = models.HardCodedModule()
    trainer = quiet_trainer(
        bench.callback(bench.job(NEVER, max_epochs=2), on_failure="stop"),
        max_epochs=2,
        reload_dataloaders_every_n_epochs=1,
    )
    trainer.fit(module)
    assert module.seen_sizes == EPOCH_OF_48 * 2
    assert module.estimated_steps == trainer.global_step


class AtTrainStart(Callback):
    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        self._look()


@pytest.mark.parametrize(
    "make",
    [lambda: train_loader(batch_size=None), models.list_of_batches, models.list_of_tensors],
    ids=["batch_size=None", "list of batches", "list of tensors"],
)
def test_fixed_batches_are_refused_and_end_trial(bench: Bench, make: Callable[[], Any]) -> None:
    with pytest.raises(ZeusBSOConfigError, match="does not say how many samples"):
        quiet_trainer(bench.callback()).fit(Classifier(), make())
    assert bench.only_trial().state is TrialState.WITHDRAWN


class AccumulatesLater(Callback):
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        trainer.accumulate_grad_batches = 4


def test_accumulation_changed_later_by_second_callback_is_refused(bench: Bench) -> None:
    trainer = quiet_trainer(AccumulatesLater(), bench.callback())
    module = Classifier()
    with pytest.raises(ZeusBSOConfigError, match=r"deliver \[48\] samples per batch instead of 12"):
        trainer.fit(module, train_loader())
    assert module.seen_sizes == []
    assert bench.only_trial().state is TrialState.WITHDRAWN


def test_accumulation_schedule_is_refused_before_trial(bench: Bench) -> None:
    trainer = quiet_trainer(bench.callback(), GradientAccumulationScheduler({0: 1, 4: 2}))
    with pytest.raises(ZeusBSOConfigError, match=r"^GradientAccumulationScheduler changes the batch size"):
        trainer.fit(Classifier(), train_loader())
    assert not bench.is_registered()


def test_callback_can_be_pickled_before_fit(bench: Bench) -> None:
    monitor = EstimateMonitor(65.0)
    copy = pickle.loads(pickle.dumps(bench.callback(energy_monitor=monitor)))  # noqa: S301 - the bytes are our own
    module = Classifier()
    quiet_trainer(copy).fit(module, train_loader())
    assert module.seen_sizes == EPOCH_OF_48
    assert bench.only_trial().energy_source == monitor.source


# Restoration of every change


def sizes_in(loader: Any) -> list[int]:
    return [loader.batch_size, loader.batch_sampler.batch_size]


# The arguments to fit, each with a function that reads its batch size.
GIVEN: dict[str, tuple[Callable[[], Any], Callable[[Any], list[int]]]] = {
    "attribute": (models.AttributeData, lambda data: [data.batch_size]),
    "hyperparameter": (models.HyperparameterData, lambda data: [data.hparams["batch_size"]]),
    "built once": (models.BuiltOnceData, lambda data: sizes_in(data.loader)),
    "loader": (train_loader, sizes_in),
    "batch sampler": (models.batch_sampler_loader, lambda loader: [loader.batch_sampler.batch_size]),
}


@pytest.mark.parametrize(
    ("make", "sizes", "error"),
    [(*given, None) for given in GIVEN.values()] + [(*GIVEN["loader"], RuntimeError("the user's own"))],
    ids=[*GIVEN, "loader, after an error"],
)
def test_every_change_is_restored(
    bench: Bench, make: Callable[[], Any], sizes: Callable[[Any], list[int]], error: Exception | None
) -> None:
    module = models.SizedModule()
    module.work = Work({2: error} if error else None)
    given = make()
    trainer = quiet_trainer(bench.callback(), accumulate_grad_batches=2)
    with pytest.raises(RuntimeError, match="the user's own") if error else contextlib.nullcontext():
        trainer.fit(module, given)
    assert module.seen_sizes[0] == SERVERS_SIZE // 2
    assert set(sizes(given)) == {USERS_SIZE}
    assert module.batch_size == USERS_SIZE
    assert trainer.accumulate_grad_batches == 2
    assert "dataloader" not in vars(trainer.fit_loop._data_source)
    assert "run" not in vars(trainer.fit_loop.epoch_loop)


# The learning rate


# Reports


def test_sanity_check_is_not_reported(bench: Bench) -> None:
    callback = bench.callback()
    watch = Watch(callback)
    quiet_trainer(callback, watch).fit(Classifier(AT_ONCE), train_loader())
    assert watch.sanity_metrics == [None]
    assert watch.epochs == [1.0]


def test_validations_within_stream_do_not_count_as_whole_epochs(bench: Bench) -> None:
    callback = bench.callback(bench.job(NEVER), on_failure="stop")
    watch = Watch(callback)
    quiet_trainer(callback, watch, val_check_interval=6).fit(Classifier(), models.stream_loader())
    assert watch.epochs == [0.5, 1.0]


def test_each_epoch_is_reported_without_validation_loop(bench: Bench) -> None:
    callback = bench.callback(bench.job(2.0, max_epochs=3, higher_is_better_metric=True), monitor="train_epoch")
    watch = Watch(callback)
    trainer = quiet_trainer(callback, watch, max_epochs=3)
    trainer.fit(TrainOnly(), train_loader())
    assert watch.epochs == [1.0, 2.0]
    assert (bench.only_trial().metric, bench.only_trial().state) == (2.0, TrialState.COMPLETED)


@pytest.mark.parametrize(
    ("least", "continues"), [({"min_epochs": 3}, 1), ({"min_steps": 9}, 1), ({"min_epochs": 2}, 0)]
)
def test_least_number_of_epochs_continues_with_a_line(
    bench: Bench, caplog: pytest.LogCaptureFixture, least: dict[str, int], continues: int
) -> None:
    callback = bench.callback(bench.job(0.9, max_epochs=4))
    trainer = quiet_trainer(callback, max_epochs=4, **least)
    with caplog.at_level("INFO"):
        trainer.fit(Classifier(0.1, 0.95), train_loader())
    assert (trainer.current_epoch, callback.trial.epochs) == (2 + continues, 2)
    (name,) = least
    assert caplog.text.count(f"Trainer({name}={least[name]}) lets this training continue, which") == continues


class LogsInTraining(Classifier):
    """Logs a rising metric of the training epoch beside its validation."""

    def __init__(self, *, on_step: bool) -> None:
        super().__init__(0.1)
        self._on_step = on_step

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        seen = self.current_epoch + 0.1 * batch_idx
        self.log("seen", seen, on_step=self._on_step, on_epoch=True, batch_size=len(batch[0]))
        return super().training_step(batch)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("on_step", [True, False])
def test_metric_of_the_training_epoch_is_read_where_early_stopping_reads_it(
    bench: Bench, *, every: int, on_step: bool
) -> None:
    zeus = bench.callback(bench.job(NEVER * 10, max_epochs=4, higher_is_better_metric=True), monitor="seen")
    read: list[tuple[float | None, float]] = []

    class Stopper(EarlyStopping):
        def on_train_epoch_end(self, *args: Any) -> None:
            super().on_train_epoch_end(*args)
            read.append((zeus.trial.metric, as_written(float(self.best_score))))

    stopper = Stopper("seen", mode="max", check_on_train_epoch_end=True)
    trainer = quiet_trainer(stopper, zeus, max_epochs=4, check_val_every_n_epoch=every)
    with pytest.raises(ZeusBSOTrainFailError):
        trainer.fit(LogsInTraining(on_step=on_step), train_loader())
    validated = read[every - 1 :: every]
    assert len(validated) == 4 // every
    assert [metric for metric, _ in validated] == [value for _, value in validated]
    assert [metric for metric, _ in read[: every - 1]] == [None] * (every - 1)


class LogsAtEpochEnd(TrainOnly):
    """Logs its metric only in its own hook at the end of the training epoch, which fails in `failing_epoch`."""

    failing_epoch = -1

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == self.failing_epoch:
            raise RuntimeError("the hook fails")
        self.log("at_end", 0.2 * (self.current_epoch + 1))


class AlsoValidates(LogsAtEpochEnd, Classifier):
    """Has a validation beside."""


@pytest.mark.parametrize("kind", [LogsAtEpochEnd, AlsoValidates])
def test_metric_of_the_modules_own_hook_at_the_end_of_an_epoch_is_reported(bench: Bench, kind: Any) -> None:
    zeus = bench.callback(bench.job(0.55, max_epochs=4, higher_is_better_metric=True), monitor="at_end")
    module, watch = kind(), Watch(zeus)
    quiet_trainer(zeus, watch, max_epochs=4).fit(module, train_loader())
    assert (zeus.trial.metric, zeus.trial.epochs, bench.only_trial().state) == (0.6, 3, TrialState.COMPLETED)
    assert "on_train_epoch_end" not in vars(module)


def test_failing_hook_is_restored(bench: Bench) -> None:
    zeus = bench.callback(bench.job(NEVER * 10, max_epochs=4, higher_is_better_metric=True), monitor="at_end")
    module = AlsoValidates(0.1)
    module.failing_epoch = 1
    with pytest.raises(RuntimeError, match="the hook fails"):
        quiet_trainer(zeus, max_epochs=4).fit(module, train_loader())
    assert "on_train_epoch_end" not in vars(module)


@pytest.mark.parametrize("run", ["fast_dev_run", "validate", "test", "predict"])
def test_callback_is_idle_outside_training(bench: Bench, run: str) -> None:
    callback = bench.callback()
    trainer = quiet_trainer(callback, fast_dev_run=run == "fast_dev_run")
    loader = train_loader()
    getattr(trainer, "fit" if run == "fast_dev_run" else run)(Classifier(), loader)
    assert loader.batch_size == USERS_SIZE
    with pytest.raises(ZeusBSOOperationOrderError, match="there is no trial before"):
        _ = callback.trial
    assert not bench.is_registered()


def test_callback_is_idle_in_tuner(bench: Bench, tmp_path: Path) -> None:
    trainer = quiet_trainer(bench.callback(), default_root_dir=tmp_path)
    module = models.SizedModule()
    Tuner(trainer).scale_batch_size(module, max_trials=1, init_val=8, steps_per_trial=1)
    assert 0 < max(module.seen_sizes) < SERVERS_SIZE
    assert not bench.is_registered()
