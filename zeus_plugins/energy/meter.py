"""Time, energy, money and CO2 of a training, by epoch and in total, for people to read."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from zeus_plugins.energy.monitor import BridgedMonitor, EnergyMonitor, logger
from zeus_plugins.energy.zeus_monitor import WindowMonitor, as_energy_monitor
from zeus_plugins.environment import CO2_G_PER_KWH, PRICE_PER_KWH, refuse_gone
from zeus_plugins.errors import ZeusBSOConfigError

_WINDOW = "zeus_energy_epoch"
_JOULES_PER_KWH = 3_600_000


class Rates:
    """The stated price and CO2 intensity of energy (docs/report.md).

    Raises:
        ZeusBSOConfigError: A variable is no number in its range, or is no longer read.
    """

    def __init__(self) -> None:
        refuse_gone()
        self._rates: dict[str, float] = {}
        for name, variable in {"money": PRICE_PER_KWH, "co2_g": CO2_G_PER_KWH}.items():
            if (variable.text() or "").lower().endswith(".csv"):
                raise ZeusBSOConfigError(
                    f"{variable} no longer names a table: set it to the mean rate, or unset it and multiply the logged"
                    " zeus/epoch_energy_j by your table"
                )
            if (number := variable.number(is_positive=True)) is not None:
                self._rates[name] = number

    def of(self, energy_j: float) -> dict[str, float]:
        """Return ``money`` and ``co2_g`` (grams) of `energy_j`, as far as stated."""
        return {name: energy_j / _JOULES_PER_KWH * rate for name, rate in self._rates.items()}


class EpochMeter:
    """Adds up the cost of epochs and returns it as metrics for a framework's loggers.

    If the monitor fails after the training has begun (a lost GPU, a driver that does not answer), the epoch is
    estimated as in `BridgedMonitor`. Each new source of the energy is logged, and each epoch tries the monitor again.

    Args:
        monitor: Measures energy and time.
        state: The result of `state` in a checkpoint, to resume from this checkpoint.

    Raises:
        ZeusBSOConfigError: A stated rate is out of range (see `Rates`).
    """

    def __init__(
        self,
        monitor: EnergyMonitor | WindowMonitor,
        state: Mapping[str, float] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rates = Rates()
        spent = {"time_s": 0.0, "energy_j": 0.0, "epoch_time_s": 0.0, "epoch_energy_j": 0.0, **(state or {})}
        known_s, known_j = spent["time_s"] + spent["epoch_time_s"], spent["energy_j"] + spent["epoch_energy_j"]
        amounts = self._rates.of(known_j)  # used if the checkpoint was written without a rate
        self._spent = {name: spent.get(name, amount) for name, amount in amounts.items()}
        self._spent |= {name: spent[name] for name in ("time_s", "energy_j", "epoch_time_s", "epoch_energy_j")}
        self._monitor = BridgedMonitor(as_energy_monitor(monitor), time_s=known_s, energy_j=known_j, clock=clock)
        self._source = self._monitor.source
        self._sources: dict[str, None] = {}
        self._windows = 0

    @property
    def totals(self) -> dict[str, float]:
        """Seconds and joules of all ended epochs, in plain types."""
        return {name: self._spent[name] for name in ("time_s", "energy_j")}

    @property
    def source(self) -> str:
        """How the energy was obtained, as in `Measurement.source`; several sources are joined."""
        return " + ".join(self._sources or [self._source])

    @property
    def is_failing(self) -> bool:
        """True if the monitor could not measure at the latest attempt."""
        return self._monitor.is_failing

    def state(self) -> dict[str, float]:
        """Return `totals` and the cost of the current epoch so far, in plain types; call it before `end`."""
        self._measure()
        return dict(self._spent)

    def begin(self) -> None:
        """Begin the first epoch, or resume the epoch of a checkpoint; raise the monitor's error if it fails."""
        logger.info("energy of the training: %s", self._source)
        self._monitor.begin_window(self._window)

    def end_epoch(self) -> dict[str, float]:
        """End an epoch and begin the next one at once, so that no time falls between them.

        Returns:
            ``zeus/epoch_time_s`` and ``zeus/epoch_energy_j`` of this epoch; ``zeus/time_s`` and ``zeus/energy_j`` of
            all epochs; and, of all epochs and if stated, ``zeus/money`` and ``zeus/co2_g``.
        """
        self._measure()
        self._spent["time_s"] += self._spent["epoch_time_s"]
        self._spent["energy_j"] += self._spent["epoch_energy_j"]
        metrics = {f"zeus/{name}": value for name, value in self._spent.items()}
        self._spent |= {"epoch_time_s": 0.0, "epoch_energy_j": 0.0}
        return metrics

    def end(self) -> None:
        """Stop measuring and drop the unfinished epoch. Never raises, so that it can be called after an error."""
        try:
            self._monitor.end_window(self._window)
        except Exception as error:
            logger.debug("could not close the last measurement window: %s", error)

    def _measure(self) -> None:
        """Add the cost since the latest call to the current epoch."""
        ended, self._windows = self._window, self._windows + 1
        self._monitor.begin_window(self._window)  # Before the old window ends, so that no energy is lost between them.
        part = self._monitor.end_window(ended)
        if part.source != self._source:
            self._source = part.source
            logger.info("energy of the training: %s", self._source)
        self._sources[part.source] = None
        self._spent["epoch_time_s"] += part.time_s
        self._spent["epoch_energy_j"] += part.energy_j
        for name, amount in self._rates.of(part.energy_j).items():
            self._spent[name] += amount

    @property
    def _window(self) -> str:
        return f"{_WINDOW}_{self._windows % 2}"
