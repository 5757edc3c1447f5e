"""Trainings of Lightning and of Hugging Face's Trainer behind one face, for tests of what their callbacks do alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tests.support.job_bench import CountingMonitor, JobBench
from tests.support.power_limit_bench import LIMITS_W, Recorder, machine
from zeus_plugins import JobSpec

TRAIN_IMAGES = 168
STEPS_OF_16 = 11  # in an epoch of them
VALIDATION = 100  # of a `Work`'s count
VALIDATION_S = 1000.0  # of a `Powered`'s time


class Work:
    """What the model of a training counts: one for each batch that it trains, `VALIDATION` for each validation.

    Args:
        events: What happens at a batch, by its number, counted from 1: an error is raised, anything else is called.

    Attributes:
        monitor: Measures a second and ten joules for each thing counted.
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
    """Work on a pretended machine: batches cost what its table says under the limit in force; validations take long."""

    def __init__(self, events: Mapping[int, BaseException | Callable[[], object]] | None = None) -> None:
        super().__init__(events)
        self.machine = machine()
        self.monitor = self.machine.monitor
        self.device = Recorder(self.machine.devices[0])
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
        """A power-limit callback's for this machine: three steps for each limit, unless these say otherwise."""
        defaults: dict[str, Any] = {"warmup_steps": 1, "profile_steps": 2, "limits_w": LIMITS_W}
        return {**defaults, "energy_monitor": self.monitor, "devices": [self.device], **options}


def energy_rows(*epochs: int) -> list[dict[str, float]]:
    """What is logged of epochs that a `Work` counts so much in."""
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
    """A training that may begin, of the digits and a linear model.

    Attributes:
        trainer: The framework's own.
        model: Likewise; it notes `seen_sizes`.
    """

    trainer: Any
    model: Any

    @property
    def sizes(self) -> list[int]:
        """The samples of each batch that was trained."""
        return list(self.model.seen_sizes)

    @property
    @abstractmethod
    def steps(self) -> tuple[int, int]:
        """Optimizer steps that were made, and those that the framework counted on."""

    @property
    @abstractmethod
    def epochs(self) -> float:
        """Epochs that were trained."""

    @property
    @abstractmethod
    def accumulation(self) -> set[int]:
        """Batches for an optimizer step, as they were seen in force."""

    @property
    @abstractmethod
    def script(self) -> tuple[int, int]:
        """The script's batch size and accumulation, as they stand now."""

    @abstractmethod
    def train(self, checkpoint: Path | None = None) -> None:
        """Train, from a checkpoint or the start."""

    @abstractmethod
    def logged(self, name: str) -> list[dict[str, float]]:
        """What was logged together with a metric of this name, without what is not ours."""

    @abstractmethod
    def left_behind(self, *callbacks: Any) -> list[str]:
        """The patches that are still there of the trainer, its parts and these callbacks."""


@dataclass
class FrameworkBench(JobBench):
    """A framework, a server with a job of one's own, and a folder for checkpoints.

    Attributes:
        BatchSize, Energy, PowerLimit: The framework's callbacks.
        Watch: A framework's callback that notes the epochs of a batch-size callback's reports.
        SANITY_CHECKS: Validations before the first step of a training.
        CTRL_C: What arrives of Ctrl-C.
        HAS_LOGGER: Whether what is told goes to a logger, and what is logged to loggers alone.
        EPOCHS_OPTION: How the framework names the number of epochs in a message.
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
        return self.BatchSize(job or self.job(), monitor, **self.callback_options(options))

    def guessing(self, target: float = 0.0, monitor: str = "score", **options: Any) -> Any:
        """A callback that is told a target and a metric alone."""
        said = {"monitor": monitor, "target": target, "job_id": self.job_id} | options
        return self.BatchSize(**self.callback_options(said))

    def training(
        self,
        *callbacks: Any,
        work: Work | None = None,
        scores: tuple[float, ...] = (),
        epochs: int = 1,
        size: int = 16,
        samples: int = TRAIN_IMAGES,
        accumulation: int = 1,
        validate_every: int | None = None,
        save_every: int | None = None,
        **options: Any,
    ) -> Training:
        """A training that is still to begin.

        Args:
            callbacks: The trainer's.
            work: What its model does beside training.
            scores: Of its validations, one after another; the last one stays.
            epochs: The most that it trains.
            size: Samples per batch, as the script says.
            samples: Those of an epoch.
            accumulation: Batches for an optimizer step, as the script says.
            validate_every: Steps; None: an epoch.
            save_every: Steps after which a checkpoint follows; 0: an epoch; None: never.
            options: The framework's own.
        """
        raise NotImplementedError

    def checkpoint(self, step: int) -> Path:
        """The checkpoint of a training in this folder after so many steps."""
        raise NotImplementedError

    def saved_trial(self, step: int) -> dict[str, Any]:
        """The trial that this checkpoint holds, as it is read without trust."""
        raise NotImplementedError

    def forking(self, *, stay: bool) -> dict[str, Any]:
        """Options of a training that loads its data in two forked processes, which stay between epochs or not."""
        raise NotImplementedError

    def slow_saver(self, work: Powered) -> Any:
        """A callback that makes checkpoints every five steps take long."""
        raise NotImplementedError


@pytest.fixture(autouse=True, scope="module", name="_one_thread")
def use_one_thread() -> Iterator[None]:
    """So small a network gains nothing from several threads, and waits for them where tests run side by side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
