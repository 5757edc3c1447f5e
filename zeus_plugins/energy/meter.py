"""Time and energy of a training, epoch by epoch and in total."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from zeus_plugins.energy.monitor import EnergyMonitor

__all__ = ["EpochMeter"]

_WINDOW = "zeus_energy_epoch"

logger = logging.getLogger("zeus_plugins.energy")


class EpochMeter:
    """Adds up what epochs cost, and gives it as metrics for a framework's loggers.

    Args:
        monitor: Measures energy and time.
        totals: What `totals` was when a checkpoint was written, to go on from there.
    """

    def __init__(self, monitor: EnergyMonitor, totals: Mapping[str, float] | None = None) -> None:
        self._monitor = monitor
        self._time_s, self._energy_j = (totals["time_s"], totals["energy_j"]) if totals else (0.0, 0.0)

    @property
    def totals(self) -> dict[str, float]:
        """Seconds and joules of all epochs that have ended, in plain types."""
        return {"time_s": self._time_s, "energy_j": self._energy_j}

    def begin(self) -> None:
        """Begin the first epoch, and log how its energy is obtained."""
        logger.info("energy of the training: %s", self._monitor.source)
        self._monitor.begin_window(_WINDOW)

    def end_epoch(self) -> dict[str, float]:
        """End an epoch, and begin the next at once, so that no time falls between them.

        Returns:
            ``zeus/epoch_time_s`` and ``zeus/epoch_energy_j`` of this epoch, ``zeus/time_s`` and ``zeus/energy_j`` of
            all epochs so far.
        """
        epoch = self._monitor.end_window(_WINDOW)
        self._monitor.begin_window(_WINDOW)
        self._time_s += epoch.time_s
        self._energy_j += epoch.energy_j
        return {
            "zeus/epoch_time_s": epoch.time_s,
            "zeus/epoch_energy_j": epoch.energy_j,
            "zeus/time_s": self._time_s,
            "zeus/energy_j": self._energy_j,
        }

    def end(self) -> None:
        """Stop measuring; what belongs to no epoch is dropped. Never raises, as it is called on the way out."""
        try:
            self._monitor.end_window(_WINDOW)
        except Exception as error:
            logger.debug("could not close the last measurement window: %s", error)
