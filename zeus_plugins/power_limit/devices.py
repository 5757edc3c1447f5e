"""The interface of a GPU whose power limit can be set."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from zeus_plugins.errors import ZeusBSOConfigError

STEP_W = 25.0
"""Watts between the power limits that are tried, as in the traces of Zeus (NSDI '23)."""


TOLERANCE_W = 1.0
"""Limits that differ by less are the same: some drivers round."""

# A limit that a driver takes some time to put in force.
_WAITS_S = (0.02, 0.1)


class PowerLimitUnavailableError(ZeusBSOConfigError):
    """No power limit can be read or set: no GPU, no permission, or a device that does not answer."""


class PowerLimitDevice(Protocol):
    """One GPU's power limit. `str()` names the GPU for people.

    An implementation can be pickled at any time: another process puts the limit back when this one is killed. It may
    have more methods, which are used where they are: ``enforced_limit_w()`` and ``default_limit_w()``, the limit that
    is really obeyed and the one after a start of the driver, in watts, and ``temperature_c()`` in °C.
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


class PowerLimitNotAppliedError(PowerLimitUnavailableError):
    """A limit was accepted, and another one is in force."""


def set_and_check(device: PowerLimitDevice, limit_w: float) -> None:
    """Set a limit, watts, and read back what is in force: drivers and commands may clamp a limit, or ignore it.

    Raises:
        PowerLimitNotAppliedError: Another limit is in force.
        PowerLimitUnavailableError: It was not set.
    """
    device.set_limit_w(limit_w)
    for wait_s in (*_WAITS_S, None):
        in_force_w = device.limit_w()
        if abs(in_force_w - limit_w) <= TOLERANCE_W:
            return
        if wait_s is not None:
            time.sleep(wait_s)
    raise PowerLimitNotAppliedError(
        f"{device} was told a power limit of {limit_w:g} W, and has one of {in_force_w:g} W in force"
    )


def enforced_limit_w(device: PowerLimitDevice) -> float:
    """The limit that a device really obeys, watts: another limiter may be below the one that was set.

    Raises:
        PowerLimitUnavailableError: The device does not tell.
    """
    tell: Callable[[], float] = getattr(device, "enforced_limit_w", device.limit_w)
    return tell()


def default_limit_w(device: PowerLimitDevice) -> float | None:
    """The limit that a device has after a start of its driver, watts; None where it does not tell."""
    tell: Callable[[], float] | None = getattr(device, "default_limit_w", None)
    try:
        return None if tell is None else tell()
    except PowerLimitUnavailableError:
        return None


def limits_between(lowest_w: float, highest_w: float, step_w: float = STEP_W) -> tuple[float, ...]:
    """The limits to try, watts: from the highest downwards, so that a training starts at full speed; at least that."""
    count = max(1, int((highest_w - lowest_w) / step_w) + 1)
    return tuple(highest_w - step_w * number for number in range(count))
