"""Trainings of Lightning and Hugging Face's Trainer behind one interface, for tests of shared behaviour."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from tests.support.job_bench import CountingMonitor, JobBench
from tests.support.power_limit_bench import ANY_LENGTH, LIMITS_W, machine
from zeus_plugins import JobSpec

TRAIN_IMAGES = 168
VAL_IMAGES = 40
STEPS_OF_16 = 11  # optimizer steps of 16 samples in an epoch
VALIDATION = 100  # counts per validation
VALIDATION_S = 1000.0  # seconds per validation


@functools.cache
def digit_tensors() -> tuple[Tensor, Tensor]:
    """Return all images and their labels."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)


class Work:
    """Counter of a training's work: 1 per trained batch, `VALIDATION` per validation.

    Args:
        events: Events by batch number, counted from 1: an error is raised, any other object is called.

    Attributes:
        monitor: Monitor that measures a second and ten joules per count.
    """

    def __init__(self, events: Mapping[int, BaseException | Callable[[], object]] | None = None) -> None:
        self._events = events or {}
        self.batches = self.validations = 0
        self.monitor: Any = CountingMonitor(self._count)

    def batch(self) -> None:
        self.batches += 1
        event = self._events.get(self.batches)
        if isinstance(event, BaseException):
            raise event
        if event is not None:
            event()

    def validation(self) -> None:
        self.validations += 1

    def _count(self) -> int:
        return self.batches + VALIDATION * self.validations


class Queued(Work):
    """Work on a device that lags behind the calls which queue it, by up to `depth`, unless `drain` waits for it."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self._depth, self._done = depth, 0

    def drain(self) -> None:
        self._done = super()._count()

    def _count(self) -> int:
        self._done = max(self._done, super()._count() - self._depth)
        return self._done


class Powered(Work):
    """Work on a simulated machine: batches cost as the table states under the limit in force; validations take long."""

    def __init__(self, events: Mapping[int, BaseException | Callable[[], object]] | None = None) -> None:
        super().__init__(events)
        self.machine = machine()
        self.monitor = self.machine.monitor
        (self.device,) = self.machine.devices
        self.limits_of_steps: list[float] = []
        self.limits_of_validations: list[float] = []

    def batch(self) -> None:
        self.limits_of_steps.append(self.device.limit_w())
        self.machine.train()
        super().batch()

    def validation(self) -> None:
        self.limits_of_validations.append(self.device.limit_w())
        self.be_slow()

    def be_slow(self) -> None:
        self.machine.time_s += VALIDATION_S

    def options(self, **options: Any) -> dict[str, Any]:
        """Return options of a power-limit callback for this machine, by default with three steps per limit."""
        defaults: dict[str, Any] = {"warmup_steps": 1, "profile_steps": 2, "limits_w": LIMITS_W}
        return {**ANY_LENGTH, **defaults, "energy_monitor": self.monitor, "devices": [self.device], **options}


def energy_rows(*epochs: int) -> list[dict[str, float]]:
    """Return the logged metrics of epochs in which a `Work` counts these numbers."""
    return [
        {
            "zeus/epoch_time_s": epoch,
            "zeus/epoch_energy_j": 10.0 * epoch,
            "zeus/time_s": sum(epochs[: number + 1]),
            "zeus/energy_j": 10.0 * sum(epochs[: number + 1]),
        }
        for number, epoch in enumerate(epochs)
    ]


class Training(ABC):
    """A training of a linear model on the digits, ready to begin.

    Attributes:
        trainer: The framework's trainer.
        model: The framework's model, which records `seen_sizes`.
    """

    trainer: Any
    model: Any

    @property
    def sizes(self) -> list[int]:
        """Number of samples of each trained batch."""
        return list(self.model.seen_sizes)

    @property
    @abstractmethod
    def steps(self) -> tuple[int, int]:
        """Optimizer steps made, and optimizer steps expected by the framework."""

    @property
    @abstractmethod
    def epochs(self) -> float:
        """Number of trained epochs."""

    @property
    @abstractmethod
    def accumulation(self) -> set[int]:
        """Observed numbers of batches per optimizer step."""

    @property
    @abstractmethod
    def script(self) -> tuple[int, int]:
        """Present batch size and accumulation of the script."""

    @abstractmethod
    def train(self, checkpoint: Path | None = None) -> None:
        """Train, from a checkpoint or the start."""

    @abstractmethod
    def logged(self, name: str) -> list[dict[str, float]]:
        """Return the rows logged with a metric of this name, without the framework's own metrics."""

    @abstractmethod
    def left_behind(self, *callbacks: Any) -> list[str]:
        """Return the remaining patches of the trainer, its parts and these callbacks."""


