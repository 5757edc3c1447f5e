"""A trainer without a framework, alone or as one rank of several, with threads as ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

from zeus_plugins.protocol import Fingerprint
from zeus_plugins.training.batches import BatchSplit
from zeus_plugins.training.defaults import TrainingFacts
from zeus_plugins.training.patches import Patches
from zeus_plugins.training.run import ActiveRun, TrialRun
from zeus_plugins.training.steps import StepScale
from zeus_plugins.training.trial import TrialInfo

T = TypeVar("T")

# Time limit for ranks that wait for a missing rank.
LIMIT_S = 120.0


class Group:
    """Exchange objects between threads that act as ranks."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._things: list[Any] = [None] * world_size
        self._barrier = threading.Barrier(world_size)

    def exchanged(self, rank: int, thing: Any) -> list[Any]:
        self._things[rank] = thing
        self._barrier.wait(LIMIT_S)
        things = list(self._things)
        self._barrier.wait(LIMIT_S)
        return things


class Loader:
    batch_size = 16


class FakeTrainer:
    """A `TrainerPort` that follows orders and records them."""

    gpu_indices: Sequence[int] = ()
    accumulation = 1
    no_accumulation: str | None = None
    no_continuation: str | None = None
    given_model = None
    epochs_before = 0
    is_in_last_epoch = False
    model: Any = SimpleNamespace(parameters=list, state_dict=dict)
    keeps_optimizers = True
    machine = "here"
    own_gpus: Sequence[str] = ()

    def __init__(self, rank: int = 0, group: Group | None = None, devices: int | None = None) -> None:
        self._group = group or Group(1)
        self.rank = self.local_rank = rank
        self.world_size = self._group.world_size
        self.devices = devices or self.world_size
        self.loader = Loader()
        self.splits: list[BatchSplit] = []
        self.optimizer = SimpleNamespace(param_groups=[{"lr": 0.1}], defaults={})
        self.scheduler = SimpleNamespace(base_lrs=[0.1])
        self.logged: list[dict[str, float]] = []
        self.is_stopped = False
        self.meetings = 0
        self.miscounted: Exception | None = None
        self.said: list[str] = []
        self.hyperparameters: dict[str, str | int] = {}
        self.told_modes: Mapping[str, Any] = {}
        self.told = TrainingFacts(
            script="train", model="Net", samples=1000, step_size=64, devices=self.devices, unit=self.devices
        )

    def broadcast(self, thing: Any) -> Any:
        return self._group.exchanged(self.rank, thing)[0]

    def all_gather(self, thing: Any) -> list[Any]:
        self.meetings += 1
        return self._group.exchanged(self.rank, thing)

    def deliver(self, split: BatchSplit, patches: Patches, *, is_own: bool = False) -> None:  # noqa: ARG002 - as below
        self.splits.append(split)
        patches.set_attribute(self, "accumulation", split.accumulation)
        patches.set_attribute(self.loader, "batch_size", split.per_device)

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(model="Net", framework="none")

    def follow_samples(self, default: int, split: BatchSplit, patches: Patches) -> tuple[StepScale, list[str]]:  # noqa: ARG002 - a port's signature
        return StepScale(), []

    def facts(self, patches: Patches, *, counts_samples: bool) -> TrainingFacts:  # noqa: ARG002 - a port's signature
        return self.told

    def modes(self, monitor: str) -> Mapping[str, Any]:  # noqa: ARG002 - a port's signature
        return self.told_modes

    def say(self, line: str) -> None:
        self.said.append(line)

    def log_hyperparameters(self, values: dict[str, str | int], patches: Patches) -> None:  # noqa: ARG002 - as above
        self.hyperparameters |= values

    def delivered(self) -> Collection[float | None]:
        return [self.loader.batch_size]

    def check_samples(self) -> None:
        if self.miscounted is not None:
            raise self.miscounted

    def end_counts(self) -> None:
        self.miscounted = None

    def optimizers(self) -> tuple[Sequence[Any], Sequence[Any]]:
        return [self.optimizer], [self.scheduler]

    def dependence(self) -> tuple[bool, Sequence[Any]]:
        return False, [self.scheduler]

    def log(self, metrics: dict[str, float]) -> None:
        self.logged.append(metrics)

    def stop(self) -> None:
        self.is_stopped = True

    def train_again(self, epochs: int, patches: Patches, *, keeps_state: bool) -> None:  # noqa: ARG002 - as above
        self.is_stopped = False


def on_each_rank(world_size: int, train: Callable[[FakeTrainer], T]) -> list[T | Exception]:
    """Return the result or the exception of `train` on each rank."""
    group = Group(world_size)
    ends: list[Any] = [None] * world_size

    def play(rank: int) -> None:
        try:
            ends[rank] = train(FakeTrainer(rank, group))
        except Exception as error:
            ends[rank] = error

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
    return ends


def active(run: TrialRun) -> ActiveRun:
    """Return the active run of a training."""
    assert run.active is not None
    return run.active


def trial_of(run: TrialRun) -> TrialInfo:
    assert run.trial is not None
    return run.trial


def failing(error: Exception) -> Callable[..., Any]:
    """Return a function that raises the error."""

    def fail(*_: Any) -> Any:
        raise error

    return fail
