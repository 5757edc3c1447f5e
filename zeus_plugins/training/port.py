"""A trainer as a trial meets it, whatever its framework: the protocols, and what needs nothing but its ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeVar, cast

from zeus_plugins import energy
from zeus_plugins.energy import ClusterMonitor, EnergyMonitor, WindowMonitor, as_energy_monitor
from zeus_plugins.placement import Neighbours, Placement
from zeus_plugins.protocol import Fingerprint
from zeus_plugins.training.batches import BatchSplit
from zeus_plugins.training.defaults import TrainingFacts
from zeus_plugins.training.patches import Patches

T = TypeVar("T")


class Ranks(Neighbours, Protocol):
    """The processes of a training, as one of them sees them."""

    def broadcast(self, thing: Any) -> Any:
        """Return what rank 0 passes; every rank makes this call."""


class TrainerPort(Ranks, Protocol):
    """A trainer, as far as a trial is concerned with it."""

    @property
    def devices(self) -> int:
        """Number of devices that train on different data."""

    @property
    def accumulation(self) -> int:
        """Number of batches that are accumulated for an optimizer step, as is in force now."""

    @property
    def no_accumulation(self) -> str | None:
        """The reason for which the trainer cannot accumulate, as the beginning of a sentence; None when it can."""

    @property
    def keeps_optimizers(self) -> bool:
        """Whether the trainer's next training uses the same optimizers again."""

    def deliver(self, split: BatchSplit, patches: Patches) -> None:
        """Have the training accumulate as `split` says, and its loaders deliver batches of that size.

        `patches` takes note of every change; the run undoes them. From then on the batches of each epoch are counted as
        `SampleCount` does, which raises `ZeusBSOConfigError` within the epoch when they are others.

        Raises:
            ZeusBSOConfigError: The data come in batches that cannot be changed.
        """

    def delivered(self) -> Collection[float | None]:
        """Samples per batch and device, as each loader of the present epoch says; none where none says.

        Of loaders that deliver different sizes in a fixed proportion, what the largest delivers.
        """

    def check_samples(self) -> None:
        """Compare the samples counted in the epoch's batches, where their sizes differ, with what was set.

        Raises:
            ZeusBSOConfigError: On average they are others.
        """

    def fingerprint(self) -> Fingerprint:
        """The making of the training, as far as is known before it begins."""

    def facts(self, patches: Patches) -> TrainingFacts:
        """The training's facts, as it tells them before it begins. `patches` takes note of what has to be undone."""

    def say(self, line: str) -> None:
        """Show the user a line, once for all ranks, whatever logging is set up."""

    def log_hyperparameters(self, values: dict[str, str | int], patches: Patches) -> None:
        """Put values among the hyperparameters of the training that begins, in every experiment tracker that it has."""

    def show_progress(self, text: str, patches: Patches) -> None:
        """Show a text as field ``zeus`` of the progress bar, where there is one."""

    def optimizers(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """The optimizers and the learning rate schedulers of the training."""

    def schedules(self) -> Sequence[tuple[Any, float | None]]:
        """The schedulers, and how often the whole training steps each; None where nobody knows."""

    @property
    def schedule_remedy(self) -> str:
        """The framework's way to schedules that follow the batch size, as a sentence."""

    def log(self, metrics: dict[str, float]) -> None:
        """Log metrics beside those of the training."""

    def stop(self) -> None:
        """End the training as soon as the trainer can."""


def decided_by_rank_zero(decide: Callable[[], T], *, rank: int, world_size: int, broadcast: Callable[[Any], Any]) -> T:
    """Let rank 0 decide, and give every rank its answer or its error; a rank that raised alone would hang the rest.

    All `world_size` processes make this call; `broadcast` takes an object and returns that of rank 0. The answer of
    `decide`, and what it raises, must be picklable.
    """
    if world_size == 1:
        return decide()
    outcome: tuple[Any, Exception | None] = (None, None)
    if rank == 0:
        try:
            outcome = (decide(), None)
        except Exception as error:
            outcome = (None, error)
    answer, failed = broadcast(outcome)
    if failed is not None:
        raise failed
    return cast("T", answer)


def node_monitor(place: Placement, monitor: EnergyMonitor | WindowMonitor | None) -> EnergyMonitor:
    """The monitor of this machine's devices: the user's, or the best one that there is."""
    return as_energy_monitor(monitor or energy.auto(device_indices=place.gpus))


def cluster_monitor(
    ranks: Ranks, place: Placement, monitor: EnergyMonitor | WindowMonitor | None
) -> ClusterMonitor | None:
    """The monitor of a training on several machines, made by all ranks together; None for one machine."""
    if place.machines == 1:
        return None
    measure = (lambda: node_monitor(place, monitor)) if place.is_first else None
    return ClusterMonitor(measure, rank=ranks.rank, all_gather=ranks.all_gather)