@dataclass
class Plan:
    """A training to make.

    Attributes:
        work: Further work of its model.
        scores: Scores of its validations in order; the last is repeated.
        epochs: Maximum number of epochs.
        size: Samples per batch in the script.
        samples: Samples of an epoch.
        accumulation: Batches per optimizer step in the script.
        validate_every: Steps between validations; None means an epoch.
        save_every: Steps between checkpoints; 0 means an epoch, None never.
        data: Data in place of the digits, in the form of the framework.
    """

    work: Work = field(default_factory=Work)
    scores: tuple[float, ...] = ()
    epochs: int = 1
    size: int = 16
    samples: int = TRAIN_IMAGES
    accumulation: int = 1
    validate_every: int | None = None
    save_every: int | None = None
    data: Any = None


@dataclass
class FrameworkBench(JobBench):
    """A framework, a server with a separate job, and a folder for checkpoints.

    Attributes:
        BatchSize, Energy, PowerLimit: The framework's callbacks.
        Watch: Callback of the framework that records the epochs of a batch-size callback's reports.
        SANITY_CHECKS: Validations before the first step of a training.
        CTRL_C: Exception that Ctrl-C causes.
        HAS_LOGGER: True if lines for the user go to a logger, and metrics only to loggers.
        EPOCHS_OPTION: Name of the number of epochs in messages.
    """

    BatchSize: ClassVar[Any]
    Energy: ClassVar[Any]
    PowerLimit: ClassVar[Any]
    Watch: ClassVar[Any]
    SANITY_CHECKS: ClassVar[int] = 0
    CTRL_C: ClassVar[BaseException] = KeyboardInterrupt()
    HAS_LOGGER: ClassVar[bool] = False
    EPOCHS_OPTION: ClassVar[str]

    folder: Path

    def callback(self, job: JobSpec | None = None, monitor: str = "score", **options: Any) -> Any:
        job = job or self.job()
        if "score" in monitor:  # this name does not say for certain that higher is better
            job = job.model_copy(update={"higher_is_better_metric": True})
        return self.BatchSize(job, monitor, **self.callback_options(options))

    def guessing(self, target: float = 0.0, monitor: str = "score", **options: Any) -> Any:
        """Return a callback with only a target and a metric."""
        mode = "max" if monitor == "score" else None
        said = {"monitor": monitor, "mode": mode, "target": target, "job_id": self.job_id} | options
        return self.BatchSize(**self.callback_options(said))

    def training(self, *callbacks: Any, **options: Any) -> Any:
        """Return a training that is ready to begin, by the attributes of a `Plan` and options of the framework."""
        planned = {each.name: options.pop(each.name) for each in fields(Plan) if each.name in options}
        return self._make(callbacks, Plan(**planned), options)

    def _make(self, callbacks: tuple[Any, ...], plan: Plan, options: dict[str, Any]) -> Training:
        raise NotImplementedError

    def checkpoint(self, step: int) -> Path:
        """Return the checkpoint after `step` steps of a training in this folder."""
        raise NotImplementedError

    def saved_trial(self, step: int) -> dict[str, Any]:
        """Return the trial in this checkpoint, loaded without pickle."""
        raise NotImplementedError

    def forking(self, *, stay: bool) -> dict[str, Any]:
        """Return options of a training with a forked loader process, which persists between epochs if `stay`."""
        raise NotImplementedError

    def slow_saver(self, work: Powered) -> Any:
        """Return a callback that slows down checkpoints every five steps."""
        raise NotImplementedError


@pytest.fixture(autouse=True, scope="module", name="_one_thread")
def use_one_thread() -> Iterator[None]:
    """Use one thread, because small networks gain nothing from several, which compete with parallel tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(name="bench")
def make_bench_without_server(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FrameworkBench:
    monkeypatch.delenv("ZEUS_SERVER_URL", raising=False)
    monkeypatch.setenv("ZEUS_BSO_DATABASE_URL", f"sqlite:///{tmp_path / 'bso.sqlite3'}")
    made: FrameworkBench = kind(None, "digits-1", tmp_path / "training")
    return made
