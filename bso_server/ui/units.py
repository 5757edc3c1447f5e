"""Numbers as people read them: three digits and a unit that fits; durations in two units; the age of an instant.

A space inside of what belongs together does not break.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache

SPACE = "\N{NO-BREAK SPACE}"
MINUS = "\N{MINUS SIGN}"

# Joules of each unit, largest first. From a kilowatt-hour on people know that better than megajoules.
_ENERGY = ((3.6e12, "GWh"), (3.6e9, "MWh"), (3.6e6, "kWh"), (1e3, "kJ"), (1.0, "J"), (1e-3, "mJ"), (1e-6, "µJ"))
_DURATIONS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def number(value: float, digits: int = 3) -> str:
    """So many significant digits, no exponent where that can be avoided, and groups of three for large numbers."""
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
    """A number that somebody has chosen, such as a target, with all of its digits."""
    return f"{value:.12g}".replace("-", MINUS)


def energy_unit(joules: float) -> tuple[float, str]:
    """The unit in which so much energy is told, and its joules."""
    return next(((size, name) for size, name in _ENERGY if abs(joules) >= 0.9995 * size), _ENERGY[-1])


@lru_cache(maxsize=8192)
def energy(joules: float) -> str:
    """Energy, or a cost in joules; a live page of a thousand runs tells of nearly the same ones each time."""
    if not joules:
        return f"0{SPACE}J"
    size, name = energy_unit(joules)
    return f"{number(joules / size)}{SPACE}{name}"


def duration(seconds: float) -> str:
    """A time in the two units that tell most of it."""
    if abs(seconds) < 10:
        return f"{number(seconds, 2)}{SPACE}s"
    left, sign = round(abs(seconds)), MINUS if seconds < 0 else ""
    for index, (size, name) in enumerate(_DURATIONS):
        if left >= size:
            whole, rest = divmod(left, size)
            below = _DURATIONS[index + 1] if index + 1 < len(_DURATIONS) else None
            second = 0 if below is None else rest // below[0]
            tail = f"{SPACE}{second}{SPACE}{below[1]}" if below is not None and second else ""
            return f"{sign}{whole}{SPACE}{name}{tail}"
    return f"0{SPACE}s"


def mass(grams: float) -> str:
    """A mass in the unit that fits."""
    size, name = next((each for each in ((1e6, "t"), (1e3, "kg")) if abs(grams) >= each[0]), (1.0, "g"))
    return f"{number(grams / size)}{SPACE}{name}"


def percent(share: float) -> str:
    """A share of a whole; one below a percent, and not nothing, keeps a digit."""
    value = share * 100
    text = f"{value:.1f}" if 0 < abs(value) < 1 else f"{value:.0f}"
    return text.replace("-", MINUS) + SPACE + "%"


def ago(then: datetime, now: datetime) -> str:
    """The age of an instant, such as ``3 min ago``."""
    seconds = (now - then).total_seconds()
    if seconds < 5:
        return "just now" if seconds > -5 else f"in{SPACE}{_largest(-seconds)}"
    return f"{_largest(seconds)}{SPACE}ago"


def _largest(seconds: float) -> str:
    size, name = next(((size, name) for size, name in _DURATIONS if seconds >= size), _DURATIONS[-1])
    return f"{int(seconds // size)}{SPACE}{name}"


def count(amount: int, one: str, many: str | None = None) -> str:
    """An amount with its noun."""
    return f"{number(amount, 15)}{SPACE}{one if amount == 1 else many or one + 's'}"


def listed(words: Sequence[str]) -> str:
    """Words as a list in a sentence."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def count_of_epochs(epochs: float) -> str:
    """Epochs, of which a training may have done a part."""
    return f"{number(epochs, 4)}{SPACE}{'epoch' if epochs == 1 else 'epochs'}"
