"""The interface of a GPU whose power limit can be set."""

from __future__ import annotations

from typing import Protocol

from zeus_plugins.errors import ZeusBSOConfigError

STEP_W = 25.0
"""Watts between the power limits that are tried, as in the traces of Zeus (NSDI '23)."""


class PowerLimitUnavailableError(ZeusBSOConfigError):
    """No power limit can be read or set: no GPU, no permission, or a device that does not answer."""


class PowerLimitDevice(Protocol):
    """One GPU's power limit. `str()` names the GPU for people.

    An implementation can be pickled at any time: another process puts the limit back when this one is killed.
    """

    @property
    def outlives_process(self) -> bool:
        """True when a limit stays in force after this process has ended, so that somebody has to put it back."""
        ...

    def range_w(self) -> tuple[float, float]:
        """The lowest and the highest limit that can be set, watts.

        Raises:
            PowerLimitUnavailableError: The device does not tell.
        """
        ...

    def limit_w(self) -> float:
        """The limit in force, watts.

        Raises:
            PowerLimitUnavailableError: The device does not tell.
        """
        ...

    def set_limit_w(self, limit_w: float) -> None:
        """Set the limit, watts. The device's energy and time belong to it from then on.

        Raises:
            PowerLimitUnavailableError: It was not set.
        """
        ...


def limits_between(lowest_w: float, highest_w: float, step_w: float = STEP_W) -> tuple[float, ...]:
    """The limits to try, watts: from the highest downwards, so that a training starts at full speed; at least that."""
    count = max(1, int((highest_w - lowest_w) / step_w) + 1)
    return tuple(highest_w - step_w * number for number in range(count))
