"""What the tests of the Lightning callback share: a server, a job of one's own on it, and callbacks that watch."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from tests.conftest import Server
from tests.lightning_models import TrainOnly
from zeus_plugins import JobSpec
from zeus_plugins.client import BsoClient
from zeus_plugins.energy import Measurement, ReplayMonitor
from zeus_plugins.lightning import ZeusBSOCallback
from zeus_plugins.protocol import GpuConfig, JobView, TrialView
from zeus_plugins.session import TrialSession

# For every test that trains.
QUIET = [
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


class StepMonitor:
    """A second and ten joules for each step that a module trained, so that totals tell which steps were counted."""

    source = "counted steps"

    def __init__(self) -> None:
        self._windows: dict[str, int] = {}
        self._module: TrainOnly | None = None

    def watch(self, module: TrainOnly) -> None:
        self._module = module

    def _steps(self) -> int:
        assert self._module is not None
        return len(self._module.seen_rates)

    def gpus(self) -> GpuConfig:
        return GPUS

    def begin_window(self, name: str) -> None:
        self._windows[name] = self._steps()

    def end_window(self, name: str) -> Measurement:
        steps = self._steps() - self._windows.pop(name)
        return Measurement(float(steps), 10.0 * steps, self.source)


@dataclass
class Bench:
    """A running server, and one job that no other test knows."""

    server: Server
    job_id: str

    def job(self, target: float = AT_ONCE, **spec: Any) -> JobSpec:
        defaults = {"batch_sizes": (NEXT_SIZE, SERVERS_SIZE), "default_batch_size": SERVERS_SIZE, "max_epochs": 1}
        return JobSpec(job_id=self.job_id, job_id_prefix="digits", target_metric=target, **(defaults | spec))

    def callback(self, job: JobSpec | None = None, monitor: str = "score", **options: Any) -> ZeusBSOCallback:
        defaults: dict[str, Any] = {"server_url": self.server.url, "energy_monitor": seconds_and_joules(1.0, 10.0)}
        return ZeusBSOCallback(job or self.job(), monitor, **(defaults | options))

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


@pytest.fixture(scope="module", name="shared_server")
def make_shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that leave it running."""
    folder = tmp_path_factory.mktemp("server")
    server = Server(f"sqlite:///{folder / 'bso.sqlite3'}", folder / "server.log")
    server.start()
    yield server
    server.kill()


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
