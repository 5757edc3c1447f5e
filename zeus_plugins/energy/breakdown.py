"""The figures beside the energy that a cost is made of: its parts, power, temperature, money and CO2."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from zeus_plugins.energy.counters import CounterWindows, EnergyCounter
from zeus_plugins.energy.integrated import SAMPLE_INTERVAL_S, IntegratedPower
from zeus_plugins.energy.monitor import EnergyUnavailableError
from zeus_plugins.energy.nvml_gpus import Nvml, NvmlGpu, open_gpus, with_stated_power
from zeus_plugins.energy.rapl import POWERCAP, open_zones
from zeus_plugins.energy.rapl import SAMPLE_INTERVAL_S as RAPL_INTERVAL_S
from zeus_plugins.energy.sampling import Sampler
from zeus_plugins.errors import ZeusBSOError
from zeus_plugins.training.environment import CO2_G_PER_KWH, PRICE_PER_KWH

JOULES_PER_KWH = 3_600_000

WATCH_INTERVAL_S = 1.0
"""Seconds between two looks at power and temperature, of which the highest are told."""

_WINDOW = "zeus_breakdown"

logger = logging.getLogger("zeus_plugins.energy")


class Breakdown:
    """The parts of one machine's energy, for people; no cost is made of them, and what cannot be measured is left out.

    Everything that runs on the machine counts in the CPU's and memory's part.

    Args:
        device_indices: As of `zeus_plugins.energy.auto`; empty for a training without GPUs.
        nvml: What to call instead of the installed `pynvml`.
        powercap: Where Linux shows the counters of CPU and memory.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        device_indices: Sequence[int | str] | None = None,
        *,
        nvml: Nvml | None = None,
        powercap: Path = POWERCAP,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpus = _gpus(device_indices, nvml)
        self._clock = clock
        self._parts: dict[str, CounterWindows] = {}
        for gpu in self._gpus:
            counter = _counter(gpu, clock)
            interval_s = SAMPLE_INTERVAL_S if isinstance(counter, IntegratedPower) else None
            self._parts[f"gpu_{gpu.index}"] = CounterWindows([counter], "", clock, interval_s)
        for name, zones in _zones(powercap).items():
            self._parts[name] = CounterWindows(zones, "", clock, RAPL_INTERVAL_S)
        self._begun_s = 0.0
        self._open: set[str] = set()
        self._peak_w: float | None = None
        self._hottest_c: float | None = None
        self._watch = Sampler(self.look, WATCH_INTERVAL_S if self._gpus else None)

    def begin(self) -> None:
        """Begin to measure. It never raises."""
        self._begun_s = self._clock()
        self._peak_w = self._hottest_c = None
        for name, windows in self._parts.items():
            try:
                windows.begin(_WINDOW)
                self._open.add(name)
            except (ZeusBSOError, OSError) as error:
                logger.debug("the energy of %s cannot be measured: %s", name, error)
        self._watch.start()

    def end(self) -> dict[str, float]:
        """End what `begin` has begun. It never raises.

        Returns:
            As far as they are known: ``gpu_energy_j``, ``cpu_energy_j`` and ``dram_energy_j``; for each of several GPUs
            its part, as ``gpu_0_energy_j`` with its number on the machine; ``gpu_mean_power_w``, ``gpu_peak_power_w``,
            ``gpu_temperature_c`` (the highest).
        """
        self._watch.stop()
        if self._gpus:
            self._watch.sample_or_log(again=True)  # one look at least
        time_s = self._clock() - self._begun_s
        parts_j = {name: joules for name in sorted(self._open) if (joules := self._ended(name)) is not None}
        self._open.clear()
        found = {f"{name}_energy_j": parts_j[name] for name in ("cpu", "dram") if name in parts_j}
        gpus_j = {name: joules for name, joules in parts_j.items() if name.startswith("gpu_")}
        if gpus_j and len(gpus_j) == len(self._gpus):
            found["gpu_energy_j"] = sum(gpus_j.values())
            if time_s > 0:
                found["gpu_mean_power_w"] = found["gpu_energy_j"] / time_s
        if len(self._gpus) > 1:
            found |= {f"{name}_energy_j": joules for name, joules in gpus_j.items()}
        if self._peak_w is not None:
            found["gpu_peak_power_w"] = self._peak_w
        if self._hottest_c is not None:
            found["gpu_temperature_c"] = self._hottest_c
        return found

    def look(self) -> None:
        """Take note of power and temperature; called again and again while it is measured."""
        powers_w = _told(self._gpus, NvmlGpu.power_w)
        if powers_w and len(powers_w) == len(self._gpus):
            self._peak_w = max(sum(powers_w), self._peak_w or 0.0)
        hottest_c = max(_told(self._gpus, NvmlGpu.temperature_c), default=None)
        if hottest_c is not None:
            self._hottest_c = hottest_c if self._hottest_c is None else max(hottest_c, self._hottest_c)

    def _ended(self, name: str) -> float | None:
        try:
            measured = self._parts[name].end(_WINDOW)
        except (ZeusBSOError, OSError) as error:
            logger.debug("the energy of %s cannot be measured: %s", name, error)
            return None
        return None if "estimate" in measured.source else measured.energy_j


def price_of(energy_j: float, environ: Mapping[str, str] | None = None) -> dict[str, float]:
    """The money and the grams of CO2 that an energy costs, as far as ``ZEUS_PRICE_PER_KWH`` and the like state them.

    Args:
        energy_j: Joules.
        environ: Environment variables; those of the process by default.

    Returns:
        ``money``, in the currency of the price, and ``co2_g``.

    Raises:
        ZeusBSOConfigError: A variable is no number above 0.
    """
    rates = {"money": PRICE_PER_KWH, "co2_g": CO2_G_PER_KWH}
    stated = {name: variable.number(environ, is_positive=True) for name, variable in rates.items()}
    return {name: rate * energy_j / JOULES_PER_KWH for name, rate in stated.items() if rate is not None}


def _gpus(indices: Sequence[int | str] | None, nvml: Nvml | None) -> tuple[NvmlGpu, ...]:
    if indices is not None and not indices:
        return ()
    try:
        return with_stated_power(open_gpus(nvml, indices), 1.0)  # No figure here is made of the maximum power.
    except ZeusBSOError as error:
        logger.debug("there are no GPUs whose energy could be broken down: %s", error)
        return ()


def _counter(gpu: NvmlGpu, clock: Callable[[], float]) -> EnergyCounter:
    try:
        gpu.energy_uj()
    except EnergyUnavailableError:
        return IntegratedPower(gpu, clock)
    return gpu


def _zones(powercap: Path) -> Mapping[str, Sequence[EnergyCounter]]:
    try:
        zones = open_zones(powercap, 1.0)
    except EnergyUnavailableError as error:
        logger.debug("the energy of CPU and memory is not known: %s", error)
        return {}
    parts = {
        "cpu": [each for each in zones if each.is_package],
        "dram": [each for each in zones if not each.is_package],
    }
    return {name: zones for name, zones in parts.items() if zones}


def _told(gpus: Sequence[NvmlGpu], question: Callable[[NvmlGpu], float]) -> list[float]:
    answers = []
    for gpu in gpus:
        try:
            answers.append(question(gpu))
        except EnergyUnavailableError:
            continue
    return answers
