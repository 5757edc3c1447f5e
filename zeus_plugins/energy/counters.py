"""Measurement windows over counters that only rise: a GPU's, a CPU package's, or one that is integrated here."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from zeus_plugins.energy.monitor import Measurement, OpenWindows
from zeus_plugins.energy.sampling import Sampler

__all__ = ["STANDSTILL_S", "CounterWindows", "EnergyCounter"]

STANDSTILL_S = 1.0
"""A counter that has not moved for so many seconds does not count: all that are known move several times a second."""

MICRO = 1_000_000

logger = logging.getLogger("zeus_plugins.energy")

Devices = TypeVar("Devices")


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
        """Energy in microjoules since some instant of the past.

        Whole numbers, so that sums and differences of them are exact.

        Raises:
            EnergyUnavailableError: The device does not answer.
        """
        ...


@dataclass(frozen=True)
class _Reading:
    """All counters at one instant."""

    time_s: float
    energies_uj: tuple[int, ...]


class CounterWindows:
    """The windows of a monitor whose devices have counters.

    What a counter that stands still, or falls, does not tell is estimated as the device's maximum power × time, and the
    measurement's source says so: 0 J would make the batch size that met with it look like the cheapest of all.

    Args:
        counters: Those of the devices that are measured together.
        source: How the energy is obtained, while all goes well.
        clock: Monotonic seconds.
        sample_interval_s: Seconds between two readings while a window is open. None: only its ends are read.
    """

    def __init__(
        self,
        counters: Sequence[EnergyCounter],
        *,
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

        self._sampler = None if sample_interval_s is None else Sampler(read_all, sample_interval_s)
        self._windows: OpenWindows[_Reading] = OpenWindows()
        # For each counter, what it read when it was last seen to move, and when that was.
        self._moved: list[tuple[int, float]] = []
        self._suspected: set[str] = set()

    def begin(self, name: str) -> None:
        """See `EnergyMonitor.begin_window`."""
        if self._sampler is not None and self._sampler.is_inherited:
            self._windows = OpenWindows()  # Those of the process that this one is a fork of.
        self._windows.refuse_open(name)
        if self._sampler is not None:
            self._sampler.start()
        try:
            self._windows.open(name, self._read())
        finally:
            self._rest()

    def end(self, name: str) -> Measurement:
        """See `EnergyMonitor.end_window`; a window that another process has opened is refused."""
        if self._sampler is not None:
            self._sampler.require_own_process()
        begun = self._windows.close(name)
        try:
            return self._between(begun, self._read())
        finally:
            self._rest()

    def _read(self) -> _Reading:
        lock = self._sampler.lock if self._sampler is not None else None
        with lock or contextlib.nullcontext():
            energies_uj = tuple(counter.energy_uj() for counter in self._counters)
        now_s = self._clock()
        seen = self._moved or [(-1, now_s)] * len(energies_uj)
        self._moved = [
            then if then[0] == energy_uj else (energy_uj, now_s)
            for then, energy_uj in zip(seen, energies_uj, strict=True)
        ]
        return _Reading(now_s, energies_uj)

    def _rest(self) -> None:
        if self._sampler is not None and not self._windows:
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
            counter,
            what,
            counter.max_power_w,
        )


class CounterMonitor(ABC, Generic[Devices]):
    """The base of monitors over counters; each finds its own devices, once, and describes them.

    Args:
        source: See `EnergyMonitor.source`.
        clock: Monotonic seconds.
        sample_interval_s: As in `CounterWindows`.
    """

    def __init__(self, source: str, clock: Callable[[], float], sample_interval_s: float | None = None) -> None:
        self.source = source
        self._clock = clock
        self._sample_interval_s = sample_interval_s
        self._opened: tuple[Devices, CounterWindows] | None = None

    def begin_window(self, name: str) -> None:
        """See `EnergyMonitor.begin_window`."""
        _, windows = self._open()
        windows.begin(name)

    def end_window(self, name: str) -> Measurement:
        """See `EnergyMonitor.end_window`; the energy is what the counters rose by, summed over all devices."""
        _, windows = self._open()
        return windows.end(name)

    def _open(self) -> tuple[Devices, CounterWindows]:
        """The devices, and the windows over their counters; the same each time."""
        if self._opened is None:
            devices, counters = self._find()
            windows = CounterWindows(
                counters, source=self.source, clock=self._clock, sample_interval_s=self._sample_interval_s
            )
            self._opened = devices, windows
        return self._opened

    @abstractmethod
    def _find(self) -> tuple[Devices, Sequence[EnergyCounter]]:
        """The devices, and their counters, of which each was seen to count."""
