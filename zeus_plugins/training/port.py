"""The interface between a trial and a trainer of any framework."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal, Protocol, TypeVar, cast

from zeus_plugins import energy
from zeus_plugins.energy import ClusterMonitor, EnergyMonitor, WindowMonitor, as_energy_monitor
from zeus_plugins.energy.counters import CounterMonitor
from zeus_plugins.energy.processes import synchronize
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.placement import Placement, Ranks, placed
from zeus_plugins.protocol import Fingerprint
from zeus_plugins.training.batches import BatchSplit, split_batch
from zeus_plugins.training.defaults import TrainingFacts
from zeus_plugins.training.patches import Patches
from zeus_plugins.training.steps import StepScale

T = TypeVar("T")

AGREEMENT_S = 60.0
"""Seconds that a rank waits for the answers of the others in `all_agree`."""

_logger = logging.getLogger("zeus_plugins.energy")


class Broadcasting(Ranks, Protocol):
    """The processes of a training, with a broadcast from rank 0."""

    def broadcast(self, thing: Any) -> Any:
        """Return on every rank the argument that rank 0 has passed; all ranks make this call."""


class TrainerPort(Broadcasting, Protocol):
    """A trainer, as a trial uses it."""

    @property
    def devices(self) -> int:
        """Number of devices that train on different data."""

    @property
    def accumulation(self) -> int:
        """Number of batches accumulated for an optimizer step, as currently set."""

    @property
    def no_accumulation(self) -> str | None:
        """Reason why the trainer cannot accumulate batches, as the beginning of a sentence; None if it can."""

    @property
    def no_continuation(self) -> str | None:
        """Reason why the trainer cannot train a second time within a launch, as a clause; None if it can."""

    @property
    def model(self) -> Any:
        """The trained torch module."""

    @property
    def given_model(self) -> Any:
        """The torch module that the training begins with; None if the training makes a new one."""

    @property
    def epochs_before(self) -> int:
        """Epochs of earlier trainings in this process, if the trainer continues to count from them; otherwise 0."""

    @property
    def is_in_last_epoch(self) -> bool:
        """True in the script's last epoch: the trainer ends by itself then, perhaps after an epoch of a callback."""

    def train_again(self, epochs: int, patches: Patches, *, keeps_state: bool) -> None:
        """Prepare the trainer to train its model for `epochs` more epochs, at the batch size of the latest `deliver`.

        Learning rates and schedules start again, for this batch size. If `keeps_state` is False, the optimizers start
        again, too, and the caller has reset the model. `patches` records the changes to the trainer. Raise an error if
        the trainer cannot train again.
        """

    @property
    def keeps_optimizers(self) -> bool:
        """Whether the trainer's next training uses the same optimizers again."""

    def follow_samples(self, default: int, split: BatchSplit, patches: Patches) -> tuple[StepScale, list[str]]:
        """Read all settings in steps or batches at the script's own size, and set them for a split; before `deliver`.

        Return the scale and the changes in words. If the script's own size is unknown, it is the `default`.
        """

    def deliver(self, split: BatchSplit, patches: Patches, *, is_own: bool = False) -> None:
        """Set the accumulation and the batch size of the training's loaders; `patches` records the changes.

        At another size than the script's own, a last batch of one sample is left out for models with a batch
        normalisation.

        From then on, a `SampleCount` checks the batches of each epoch. This call and the check raise
        `ZeusBSOConfigError` if the data do not take the batch size that is set.
        """

    def delivered(self) -> Collection[float | None]:
        """Return the samples per batch and device that the loaders declare; for mixed loaders, the largest number."""

    def check_samples(self) -> None:
        """Raise `ZeusBSOConfigError` if the mean size of the epoch's batches is not the size that was set."""

    def end_counts(self) -> None:
        """Check no more batches, as the trial is over."""

    def fingerprint(self) -> Fingerprint:
        """Return model, parameters, framework and optimizer of the training, as far as they are known at its start."""

    def facts(self, patches: Patches, *, counts_samples: bool) -> TrainingFacts:
        """Return the facts from which a job is guessed and sizes are checked; `patches` records any changes.

        `counts_samples` is True if settings in steps will follow the samples (`follow_samples`).
        """

    def modes(self, monitor: str) -> Mapping[str, Literal["max", "min"]]:
        """Return the direction ("max" or "min") that each other setting of the script, in words, gives the metric."""

    def say(self, line: str) -> None:
        """Show a line to the user, once for all ranks, however logging is configured."""

    def log_hyperparameters(self, values: dict[str, str | int], patches: Patches) -> None:
        """Add hyperparameters to those that the training logs to its experiment trackers."""

    def optimizers(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the optimizers and the learning rate schedulers of the training."""

    def dependence(self) -> tuple[bool, Sequence[Any]]:
        """Return whether the rates depend on the batch size, and the schedulers of steps that do not; on all ranks.

        The second part has the schedulers that a trainer advances with each step, and whose length the script has
        chosen for its own batch size.
        """

    def log(self, metrics: dict[str, float]) -> None:
        """Log metrics in addition to those of the training."""

    def stop(self) -> None:
        """End the training as soon as the trainer can."""


def decided(ranks: Broadcasting, decide: Callable[[], T]) -> T:
    """Call `decide` on rank 0, and return its answer or raise its error on every rank, so that no rank waits forever.

    All ranks make this call; the answer or error of `decide` must be picklable.
    """
    if ranks.world_size == 1:
        return decide()
    outcome: tuple[Any, Exception | None] = (None, None)
    if ranks.rank == 0:
        try:
            outcome = (decide(), None)
        except Exception as error:
            outcome = (None, error)
    answer, failed = ranks.broadcast(outcome)
    if failed is not None:
        raise failed
    return cast("T", answer)


def all_agree(ranks: Ranks, topic: str, is_able: bool) -> bool:
    """Return True if every rank makes this call about the same topic, with True, within `AGREEMENT_S` seconds.

    A rank that waits for others in a step cannot take part in a collective call, so that the ranks meet in the store of
    torch's process group.
    """
    if ranks.world_size == 1:
        return is_able
    answers = [f"zeus/{topic}/{rank}" for rank in range(ranks.world_size)]
    try:
        store = sys.modules["torch"].distributed.distributed_c10d._get_default_store()
        store.set(answers[ranks.rank], str(int(is_able)))
        try:
            store.wait(answers, timedelta(seconds=AGREEMENT_S))
        except Exception:
            store.set(answers[ranks.rank], "0")  # a later rank must not continue without this one
            raise
        return all(store.get(answer) == b"1" for answer in answers)
    except Exception as error:
        _logger.debug("the ranks did not agree about %s: %s", topic, error)
        return False


def splits_of(
    port: TrainerPort, batch_sizes: Sequence[int], most: int | None, facts: TrainingFacts | None = None
) -> dict[int, BatchSplit]:
    """Return the split of each global size over the devices; a batch of one device has at `most` this many samples.

    Raise `ZeusBSOConfigError` for sizes that cannot be trained, as far as the `facts` say.
    """
    devices, accumulation = port.devices, port.accumulation
    splits: dict[int, BatchSplit] = {}
    uneven, obstacles = [], {}
    for size in batch_sizes:
        split = split_batch(size, world_size=devices, accumulation=accumulation, max_per_device=most)
        if split is None:
            uneven.append(size)
            continue
        splits[size] = split
        obstacle = None if facts is None else facts.obstacle(split)
        if obstacle is not None:
            obstacles[size] = obstacle
    if uneven:
        raise ZeusBSOConfigError(
            f"the batch sizes {uneven} cannot be spread evenly over {devices} devices × {accumulation} accumulated "
            "batches: batch sizes are global, samples per optimizer step over all devices; choose multiples of "
            f"{devices * accumulation}"
        )
    if port.no_accumulation is not None and any(split.accumulation > 1 for split in splits.values()):
        raise ZeusBSOConfigError(
            f"{port.no_accumulation}, so sizes above max_per_device_batch_size={most} × {devices} devices cannot "
            "be reached: raise it, or drop those batch sizes from the job"
        )
    if obstacles:
        sizes, (first, obstacle) = ", ".join(map(str, obstacles)), next(iter(obstacles.items()))
        raise ZeusBSOConfigError(
            f"batch {'sizes' if len(obstacles) > 1 else 'size'} {sizes} cannot be trained here: at {first}, "
            f"{obstacle}. Change that setting, or choose other batch sizes"
        )
    return splits


def node_monitor(place: Placement, monitor: EnergyMonitor | WindowMonitor | None) -> EnergyMonitor:
    """Return the user's monitor, or the best one for the training devices of this machine."""
    found = as_energy_monitor(monitor or energy.auto(device_indices=place.gpus))
    if isinstance(found, energy.EstimateMonitor | CounterMonitor):
        found.include(place.processes)
    return found


class TrainingMonitor:
    """Monitor of the devices of all machines of a training. All ranks construct it and call `synchronize` together."""

    def __init__(self, ranks: Ranks, monitor: EnergyMonitor | WindowMonitor | None) -> None:
        self.place = place = placed(ranks)
        self._here = partial(node_monitor, place, monitor)
        self._cluster: ClusterMonitor | None = None
        if place.machines > 1:
            measure = self._here if place.is_first else None
            self._cluster = ClusterMonitor(measure, rank=ranks.rank, all_gather=ranks.all_gather)

    def monitor(self) -> EnergyMonitor:
        """Return the monitor of all devices, for rank 0."""
        return self._cluster or self._here()

    def synchronize(self) -> None:
        """Wait for the queued work of the device and for the other machines; call it before a window begins or ends."""
        synchronize()
        if self._cluster is not None:
            self._cluster.synchronize()

    def close(self) -> None:
        """Stop measuring on this rank; never raises."""
        if self._cluster is not None:
            self._cluster.close()
