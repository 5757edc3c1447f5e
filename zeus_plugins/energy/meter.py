"""Time and energy of a training, epoch by epoch and in total."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from zeus_plugins.energy.monitor import EnergyMonitor, Measurement
from zeus_plugins.energy.zeus_monitor import WindowMonitor, as_energy_monitor

_WINDOW = "zeus_energy_epoch"

logger = logging.getLogger("zeus_plugins.energy")


class EpochMeter:
    """Adds up what epochs cost, and gives it as metrics for a framework's loggers.

    A monitor that fails once the training has begun (a GPU is lost, its driver does not answer) does not end it. While
    it fails, the training is taken to draw the mean power that it drew before or, in its first epoch, its devices'
    maximum power. A warning says so, once, and the log names the source of what follows; the monitor is tried again at
    each epoch.

    Args:
        monitor: Measures energy and time, in our way or in Zeus's.
        state: What `state` was when a checkpoint was written, to go on from there.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        monitor: EnergyMonitor | WindowMonitor,
        state: Mapping[str, float] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monitor = as_energy_monitor(monitor)
        self._source = self._monitor.source
        self._clock = clock
        self._begun_s = 0.0
        self._is_measuring = False
        self._failures = 0
        self._spent = {"time_s": 0.0, "energy_j": 0.0, "epoch_time_s": 0.0, "epoch_energy_j": 0.0, **(state or {})}

    @property
    def totals(self) -> dict[str, float]:
        """Seconds and joules of all epochs that have ended, in plain types."""
        return {name: self._spent[name] for name in ("time_s", "energy_j")}

    def state(self) -> dict[str, float]:
        """The state for a checkpoint, in plain types: `totals`, and what the present epoch has cost so far.

        Seconds and joules. Call it between `begin` and `end`.
        """
        self._measure()
        return dict(self._spent)

    def begin(self) -> None:
        """Begin the first epoch, or go on with that of a checkpoint, and log how its energy is obtained.

        Raises:
            Exception: What the monitor raises that cannot measure.
        """
        logger.info("energy of the training: %s", self._source)
        self._begin_window()

    def end_epoch(self) -> dict[str, float]:
        """End an epoch, and begin the next at once, so that no time falls between them.

        Where its energy was obtained in another way than what came before, that is logged.

        Returns:
            ``zeus/epoch_time_s`` and ``zeus/epoch_energy_j`` of this epoch, ``zeus/time_s`` and ``zeus/energy_j`` of
            all epochs so far.
        """
        self._measure()
        self._spent["time_s"] += self._spent["epoch_time_s"]
        self._spent["energy_j"] += self._spent["epoch_energy_j"]
        metrics = {f"zeus/{name}": value for name, value in self._spent.items()}
        self._spent |= {"epoch_time_s": 0.0, "epoch_energy_j": 0.0}
        return metrics

    def end(self) -> None:
        """Stop measuring; what belongs to no epoch is dropped. Never raises, as it is called on the way out."""
        try:
            if self._is_measuring:
                self._monitor.end_window(self._window)
        except Exception as error:
            logger.debug("could not close the last measurement window: %s", error)

    def _measure(self) -> None:
        """Add what was used since the last time to the present epoch."""
        part = self._end_window()
        try:
            self._begin_window()
        except Exception as error:
            self._note(error)
        if part.source != self._source:
            self._source = part.source
            logger.info("energy of the training: %s", self._source)
        self._spent["epoch_time_s"] += part.time_s
        self._spent["epoch_energy_j"] += part.energy_j

    @property
    def _window(self) -> str:
        """Another one after each failure: one that could not be ended may still be open."""
        return f"{_WINDOW}_{self._failures}" if self._failures else _WINDOW

    def _begin_window(self) -> None:
        self._begun_s = self._clock()
        self._monitor.begin_window(self._window)
        self._is_measuring = True

    def _end_window(self) -> Measurement:
        """The use since the window began, measured or estimated."""
        if self._is_measuring:
            self._is_measuring = False
            try:
                return self._monitor.end_window(self._window)
            except Exception as error:
                self._note(error)
        time_s, power_w = self._clock() - self._begun_s, self._latest_power_w()
        basis = "unknown, so 0 J" if power_w is None else f"estimate: {power_w:g} W"
        return Measurement(time_s, (power_w or 0.0) * time_s, f"{basis}, as it cannot be measured")

    def _latest_power_w(self) -> float | None:
        """The mean power up to now, else the most that the devices draw; None where neither is known."""
        time_s = self._spent["time_s"] + self._spent["epoch_time_s"]
        energy_j = self._spent["energy_j"] + self._spent["epoch_energy_j"]
        if time_s > 0 and energy_j > 0:
            return energy_j / time_s
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
