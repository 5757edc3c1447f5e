"""A monitor whose errors end no training: what it fails to measure is estimated, and labelled so."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from zeus_plugins.energy.monitor import EnergyMonitor, Measurement, OpenWindows
from zeus_plugins.protocol import GpuConfig

logger = logging.getLogger("zeus_plugins.energy")


class BridgedMonitor:
    """An `EnergyMonitor` that estimates the windows in which another one fails.

    The devices are taken to draw the mean power that was measured before or, before the first measurement, their
    maximum power; the measurement's source says so. One warning tells of the first failure, and each window tries the
    monitor again.

    Args:
        monitor: Measures.
        strict: Estimate only what passes: raise where the monitor fails again at once.
        time_s: Seconds measured before, in the same training.
        energy_j: The joules of that time.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        monitor: EnergyMonitor,
        *,
        strict: bool = False,
        time_s: float = 0.0,
        energy_j: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monitor = monitor
        self._strict = strict
        self._time_s, self._energy_j = time_s, energy_j
        self._clock = clock
        self._has_begun = False
        self._failures = 0
        # When each window began, and its name at the other monitor; None where it could not begin there.
        self._windows: OpenWindows[tuple[float, str | None]] = OpenWindows()

    @property
    def source(self) -> str:
        """That of the other monitor."""
        return self._monitor.source

    def gpus(self) -> GpuConfig:
        """Describe the other monitor's devices."""
        return self._monitor.gpus()

    def begin_window(self, name: str) -> None:
        """Start to measure; see `EnergyMonitor.begin_window`.

        Raises:
            Exception: What the monitor raises, in its first window and where it is `strict`.
        """
        self._windows.refuse_open(name)
        # Another one after each failure: one that could not be ended may still be open.
        own: str | None = f"{name}_{self._failures}" if self._failures else name
        begun_s = self._clock()
        try:
            self._monitor.begin_window(own or name)
        except Exception as error:
            if self._strict or not self._has_begun:
                raise
            self._note(error)
            own = None
        self._has_begun = True
        self._windows.open(name, (begun_s, own))

    def end_window(self, name: str) -> Measurement:
        """Return what was used since the window began, measured or estimated; see `EnergyMonitor.end_window`.

        Raises:
            ZeusBSOOperationOrderError: No window of that name is open.
            Exception: What the monitor raises, where it is `strict` and the monitor cannot go on either.
        """
        begun_s, own = self._windows.close(name)
        part = None if own is None else self._measured(own)
        part = part or self._estimated(self._clock() - begun_s)
        self._time_s += part.time_s
        self._energy_j += part.energy_j
        return part

    def _measured(self, own: str) -> Measurement | None:
        try:
            return self._monitor.end_window(own)
        except Exception as error:
            if self._strict and not self._goes_on(f"{own}_again"):
                raise
            self._note(error)
            return None

    def _goes_on(self, name: str) -> bool:
        try:
            self._monitor.begin_window(name)
            self._monitor.end_window(name)
        except Exception as error:
            logger.debug("the monitor fails again: %s", error)
            return False
        return True

    def _estimated(self, time_s: float) -> Measurement:
        power_w = self._latest_power_w()
        basis = "unknown, so 0 J" if power_w is None else f"estimate: {power_w:g} W"
        return Measurement(time_s, (power_w or 0.0) * time_s, f"{basis}, as it cannot be measured")

    def _latest_power_w(self) -> float | None:
        """The mean power up to now, else the most that the devices draw; None where neither is known."""
        if self._time_s > 0 and self._energy_j > 0:
            return self._energy_j / self._time_s
        try:
            return self._monitor.gpus().max_power
        except Exception as error:
            logger.debug("the devices' maximum power is not known either: %s", error)
            return None

    def _note(self, error: Exception) -> None:
        level = logging.DEBUG if self._failures else logging.WARNING
        self._failures += 1
        power_w = self._latest_power_w()
        logger.log(
            level,
            "the energy of the training cannot be measured any more (%s): the training goes on, and until it can be "
            "measured again %s",
            error,
            "its energy counts for nothing, as its power is not known"
            if power_w is None
            else f"it is taken to draw {power_w:g} W",
        )
