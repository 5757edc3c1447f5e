"""A recurring training as it was recorded: epochs, energy, time and cost of a run at each batch size, and savings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zeus_plugins.protocol import cost

_JOULES_PER_KWH = 3.6e6
_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Consumption:
    """Energy (J) of trainings, and time (s), of all of them one after another."""

    energy_j: float = 0.0
    time_s: float = 0.0

    def __add__(self, other: Consumption) -> Consumption:
        return Consumption(self.energy_j + other.energy_j, self.time_s + other.time_s)

    def __sub__(self, other: Consumption) -> Consumption:
        return Consumption(self.energy_j - other.energy_j, self.time_s - other.time_s)

    def __mul__(self, times: float) -> Consumption:
        return Consumption(self.energy_j * times, self.time_s * times)

    @property
    def energy_kwh(self) -> float:
        """Kilowatt-hours."""
        return self.energy_j / _JOULES_PER_KWH

    @property
    def time_h(self) -> float:
        """Hours."""
        return self.time_s / _SECONDS_PER_HOUR

    def money(self, price_per_kwh: float) -> float:
        """Price of the energy, in the currency of `price_per_kwh`."""
        return self.energy_kwh * price_per_kwh

    def as_json(self, price_per_kwh: float | None) -> dict[str, Any]:
        """The same in JSON's types, with ``money`` if there is a price."""
        money = {} if price_per_kwh is None else {"money": self.money(price_per_kwh)}
        return {"energy_j": self.energy_j, "energy_kwh": self.energy_kwh, "time_h": self.time_h, **money}


@dataclass(frozen=True, slots=True)
class Savings:
    """Savings of a number of recurrences over as many at the default batch size.

    Attributes:
        recurrences: Their number.
        consumed: Energy and time of all their trials.
        default: Expected at the default batch size; None if that never reaches the target.
    """

    recurrences: int
    consumed: Consumption
    default: Consumption | None

    @property
    def saved(self) -> Consumption | None:
        """Energy and time saved; None where the default never reaches the target."""
        return None if self.default is None else self.default - self.consumed

    @property
    def energy_share_saved(self) -> float | None:
        """The share of the default's energy that was saved; None where that is unknown or 0 J."""
        return None if self.default is None else _share_saved(self.consumed.energy_j, self.default.energy_j)

    @property
    def time_share_saved(self) -> float | None:
        """The same of time."""
        return None if self.default is None else _share_saved(self.consumed.time_s, self.default.time_s)

    def as_json(self, price_per_kwh: float | None) -> dict[str, Any]:
        """The same in JSON's types, without the consumption at the default."""
        saved = None if self.saved is None else self.saved.as_json(price_per_kwh)
        return {
            "recurrences": self.recurrences,
            **self.consumed.as_json(price_per_kwh),
            "saved": saved,
            "energy_share_saved": self.energy_share_saved,
            "time_share_saved": self.time_share_saved,
        }


def _share_saved(consumed: float, default: float) -> float | None:
    return 1 - consumed / default if default else None


@dataclass(frozen=True, slots=True)
class Epoch:
    """Time (s) and energy (J) of one epoch."""

    time_s: float
    energy_j: float


@dataclass(frozen=True, slots=True)
class SizeTrace:
    """The recorded runs of one batch size.

    Attributes:
        epochs_to_target: Of each recorded run the epoch at which it reached the target; infinite if it never did.
        epochs: An epoch by power limit (W).
    """

    batch_size: int
    epochs_to_target: tuple[float, ...]
    epochs: dict[float, Epoch]


@dataclass(frozen=True, slots=True)
class Workload:
    """A training job on one kind of GPU.

    Attributes:
        sizes: Its batch sizes, ascending.
        default_batch_size: Its owner's choice.
        max_epochs: A run that has not reached the target by then has failed.
        max_power_w: The largest power limit of the GPU.
    """

    name: str
    sizes: tuple[SizeTrace, ...]
    default_batch_size: int
    max_epochs: int
    max_power_w: float


@dataclass(frozen=True, slots=True)
class Profile:
    """A run at one batch size, power limits being decided.

    Attributes:
        epochs_to_target: As in `SizeTrace`, infinite if more than `max_epochs`.
        epoch: An epoch at the power limit that the run has.
        profiling: The first epoch of the size's first run, during which all power limits are tried; None if none are.
        epoch_j: Cost of `epoch`.
        expected_epochs: Of a run and of the runs that have to be repeated because they never reach the target; infinite
            if no run does.
    """

    batch_size: int
    epochs_to_target: tuple[float, ...]
    epoch: Epoch
    profiling: Epoch | None
    epoch_j: float
    expected_epochs: float

    @property
    def expected_cost_j(self) -> float:
        """Cost of so many epochs, joules."""
        return self.expected_epochs * self.epoch_j

    @property
    def expected_consumption(self) -> Consumption | None:
        """Energy and time of so many epochs; None if no run reaches the target."""
        if math.isinf(self.expected_epochs):
            return None
        return Consumption(self.epoch.energy_j, self.epoch.time_s) * self.expected_epochs


@dataclass(frozen=True, slots=True)
class Landscape:
    """Every size of a workload for one η and one way of choosing power limits.

    Attributes:
        profiles: Per batch size, ascending.
        oracle: The profile with the lowest expected cost.
        default: The profile of the default size at the maximum power limit, the owner's without an optimizer.
    """

    profiles: dict[int, Profile]
    oracle: Profile
    default: Profile


def landscape(workload: Workload, *, eta: float, optimal_power_limits: bool) -> Landscape:
    """Decide power limits: for each size that of the lowest cost of an epoch, or the largest.

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

    epoch = min(size.epochs.values(), key=cost_of) if optimal else size.epochs[max(size.epochs)]
    paths = tuple(epochs if epochs <= workload.max_epochs else math.inf for epochs in size.epochs_to_target)
    return Profile(
        batch_size=size.batch_size,
        epochs_to_target=paths,
        epoch=epoch,
        profiling=_mean(list(size.epochs.values())) if optimal else None,
        epoch_j=cost_of(epoch),
        expected_epochs=_expected_epochs(paths, workload.max_epochs),
    )


def _expected_epochs(paths: Sequence[float], max_epochs: int) -> float:
    """Expected epochs until a run reaches the target: every failure costs `max_epochs` and is repeated."""
    reached = [epochs for epochs in paths if math.isfinite(epochs)]
    if not reached:
        return math.inf
    return (sum(reached) + (len(paths) - len(reached)) * max_epochs) / len(reached)


def _mean(epochs: Sequence[Epoch]) -> Epoch:
    return Epoch(
        sum(epoch.time_s for epoch in epochs) / len(epochs), sum(epoch.energy_j for epoch in epochs) / len(epochs)
    )
