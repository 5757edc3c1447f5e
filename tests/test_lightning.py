"""Real fits of a tiny network against a real server process."""

from __future__ import annotations

import logging
import pickle
import signal
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

from tests import lightning_models as models
import pytest
import torch
from tests.conftest import Server, free_port
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from tests.lightning_models import USERS_SIZE, Classifier, TrainOnly, quiet_trainer, train_loader
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from zeus_plugins import JobSpec
from zeus_plugins.client import BsoClient
from zeus_plugins.energy import EnergyMonitor, EstimateMonitor, Measurement, ReplayMonitor
from zeus_plugins.errors import (
    ZeusBSOConfigError,
    ZeusBSOOperationOrderError,
    ZeusBSOServerUnreachableError,
    ZeusBSOTrainFailError,
)
from zeus_plugins.lightning import ZeusBSOCallback
from zeus_plugins.protocol import EndReason, GpuConfig, JobView, TrialState, TrialView
from zeus_plugins.session import TrialSession

pytestmark = [
    # A loader in the training's own process is the fastest for digits.
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    # Lightning calls a deprecated part of torch whenever it walks a collection of loaders.
    pytest.mark.filterwarnings("ignore:.*isinstance\\(treespec, LeafSpec\\):FutureWarning"),
]

GPUS = GpuConfig(max_power=100.0, number_of_gpus=1, gpu_model="A40")
SERVERS_SIZE = 48  # the job's default, which the first trial gets
NEXT_SIZE = 24  # what the second trial gets when the first reached its target
EPOCH_OF_48 = [48, 48, 48, 24]
EPOCH_OF_16 = [16] * 10 + [8]
NEVER = 2.0  # a score no module reaches
AT_ONCE = 0.0  # a score every module has from the start


def seconds_and_joules(time_s: float, energy_j: float) -> ReplayMonitor:
    """Every window took as long and as much."""
    return ReplayMonitor(repeat(Measurement(time_s, energy_j, "replayed")), GPUS)


