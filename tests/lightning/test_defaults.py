"""Lightning trainings for which only a target and a metric are stated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

from tests.support import lightning_bench as models
from tests.support.lightning_bench import QUIET, USERS_SIZE, Bench, Classifier, Loader, TrainOnly, quiet_trainer
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.training.defaults import hash_of_parameters

pytestmark = QUIET

SIZES = (2, 4, 8, 16, 32, 64, 128)


class MakesDataInSetup(Classifier):
    """The train loader needs data from the module's own `setup`, which Lightning calls after the callback's."""

    def __init__(self, batch_size: int | None = None) -> None:
        super().__init__()
        if batch_size is not None:
            self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        assert stage == "fit"
        self.data = models.digits()[0]

    def train_dataloader(self) -> Loader:
        return DataLoader(self.data, batch_size=USERS_SIZE)


@pytest.mark.parametrize(
    "kind",
    [
        lambda: (Classifier(), {"datamodule": models.AttributeData()}),
        lambda: (Classifier(), {"datamodule": models.HardCodedData()}),
        lambda: (models.HyperparameterModule(), {}),
        lambda: (Classifier(), {"train_dataloaders": models.train_loader()}),
        lambda: (Classifier(), {"train_dataloaders": models.batch_sampler_loader()}),
        lambda: (Classifier(), {"train_dataloaders": models.loaders_in_a_dict()}),
    ],
    ids=["data module", "hard-coded", "hyperparameter", "loader", "batch sampler", "dict"],
)
def test_size_is_read_from_data(bench: Bench, kind: Callable[[], tuple[TrainOnly, dict[str, Any]]]) -> None:
    module, data = kind()
    quiet_trainer(bench.guessing(), max_epochs=7).fit(module, **data)
    view = bench.view()
    assert (view.job.batch_sizes, view.job.default_batch_size) == (SIZES, USERS_SIZE)
    assert (view.job.max_epochs, view.job.higher_is_better_metric, view.job.target_metric) == (7, True, 0.0)
    assert module.seen_sizes[0] == USERS_SIZE
    assert view.job.fingerprint is not None
    told = {"model": type(module).__name__, "framework": "lightning", "optimizer": "SGD", "monitor": "score"}
    data = {"samples": 168, "data": "TensorDataset"}
    assert view.job.fingerprint.model_dump() == {**told, **data, "parameters": hash_of_parameters(module)}


def test_accumulated_batches_and_stream_count(bench: Bench) -> None:
    trainer = quiet_trainer(bench.guessing(), max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(Classifier(), models.stream_loader())
    job = bench.view().job
    assert (job.default_batch_size, job.batch_sizes) == (2 * USERS_SIZE, (4, 8, 16, 32, 64, 128, 256))


def test_module_with_data_from_own_setup_needs_stated_size(bench: Bench) -> None:
    with pytest.raises(ZeusBSOConfigError, match="is unknown before it begins: give the data a batch_size"):
        quiet_trainer(bench.guessing()).fit(MakesDataInSetup())
    assert not bench.is_registered()
    quiet_trainer(bench.guessing()).fit(MakesDataInSetup(USERS_SIZE))
    assert bench.view().job.batch_sizes == SIZES


def test_script_is_asked_for_loader_no_more_often_than_without_callback(bench: Bench) -> None:
    calls: list[str] = []

    class Counted(models.HardCodedData):
        def train_dataloader(self) -> Loader:
            calls.append("loader")
            return super().train_dataloader()

    for callbacks in ([], [bench.guessing(target=2.0, on_failure="stop")]):
        calls.append("fit")
        trainer = quiet_trainer(*callbacks, max_epochs=3, reload_dataloaders_every_n_epochs=1)
        trainer.fit(Classifier(), datamodule=Counted())
    without, with_ours = calls[: calls.index("fit", 1)], calls[calls.index("fit", 1) :]
    assert len(without) == len(with_ours) > 3


def test_checkpoint_callback_decides_direction_of_metric(bench: Bench, tmp_path: Path) -> None:
    class Drifting(Classifier):
        def validation_step(self, batch: models.Batch) -> None:
            super().validation_step(batch)
            self.log("drift", 1.5)

    def train(*callbacks: Callback) -> None:
        trainer = quiet_trainer(bench.guessing(target=2.0, monitor="drift"), *callbacks, enable_checkpointing=True)
        trainer.fit(Drifting(), models.train_loader(), models.val_loader())

    with pytest.raises(ZeusBSOConfigError, match=r"'drift' does not say .* say mode='max' or mode='min'"):
        train(ModelCheckpoint(tmp_path, monitor="score", mode="max"))
    assert not bench.is_registered()
    train(ModelCheckpoint(tmp_path, monitor="drift", mode="min"))
    view = bench.view()
    assert (view.job.higher_is_better_metric, view.trials[0].state) == (False, "completed")


def test_second_fit_of_trainer_continues_without_trial(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    zeus = bench.guessing()
    first = bench.training(zeus, epochs=3)
    first.train()
    first.model = Classifier()
    first.train()
    assert "this Trainer goes on after epoch 2 of an earlier training: it has its own batch size" in caplog.text
    assert bench.view().job.max_epochs == 3
    assert bench.view().trial_count == 1
    assert set(first.sizes) == {16, 8}  # A batch of 8 ends each epoch.
