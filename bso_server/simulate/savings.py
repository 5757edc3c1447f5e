"""Energy, time and money that recurrences took and saved, compared with the default batch size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