@dataclass
class Bench:
    """A running server, and one job that no other test knows."""

    server: Server
    job_id: str

    def job(self, target: float = AT_ONCE, **spec: Any) -> JobSpec:
        defaults = {"batch_sizes": (NEXT_SIZE, SERVERS_SIZE), "default_batch_size": SERVERS_SIZE, "max_epochs": 1}
        return JobSpec(job_id=self.job_id, job_id_prefix="digits", target_metric=target, **(defaults | spec))

    def callback(
        self,
        job: JobSpec | None = None,
        monitor: str = "score",
        *,
        energy_monitor: EnergyMonitor | None = None,
        **options: Any,
    ) -> ZeusBSOCallback:
        energy_monitor = energy_monitor or seconds_and_joules(1.0, 10.0)
        options = {"server_url": self.server.url, "energy_monitor": energy_monitor} | options
        return ZeusBSOCallback(job or self.job(), monitor, **options)

    def is_registered(self) -> bool:
        with BsoClient(self.server.url) as client:
            return self.job_id in {job.job_id for job in client.list_jobs().jobs}

    def view(self) -> JobView:
        with BsoClient(self.server.url) as client:
            return client.show_job(self.job_id)

    def only_trial(self) -> TrialView:
        (trial,) = self.view().trials
        return trial

    def complete_first_trial(self, job: JobSpec) -> None:
        """Without a training: 1 s and 10 J, 55 J by the job's cost."""
        with BsoClient(self.server.url) as client:
            session = TrialSession(job, client, seconds_and_joules(1.0, 10.0))
            assert session.ask() == SERVERS_SIZE
            session.begin_measurement()
            assert session.report(1.0, 1).converged


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that leave it running."""
    folder = tmp_path_factory.mktemp("server")
    server = Server(f"sqlite:///{folder / 'bso.sqlite3'}", folder / "server.log")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def bench(shared_server: Server) -> Bench:
    return Bench(shared_server, f"digits-{uuid.uuid4().hex}")


@pytest.fixture
def mortal_bench(server: Server) -> Bench:
    """With a server that the test may kill."""
    return Bench(server, "digits-nightly")


class Watch(Callback):
    """Notes what the callback under test knows after each validation."""

    def __init__(self, zeus: ZeusBSOCallback) -> None:
        self._zeus = zeus
        self.epochs: list[float | None] = []
        self.sanity_metrics: list[float | None] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        if trainer.sanity_checking:
            self.sanity_metrics.append(self._zeus.trial.metric)
        else:
            self.epochs.append(self._zeus.trial.epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        if not trainer.enable_validation:
            self.epochs.append(self._zeus.trial.epoch)


# How a user may give the training data: the module, and what to pass to fit.
DataKind = Callable[[], tuple[TrainOnly, dict[str, Any]]]
DATA: dict[str, DataKind] = {
    "datamodule.batch_size": lambda: (Classifier(), {"datamodule": models.AttributeData()}),
    "datamodule.hparams": lambda: (Classifier(), {"datamodule": models.HyperparameterData()}),
    "hard-coded in the datamodule": lambda: (Classifier(), {"datamodule": models.HardCodedData()}),
    "read-only property": lambda: (Classifier(), {"datamodule": models.PropertyData()}),
    "built once in setup": lambda: (Classifier(), {"datamodule": models.BuiltOnceData()}),
    "module.batch_size": lambda: (models.SizedModule(), {}),
    "hard-coded in the module": lambda: (models.HardCodedModule(), {}),
    "loader": lambda: (Classifier(), {"train_dataloaders": train_loader()}),
    "subclass": lambda: (Classifier(), {"train_dataloaders": models.LoaderWithSurcharge(0.5)}),
    "batch sampler": lambda: (Classifier(), {"train_dataloaders": models.batch_sampler_loader()}),
    "stream": lambda: (Classifier(), {"train_dataloaders": models.stream_loader()}),
}
COLLECTIONS: dict[str, DataKind] = {
    "list": lambda: (Classifier(), {"train_dataloaders": models.loaders_in_a_list()}),
    "dict": lambda: (Classifier(), {"train_dataloaders": models.loaders_in_a_dict()}),
    "combined": lambda: (Classifier(), {"train_dataloaders": models.combined_loader()}),
}


def kinds(data: dict[str, DataKind]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", data.values(), ids=data.keys())


# The batch size


@kinds(DATA)
def test_every_way_to_give_data_trains_at_the_servers_size(bench: Bench, kind: DataKind) -> None:
    module, data = kind()
    trainer = quiet_trainer(bench.callback())
    trainer.fit(module, **data)
    assert module.seen_sizes == EPOCH_OF_48
    # The length of a stream is unknown, and Lightning's estimate then says -1.
    assert module.estimated_steps in (-1, trainer.global_step)
    assert trainer.global_step == len(EPOCH_OF_48)


@kinds(COLLECTIONS)
def test_every_loader_of_a_collection_gets_the_servers_size(bench: Bench, kind: DataKind) -> None:
    module, data = kind()
    trainer = quiet_trainer(bench.callback())
    trainer.fit(module, **data)
    assert module.seen_sizes == [size for size in EPOCH_OF_48 for _ in range(2)]
    assert module.estimated_steps == trainer.global_step == len(EPOCH_OF_48)


def test_reloaded_loaders_get_the_servers_size(bench: Bench) -> None:
    module = models.HardCodedModule()
    trainer = quiet_trainer(
        bench.callback(bench.job(NEVER, max_epochs=2), on_failure="stop"),
        max_epochs=2,
        reload_dataloaders_every_n_epochs=1,
    )
    trainer.fit(module)
    assert module.seen_sizes == EPOCH_OF_48 * 2
    assert module.estimated_steps == trainer.global_step


def test_data_that_comes_in_fixed_batches_is_refused_and_ends_the_trial(bench: Bench) -> None:
    with pytest.raises(ZeusBSOConfigError, match="does not say how many samples"):
        quiet_trainer(bench.callback()).fit(Classifier(), train_loader(batch_size=None))
    assert bench.only_trial().state is TrialState.FAILED


def test_accumulation_that_another_callback_changes_later_is_refused(bench: Bench) -> None:
    trainer = quiet_trainer(GradientAccumulationScheduler({0: 4}), bench.callback())
    module = Classifier()
    with pytest.raises(ZeusBSOConfigError, match=r"deliver \[48\] samples per batch instead of 12"):
        trainer.fit(module, train_loader())
    assert module.seen_sizes == []
    assert bench.only_trial().state is TrialState.FAILED


def test_the_chosen_size_is_logged_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="zeus_plugins"):
        quiet_trainer(bench.callback()).fit(Classifier(), train_loader())
    (said,) = [record for record in caplog.records if "batch size" in record.getMessage()]
    assert said.levelno == logging.INFO
    assert f"job {bench.job_id}, trial 1: batch size 48 (exploring" in said.getMessage()


def test_the_callback_can_be_pickled_before_fit(bench: Bench) -> None:
    monitor = EstimateMonitor(65.0)
    copy = pickle.loads(pickle.dumps(bench.callback(energy_monitor=monitor)))  # noqa: S301 - our own bytes
    module = Classifier()
    quiet_trainer(copy).fit(module, train_loader())
    assert module.seen_sizes == EPOCH_OF_48
    assert bench.only_trial().energy_source == monitor.source


# Taking everything back


def raise_at_step(step: int, error: BaseException) -> Callable[[int], None]:
    def before_step(global_step: int) -> None:
        if global_step == step:
            raise error

    return before_step


@pytest.mark.parametrize("error", [None, RuntimeError("the user's own")], ids=["after fit", "after an error"])
def test_everything_is_taken_back(bench: Bench, error: Exception | None) -> None:
    loader = models.batch_sampler_loader()
    data = models.AttributeData()
    hyperparameters = models.HyperparameterData()
    once = models.BuiltOnceData()
    loader = train_loader()
    sampler_loader = models.batch_sampler_loader()
    for given in (data, hyperparameters, once, loader, sampler_loader):
        holder = Bench(bench.server, f"{bench.job_id}-{type(given).__name__}-{id(given)}")
        module = models.SizedModule(before_step=raise_at_step(1, error) if error else lambda _: None)
        trainer = quiet_trainer(holder.callback(), accumulate_grad_batches=2)
        if error is None:
            trainer.fit(module, given)
        else:
            with pytest.raises(RuntimeError, match="the user's own"):
                trainer.fit(module, given)
        assert module.seen_sizes[0] == SERVERS_SIZE // 2
        assert trainer.accumulate_grad_batches == 2
        assert module.batch_size == USERS_SIZE
        assert "dataloader" not in vars(trainer.fit_loop._data_source)
