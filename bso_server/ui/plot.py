"""The geometry of charts: axes with round numbers, and the parts that ``templates/charts.html`` draws; pure.

Horizontal places are shares of the width and vertical places are pixels, so a drawing fits every screen while its text
keeps its size. The stylesheet sets colours and hides labels on narrow screens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bso_server.ui import units

# Least distance between labels: vertical in pixels, horizontal as a share of a wide and of a narrow screen.
_LINE_HEIGHT = 20.0
_APART = 0.045
_APART_NARROW = 0.13

Ticks = list[tuple[float, str]]
"""Values on an axis, each with its label."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The part of an axis from `low` to `high`. Both are finite and differ."""

    low: float
    high: float

    @classmethod
    def over(cls, values: Iterable[float], *, zero: bool = True) -> Scale:
        """Return an axis that covers these values.

        Args:
            values: The values; infinities and NaN are ignored.
            zero: Whether the axis includes 0.
        """
        found = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
        low, high = min(found), max(found)
        if zero:
            low, high = min(low, 0.0), max(high, 0.0)
        if low == high:
            # Put a single value in the middle of the axis; but if the axis includes 0, the value is 0: begin there.
            reach = abs(high) or 1.0
            return cls(low, low + reach) if zero else cls(low - reach / 2, high + reach / 2)
        room = (high - low) * 0.06
        return cls(low if zero and low == 0 else low - room, high if zero and high == 0 else high + room)

    def at(self, value: float) -> float:
        """Return the place of a value: 0 at the low end, 1 at the high end."""
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int = 6) -> list[float]:
        """Return about `most` round numbers within the axis: multiples of a step of 1, 2 or 5 times a power of ten."""
        least = (self.high - self.low) / most
        power: float = 10.0 ** math.floor(math.log10(least))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]

    def energies(self, most: int = 5) -> Ticks:
        """Return round energies in the unit that fits the largest energy."""
        size, name = units.energy_unit(max(abs(self.low), abs(self.high)))
        return [(value, label if value else "0") for value, label in self._in_unit(size, name, most)]

    def costs(self, of_unit_j: float | None, most: int = 5) -> Ticks:
        """Return costs that are round percentages of `of_unit_j` joules, or for None, round energies."""
        return self.energies(most) if of_unit_j is None else self._in_unit(of_unit_j / 100, "%", most)

    def _in_unit(self, size: float, name: str, most: int) -> Ticks:
        ticks = Scale(self.low / size, self.high / size).ticks(most)
        return [(value * size, f"{units.number(value)}{units.SPACE}{name}") for value in ticks]

    def whole_numbers(self, most: int = 10) -> Ticks:
        """Return round whole numbers, for example of trials."""
        return [(value, units.exact(value)) for value in self.ticks(most) if float(value).is_integer()]


def apart(places: Sequence[float], least: float) -> list[bool]:
    """Return True for each label, by ascending place, that is at least `least` from the last label with True."""
    shown, last = [], -math.inf
    for place in places:
        is_shown = place - last >= least
        shown.append(is_shown)
        last = place if is_shown else last
    return shown


def share(place: float) -> str:
    """Format a horizontal place or width for SVG."""
    return f"{100 * place:.2f}".rstrip("0").rstrip(".") + "%"


def pixels(place: float) -> str:
    """Format a vertical place or height for SVG."""
    return f"{place:.1f}".removesuffix(".0")


class Line(NamedTuple):
    """A straight line, by default across the whole drawing."""

    classes: str
    y1: float
    y2: float
    x1: str = "0"
    x2: str = "100%"


class Box(NamedTuple):
    """A filled rectangle, by default across the whole drawing."""

    classes: str
    y: float
    height: float
    x: str = "0"
    width: str = "100%"


class Dot(NamedTuple):
    """A small circle."""

    classes: str
    x: str
    y: float
    radius: float


class Label(NamedTuple):
    """A text."""

    x: str
    y: float
    text: str
    classes: str


