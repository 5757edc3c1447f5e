"""Time and energy of a training, epoch by epoch and in total."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from zeus_plugins.energy.breakdown import Breakdown, price_of
from zeus_plugins.energy.bridged import BridgedMonitor
from zeus_plugins.energy.monitor import EnergyMonitor
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
        breakdown: Measures the parts, which become metrics of their own.
        state: What `state` was when a checkpoint was written, to go on from there.
        clock: Monotonic seconds.

    Raises:
        ZeusBSOConfigError: A stated price or CO2 intensity is no number above 0.
    """

    def __init__(
        self,
        monitor: EnergyMonitor | WindowMonitor,
        state: Mapping[str, float] | None = None,
        *,
        breakdown: Breakdown | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._breakdown = breakdown
        price_of(0.0)  # The rates are numbers, or this raises before the training has begun.
        spent = {"time_s": 0.0, "energy_j": 0.0, "epoch_time_s": 0.0, "epoch_energy_j": 0.0, **(state or {})}
        self._spent = spent
        self._monitor = BridgedMonitor(
            as_energy_monitor(monitor),
            time_s=spent["time_s"] + spent["epoch_time_s"],
            energy_j=spent["energy_j"] + spent["epoch_energy_j"],
            clock=clock,
        )
        self._source = self._monitor.source

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
        self._monitor.begin_window(_WINDOW)
        if self._breakdown is not None:
            self._breakdown.begin()

    def end_epoch(self) -> dict[str, float]:
        """End an epoch, and begin the next at once, so that no time falls between them.

        Where its energy was obtained in another way than what came before, that is logged.

        Returns:
            ``zeus/epoch_time_s`` and ``zeus/epoch_energy_j`` of this epoch, ``zeus/time_s`` and ``zeus/energy_j`` of
            all epochs so far; ``zeus/money`` and ``zeus/co2_g`` of the latter, if their rates are stated; and the parts
            of this epoch's energy, as ``zeus/epoch_gpu_energy_j`` (see `Breakdown.end`).
        """
        self._measure()
        self._spent["time_s"] += self._spent["epoch_time_s"]
        self._spent["energy_j"] += self._spent["epoch_energy_j"]
        metrics = {f"zeus/{name}": value for name, value in self._spent.items()}
        metrics |= {f"zeus/{name}": value for name, value in price_of(self._spent["energy_j"]).items()}
        if self._breakdown is not None:
            metrics |= {f"zeus/epoch_{name}": value for name, value in self._breakdown.end().items()}
            self._breakdown.begin()
        self._spent |= {"epoch_time_s": 0.0, "epoch_energy_j": 0.0}
        return metrics

    def end(self) -> None:
        """Stop measuring; what belongs to no epoch is dropped. Never raises, as it is called on the way out."""
        try:
            if self._breakdown is not None:
                self._breakdown.end()
            self._monitor.end_window(_WINDOW)
        except Exception as error:
            logger.debug("could not close the last measurement window: %s", error)

    def _measure(self) -> None:
        """Add what was used since the last time to the present epoch."""
        part = self._monitor.end_window(_WINDOW)
        self._monitor.begin_window(_WINDOW)
        if part.source != self._source:
            self._source = part.source
            logger.info("energy of the training: %s", self._source)
        self._spent["epoch_time_s"] += part.time_s
        self._spent["epoch_energy_j"] += part.energy_j
