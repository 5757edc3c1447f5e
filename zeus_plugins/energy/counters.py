"""Measurement windows over counters that only rise: a GPU's, a CPU package's, or one that is integrated here."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

from zeus_plugins.energy.monitor import Measurement, OpenWindows
from zeus_plugins.energy.sampling import Sampler
from zeus_plugins.protocol import GpuConfig

STANDSTILL_S = 1.0
"""A counter that has not moved for so many seconds does not count: all that are known move several times a second."""

MICRO = 1_000_000

logger = logging.getLogger("zeus_plugins.energy")


class EnergyCounter(Protocol):
    """A counter of the energy of one device. `str()` names the device for people."""

    @property
    def max_power_w(self) -> float:
        """The most that the device draws, in watts.

        Raises:
            EnergyUnavailableError: Nobody knows.
        """
        ...

    def energy_uj(self) -> int:
        """Energy in microjoules since some instant of the past: whole, so that sums and differences are exact.

        Raises:
            EnergyUnavailableError: The device does not answer.
        """
        ...


class _Reading(NamedTuple):
    """All counters at one instant."""

    time_s: float
    energies_uj: tuple[int, ...]


class CounterWindows:
    """The windows of a monitor whose devices have counters.

    What a counter that stands still, or falls, does not tell is estimated as the device's maximum power × time, and the
    measurement's source says so: 0 J would make the batch size that met with it look like the cheapest of all. Without
    `sample_interval_s`, the seconds between two readings while a window is open, only the ends of windows are read.
    """

    def __init__(
        self,
        counters: Sequence[EnergyCounter],
        source: str,
        clock: Callable[[], float],
        sample_interval_s: float | None = None,
    ) -> None:
        self._counters = tuple(counters)
        self._source = source
        self._clock = clock

        def read_all() -> None:
            for counter in counters:
                counter.energy_uj()

        self._sampler = Sampler(read_all, sample_interval_s)
        self._windows: OpenWindows[_Reading] = OpenWindows()
        # For each counter, what it read when it was last seen to move, and when that was.
        self._moved: list[tuple[int, float]] = []
        self._suspected: set[str] = set()

    def begin(self, name: str) -> None:
        """See `EnergyMonitor.begin_window`."""
        if self._sampler.is_inherited:
            self._windows = OpenWindows()  # Those of the process that this one is a fork of.
        self._windows.refuse_open(name)
        self._sampler.start()
        try:
            self._windows.open(name, self._read())
        finally:
            self._rest()

    def end(self, name: str) -> Measurement:
        """See `EnergyMonitor.end_window`; a window that another process has opened is refused."""
        self._sampler.require_own_process()
        begun = self._windows.close(name)
        try:
            return self._between(begun, self._read())
        finally:
            self._rest()

    def _read(self) -> _Reading:
        with self._sampler.lock or contextlib.nullcontext():
            energies_uj = tuple(counter.energy_uj() for counter in self._counters)
        now_s = self._clock()
        seen = self._moved or [(-1, now_s)] * len(energies_uj)
        self._moved = [
            then if then[0] == energy_uj else (energy_uj, now_s)
            for then, energy_uj in zip(seen, energies_uj, strict=True)
        ]
        return _Reading(now_s, energies_uj)

    def _rest(self) -> None:
        if not self._windows:
            self._sampler.stop()

    def _between(self, begun: _Reading, ended: _Reading) -> Measurement:
        time_s = ended.time_s - begun.time_s
        energy_uj, estimated_w, silent = 0, 0.0, 0
        for counter, first_uj, last_uj, (_, moved_s) in zip(
            self._counters, begun.energies_uj, ended.energies_uj, self._moved, strict=True
        ):
            stands_still = last_uj == first_uj and ended.time_s - moved_s >= STANDSTILL_S
            if last_uj < first_uj or stands_still:
                self._warn_of(counter, "has not moved" if stands_still else "has fallen")
                estimated_w += counter.max_power_w
                silent += 1
            else:
                energy_uj += last_uj - first_uj
        source = self._source
        if silent:
            source += (
                f", but estimate: {estimated_w:g} W for {silent} of {len(self._counters)} devices, whose counter does "
                "not count"
            )
        return Measurement(time_s=time_s, energy_j=energy_uj / MICRO + estimated_w * time_s, source=source)

    def _warn_of(self, counter: EnergyCounter, what: str) -> None:
        if str(counter) in self._suspected:
            return
        self._suspected.add(str(counter))
        logger.warning(
            "the energy counter of %s %s: while it does not count, %g W × time is taken instead, an estimate",
            *(counter, what, counter.max_power_w),
        )


class CounterMonitor(ABC):
    """The base of monitors over counters, as `CounterWindows`; each finds its own devices, once."""

    def __init__(self, source: str, clock: Callable[[], float], sample_interval_s: float | None = None) -> None:
        self.source = source
        self._clock = clock
        self._sample_interval_s = sample_interval_s

    def gpus(self) -> GpuConfig:
        """Describe the devices; their maximum power is the sum of the highest limits that can be set, in watts."""
        return self._opened[0]()

    def begin_window(self, name: str) -> None:
        """See `EnergyMonitor.begin_window`."""
        self._opened[1].begin(name)

    def end_window(self, name: str) -> Measurement:
        """See `EnergyMonitor.end_window`; the energy is what the counters rose by, summed over all devices."""
        return self._opened[1].end(name)

    @cached_property
    def _opened(self) -> tuple[Callable[[], GpuConfig], CounterWindows]:
        counters, describe = self._find()
        return describe, CounterWindows(counters, self.source, self._clock, self._sample_interval_s)

    @abstractmethod
    def _find(self) -> tuple[Sequence[EnergyCounter], Callable[[], GpuConfig]]:
        """The devices' counters, of which each was seen to count, and what describes the devices."""