class Mark(NamedTuple):
    """A data point: the id of its shape, the text of its tooltip, and its link or ""."""

    x: str
    y: float
    shape: str
    classes: str
    told: str
    href: str = ""


class Path(NamedTuple):
    """A path with the SVG commands `steps`, in a drawing 1000 wide that is stretched to the chart's width."""

    classes: str
    steps: str


Part = Line | Box | Dot | Label | Mark | Path
"""A part of a drawing; ``templates/charts.html`` chooses the SVG element by its class."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing without axes. Screen readers ignore it if `told` is empty."""

    height: int
    parts: Sequence[Part]
    told: str = ""
    classes: str = "row"


@dataclass
class Plot:
    """A chart with two axes.

    Attributes:
        name: The id of its element.
        title: Its subject, in a few words.
        told: Its message in a sentence, for screen readers.
        x: The horizontal axis.
        y: The vertical axis.
        height: Height in pixels.
        across: The name of the horizontal axis.
    """

    name: str
    title: str
    told: str
    x: Scale
    y: Scale
    height: int = 260
    parts: list[Part] = field(default_factory=list)
    across: str = ""

    def left(self, value: float) -> str:
        """Return the horizontal place of a value."""
        return share(self.x.at(value))

    def top(self, value: float) -> float:
        """Return the vertical place of a value, limited to the ends of the axis."""
        return self.height * (1 - min(max(self.y.at(value), 0.0), 1.0))

    def axes(self, up: Ticks, across: Ticks, name: str) -> None:
        """Draw the lines of both axes, and the labels that do not overlap."""
        self.across = name
        for value, label in up:
            y = self.top(value)
            self.parts += [Line("grid", y, y), Label("-10", y + 4, label, "tick end")]
        places = [self.x.at(value) for value, _ in across]
        shown, narrow = apart(places, _APART), apart(places, _APART_NARROW)
        for (value, label), is_shown, is_narrow in zip(across, shown, narrow, strict=True):
            if is_shown:
                classes = "tick mid" if is_narrow else "tick mid wide"
                self.parts.append(Label(self.left(value), self.height + 20, label, classes))
        self.parts += [Line("axis", self.height, self.height), Label("100%", self.height + 38, name, "name end")]

    def level(self, value: float, label: str, kind: str, *, above: bool = True) -> None:
        """Draw a horizontal line at a value, with its label at the right end, if it has one."""
        y = self.top(value)
        self.parts.append(Line(f"level {kind}", y, y))
        if label:
            self.parts.append(Label("100%", y - 6 if above else y + 15, label, f"level-name end {kind}"))

    def levels(self, levels: Sequence[tuple[float, str, str]]) -> None:
        """Draw several levels. If two levels are close, the lower level's label is below its line."""
        tops = [self.top(value) for value, _, _ in levels]
        for (value, label, kind), own in zip(levels, tops, strict=True):
            is_crowded = any(other < own < other + _LINE_HEIGHT for other in tops)
            self.level(value, label, kind, above=not is_crowded)

    def upright(self, value: float, classes: str) -> None:
        """Draw a vertical line at a value of the horizontal axis."""
        self.parts.append(Line(classes, 0, self.height, self.left(value), self.left(value)))

    def mark(self, x: float, y: float, shape: str, classes: str, told: str, href: str = "") -> None:
        """Draw a data point; see `Mark`."""
        self.parts.append(Mark(self.left(x), self.top(y), shape, classes, told, href))

    def path(self, points: Sequence[tuple[float, float]], classes: str) -> None:
        """Draw a line through points."""
        if not points:
            return
        at, top = self.x.at, self.top
        # Local names, because a page of a thousand runs draws three thousand points.
        steps = [f"{1000 * at(x):.1f} {top(y):.1f}" for x, y in points]
        self.parts.append(Path(classes, f"M{'L'.join(steps)}"))
