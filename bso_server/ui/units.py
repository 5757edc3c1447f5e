"""Numbers for people: three digits and a fitting unit, durations in two units, ages; all with no-break spaces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache

SPACE = "\N{NO-BREAK SPACE}"
MINUS = "\N{MINUS SIGN}"

# Joules of each unit, largest first. Kilowatt-hours are better known than megajoules.
ENERGY_UNITS = ((3.6e12, "GWh"), (3.6e9, "MWh"), (3.6e6, "kWh"), (1e3, "kJ"), (1.0, "J"), (1e-3, "mJ"), (1e-6, "µJ"))
_DURATIONS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def number(value: float, digits: int = 3) -> str:
    """Format with `digits` significant digits, groups of three from 10,000, and an exponent beyond 1e-4 and 1e12."""
    if not value or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -4 or magnitude >= 12:
        return f"{value:.{digits - 1}e}".replace("-", MINUS)
    places = max(digits - 1 - magnitude, 0)
    text = f"{round(value, digits - 1 - magnitude) if magnitude >= digits else value:,.{places}f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return text.replace(",", SPACE if abs(value) >= 10_000 else "").replace("-", MINUS)


def exact(value: float) -> str:
    """Format a number that a user has chosen, such as a target, with all of its digits."""
    return f"{value:.12g}".replace("-", MINUS)


def energy_unit(joules: float) -> tuple[float, str]:
    """Return the unit that fits an energy: its size in joules, and its name."""
    return next(((size, name) for size, name in ENERGY_UNITS if abs(joules) >= 0.9995 * size), ENERGY_UNITS[-1])


@lru_cache(maxsize=8192)
def energy(joules: float, unit: tuple[float, str] | None = None) -> str:
    """Format an energy, by default in the unit that fits it. Cached: refreshed pages repeat most of their figures."""
    size, name = unit or (energy_unit(joules) if joules else (1.0, "J"))
    return f"{number(joules / size)}{SPACE}{name}"


@dataclass(frozen=True, slots=True)
class PageUnits:
    """The units of all energies and costs on a page.

    Attributes:
        of_energy: The unit of energies: its size in joules, and its name.
        run_cost_j: The cost that is shown as 100 %, in joules; None before a run has reached the target.
    """

    of_energy: tuple[float, str]
    run_cost_j: float | None

    def energy(self, joules: float) -> str:
        """Format an energy."""
        return energy(joules, self.of_energy)

    def cost(self, cost_j: float) -> str:
        """Format a cost as a percentage of a run's cost; if that is None, as an energy."""
        return self.energy(cost_j) if self.run_cost_j is None else percent(cost_j / self.run_cost_j)

    def runs(self, cost_j: float) -> str:
        """Format a cost as a number of runs; if the cost of a run is None, as an energy."""
        return self.energy(cost_j) if self.run_cost_j is None else count(round(cost_j / self.run_cost_j, 1), "run")


def duration(seconds: float) -> str:
    """Format a duration in its largest unit and the next smaller one."""
    if abs(seconds) < 10:
        return f"{number(seconds, 2)}{SPACE}s"
    left, parts = round(abs(seconds)), list[tuple[int, str]]()
    for size, name in _DURATIONS:
        amount, left = divmod(left, size)
        if amount or parts:
            parts.append((amount, name))
    return (MINUS if seconds < 0 else "") + SPACE.join(f"{amount}{SPACE}{name}" for amount, name in parts[:2] if amount)


def mass(grams: float) -> str:
    """Format a mass in the unit that fits."""
    size, name = next((each for each in ((1e6, "t"), (1e3, "kg")) if abs(grams) >= each[0]), (1.0, "g"))
    return f"{number(grams / size)}{SPACE}{name}"


def percent(share: float) -> str:
    """Format a share as a percentage, with one decimal between 0 and 1 %."""
    value = share * 100
    # Adding 0 makes a negative zero positive.
    text = f"{round(value, 1) + 0.0:.1f}" if 0 < abs(value) < 1 else f"{value:.0f}"
    return text.replace("-", MINUS) + SPACE + "%"


def ago(then: datetime, now: datetime) -> str:
    """Format the age of an instant, such as ``3 min ago``."""
    seconds = (now - then).total_seconds()
    if abs(seconds) < 5:
        return "just now"
    size, name = next(each for each in _DURATIONS if abs(seconds) >= each[0])
    age = f"{int(abs(seconds) // size)}{SPACE}{name}"
    return f"{age}{SPACE}ago" if seconds > 0 else f"in{SPACE}{age}"


def count(amount: float, noun: str, digits: int = 15) -> str:
    """Format an amount with its noun."""
    return f"{number(amount, digits)}{SPACE}{noun}{'' if amount == 1 else 's'}"


def listed(words: Sequence[str]) -> str:
    """Join words with commas and "and"."""
    return "".join(words) if len(words) < 2 else f"{', '.join(words[:-1])} and {words[-1]}"
