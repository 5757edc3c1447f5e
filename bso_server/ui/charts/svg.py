"""The parts that charts are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from markupsafe import Markup

from bso_server.ui.charts.scales import Scale, apart

COLOURS = 12
"""Colours for batch sizes in the stylesheet, from small to large."""

# The least distance between two labels, as a share of the width, on a wide screen and on a narrow one.
_LINE_HEIGHT = 20.0
_APART = 0.045
_APART_NARROW = 0.13


def colours(batch_sizes: Sequence[int]) -> dict[int, str]:
    """The class of each of a job's batch sizes: the same size has the same colour in all of its charts."""
    last = max(len(batch_sizes) - 1, 1)
    return {size: f"s{round(index * (COLOURS - 1) / last)}" for index, size in enumerate(batch_sizes)}


def share(place: float) -> str:
    """A place across, or a width, as SVG takes it."""
    return f"{100 * place:.2f}".rstrip("0").rstrip(".") + "%"


def pixels(place: float) -> str:
    """A place down, or a height."""
    return f"{place:.1f}".removesuffix(".0")


def text(x: str, y: float, content: str, classes: str = "") -> str:
    """A label."""
    kind = f' class="{classes}"' if classes else ""
    return f'<text x="{x}" y="{pixels(y)}"{kind}>{escape(content)}</text>'


def mark(x: str, y: float, shape: str, classes: str, told: str, href: str = "") -> str:
    """A data point that tells of itself when pointed at, and leads to its page if it has one.

    The stylesheet's shapes are defined once a page; `told` is text.
    """
    label = f' aria-label="{escape(told)}"'
    use = f'<use href="#m-{shape}" x="{x}" y="{pixels(y)}" class="{classes}"'
    if href:
        return f'<a href="{escape(href)}" tabindex="-1"{label}>{use}/></a>'
    return f'{use} role="img"{label}/>'


@dataclass
class Plot:
    """A chart with two axes.

    Attributes:
        name: Its id in the page.
        title: What it shows, in a few words.
        description: The same in a sentence with what can be seen, for those who cannot see it.
        x: The axis across.
        y: The axis upwards.
        height: Pixels.
    """

    name: str
    title: str
    description: str
    x: Scale
    y: Scale
    height: int = 260
    parts: list[str] = field(default_factory=list)

    def left(self, value: float) -> str:
        """The place across of a value."""
        return share(self.x.at(value))

    def top(self, value: float) -> float:
        """The place down of a value; beyond the ends of the axis it is at an end."""
        return self.height * (1 - min(max(self.y.at(value), 0.0), 1.0))

    def y_axis(self, ticks: Sequence[tuple[float, str]]) -> None:
        """Labels and lines across."""
        for value, label in ticks:
            y = pixels(self.top(value))
            self.parts.append(f'<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>')
            self.parts.append(text("-10", self.top(value) + 4, label, "tick end"))

    def x_axis(self, ticks: Sequence[tuple[float, str]], title: str) -> None:
        """Labels below, as far as they do not run into each other, and the axis' name."""
        places = [self.x.at(value) for value, _ in ticks]
        shown, narrow = apart(places, _APART), apart(places, _APART_NARROW)
        for (value, label), is_shown, is_narrow in zip(ticks, shown, narrow, strict=True):
            if is_shown:
                classes = "tick mid" if is_narrow else "tick mid wide"
                self.parts.append(text(self.left(value), self.height + 20, label, classes))
        self.parts.append(f'<line class="axis" x1="0" x2="100%" y1="{self.height}" y2="{self.height}"/>')
        self.parts.append(text("100%", self.height + 38, title, "name end"))

    def level(self, value: float, label: str, kind: str, *, above: bool = True) -> None:
        """A line across at a value, with its name at the right end."""
        y = self.top(value)
        self.parts.append(f'<line class="level {kind}" x1="0" x2="100%" y1="{pixels(y)}" y2="{pixels(y)}"/>')
        self.parts.append(text("100%", y - 6 if above else y + 15, label, f"level-name end {kind}"))

    def levels(self, levels: Sequence[tuple[float, str, str]]) -> None:
        """Several such lines, of which the lower one of two that are close has its name below."""
        tops = [self.top(value) for value, _, _ in levels]
        for (value, label, kind), own in zip(levels, tops, strict=True):
            is_crowded = any(other < own < other + _LINE_HEIGHT for other in tops)
            self.level(value, label, kind, above=not is_crowded)

    def path(self, points: Sequence[tuple[float, float]], classes: str, *, down_to: float | None = None) -> None:
        """A line through points, or with `down_to` the area between it and that level."""
        if not points:
            return
        lefts, tops = self.x.places(x for x, _ in points), self.y.places(y for _, y in points)
        height = self.height
        # Three thousand points are drawn on a page of a thousand runs: no call for each.
        steps = [
            f"{1000 * left:.1f} {height * (1.0 - top) if 0.0 <= top <= 1.0 else (0.0 if top > 1.0 else height):.1f}"
            for left, top in zip(lefts, tops, strict=True)
        ]
        line = "M" + "L".join(steps)
        if down_to is not None:
            base = f"{self.top(down_to):.1f}"
            line += f"L{1000 * self.x.at(points[-1][0]):.1f} {base}L{1000 * self.x.at(points[0][0]):.1f} {base}Z"
        self.parts.append(
            f'<svg viewBox="0 0 1000 {self.height}" preserveAspectRatio="none" width="100%" height="{self.height}" '
            f'class="inner"><path class="{classes}" d="{line}"/></svg>'
        )

    def drawn(self) -> Markup:
        """The chart."""
        ids = f"{self.name}-t", f"{self.name}-d"
        return Markup(  # noqa: S704 - every text within went through `escape`
            f'<svg class="plot" id="{self.name}" height="{self.height}" role="group" tabindex="0" '
            f'aria-roledescription="chart" aria-labelledby="{ids[0]}" aria-describedby="{ids[1]}">'
            f'<title id="{ids[0]}">{escape(self.title)}</title><desc id="{ids[1]}">{escape(self.description)}</desc>'
            f"{''.join(self.parts)}</svg>"
        )
