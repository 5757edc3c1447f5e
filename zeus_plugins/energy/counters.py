"""Measurement windows over counters that only rise: a GPU's, a CPU package's, or power that is integrated here."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from zeus_plugins.energy.monitor import MAX_SOURCE_LENGTH, Measurement, OpenWindows, logger
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOOperationOrderError
from zeus_plugins.protocol import GpuConfig

STANDSTILL_S = 1.0
"""A counter that has not moved for so many seconds does not count: all that are known move several times a second."""

SAMPLE_INTERVAL_S = 0.1
"""Seconds between two power readings."""

LATE_S = 1.0
"""Power readings further apart are told of: something held the interpreter."""

MICRO = 1_000_000


class EnergyCounter(Protocol):
    """A counter of the energy of one device. `str()` names the device for people.

    What the device does not tell is an `EnergyUnavailableError`.
    """

    @property
    def max_power_w(self) -> float:
        """The most that the device draws, in watts."""

    def energy_uj(self) -> int:
        """Energy in microjoules since some instant of the past: whole, so that sums and differences are exact."""


class IntegratedPower:
    """An `EnergyCounter` made of power readings: the area below the straight lines between them (trapezoidal rule).

    The device has `max_power_w` and `power_w()`, in watts. `late` counts the readings that came more than a second
    after the one before.
    """

    def __init__(self, device: Any, clock: Callable[[], float]) -> None:
        self.late = 0
        self._device = device
        self._clock = clock
        self._energy_j = 0.0
        self._latest: tuple[float, float] | None = None

    def __str__(self) -> str:
        return str(self._device)

    @property
    def max_power_w(self) -> float:
        """The most that the device draws, in watts."""
        return float(self._device.max_power_w)

    def energy_uj(self) -> int:
        """Microjoules since the first reading, up to now: each call reads the power and adds what was used since."""
        power_w = self._device.power_w()
        now_s = self._clock()
        if self._latest is not None:
            then_s, power_then_w = self._latest
            self._energy_j += (now_s - then_s) * (power_w + power_then_w) / 2
            self.late += now_s - then_s > LATE_S
        self._latest = (now_s, power_w)
        return round(self._energy_j * MICRO)


class Found(NamedTuple):
    """The devices of a monitor, how they are described, and what a measurement's source is to say of them.

    The devices are `EnergyCounter`s, or those of `IntegratedPower`.
    """

    devices: Sequence[Any]
    number: int
    model: str
    notes: Callable[[], Sequence[str]] = tuple


class _Reading(NamedTuple):
    """All counters at one instant."""

    time_s: float
    energies_uj: tuple[int, ...]
    late: int


class CounterMonitor:
    """An `EnergyMonitor` over devices that have counters.

    What a counter that stands still, or falls, does not tell is estimated as the device's maximum power × time, and the
    measurement's source says so: 0 J would make the batch size that met with it look like the cheapest of all.

    Args:
        source: See `EnergyMonitor.source`.
        find: Finds the devices; called once, when they are first needed.
        sample_interval_s: Seconds between two readings while a window is open. None: only its ends are read.
    """

    def __init__(
        self,
        source: str,
        find: Callable[[], Found],
        clock: Callable[[], float],
        sample_interval_s: float | None = None,
    ) -> None:
        self.source = source
        self._find = find
        self._clock = clock
        self._sample_interval_s = sample_interval_s
        self._windows: OpenWindows[_Reading] = OpenWindows()
        # For each counter, what it read when it was last seen to move, and when that was.
        self._moved: list[tuple[int, float]] = []
        self._suspected: set[str] = set()

    def gpus(self) -> GpuConfig:
        """Describe the devices; their maximum power is the sum of the highest limits that can be set, in watts."""
        devices, number, model, _notes = self._found
        max_power_w = sum(counter.max_power_w for counter in devices)
        return GpuConfig(max_power=max_power_w, number_of_gpus=number, gpu_model=model)

    def begin_window(self, name: str) -> None:
        """See `EnergyMonitor.begin_window`."""
        if self._sampler.is_inherited:
            self._windows = OpenWindows()  # Discard windows inherited from the parent of a fork.
        self._windows.refuse_open(name)
        self._sampler.start()
        try:
            self._windows.open(name, self._read())
        finally:
            self._rest()

    def end_window(self, name: str) -> Measurement:
        """See `EnergyMonitor.end_window`; the energy is what the counters rose by, summed over all devices.

        A window that another process has opened is refused.
        """
        self._sampler.require_own_process()
        begun = self._windows.close(name)
        try:
            return self._between(begun, self._read())
        finally:
            self._rest()

    @cached_property
    def _found(self) -> Found:
        found = self._find()
        for counter in found.devices:
            counter.energy_uj()  # It counts, or this raises.
        return found

    @cached_property
    def _sampler(self) -> Sampler:
        counters = self._found.devices
        return Sampler(lambda: [counter.energy_uj() for counter in counters], self._sample_interval_s)

    def _read(self) -> _Reading:
        counters = self._found.devices
        with self._sampler.lock or contextlib.nullcontext():
            energies_uj = tuple(counter.energy_uj() for counter in counters)
        now_s = self._clock()
        seen = self._moved or [(-1, now_s)] * len(energies_uj)
        self._moved = [
            then if then[0] == energy_uj else (energy_uj, now_s)
            for then, energy_uj in zip(seen, energies_uj, strict=True)
        ]
        late = sum(counter.late for counter in counters if isinstance(counter, IntegratedPower))
        return _Reading(now_s, energies_uj, late)

    def _rest(self) -> None:
        if not self._windows:
            self._sampler.stop()

    def _between(self, begun: _Reading, ended: _Reading) -> Measurement:
        counters = self._found.devices
        time_s = ended.time_s - begun.time_s
        energy_uj, estimated_w, silent = 0, 0.0, 0
        for counter, first_uj, last_uj, (_, moved_s) in zip(
            counters, begun.energies_uj, ended.energies_uj, self._moved, strict=True
        ):
            stands_still = last_uj == first_uj and ended.time_s - moved_s >= STANDSTILL_S
            if last_uj < first_uj or stands_still:
                self._warn_once(counter, "has not moved" if stands_still else "has fallen")
                estimated_w += counter.max_power_w
                silent += 1
            else:
                energy_uj += last_uj - first_uj
        source = [self.source]
        if silent:
            estimate = f"estimate: {estimated_w:g} W for {silent} of {len(counters)} devices"
            source.append(f"but {estimate}, whose counter does not count")
        if ended.late != begun.late:
            source.append(f"with gaps above {LATE_S:g} s")
        told = ", ".join([*source, *self._found.notes()])[:MAX_SOURCE_LENGTH]
        return Measurement(time_s=time_s, energy_j=energy_uj / MICRO + estimated_w * time_s, source=told)

    def _warn_once(self, counter: EnergyCounter, what: str) -> None:
        if str(counter) in self._suspected:
            return
        self._suspected.add(str(counter))
        logger.warning(
            "the energy counter of %s %s: while it does not count, %g W × time is taken instead, an estimate",
            counter,
            what,
            counter.max_power_w,
        )


class IntegratedPowerMonitor(CounterMonitor):
    """The base of monitors that read power every `interval_s` seconds while a window is open.

    Raises:
        ZeusBSOConfigError: `interval_s` makes no sense.
    """

    def __init__(
        self,
        what: str,
        find: Callable[[], Found],
        clock: Callable[[], float],
        interval_s: float = SAMPLE_INTERVAL_S,
    ) -> None:
        if not 0 < interval_s <= LATE_S:
            raise ZeusBSOConfigError(f"interval_s is {interval_s!r}: choose seconds above 0, {LATE_S:g} at most")
        self._find_devices = find
        super().__init__(f"{what}, integrated every {interval_s:g} s", self._integrated, clock, interval_s)

    def _integrated(self) -> Found:
        found = self._find_devices()
        return found._replace(devices=[IntegratedPower(device, self._clock) for device in found.devices])


class Sampler:
    """Calls a function in a daemon thread, every so many seconds between `start` and `stop`.

    What the function raises is logged, and the next call tries again. `lock` is held during each call, and is None
    before the first `start`. A thread does not survive a fork, and a lock that it held stays locked in the child for
    ever. So a forked process has to ask `is_inherited` first, and `start` makes a thread and a lock of its own. An
    unused sampler can be pickled.
    """

    def __init__(self, sample: Callable[[], object], interval_s: float | None) -> None:
        self.interval_s = interval_s
        self.lock: threading.Lock | None = None
        self._sample = sample
        self._thread: threading.Thread | None = None
        self._stopped: threading.Event | None = None
        self._process_id: int | None = None

    @property
    def is_inherited(self) -> bool:
        """True when it was started by another process, of which this one is a fork: there is no thread here."""
        return self._process_id is not None and self._process_id != os.getpid()

    def require_own_process(self) -> None:
        """Refuse to go on with what another process has begun (`ZeusBSOOperationOrderError` if `is_inherited`)."""
        if self.is_inherited:
            raise ZeusBSOOperationOrderError(
                f"the measurement was begun by process {self._process_id}, and the thread that reads the device did "
                f"not come along into its forked process {os.getpid()}: begin and end a window in one process"
            )

    def start(self) -> None:
        """Begin to sample; the first call comes after one interval. Nothing without one, or where it runs already."""
        if self.interval_s is None or (self._process_id == os.getpid() and self._thread is not None):
            return
        self._process_id = os.getpid()
        self.lock, self._stopped = threading.Lock(), threading.Event()
        arguments = (weakref.ref(self), self._stopped, self.interval_s)
        self._thread = threading.Thread(target=_run, args=arguments, name="zeus-energy-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Sample no more; returns when the thread has ended. Nothing where it does not run."""
        thread, self._thread = self._thread, None
        if thread is None or self._stopped is None or self.is_inherited:
            return
        self._stopped.set()
        thread.join()

    def sample_or_log(self, *, again: bool) -> bool:
        """Sample once; returns whether that failed. What fails `again` is logged for developers alone."""
        try:
            with self.lock or contextlib.nullcontext():
                self._sample()
        except Exception as error:
            # The reading at the window's end raises what lasts; a thread that dies would lose what comes between.
            logger.log(logging.DEBUG if again else logging.WARNING, "could not read a device's energy: %s", error)
            return True
        return False


# The thread holds no reference while it waits: a monitor that is dropped with a window open would be read for ever.
def _run(sampler_of: weakref.ref[Sampler], stopped: threading.Event, interval_s: float) -> None:
    has_failed = False
    while not stopped.wait(interval_s):
        sampler = sampler_of()
        if sampler is None:
            return
        has_failed = sampler.sample_or_log(again=has_failed) or has_failed
        del sampler
