"""What the tests of the Lightning callback share: a server, a job of one's own on it, and callbacks that watch."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from tests.support.job_bench import CountingMonitor, JobBench
from tests.support.lightning_models import TrainOnly
from tests.support.servers import Server
from zeus_plugins import JobSpec
from zeus_plugins.lightning import ZeusBSOCallback

# For every test that trains.
QUIET = [
    # A loader in the training's own process is the fastest for digits.
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    # Lightning calls a deprecated part of torch whenever it walks a collection of loaders.
    pytest.mark.filterwarnings("ignore:.*isinstance\\(treespec, LeafSpec\\):FutureWarning"),
]

EPOCH_OF_16 = [16] * 10 + [8]


class StepMonitor(CountingMonitor):
    """Counts the steps that a module trained."""

    def __init__(self) -> None:
        super().__init__(self._steps)
        self._module: TrainOnly | None = None

    def watch(self, module: TrainOnly) -> None:
        self._module = module

    def _steps(self) -> int:
        assert self._module is not None
        return len(self._module.seen_rates)


class Bench(JobBench):
    """One for Lightning."""

    def callback(self, job: JobSpec | None = None, monitor: str = "score", **options: Any) -> ZeusBSOCallback:
        return ZeusBSOCallback(job or self.job(), monitor, **self.callback_options(options))


@pytest.fixture(name="bench")
def make_bench(shared_server: Server) -> Bench:
    return Bench(shared_server, f"digits-{uuid.uuid4().hex}")


@pytest.fixture(name="mortal_bench")
def make_mortal_bench(server: Server) -> Bench:
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


class Interrupt(Callback):
    """Raises at the second training step."""

    def __init__(self, error: BaseException, before: Callable[[], None] = lambda: None) -> None:
        self._error = error
        self._before = before

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step == 2:
            self._before()
            raise self._error
