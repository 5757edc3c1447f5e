"""Measurement windows over energy counters: those in a GPU or CPU package, or power readings integrated here."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial, partialmethod
from typing import Any, NamedTuple, Protocol

from zeus_plugins.energy.monitor import (
    MAX_SOURCE_LENGTH,
    Measurement,
    NoPowerLimitError,
    OpenWindows,
    check_power_w,
    logger,
    warn_once,
)
from zeus_plugins.errors import ZeusBSOOperationOrderError
from zeus_plugins.protocol import GpuConfig

STANDSTILL_S = 1.0
"""Seconds without a change after which a counter is treated as broken: known counters change several times a second."""

UPDATE_S = 0.25
"""Seconds between two changes of a counter, at most; the slowest known counter of a GPU needs 0.15 s."""

UNKNOWN_PEAK_W = 1000.0
"""The watts that a device without a stated limit draws at most."""

SAMPLE_INTERVAL_S = 0.05
"""Seconds between two power readings: most sensors change every 0.1 s."""

POLL_S = 0.002
"""Seconds between two readings of a counter while waiting for its next change."""

MICRO = 1_000_000


class EnergyCounter(Protocol):
    """The energy counter of one device; `str()` names the device. A failed reading raises `EnergyUnavailableError`.

    Optional attributes: ``peak_power_w`` replaces `max_power_w` in the check of readings. After a gap above
    ``longest_gap_s`` between two readings, the energy is not certain. ``update_s`` is the longest time between two
    changes.
    """

    @property
    def max_power_w(self) -> float:
        """The maximum power of the device in watts; raises `NoPowerLimitError` if the device gives none."""

    def energy_uj(self) -> int:
        """Return the microjoules since a fixed past instant, as an integer so that sums and differences are exact."""


def next_moves(
    reads: Sequence[Callable[[], int]], clock: Callable[[], float], sleep: Callable[[float], None]
) -> list[tuple[float, int]]:
    """Wait until each counter has changed, for at most `STANDSTILL_S`.

    Returns:
        For each counter, the time in seconds and the value of the first changed reading; without a change, of the last.
    """
    before = [read() for read in reads]
    found = [(clock(), value) for value in before]
    for _ in range(round(STANDSTILL_S / POLL_S)):
        still = [place for place, (_, value) in enumerate(found) if value == before[place]]
        if not still:
            break
        for place in still:
            found[place] = clock(), reads[place]()
        sleep(POLL_S)
    return found


class IntegratedPower:
    """An `EnergyCounter` that integrates `instant_power_w()` of a device by the trapezoidal rule."""

    longest_gap_s = 1.0
    update_s = 0.0

    def __init__(self, device: Any, clock: Callable[[], float]) -> None:
        self._device = device
        self._clock = clock
        self._energy_j = 0.0
        self._latest: tuple[float, float] | None = None

    def __str__(self) -> str:
        return str(self._device)

    @property
    def max_power_w(self) -> float:
        """The maximum power of the device in watts."""
        return float(self._device.max_power_w)

    def energy_uj(self) -> int:
        """Read the power, add the energy since the previous reading, and return the sum in microjoules."""
        power_w: float = self._device.instant_power_w()
        now_s = self._clock()
        if self._latest is not None:
            then_s, power_then_w = self._latest
            self._energy_j += (now_s - then_s) * (power_w + power_then_w) / 2
        self._latest = (now_s, power_w)
        return round(self._energy_j * MICRO)


class _Watched:
    """An `EnergyCounter` in which maximum power × time replaces each rise that the device cannot have.

    `doubts` counts these rises, `late` the readings after too long a gap, and `moved_s` is the time of the latest
    change. `max_power_w` returns the watts of the replacement.
    """

    def __init__(self, counter: Any, clock: Callable[[], float], max_power_w: Callable[[], float]) -> None:
        self._counter, self._clock, self.max_power_w = counter, clock, max_power_w
        self.longest_gap_s: float = getattr(counter, "longest_gap_s", math.inf)
        self._update_s: float = getattr(counter, "update_s", UPDATE_S)
        self._reading_uj: int = counter.energy_uj()  # Raises if the device cannot be read.
        self._read_s = self.moved_s = clock()
        self._total_uj = self.doubts = self.late = 0

    def __str__(self) -> str:
        return str(self._counter)

    def energy_uj(self) -> int:
        """Return the microjoules since the first reading."""
        reading_uj, now_s = self._counter.energy_uj(), self._clock()
        rise_uj, time_s = reading_uj - self._reading_uj, now_s - self._read_s
        # A counter that stood still for some readings may rise for all of their time.
        if not 0 <= rise_uj <= 2 * self._peak_w * (now_s - self.moved_s + self._update_s) * MICRO:
            self.warn("has fallen" if rise_uj < 0 else "has risen by more than twice the device's maximum power")
            self.doubts += 1
            rise_uj = round(self.max_power_w() * time_s * MICRO)
        if rise_uj:
            self.moved_s = now_s
        self.late += time_s > self.longest_gap_s
        self._reading_uj, self._read_s = reading_uj, now_s
        self._total_uj += rise_uj
        return self._total_uj

    @cached_property
    def _peak_w(self) -> float:
        try:
            return float(getattr(self._counter, "peak_power_w", 0) or self._counter.max_power_w or UNKNOWN_PEAK_W)
        except NoPowerLimitError:
            return UNKNOWN_PEAK_W

    def warn(self, what: str) -> None:
        """Log a fault of the counter, once."""
        instead = f"{self.max_power_w():g} W × time is taken instead, an estimate"
        warn_once(f"the energy counter of {self} {what}: while it does not count, {instead}")


class Found(NamedTuple):
    """Devices, their number and model, and a function that returns notes for a measurement's source.

    The devices are `EnergyCounter`s, or devices as `IntegratedPower` takes them. The function gets the known process
    ids of the training.
    """

    devices: Sequence[Any]
    number: int
    model: str
    notes: Callable[[Collection[int]], Sequence[str]]


class _Reading(NamedTuple):
    time_s: float
    energies_uj: tuple[int, ...]
    faults: tuple[tuple[int, int], ...]  # of each counter, its `doubts` and `late`
    looks: int


class CounterMonitor:
    """An `EnergyMonitor` over devices that have counters.

    If a counter stops or falls, or rises by more than twice the device's maximum power × time, the device's maximum
    power × time replaces the rise, and the measurement's source says so. With 0 J instead, the batch size of the window
    would look like the cheapest.

    Args:
        source: See `EnergyMonitor.source`.
        find: Finds the devices; called once, on first use.
        sample_interval_s: Seconds between two readings while a window is open. None: read only when a window begins or
            ends.
        max_power_w: The devices' summed maximum power in watts, used if they give none.
        sleep: Waits for a number of seconds.
    """

    def __init__(
        self,
        source: str,
        find: Callable[[], Found],
        clock: Callable[[], float],
        sample_interval_s: float | None = None,
        max_power_w: float | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if max_power_w is not None:
            check_power_w("max_power_w", max_power_w, "the devices together")
        self.source = source
        self._find = find
        self._clock, self._sleep = clock, sleep
        self._sample_interval_s = sample_interval_s
        self._stated_power_w = max_power_w
        self._windows: OpenWindows[_Reading] = OpenWindows()
        self._own_processes: tuple[int, ...] = ()
        # Each note on the devices, and the number of the latest `look` that returned it.
        self._notes: dict[str, int] = {}
        self._looks = 0
        self._sampler: Sampler | None = None  # while a window is open

    def gpus(self) -> GpuConfig:
        """Describe the devices; their maximum power is the sum of the highest settable limits, in watts."""
        devices, number, model, _notes = self._found
        max_power_w = sum(counter.max_power_w() for counter in devices)
        return GpuConfig(max_power=max_power_w, number_of_gpus=number, gpu_model=model)

    def begin_window(self, name: str, *, at_moves: bool = False) -> None:
        """See `EnergyMonitor.begin_window` and `begin_window_at_moves`."""
        if self._is_forked:
            # A forked child has no sampling thread, and its parent's windows do not apply to it.
            self._windows, self._sampler = OpenWindows(), None
        try:
            self._windows.open(name, partial(self._begun, at_moves))
        finally:
            self._rest()

    def look(self) -> None:
        """Record the present notes on the devices, such as other processes, for the sources of the open windows."""
        self._looks += 1
        self._notes |= dict.fromkeys(self._found.notes(self._own_processes), self._looks)

    def include(self, processes: Collection[int]) -> None:
        """Count the processes with these ids, such as other ranks, as part of the training."""
        self._own_processes = tuple(processes)

    def end_window(self, name: str, *, at_moves: bool = False) -> Measurement:
        """See `EnergyMonitor.end_window`; also raise its order error in a fork, which lacks the sampling thread."""
        if self._sampler is not None and self._is_forked:
            raise ZeusBSOOperationOrderError(
                f"the measurement was begun by process {self._sampler.process_id}, and the thread that reads the device"
                f" did not come along into its forked process {os.getpid()}: begin and end a window in one process"
            )
        begun = self._windows.close(name)
        try:
            return self._between(begun, self._read_at_moves(is_end=True) if at_moves else self._read())
        finally:
            self._rest()

    begin_window_at_moves = partialmethod(begin_window, at_moves=True)
    end_window_at_moves = partialmethod(end_window, at_moves=True)

    def _max_power_w(self, counter: EnergyCounter) -> float:
        try:
            return counter.max_power_w
        except NoPowerLimitError:
            if self._stated_power_w is None:
                raise
            return self._stated_power_w / self._found.number

    @cached_property
    def _found(self) -> Found:
        found = self._find()
        watched = [_Watched(each, self._clock, partial(self._max_power_w, each)) for each in found.devices]
        return found._replace(devices=watched)

    @property
    def _is_forked(self) -> bool:
        return self._sampler is not None and self._sampler.process_id != os.getpid()

    def _begun(self, at_moves: bool) -> _Reading:
        counters = self._found.devices
        interval_s = self._sample_interval_s
        if self._sampler is None and interval_s is not None:
            self._sampler = Sampler(lambda: [counter.energy_uj() for counter in counters], interval_s)
        self.look()  # Before the reading, so that the new window does not include the time of the look.
        return self._read_at_moves(is_end=False) if at_moves else self._read()

    def _read_at_moves(self, *, is_end: bool) -> _Reading:
        """Wait until each counter has changed twice; return the energies before the wait if `is_end`, else after it.

        The devices are idle during the wait, so the energies are extrapolated on the line through the two changes.
        """
        reading, reads = self._read(), [counter.energy_uj for counter in self._found.devices]
        if self._sample_interval_s is not None:  # integrated power, or a counter that moves within a millisecond
            return reading
        first, second = (next_moves(reads, self._clock, self._sleep) for _ in range(2))
        now_s = reading.time_s if is_end else self._clock()
        energies_uj = tuple(
            first_uj + round((second_uj - first_uj) * (now_s - first_s) / max(second_s - first_s, POLL_S))
            for (first_s, first_uj), (second_s, second_uj) in zip(first, second, strict=True)
        )
        return reading._replace(time_s=now_s, energies_uj=energies_uj)

    def _read(self) -> _Reading:
        counters = self._found.devices
        with contextlib.nullcontext() if self._sampler is None else self._sampler.lock:
            energies_uj = tuple(counter.energy_uj() for counter in counters)
            faults = tuple((counter.doubts, counter.late) for counter in counters)
        return _Reading(self._clock(), energies_uj, faults, self._looks)

    def _rest(self) -> None:
        if not self._windows and self._sampler is not None:
            # Clear the attribute first: if a signal interrupts the wait for the thread, the thread ends anyway.
            sampler, self._sampler = self._sampler, None
            sampler.stop()

    def _between(self, begun: _Reading, ended: _Reading) -> Measurement:
        counters: Sequence[_Watched] = self._found.devices
        time_s = ended.time_s - begun.time_s
        estimated_j, estimated_w, doubtful = 0.0, 0.0, 0
        counted_uj, gaps_s = 0, list[float]()
        for place, counter in enumerate(counters):
            doubts, late = (now - then for now, then in zip(ended.faults[place], begun.faults[place], strict=True))
            risen_uj = max(0, ended.energies_uj[place] - begun.energies_uj[place])
            stands_still = risen_uj == 0 and ended.time_s - counter.moved_s >= STANDSTILL_S
            if stands_still:
                counter.warn("has not moved")
                estimated_j += counter.max_power_w() * time_s
            if stands_still or doubts:
                estimated_w += counter.max_power_w()
                doubtful += 1
            if late:
                gaps_s.append(counter.longest_gap_s)
            counted_uj += risen_uj
        source = [self.source]
        if doubtful:
            estimate = f"estimate: {estimated_w:g} W for {doubtful} of {len(counters)} devices"
            source.append(f"but {estimate}, whose counter does not count")
        if gaps_s:
            source.append(f"with gaps above {min(gaps_s):.4g} s")
        self.look()
        source += [note for note, latest in self._notes.items() if latest >= begun.looks]
        return Measurement(time_s, counted_uj / MICRO + estimated_j, ", ".join(source)[:MAX_SOURCE_LENGTH])


class Sampler:
    """A daemon thread that calls a function every `interval_s` seconds until `stop`.

    The thread logs an exception of the function and tries again. It holds `lock` during each call. A forked process can
    use neither thread nor lock; it recognises this by a `process_id` that is not its own.
    """

    def __init__(self, sample: Callable[[], object], interval_s: float) -> None:
        self.lock = threading.Lock()
        self.process_id = os.getpid()
        self._sample = sample
        self._has_failed = False
        self._stopped = threading.Event()
        arguments = (weakref.ref(self), self._stopped, interval_s)
        self._thread = threading.Thread(target=_run, args=arguments, name="zeus-energy-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling and wait for the thread's end."""
        if self.process_id == os.getpid():
            self._stopped.set()
            self._thread.join()

    def sample(self) -> None:
        """Call the function; log its first failure as a warning and further failures at debug level."""
        try:
            with self.lock:
                self._sample()
        except Exception as error:
            # Do not raise: that would end the thread. If the error lasts, the reading at the window's end raises it.
            level = logging.DEBUG if self._has_failed else logging.WARNING
            logger.log(level, "could not read a device's energy: %s", error)
            self._has_failed = True


# The thread holds only a weak reference, so that a monitor dropped with a window open is collected and its thread ends.
def _run(sampler_of: weakref.ref[Sampler], stopped: threading.Event, interval_s: float) -> None:
    # Python handles signals in the main thread, and a signal that arrives in this thread would not wake it.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while not stopped.wait(interval_s):
        sampler = sampler_of()
        if sampler is None:
            return
        sampler.sample()
        del sampler
