"""Recorded recurring trainings: epochs, energy, time and cost of a run at each batch size."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zeus_plugins.protocol import cost

_JOULES_PER_KWH = 3.6e6
_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Consumption:
    """Total energy (J) and time (s) of trainings that run one after another."""

    energy_j: float = 0.0
    time_s: float = 0.0

    def __add__(self, other: Consumption) -> Consumption:
        return Consumption(self.energy_j + other.energy_j, self.time_s + other.time_s)

    def __mul__(self, times: float) -> Consumption:
        return Consumption(self.energy_j * times, self.time_s * times)

    @property
    def energy_kwh(self) -> float:
        """Energy in kilowatt-hours."""
        return self.energy_j / _JOULES_PER_KWH

    @property
    def time_h(self) -> float:
        """Time in hours."""
        return self.time_s / _SECONDS_PER_HOUR

    def saved_against(self, default: Consumption | None) -> tuple[float | None, float | None]:
        """Return the shares of the energy and the time of `default` that were saved; None if unknown, or if it is 0."""
        if default is None:
            return None, None
        pairs = (self.energy_j, default.energy_j), (self.time_s, default.time_s)
        energy, time = (1 - own / theirs if theirs else None for own, theirs in pairs)
        return energy, time


@dataclass(frozen=True, slots=True)
class Epoch:
    """Time (s) and energy (J) of one epoch."""

    time_s: float
    energy_j: float


@dataclass(frozen=True, slots=True)
class SizeTrace:
    """Recorded runs of one batch size.

    `epochs_to_target` has the epoch at which each run reached the target, infinite if it never did; `epochs` has the
    time and energy of an epoch, by power limit (W).
    """

    batch_size: int
    epochs_to_target: tuple[float, ...]
    epochs: dict[float, Epoch]


@dataclass(frozen=True, slots=True)
class Workload:
    """Training job on one kind of GPU with the largest power limit `max_power_w`.

    Its sizes are ascending. A run that has not reached the target after `max_epochs` has failed.
    """

    name: str
    sizes: tuple[SizeTrace, ...]
    default_batch_size: int
    max_epochs: int
    max_power_w: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Run at one batch size and its chosen power limit.

    Attributes:
        epochs_to_target: As in `SizeTrace`, infinite if more than `max_epochs`.
        epoch: Epoch at the chosen power limit.
        profiling: First epoch of the size's first run, in which it tries all power limits; None if it tries none.
        epoch_j: Cost of `epoch`.
        expected_epochs: Expected epochs until a run reaches the target: each failed run costs `max_epochs` and is
            repeated; infinite if no run reaches the target.
    """

    batch_size: int
    epochs_to_target: tuple[float, ...]
    epoch: Epoch
    profiling: Epoch | None
    epoch_j: float
    expected_epochs: float

    @property
    def expected_cost_j(self) -> float:
        """Cost of the expected epochs, joules."""
        return self.expected_epochs * self.epoch_j

    @property
    def expected_consumption(self) -> Consumption | None:
        """Energy and time of the expected epochs; None if no run reaches the target."""
        if math.isinf(self.expected_epochs):
            return None
        return Consumption(self.epoch.energy_j, self.epoch.time_s) * self.expected_epochs


@dataclass(frozen=True, slots=True)
class Landscape:
    """All sizes of a workload, ascending, for one η and one way of choosing power limits.

    The oracle's profile has the lowest expected cost. The default's has the maximum power limit, because that is the
    owner's choice without an optimizer.
    """

    profiles: dict[int, Profile]
    oracle: Profile
    default: Profile


def landscape(workload: Workload, *, eta: float, optimal_power_limits: bool) -> Landscape:
    """Choose each size's power limit: with `optimal_power_limits`, that of the cheapest epoch, otherwise the largest.

    Raises:
        ValueError: No recorded run reaches the target.
    """
    profiles = {
        size.batch_size: _profile(size, workload, eta=eta, optimal=optimal_power_limits) for size in workload.sizes
    }
    oracle = min(profiles.values(), key=lambda profile: profile.expected_cost_j)
    if math.isinf(oracle.expected_cost_j):
        raise ValueError(f"{workload.name}: no recorded run reaches the target within {workload.max_epochs} epochs")
    default_trace = next(size for size in workload.sizes if size.batch_size == workload.default_batch_size)
    return Landscape(profiles, oracle, _profile(default_trace, workload, eta=eta, optimal=False))


def _profile(size: SizeTrace, workload: Workload, *, eta: float, optimal: bool) -> Profile:
    def cost_of(epoch: Epoch) -> float:
        return cost(energy_j=epoch.energy_j, time_s=epoch.time_s, max_power_w=workload.max_power_w, eta=eta)

    epochs = list(size.epochs.values())
    epoch = min(epochs, key=cost_of) if optimal else size.epochs[max(size.epochs)]
    mean = Epoch(sum(each.time_s for each in epochs) / len(epochs), sum(each.energy_j for each in epochs) / len(epochs))
    paths = tuple(epochs if epochs <= workload.max_epochs else math.inf for epochs in size.epochs_to_target)
    reached = [epochs for epochs in paths if math.isfinite(epochs)]
    failed_epochs = (len(paths) - len(reached)) * workload.max_epochs
    return Profile(
        batch_size=size.batch_size,
        epochs_to_target=paths,
        epoch=epoch,
        profiling=mean if optimal else None,
        epoch_j=cost_of(epoch),
        expected_epochs=(sum(reached) + failed_epochs) / len(reached) if reached else math.inf,
    )
