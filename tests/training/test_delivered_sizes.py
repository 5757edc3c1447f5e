"""Real fits that would not train at the set size: no report is sent, and no batch size loses an attempt."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, Subset

from tests.support.job_bench import EPOCH_OF_24, EPOCH_OF_48, NEVER, JobBench
from tests.support.lightning_bench import (  # noqa: F401 - a fixture
    QUIET,
    Bench,
    Classifier,
    ManualModule,
    digits,
    make_bench,
    quiet_trainer,
    train_loader,
)
from tests.support.odd_sizes import (
    Announced,
    BatchItems,
    Buckets,
    ByHand,
    FixedLength,
    FixedLengthData,
    MixedData,
    Ragged,
    first_of,
    small_loader,
)
from zeus_plugins.client.http import BsoClient
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import EndReason, TrialState

pytestmark = QUIET


LIGHTNING: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "batches made before": (
        Classifier,
        lambda: DataLoader(digits()[0], batch_sampler=Buckets()),
        r"by Buckets.__len__, an epoch has 160 samples at batch size 16 and 480 at 48",
    ),
    "items that are batches": (
        Classifier,
        lambda: DataLoader(BatchItems(), batch_size=1, collate_fn=first_of),
        "the items of the training data are batches already",
    ),
    "a length that is too large": (
        Classifier,
        lambda: DataLoader(Announced(), batch_size=16),
        "epoch 1 ended after 4 of the 7 batches that the train loader's length announces, so that Lightning left its",
    ),
    "other on average": (
        Classifier,
        lambda: DataLoader(digits()[0], batch_sampler=Ragged(1.25)),
        "60 samples on average over 6 batches of different sizes, in place of 48",
    ),
    "accumulated by hand": (ByHand, train_loader, "an optimizer step followed after each 2 batches in place of 1"),
}


def is_withdrawn(bench: JobBench) -> bool:
    """Return True if the only trial was withdrawn without a report, so that the next trial gets its size."""
    trial = bench.only_trial()
    return (trial.state, trial.end_reason, trial.epochs) == (TrialState.WITHDRAWN, EndReason.REFUSED, None)


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined:UserWarning")
@pytest.mark.parametrize(("module", "data", "problem"), LIGHTNING.values(), ids=LIGHTNING.keys())
def test_lightning_training_at_a_wrong_size_is_refused(
    bench: Bench, module: Callable[[], Any], data: Callable[[], Any], problem: str
) -> None:
    with pytest.raises(ZeusBSOConfigError, match=problem):
        quiet_trainer(bench.callback()).fit(module(), data())
    assert is_withdrawn(bench)


def test_fixed_length_is_detected_at_the_scripts_own_size(bench: Bench) -> None:
    own = bench.job(batch_sizes=(16, 32), default_batch_size=16)
    with pytest.raises(ZeusBSOConfigError, match="176 samples at batch size 16 and 352 at 32"):
        quiet_trainer(bench.callback(own)).fit(Classifier(), DataLoader(digits()[0], batch_sampler=FixedLength()))
    assert is_withdrawn(bench)


@pytest.mark.parametrize("is_guessed", [True, False])
def test_sampler_made_for_the_present_size_is_accepted(bench: Bench, is_guessed: bool) -> None:
    module = Classifier()
    job = bench.job()
    if is_guessed:
        bench.complete_first_trial(job)
    callback = bench.guessing() if is_guessed else bench.callback(job)
    quiet_trainer(callback).fit(module, datamodule=FixedLengthData())
    assert module.seen_sizes == (EPOCH_OF_24 if is_guessed else EPOCH_OF_48)


# Impossible sizes

IMPOSSIBLE: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "little data": (
        lambda: DataLoader(Subset(digits()[0], range(36)), batch_size=16),
        {},
        "^batch size 48 cannot be trained here: at 48, a batch is larger than an epoch, which has 36 samples",
    ),
    "drop_last": (
        lambda: DataLoader(Subset(digits()[0], range(36)), batch_size=16, drop_last=True),
        {},
        "^batch size 48 cannot be trained here: at 48, a batch is larger than an epoch, which has 36 samples",
    ),
    "val_check_interval": (
        train_loader,
        {"val_check_interval": 5},
        r"^batch size 48 .* at 48, an epoch has 4 batches, fewer than Trainer\(val_check_interval=5\)",
    ),
    "val_check_interval across epochs": (
        train_loader,
        {"val_check_interval": 13, "check_val_every_n_epoch": None, "max_epochs": 3},
        "^batch size 48 .* at 48, the whole training has 12 batches, fewer than",
    ),
    "max_steps": (
        train_loader,
        {"max_steps": 3},
        r"^batch sizes 24, 48 .* at 24, Trainer\(max_steps=3\) ends before the first report, which is after 7 steps",
    ),
}


def test_size_without_validation_is_refused_with_manual_optimization(bench: Bench) -> None:
    trainer = quiet_trainer(bench.callback(steps="unchanged"), max_steps=3)
    with pytest.raises(ZeusBSOConfigError, match=r"^batch sizes 24, 48 .* at 24, Trainer\(max_steps=3\) ends before"):
        trainer.fit(ManualModule(), train_loader())
    assert not bench.is_registered()


@pytest.mark.parametrize(("data", "options", "problem"), IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_impossible_size_of_a_described_job_is_refused_before_a_trial(
    bench: Bench, data: Callable[[], Any], options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ZeusBSOConfigError, match=problem):
        quiet_trainer(bench.callback(steps="unchanged"), **options).fit(Classifier(), data())
    assert not bench.is_registered()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"val_check_interval": 12}, r"an epoch has 11 batches, fewer than Trainer\(val_check_interval=12\)"),
        ({"max_steps": 10}, r"Trainer\(max_steps=10\) ends before the first report, which is after 11 steps"),
    ],
)
def test_training_without_evaluation_at_own_size_is_refused_at_each_size(
    bench: Bench, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ZeusBSOConfigError, match=f"^batch sizes 24, 48 cannot be trained here: at 24, {problem}"):
        quiet_trainer(bench.callback(), **options).fit(Classifier(), train_loader())
    assert not bench.is_registered()


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"val_check_interval": 5}, (2, 4, 8, 16, 32)),  # 168 images make five batches of 42 at most
        ({"val_check_interval": 0.5}, (2, 4, 8, 16, 32, 64, 128)),
        ({"max_steps": 11}, (16, 32, 64, 128)),
        ({"max_steps": 11, "val_check_interval": 0.5}, (8, 16, 32, 64, 128)),
        ({"max_steps": 11, "val_check_interval": 2}, (2, 4, 8, 16, 32, 64, 128)),
        ({"limit_train_batches": 9, "max_steps": 9}, (2, 4, 8, 16, 32, 64, 128)),
    ],
)
def test_impossible_sizes_are_not_guessed(
    bench: Bench, options: dict[str, Any], sizes: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for steps in ("samples", "unchanged"):
        callback = bench.guessing(steps=steps, job_id=f"{bench.job_id}-{steps}")
        quiet_trainer(callback, **options).fit(Classifier(), train_loader())
        with BsoClient(bench.server.url) as client:
            found = client.show_job(callback.trial.job_id).job.batch_sizes
        assert found == (sizes if steps == "unchanged" else (2, 4, 8, 16, 32, 64, 128))
        assert callback.converged
    assert f"batch sizes {', '.join(map(str, sizes))}" in caplog.text


def test_sizes_beyond_a_device_are_not_guessed_if_nothing_accumulates(bench: Bench) -> None:
    quiet_trainer(bench.guessing(max_per_device_batch_size=40)).fit(ManualModule(), train_loader())
    assert bench.view().job.batch_sizes == (2, 4, 8, 16, 32)


def test_data_created_by_a_later_hook_do_not_prevent_a_described_job(bench: Bench) -> None:
    class Late(Classifier):
        data: Any = None

        def configure_model(self) -> None:
            self.data = digits()[0]

        def train_dataloader(self) -> Any:
            return DataLoader(Subset(self.data, range(len(self.data))), batch_size=16)

    module = Late()
    quiet_trainer(bench.callback()).fit(module)
    assert module.seen_sizes == EPOCH_OF_48


def test_rehearsed_callback_counts_steps_like_a_new_callback(bench: Bench) -> None:
    callback = bench.callback()
    quiet_trainer(callback, fast_dev_run=True).fit(Classifier(), train_loader())
    with pytest.raises(ZeusBSOConfigError, match="an optimizer step followed after each 2 batches"):
        quiet_trainer(callback).fit(ByHand(), train_loader())
    assert is_withdrawn(bench)


def test_variable_batches_of_the_right_mean_size_are_trained(bench: Bench) -> None:
    module = Classifier()
    quiet_trainer(bench.callback()).fit(module, DataLoader(digits()[0], batch_sampler=Ragged()))
    assert module.seen_sizes == [44, 52, 46, 50, 47, 49]
    assert bench.only_trial().state is TrialState.COMPLETED


MIXTURES: dict[str, Callable[[], dict[str, Any]]] = {
    "list": lambda: {"train_dataloaders": [train_loader(), small_loader()]},
    "dict": lambda: {"train_dataloaders": {"large": train_loader(), "small": small_loader()}},
    "combined": lambda: {"train_dataloaders": CombinedLoader([train_loader(), small_loader()])},
    "data module": lambda: {"datamodule": MixedData()},
}


@pytest.mark.parametrize("data", MIXTURES.values(), ids=MIXTURES.keys())
def test_several_loaders_keep_their_proportion(
    bench: Bench, data: Callable[[], dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "zeus_plugins")
    module = Classifier()
    quiet_trainer(bench.callback()).fit(module, **data())
    assert module.seen_sizes == [size for pair in zip(EPOCH_OF_48, [12, 12, 12, 6], strict=True) for size in pair]
    assert caplog.text.count("keep their proportion: [16, 4] samples become [48, 12]") == 1


def test_indivisible_proportion_is_refused(bench: Bench) -> None:
    loaders = [DataLoader(digits()[0], batch_size=16), DataLoader(digits()[0], batch_size=3)]
    with pytest.raises(ZeusBSOConfigError, match=r"16:3 samples, which cannot become 24 .* multiples of 16 for each"):
        quiet_trainer(bench.callback(bench.job(batch_sizes=(24,), default_batch_size=24))).fit(Classifier(), loaders)
    assert is_withdrawn(bench)


def test_missing_metric_costs_the_batch_size_no_attempt(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ZeusBSOConfigError, match="'accuracy' is not among the logged metrics"):
        quiet_trainer(bench.callback(monitor="accuracy")).fit(Classifier(), train_loader())
    assert bench.only_trial().end_reason is EndReason.REFUSED
    said = "monitor='accuracy' is not among the metrics of the sanity check ['score', 'val_acc']"
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [message.startswith(said) for message in warnings] == [True]


EARLY: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "EarlyStopping": (
        lambda: {"callbacks": [EarlyStopping("score", patience=1, mode="max")]},
        r"\(EarlyStopping\(monitor='score'\) in epoch 2\)",
    ),
    "max_steps": (lambda: {"max_steps": 22}, r"\(max_steps=8\)"),
    "max_time": (lambda: {"callbacks": [Timer({"seconds": 0})]}, r"\(max_time\)"),
}


@pytest.mark.parametrize(("options", "rule"), EARLY.values(), ids=EARLY.keys())
def test_lightning_training_ended_by_a_stopping_rule_names_the_rule(
    bench: Bench, options: Callable[[], dict[str, Any]], rule: str
) -> None:
    given = options()
    callbacks = given.pop("callbacks", [])
    zeus = bench.callback(bench.job(NEVER, max_epochs=9), on_failure="stop")
    quiet_trainer(zeus, *callbacks, **{"max_epochs": 9} | given).fit(Classifier(), train_loader())
    trial = bench.only_trial()
    assert (trial.state, trial.end_reason) == (TrialState.FAILED, EndReason.ENDED_EARLY)
    assert re.search(rule, trial.message or "")
