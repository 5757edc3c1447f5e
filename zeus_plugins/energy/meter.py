"""Time, energy, power, money and CO2 of a training, by epoch, in total and by component, for people to read."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from zeus_plugins.energy.counters import (
    SAMPLE_INTERVAL_S,
    CounterMonitor,
    EnergyCounter,
    Found,
    IntegratedPower,
    Sampler,
)
from zeus_plugins.energy.linux import POWERCAP, RAPL_INTERVAL_S, open_zones
from zeus_plugins.energy.monitor import BridgedMonitor, EnergyMonitor, EnergyUnavailableError, logger
from zeus_plugins.energy.nvml import Nvml, NvmlGpu, open_gpus
from zeus_plugins.energy.zeus_monitor import WindowMonitor, as_energy_monitor
from zeus_plugins.environment import CO2_G_PER_KWH, PRICE_PER_KWH
from zeus_plugins.errors import ZeusBSOError

JOULES_PER_KWH = 3_600_000

WATCH_INTERVAL_S = 1.0
"""Seconds between two readings of power and temperature, whose highest values are reported."""

Device = TypeVar("Device")

_EPOCH_WINDOW, _PART_WINDOW = "zeus_energy_epoch", "zeus_breakdown"


class EpochMeter:
    """Adds up the cost of epochs and returns it as metrics for a framework's loggers.

    If the monitor fails after the training has begun (a lost GPU, a driver that does not answer), the epoch is
    estimated as in `BridgedMonitor`. The log names the source of each change, and the monitor is tried again at each
    epoch.

    Args:
        monitor: Measures energy and time.
        state: The `state` from a checkpoint, to resume from it.
        breakdown: Measures the components for further metrics.

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
        price_of(0.0)  # Raises for an invalid rate before the training begins.
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
        """Seconds and joules of all ended epochs, in plain types."""
        return {name: self._spent[name] for name in ("time_s", "energy_j")}

    def state(self) -> dict[str, float]:
        """Return `totals` and the cost of the current epoch so far, in plain types; call it before `end`."""
        self._measure()
        return dict(self._spent)

    def begin(self) -> None:
        """Begin the first epoch, or resume the epoch of a checkpoint; pass an error of the monitor on."""
        logger.info("energy of the training: %s", self._source)
        self._monitor.begin_window(_EPOCH_WINDOW)
        if self._breakdown is not None:
            self._breakdown.begin()

    def end_epoch(self) -> dict[str, float]:
        """End an epoch and begin the next one at once, so that no time falls between them.

        Returns:
            ``zeus/epoch_time_s`` and ``zeus/epoch_energy_j`` of this epoch; ``zeus/time_s`` and ``zeus/energy_j`` of
            all epochs; ``zeus/money`` and ``zeus/co2_g`` of all epochs if their rates are stated; and this epoch's
            components, as ``zeus/epoch_gpu_energy_j`` (see `Breakdown.end`).
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
        """Stop measuring and drop the unfinished epoch. Never raises, so that it can be called after an error."""
        try:
            if self._breakdown is not None:
                self._breakdown.end()
            self._monitor.end_window(_EPOCH_WINDOW)
        except Exception as error:
            logger.debug("could not close the last measurement window: %s", error)

    def _measure(self) -> None:
        """Add the cost since the latest call to the current epoch."""
        part = self._monitor.end_window(_EPOCH_WINDOW)
        self._monitor.begin_window(_EPOCH_WINDOW)
        if part.source != self._source:
            self._source = part.source
            logger.info("energy of the training: %s", self._source)
        self._spent["epoch_time_s"] += part.time_s
        self._spent["epoch_energy_j"] += part.energy_j


class Breakdown:
    """The energy of one machine by component; components that cannot be measured are left out.

    It is not part of any cost. CPU and memory include everything that runs on the machine. `device_indices` are those
    of `zeus_plugins.energy.auto`.
    """

    def __init__(
        self,
        device_indices: Sequence[int | str] | None = None,
        *,
        nvml: Nvml | None = None,
        powercap: Path = POWERCAP,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        uses_no_gpu = device_indices is not None and not device_indices
        self._gpus: Sequence[NvmlGpu] = () if uses_no_gpu else _found(partial(open_gpus, nvml, device_indices))
        self._clock = clock
        self._parts: dict[str, CounterMonitor] = {}
        for gpu in self._gpus:
            try:
                gpu.energy_uj()
                self._add(f"gpu_{gpu.index}", [gpu], None)
            except EnergyUnavailableError:
                self._add(f"gpu_{gpu.index}", [IntegratedPower(gpu, clock)], SAMPLE_INTERVAL_S)
        zones = _found(partial(open_zones, powercap, None))
        self._add("cpu", [zone for zone in zones if zone.is_package], RAPL_INTERVAL_S)
        self._add("dram", [zone for zone in zones if not zone.is_package], RAPL_INTERVAL_S)
        self._begun_s = 0.0
        self._peak_w: float | None = None
        self._hottest_c: float | None = None
        self._watch: Sampler | None = None

    def _add(self, name: str, counters: Sequence[EnergyCounter], interval_s: float | None) -> None:
        if counters:
            self._parts[name] = CounterMonitor("", lambda: Found(counters, 1, name), self._clock, interval_s)

    def begin(self) -> None:
        """Begin to measure. Never raises."""
        self._begun_s = self._clock()
        self._peak_w = self._hottest_c = None
        for name, part in self._parts.items():
            try:
                part.begin_window(_PART_WINDOW)
            except (ZeusBSOError, OSError) as error:
                logger.debug("the energy of %s cannot be measured: %s", name, error)
        if self._gpus:
            self._watch = Sampler(self.look, WATCH_INTERVAL_S)

    def end(self) -> dict[str, float]:
        """End the measurement of `begin`. Never raises.

        Returns:
            As far as known: ``gpu_energy_j``, ``cpu_energy_j`` and ``dram_energy_j``; for each of several GPUs its
            energy, as ``gpu_0_energy_j`` with its number on the machine; ``gpu_mean_power_w``, ``gpu_peak_power_w`` and
            ``gpu_temperature_c`` (the highest).
        """
        if self._watch is not None:
            self._watch.stop()
            self._watch.sample()  # Reads at least once, even in a short epoch.
            self._watch = None
        time_s = self._clock() - self._begun_s
        parts_j = {name: joules for name in self._parts if (joules := self._ended(name)) is not None}
        found = {f"{name}_energy_j": parts_j[name] for name in ("cpu", "dram") if name in parts_j}
        gpus_j = {name: joules for name, joules in parts_j.items() if name.startswith("gpu_")}
        if gpus_j and len(gpus_j) == len(self._gpus):
            found["gpu_energy_j"] = sum(gpus_j.values())
            if time_s > 0:
                found["gpu_mean_power_w"] = found["gpu_energy_j"] / time_s
        if len(self._gpus) > 1:
            found |= {f"{name}_energy_j": joules for name, joules in gpus_j.items()}
        seen = {"gpu_peak_power_w": self._peak_w, "gpu_temperature_c": self._hottest_c}
        return found | {name: highest for name, highest in seen.items() if highest is not None}

    def look(self) -> None:
        """Record power and temperature."""
        powers_w = _known(self._gpus, NvmlGpu.power_w)
        if powers_w and len(powers_w) == len(self._gpus):
            self._peak_w = max(sum(powers_w), self._peak_w or 0.0)
        known_c = [] if self._hottest_c is None else [self._hottest_c]
        self._hottest_c = max(known_c + _known(self._gpus, NvmlGpu.temperature_c), default=None)

    def _ended(self, name: str) -> float | None:
        try:
            measured = self._parts[name].end_window(_PART_WINDOW)
        except (ZeusBSOError, OSError) as error:
            logger.debug("the energy of %s cannot be measured: %s", name, error)
            return None
        return None if "estimate" in measured.source else measured.energy_j


def price_of(energy_j: float, environ: Mapping[str, str] | None = None) -> dict[str, float]:
    """Return the ``money`` and the ``co2_g`` (grams) of an energy, as far as the environment states their rates.

    The variables are ``ZEUS_PRICE_PER_KWH`` and ``ZEUS_CO2_G_PER_KWH``, by default of this process. Raise
    `ZeusBSOConfigError` if one is no number above 0.
    """
    rates = {"money": PRICE_PER_KWH, "co2_g": CO2_G_PER_KWH}
    stated = {name: variable.number(environ, is_positive=True) for name, variable in rates.items()}
    return {name: rate * energy_j / JOULES_PER_KWH for name, rate in stated.items() if rate is not None}


def _found(find: Callable[[], Sequence[Device]]) -> Sequence[Device]:
    try:
        return find()
    except ZeusBSOError as error:
        logger.debug("a part of the energy is not known: %s", error)
        return ()


def _known(gpus: Sequence[NvmlGpu], question: Callable[[NvmlGpu], float]) -> list[float]:
    answers = []
    for gpu in gpus:
        with contextlib.suppress(EnergyUnavailableError):
            answers.append(question(gpu))
    return answers
