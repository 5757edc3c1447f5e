"""Amounts saved by several jobs together, with intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zeus_plugins.protocol import Share


@dataclass(frozen=True, slots=True)
class Saved:
    """Amount (J or s) that runs took less than at the default batch sizes, negative if they took more.

    Attributes:
        taken: Amount that the runs took, exploration and control runs included.
        low: Lower end of the 90 % interval of the saving; None: no bound known.
        middle: The saving.
        high: Upper end; None: no bound known.
    """

    taken: float
    low: float | None
    middle: float
    high: float | None

    @property
    def is_shown(self) -> bool:
        """True if the whole interval is above 0, or the whole interval is below 0."""
        return (self.low is not None and self.low > 0) or (self.high is not None and self.high < 0)

    @property
    def share(self) -> Share:
        """Saving as a share of what the runs would have taken at the default batch sizes."""
        low, middle, high = (None if each is None else self._share(each) for each in (self.low, self.middle, self.high))
        return Share(low=low, middle=middle or 0.0, high=1.0 if high is None else high)

    def _share(self, saved: float) -> float | None:
        at_default = self.taken + saved
        return saved / at_default if at_default > 0 else None


def total(parts: Iterable[Saved | None]) -> Saved | None:
    """Return the saving of independent jobs together; None if none is known.

    The savings add up. On each side, the distance to the end of the interval is the root of the sum of the squared
    distances of the jobs, because variances of independent errors add, and bounds do not.
    """
    known = [part for part in parts if part is not None]
    if not known:
        return None
    middle = math.fsum(part.middle for part in known)
    below = _reach([None if part.low is None else part.middle - part.low for part in known])
    above = _reach([None if part.high is None else part.high - part.middle for part in known])
    return Saved(
        taken=math.fsum(part.taken for part in known),
        low=None if below is None else middle - below,
        middle=middle,
        high=None if above is None else middle + above,
    )


def _reach(distances: Sequence[float | None]) -> float | None:
    known = [each for each in distances if each is not None]
    return math.hypot(*known) if len(known) == len(distances) else None
